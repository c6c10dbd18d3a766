"""What the caller is told beside its answer: marks of the door, what was cut. In a header each, and in the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidegate.api.client import Header


def note_headers(notes: Mapping[str, Any]) -> list[Header]:
    """x-tidegate-NAME: a list as `a, b`; an object as `a=1; b=c`, its lists and objects left to the answer."""
    return [(b"x-tidegate-" + name.encode(), _said(facts).encode("ascii", "replace")) for name, facts in notes.items()]


def _said(facts: Any) -> str:
    if isinstance(facts, Mapping):
        return "; ".join(f"{name}={_plain(value)}" for name, value in facts.items() if not isinstance(value, list | Mapping))
    return ", ".join(map(_plain, facts)) if isinstance(facts, list) else _plain(facts)


def _plain(value: Any) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)
