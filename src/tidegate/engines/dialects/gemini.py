"""Google's Gemini, as its developer API and Vertex speak it: candidates with parts."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from tidegate.core.chunk import End
from tidegate.engines.answer import Answer, dict_at, text_at, whole_number

_FILTERED = (
    "SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "LANGUAGE", "IMAGE_SAFETY", "IMAGE_PROHIBITED_CONTENT", "IMAGE_RECITATION",
)  # fmt: skip
_ENDS: dict[str, End] = {"STOP": "stop", "tool_calls": "tool_calls", "MAX_TOKENS": "length", **dict.fromkeys(_FILTERED, "content_filter")}
_GIVEN_UP = frozenset({"MALFORMED_FUNCTION_CALL", "UNEXPECTED_TOOL_CALL", "TOO_MANY_TOOL_CALLS", "MALFORMED_RESPONSE"})
#: `$.recipe.steps[3].name` and `$['odd name']`: the steps of a path into a call's arguments.
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d{1,6})\]|\[(['\"])(.*?)\3\]")
#: A list of arguments grows by at most this many places at a time: an index far off is a mistake, not a reason to make room.
_MAX_GAP = 64
#: Arguments are nested at most this deep.
_MAX_STEPS = 64


def begins(event: dict[str, Any]) -> bool:
    """Whether it is one of Gemini's."""
    return "candidates" in event or "usageMetadata" in event or "promptFeedback" in event


class _Call:
    """A function's call whose arguments come piece by piece, each with the path of its place."""

    __slots__ = ("arguments", "index")

    def __init__(self, index: int, arguments: dict[str, Any]) -> None:
        self.index = index
        self.arguments = arguments

    def grow(self, pieces: list[Any]) -> None:
        for piece in pieces:
            path = text_at(piece, "jsonPath")
            if not path:
                continue
            steps: list[str | int] = [int(m[2]) if m[2] else (m[4] if m[3] else m[1]) for m in _STEP.finditer(path)]
            if steps and len(steps) <= _MAX_STEPS:
                _put(self.arguments, steps, _value(piece))


class Reader:
    """Reads Gemini's events. Arguments become JSON text when their call is whole; the engine's own tools, files and signatures are passed on."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._calls = 0
        self._open: _Call | None = None
        self._other = False

    def read(self, event: dict[str, Any], data: bytes, at_ns: int) -> None:
        """See `engines.dialects`."""
        answer = self._answer
        if event.get("error"):
            raise answer.error(event["error"])
        candidates = event.get("candidates")
        unknown = not candidates and "usageMetadata" not in event
        self._other = False
        reason = ""
        for candidate in candidates if isinstance(candidates, list) else ():
            if not isinstance(candidate, dict) or whole_number(candidate.get("index")):
                unknown = True  # a second answer: one flight has one text
                continue
            parts = dict_at(candidate, "content").get("parts")
            for part in parts if isinstance(parts, list) else ():
                unknown = not self._part(part, at_ns) or unknown
            reason = text_at(candidate, "finishReason") or reason
            unknown = unknown or bool(candidate.get("groundingMetadata") or candidate.get("citationMetadata"))
        reason = reason or text_at(event, "promptFeedback", "blockReason")
        if unknown:
            answer.pass_on(at_ns, data, says=self._other)
        if reason:
            self._close(at_ns)
        usage = dict_at(event, "usageMetadata")
        if "candidatesTokenCount" in usage or "thoughtsTokenCount" in usage or (reason and "promptTokenCount" in usage):
            self._count(usage)
        if reason:
            self._end(reason, at_ns, blocked="promptFeedback" in event)

    def _part(self, part: Any, at_ns: int) -> bool:
        """Whether it was understood."""
        if not isinstance(part, dict):
            return False
        call = part.get("functionCall")
        if isinstance(call, dict):
            self._call(call, at_ns)
            return "thoughtSignature" not in part
        text = part.get("text")
        if not isinstance(text, str):
            self._other = True  # code, a file, a picture: something said that is no text
            return False
        if part.get("thought") is True:
            self._answer.add_reasoning(at_ns, text)
        else:
            self._answer.add_text(at_ns, text)
        return "thoughtSignature" not in part

    def _call(self, call: dict[str, Any], at_ns: int) -> None:
        """A call begins (it has a name), grows (`partialArgs`), and ends (no `willContinue`)."""
        name = text_at(call, "name")
        if name:
            self._close(at_ns)
            self._open = _Call(self._calls, dict(dict_at(call, "args")))
            self._calls += 1
            self._answer.add_tool(at_ns, self._open.index, id=text_at(call, "id") or f"call_{self._open.index}", name=name)
        opened = self._open
        if opened is None:
            return
        pieces = call.get("partialArgs")
        if isinstance(pieces, list):
            opened.grow(pieces)
        if call.get("willContinue") is not True:
            self._close(at_ns)

    def _close(self, at_ns: int) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            self._answer.add_tool(at_ns, opened.index, arguments=msgspec.json.encode(opened.arguments).decode())

    def _count(self, usage: dict[str, Any]) -> None:
        reasoning = whole_number(usage.get("thoughtsTokenCount"))
        self._answer.count(
            whole_number(usage.get("promptTokenCount")) + whole_number(usage.get("toolUsePromptTokenCount")),
            whole_number(usage.get("candidatesTokenCount")) + reasoning,
            whole_number(usage.get("cachedContentTokenCount")), reasoning,
        )  # fmt: skip

    def _end(self, reason: str, at_ns: int, *, blocked: bool) -> None:
        answer = self._answer
        if blocked and reason not in _ENDS:
            reason = "SAFETY"
        if reason == "STOP" and self._calls:
            reason = "tool_calls"
        answer.add_end(at_ns, answer.end(reason, _ENDS, _GIVEN_UP))
        if answer.usage is not None:
            answer.add_usage(at_ns, answer.usage)
            answer.over = True
        else:
            answer.ends_with_body = True


def _value(piece: dict[str, Any]) -> Any:
    for name in ("stringValue", "numberValue", "boolValue"):
        if name in piece:
            return piece[name]
    return None


def _put(root: dict[str, Any], steps: list[str | int], value: Any) -> None:
    """Put a value at its place; a text that is already there grows."""
    at: Any = root
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        if isinstance(step, int):
            if not isinstance(at, list) or step >= len(at) + _MAX_GAP:
                return
            at.extend([None] * (step + 1 - len(at)))
            there = at[step]
        elif isinstance(at, dict):
            there = at.get(step)
        else:
            return
        if following is None:
            there = there + value if isinstance(there, str) and isinstance(value, str) else value
        elif there is None:
            there = [] if isinstance(following, int) else {}
        at[step] = there
        at = there
