"""OpenAI's stream events for what an engine did not say in OpenAI's own form: one id, time and model for the whole stream."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

from tidegate.core.chunk import Chunk, ToolDelta, Usage
from tidegate.core.flight import Flight

Kind = Literal["chat", "completion"]

_encode = msgspec.json.encode
_OBJECTS = {"chat": "chat.completion.chunk", "completion": "text_completion"}
_ID_PREFIX = {"chat": "chatcmpl-", "completion": "cmpl-"}


class _Identity(msgspec.Struct):
    """What every event of one stream repeats."""

    id: str = ""
    created: int = 0
    model: str = ""


class EventMaker:
    """Makes the events of one stream. `first`: the engine's own first event, where one went before: the made ones carry its id, its time and its
    model, because clients tell answers apart by them."""

    __slots__ = ("_end", "_kind", "_says_role", "_start")

    def __init__(self, kind: Kind, flight: Flight, first: bytes | None) -> None:
        self._kind: Kind = kind
        said = _identity(first)
        same = {
            "id": said.id or _ID_PREFIX[kind] + flight.id,
            "object": _OBJECTS[kind],
            "created": said.created or time.time_ns() // 1_000_000_000,
            "model": said.model or flight.model,
        }
        self._start = b"data: " + _encode(same)[:-1]
        self._end = b"}\n\n"
        self._says_role = first is None and kind == "chat"

    def events(self, chunk: Chunk, *, shows_usage: bool = False) -> bytes:
        """What a chunk says, as none, one or several whole events."""
        made = b""
        kind = chunk.kind
        if chunk.text and kind in ("text", "reasoning"):
            made = self._text(kind, chunk.text)
        elif chunk.tools and self._kind == "chat":
            made = self._choice(b'"delta":' + _encode(self._with_role({"tool_calls": [_tool(tool) for tool in chunk.tools]})), b"null")
        if chunk.finish is not None:
            last = b'"delta":' + _encode(self._with_role({})) if self._kind == "chat" else b'"text":""'
            made += self._choice(last, b'"%b"' % chunk.finish.encode())
        if shows_usage and chunk.usage is not None:
            made += self.usage(chunk.usage)
        return made

    def usage(self, usage: Usage) -> bytes:
        """OpenAI's usage event."""
        return self._start + b',"choices":[],"usage":' + _encode(usage_fields(usage)) + self._end

    def beside(self, members: dict[str, Any]) -> bytes:
        """An event without a choice that tells members of ours."""
        return self._start + b',"choices":[],' + _encode(members)[1:-1] + self._end

    def _text(self, kind: str, text: str) -> bytes:
        if self._kind == "chat":
            name = "content" if kind == "text" else "reasoning_content"
            return self._choice(b'"delta":' + _encode(self._with_role({name: text})), b"null")
        if kind == "text":
            return self._choice(b'"text":' + _encode(text), b"null")
        return self._choice(b'"text":"","reasoning_content":' + _encode(text), b"null")  # plain completions have no name for it in OpenAI's API

    def _choice(self, says: bytes, finish: bytes) -> bytes:
        return b'%b,"choices":[{"index":0,%b,"logprobs":null,"finish_reason":%b}]%b' % (self._start, says, finish, self._end)

    def _with_role(self, delta: dict[str, Any]) -> dict[str, Any]:
        if not self._says_role:
            return delta
        self._says_role = False
        return {"role": "assistant", **delta}


def usage_fields(usage: Usage) -> dict[str, Any]:
    """OpenAI's fields, and `exact`: false where it is an estimate."""
    return {
        "prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens, "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens}, "exact": usage.exact,
        **({"completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens}} if usage.reasoning_tokens else {}),
    }


def _tool(tool: ToolDelta) -> dict[str, Any]:
    """A piece of a tool call. As OpenAI has it: id, type and name come with its first piece only."""
    function: dict[str, Any] = {"arguments": tool.arguments}
    if tool.name:
        function = {"name": tool.name, **function}
    made: dict[str, Any] = {"index": tool.index}
    if tool.id:
        made["id"] = tool.id
    if tool.id or tool.name:
        made["type"] = "function"
    made["function"] = function
    return made


def _identity(first: bytes | None) -> _Identity:
    if first is None:
        return _Identity()
    try:
        return msgspec.json.decode(first, type=_Identity)
    except (msgspec.MsgspecError, UnicodeDecodeError):  # an engine may say anything: what it says otherwise is made here
        return _Identity()
