"""How deep JSON may be nested."""

from __future__ import annotations

from typing import Any

import pytest

from tidegate.core.nesting import MAX_DEPTH, too_deep


def nested(depth: int, kind: str) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if kind == "list" or (kind == "both" and level % 2) else {"key": value}
    return value


@pytest.mark.parametrize("kind", ["list", "dict", "both"])
def test_the_bound_is_exact(kind: str) -> None:
    """MAX_DEPTH levels pass, one more does not, and a depth that no recursion survives is only too deep."""
    assert not too_deep(nested(MAX_DEPTH, kind))
    assert too_deep(nested(MAX_DEPTH + 1, kind))
    assert too_deep(nested(100_000, kind))


@pytest.mark.parametrize("value", [1, "text", None, [], {}, [[], [1]], {"a": {"b": [1]}}])
def test_flat_values_pass(value: Any) -> None:
    """What is hardly nested is never too deep."""
    assert not too_deep(value)
