"""How deep JSON may be nested: far below the depth at which what walks it (validators, encoders, our own code) would give up."""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 100


def too_deep(value: Any, most: int = MAX_DEPTH) -> bool:
    """Whether lists and objects lie in each other more than `most` deep. Never raises; takes time in proportion to the value's size."""
    level = _nested([value])
    for _ in range(most):
        if not level:
            return False
        level = [inner for outer in level for inner in _nested(outer.values() if isinstance(outer, dict) else outer)]
    return bool(level)


def _nested(values: Any) -> list[Any]:
    return [value for value in values if isinstance(value, (dict, list))]
