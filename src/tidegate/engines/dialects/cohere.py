"""Cohere's chat API, version 2."""

from __future__ import annotations

from typing import Any

from tidegate.core.chunk import End
from tidegate.engines.answer import Answer, dict_at, text_at, whole_number

_ENDS: dict[str, End] = {
    "COMPLETE": "stop", "STOP_SEQUENCE": "stop", "MAX_TOKENS": "length", "TOOL_CALL": "tool_calls", "ERROR_TOXIC": "content_filter",
}  # fmt: skip
_GIVEN_UP = frozenset({"ERROR", "TIMEOUT", "ERROR_LIMIT", "USER_CANCEL"})
_BEGINNINGS = frozenset({"message-start", "content-start", "content-delta", "tool-plan-delta", "tool-call-start"})


def begins(event: dict[str, Any]) -> bool:
    """Whether a Cohere stream begins by it."""
    return text_at(event, "type") in _BEGINNINGS


class Reader:
    """Reads Cohere's events. The plan that precedes tool calls counts as reasoning; citations are passed on."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._tools: dict[Any, list[Any]] = {}  # by Cohere's index: ours, and whether arguments came

    def read(self, event: dict[str, Any], data: bytes, at_ns: int) -> None:
        """See `engines.dialects`."""
        answer = self._answer
        kind = text_at(event, "type")
        message = dict_at(event, "delta", "message")
        if kind in ("content-delta", "content-start"):
            content = dict_at(message, "content")
            answer.add_reasoning(at_ns, text_at(content, "thinking"))
            answer.add_text(at_ns, text_at(content, "text"))
        elif kind == "tool-plan-delta":
            answer.add_reasoning(at_ns, text_at(message, "tool_plan"))
        elif kind in ("tool-call-start", "tool-call-delta"):
            self._tool(_index(event), dict_at(message, "tool_calls"), at_ns)
        elif kind == "tool-call-end":
            tool = self._tools.get(_index(event))
            if tool is not None and not tool[1]:
                answer.add_tool(at_ns, tool[0], arguments="{}")
        elif kind == "message-end":
            self._end(dict_at(event, "delta"), at_ns)
        elif event.get("error"):
            raise answer.error(event["error"])
        elif kind not in ("message-start", "content-end"):
            answer.pass_on(at_ns, data, says=False)

    def _tool(self, index: int, call: dict[str, Any], at_ns: int) -> None:
        tool = self._tools.setdefault(index, [len(self._tools), False])
        arguments = text_at(call, "function", "arguments")
        tool[1] = tool[1] or bool(arguments)
        self._answer.add_tool(at_ns, tool[0], id=text_at(call, "id"), name=text_at(call, "function", "name"), arguments=arguments)

    def _end(self, delta: dict[str, Any], at_ns: int) -> None:
        answer = self._answer
        if delta.get("error"):
            raise answer.error(delta["error"])
        answer.add_end(at_ns, answer.end(text_at(delta, "finish_reason") or "COMPLETE", _ENDS, _GIVEN_UP))
        usage = dict_at(delta, "usage")
        tokens = dict_at(usage, "tokens") or dict_at(usage, "billed_units")
        if "output_tokens" in tokens:
            prompt, completion = whole_number(tokens.get("input_tokens")), whole_number(tokens["output_tokens"])
            answer.add_usage(at_ns, answer.count(prompt, completion, whole_number(usage.get("cached_tokens"))))
        answer.over = True


def _index(event: dict[str, Any]) -> int:
    index = event.get("index")
    return index if isinstance(index, int) else 0
