"""Anthropic's messages: content blocks that begin, grow and stop."""

from __future__ import annotations

from typing import Any

import msgspec

from tidegate.core.chunk import End
from tidegate.core.errors import EngineCut
from tidegate.engines.answer import Answer, dict_at, text_at, whole_number

_ENDS: dict[str, End] = {
    "end_turn": "stop", "stop_sequence": "stop", "pause_turn": "stop", "max_tokens": "length", "model_context_window_exceeded": "length",
    "tool_use": "tool_calls", "refusal": "content_filter",
}  # fmt: skip
_GIVEN_UP: frozenset[str] = frozenset()


def begins(event: dict[str, Any]) -> bool:
    """Whether an Anthropic stream begins by it."""
    return event.get("type") in ("message_start", "content_block_start", "content_block_delta")


class _Tool:
    """A call of the client's tool while it grows. `start` is the input that its block began with, used where nothing came after it."""

    __slots__ = ("grown", "index", "start")

    def __init__(self, index: int, start: Any) -> None:
        self.index = index
        self.start = start
        self.grown = False


class Reader:
    """Reads Anthropic's events. What the engine's own tools do and find (`server_tool_use`, results, signatures, citations) is passed on."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._id: str | None = None
        self._tools: dict[Any, _Tool] = {}
        self._calls = 0
        self._prompt = self._cached = 0

    def read(self, event: dict[str, Any], data: bytes, at_ns: int) -> None:
        """See `engines.dialects`."""
        kind = text_at(event, "type")
        if kind == "content_block_delta":
            self._delta(event, data, at_ns)
        elif kind == "content_block_start":
            self._start(event, data, at_ns)
        elif kind == "content_block_stop":
            self._stop(event, at_ns)
        elif kind == "message_start":
            self._begin(dict_at(event, "message"))
        elif kind == "message_delta":
            self._end(event, data, at_ns)
        elif kind == "message_stop":
            self._answer.over = True
        elif kind == "error" or event.get("error"):
            raise self._answer.error(event.get("error") or event)
        elif kind != "ping":
            self._answer.pass_on(at_ns, data)

    def _begin(self, message: dict[str, Any]) -> None:
        """A message may be begun twice by what lies between (a duplicate, a try anew), but not once something was said: nobody can take that back."""
        answer = self._answer
        if answer.said and text_at(message, "id") != self._id:
            raise EngineCut(
                f"{answer.label} began its answer anew in the middle of it.", hint="Does something between us and the engine try again by itself?"
            )
        self._id = text_at(message, "id")
        self._tools.clear()
        self._count_prompt(dict_at(message, "usage"))

    def _start(self, event: dict[str, Any], data: bytes, at_ns: int) -> None:
        block = dict_at(event, "content_block")
        kind = block.get("type")
        if kind == "text":
            self._answer.add_text(at_ns, text_at(block, "text"))
        elif kind == "thinking":
            self._answer.add_reasoning(at_ns, text_at(block, "thinking"))
        elif kind == "tool_use":
            tool = self._tools[_key(event)] = _Tool(self._calls, block.get("input"))
            self._calls += 1
            self._answer.add_tool(at_ns, tool.index, id=text_at(block, "id"), name=text_at(block, "name"))
        else:
            self._answer.pass_on(at_ns, data)

    def _delta(self, event: dict[str, Any], data: bytes, at_ns: int) -> None:
        delta = dict_at(event, "delta")
        kind = delta.get("type")
        tool = self._tools.get(_key(event))
        if kind == "text_delta":
            self._answer.add_text(at_ns, text_at(delta, "text"))
        elif kind == "thinking_delta":
            self._answer.add_reasoning(at_ns, text_at(delta, "thinking"))
        elif kind == "input_json_delta" and tool is not None:
            arguments = text_at(delta, "partial_json")
            tool.grown = tool.grown or bool(arguments)
            self._answer.add_tool(at_ns, tool.index, arguments=arguments)
        else:
            self._answer.pass_on(at_ns, data, says=False)  # signatures, citations, what the engine's own tools are asked

    def _stop(self, event: dict[str, Any], at_ns: int) -> None:
        tool = self._tools.pop(_key(event), None)
        if tool is not None and not tool.grown:  # a call without arguments, or one that came whole
            start = tool.start if isinstance(tool.start, dict) else {}
            self._answer.add_tool(at_ns, tool.index, arguments=msgspec.json.encode(start).decode())

    def _end(self, event: dict[str, Any], data: bytes, at_ns: int) -> None:
        answer = self._answer
        usage = dict_at(event, "usage")
        self._count_prompt(usage)
        reason = text_at(event, "delta", "stop_reason")
        if not reason:
            answer.pass_on(at_ns, data, says=False)
            return
        answer.add_end(at_ns, answer.end(reason, _ENDS, _GIVEN_UP))
        if "output_tokens" in usage:
            completion = whole_number(usage["output_tokens"])
            answer.add_usage(at_ns, answer.count(self._prompt, completion, self._cached))

    def _count_prompt(self, usage: dict[str, Any]) -> None:
        """`input_tokens` are those that no cache had to do with; the last figures told hold."""
        if "input_tokens" in usage:
            self._cached = whole_number(usage.get("cache_read_input_tokens"))
            self._prompt = whole_number(usage["input_tokens"]) + self._cached + whole_number(usage.get("cache_creation_input_tokens"))
            self._answer.count_prompt(self._prompt)


def _key(event: dict[str, Any]) -> int:
    index = event.get("index")
    return index if isinstance(index, int) else 0
