"""OpenAI's Responses API, also as Azure, LM Studio and GitHub speak it."""

from __future__ import annotations

from typing import Any

import msgspec

from tidegate.core.chunk import End
from tidegate.core.errors import EngineCut
from tidegate.engines.answer import Answer, dict_at, text_at, whole_number

_ENDS: dict[str, End] = {"stop": "stop", "tool_calls": "tool_calls", "max_output_tokens": "length", "content_filter": "content_filter"}
_GIVEN_UP: frozenset[str] = frozenset()
#: Events that say nothing that their neighbours do not.
_SILENT = frozenset(
    {
        "response.created", "response.in_progress", "response.queued", "response.content_part.added", "response.content_part.done",
        "response.reasoning_summary_part.added", "response.reasoning_summary_part.done", "response.reasoning_summary_text.done",
        "response.reasoning_text.done",
    }
)  # fmt: skip


def begins(event: dict[str, Any]) -> bool:
    """Whether a response begins by it."""
    kind = text_at(event, "type")
    return isinstance(kind, str) and kind.startswith("response.")


class _Tool:
    __slots__ = ("custom", "grown", "index")

    def __init__(self, index: int, custom: bool) -> None:
        self.index = index
        self.custom = custom
        self.grown = False


class Reader:
    """Reads the events of a response.

    Items are told apart by `output_index`: their ids change from event to event with some speakers. A custom tool's input is plain text; it
    becomes the JSON object `{"input": TEXT}`, so that arguments are JSON with every tool. What the engine's own tools do is passed on.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._tools: dict[int, _Tool] = {}
        self._texts: set[tuple[int, int]] = set()  # (output_index, content_index) of texts that came piece by piece

    def read(self, event: dict[str, Any], data: bytes, at_ns: int) -> None:
        """See `engines.dialects`."""
        answer = self._answer
        kind = text_at(event, "type")
        if kind in ("response.output_text.delta", "response.refusal.delta"):
            self._texts.add(_place(event))
            answer.add_text(at_ns, text_at(event, "delta"))
        elif kind in ("response.reasoning_summary_text.delta", "response.reasoning_text.delta"):
            answer.add_reasoning(at_ns, text_at(event, "delta"))
        elif kind in ("response.output_text.done", "response.refusal.done"):
            if _place(event) not in self._texts:
                answer.add_text(at_ns, text_at(event, "text") or text_at(event, "refusal"))
        elif kind in ("response.function_call_arguments.delta", "response.custom_tool_call_input.delta"):
            self._grow(event, text_at(event, "delta"), data, at_ns)
        elif kind in ("response.function_call_arguments.done", "response.custom_tool_call_input.done"):
            tool = self._tools.get(_place(event)[0])
            if tool is None or not tool.grown:
                self._grow(event, text_at(event, "arguments") or text_at(event, "input"), data, at_ns)
        elif kind in ("response.output_item.added", "response.output_item.done"):
            self._item(event, data, at_ns, done=kind.endswith("done"))
        elif kind in ("response.completed", "response.incomplete", "response.failed", "response.cancelled"):
            self._end(kind, dict_at(event, "response"), at_ns)
        elif kind == "error" or event.get("error"):
            raise answer.error(event.get("error") or event)
        elif kind not in _SILENT:
            answer.pass_on(at_ns, data, says=False)

    def _item(self, event: dict[str, Any], data: bytes, at_ns: int, *, done: bool) -> None:
        """A function's or custom tool's call begins or is whole; a text that came in no other way; anything else is the engine's own."""
        item = dict_at(event, "item")
        place = _place(event)[0]
        kind = item.get("type")
        if kind in ("function_call", "custom_tool_call"):
            tool = self._tools.get(place)
            if tool is None:
                tool = self._tools[place] = _Tool(len(self._tools), kind == "custom_tool_call")
                self._answer.add_tool(at_ns, tool.index, id=text_at(item, "call_id") or text_at(item, "id"), name=text_at(item, "name"))
            if not tool.grown:
                self._grow(event, text_at(item, "input" if tool.custom else "arguments"), data, at_ns)
            if done:
                self._close(tool, at_ns)
        elif kind == "reasoning":
            if done and item.get("encrypted_content"):
                self._answer.pass_on(at_ns, data, says=False)
        elif kind != "message":
            self._answer.pass_on(at_ns, data)

    def _grow(self, event: dict[str, Any], arguments: str, data: bytes, at_ns: int) -> None:
        tool = self._tools.get(_place(event)[0])
        if tool is None:  # the call of one of the engine's own tools
            self._answer.pass_on(at_ns, data)
        elif arguments:
            if tool.custom:
                arguments = ("" if tool.grown else '{"input":"') + msgspec.json.encode(arguments).decode()[1:-1]
            tool.grown = True
            self._answer.add_tool(at_ns, tool.index, arguments=arguments)

    def _close(self, tool: _Tool, at_ns: int) -> None:
        if tool.custom:
            self._answer.add_tool(at_ns, tool.index, arguments='"}' if tool.grown else '{"input":""}')
        elif not tool.grown:
            self._answer.add_tool(at_ns, tool.index, arguments="{}")
        tool.grown = True

    def _end(self, kind: str, response: dict[str, Any], at_ns: int) -> None:
        answer = self._answer
        if kind == "response.failed":
            raise answer.error(response.get("error") or {"message": "the response failed"})
        if kind == "response.cancelled":
            raise EngineCut(f"{answer.label} gave the answer up (cancelled).", hint="Somebody cancelled it at the engine.")
        reason = "tool_calls" if self._tools else "stop"
        if kind == "response.incomplete":
            reason = text_at(response, "incomplete_details", "reason") or "incomplete"
        answer.add_end(at_ns, answer.end(reason, _ENDS, _GIVEN_UP))
        usage = dict_at(response, "usage")
        if "output_tokens" in usage:
            told = answer.count(
                whole_number(usage.get("input_tokens")), whole_number(usage["output_tokens"]),
                whole_number(dict_at(usage, "input_tokens_details").get("cached_tokens")),
                whole_number(dict_at(usage, "output_tokens_details").get("reasoning_tokens")),
            )  # fmt: skip
            answer.add_usage(at_ns, told)
        answer.over = True


def _place(event: dict[str, Any]) -> tuple[int, int]:
    output, content = event.get("output_index"), event.get("content_index")
    return output if isinstance(output, int) else 0, content if isinstance(content, int) else 0
