"""What the caller is told beside its answer: marks of the door, what was cut. In a header each, and in the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tidegate.api.client import Header

#: What a header alone tells: it is about the request, not about the answer.
_HEADER_ONLY = frozenset({"door"})


def note_headers(notes: Mapping[str, Any]) -> list[Header]:
    """x-tidegate-NAME: a list as `a, b`; an object as `a=1; b=c`, its lists and objects left to the answer."""
    return [(b"x-tidegate-" + name.encode(), _said(facts).encode("ascii", "replace")) for name, facts in notes.items()]


def told_in_answer(notes: Mapping[str, Any]) -> dict[str, Any]:
    """What of the notes stands in an answer of /v1, under `tidegate`."""
    return {name: facts for name, facts in notes.items() if name not in _HEADER_ONLY}


def noted(answer: bytes, notes: Mapping[str, Any]) -> bytes:
    """An engine's answer, a JSON object, with the notes as its last member; the rest stays as it is."""
    told = told_in_answer(notes)
    body = answer.rstrip()
    if not told or not body.endswith(b"}"):
        return answer
    return body[:-1] + b',"tidegate":' + msgspec.json.encode(told) + b"}"


def _said(facts: Any) -> str:
    if isinstance(facts, Mapping):
        return "; ".join(f"{name}={_plain(value)}" for name, value in facts.items() if not isinstance(value, list | Mapping))
    return ", ".join(map(_plain, facts)) if isinstance(facts, list) else _plain(facts)


def _plain(value: Any) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)
