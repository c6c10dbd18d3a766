"""A whole OpenAI-shaped answer out of the events of a stream, for engines that can only be cancelled while they stream."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

#: Members of a delta that are strings and grow piece by piece.
_GROWING = frozenset({"content", "reasoning_content", "reasoning", "refusal"})


class Gathered:
    """Collects stream payloads; `json()` is the body that the engine would have sent without `stream`."""

    def __init__(self) -> None:
        self._top: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def add(self, payload: bytes) -> None:
        """One event's JSON. What is no chunk of an answer, or of a shape we do not know, is left out."""
        try:
            event = msgspec.json.decode(payload)
        except msgspec.DecodeError:  # a number beyond every range is JSON, but nothing that we can hold
            return
        with contextlib.suppress(TypeError, AttributeError, KeyError):
            self._add(event)

    def _add(self, event: Any) -> None:
        if not isinstance(event, dict) or not isinstance(event.get("choices"), list):
            return
        for key, value in event.items():
            if key != "choices" and value is not None:
                self._top[key] = value
        for piece in event["choices"]:
            index = piece.get("index", 0)
            if not isinstance(index, int):
                continue
            choice = self._choices.setdefault(index, {"index": index, "finish_reason": None})
            for key, value in piece.items():
                if key == "delta":
                    _grow_message(choice.setdefault("message", {"role": "assistant", "content": None}), value or {})
                elif key == "text":
                    choice["text"] = choice.get("text", "") + (value or "")
                elif key == "logprobs":
                    choice["logprobs"] = _grow_logprobs(choice.get("logprobs"), value)
                elif value is not None:
                    choice[key] = value

    def json(self) -> bytes:
        """The whole answer as JSON."""
        kind = str(self._top.get("object", ""))
        return msgspec.json.encode(
            {**self._top, "object": kind.removesuffix(".chunk"), "choices": [self._choices[index] for index in sorted(self._choices)]}
        )


def _grow_message(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for key, value in delta.items():
        if value is None:
            continue
        if key in _GROWING and isinstance(value, str):
            message[key] = (message.get(key) or "") + value
        elif isinstance(value, list) and isinstance(message.get(key), list) and key != "tool_calls":
            message[key] = message[key] + value  # parts
        elif key == "tool_calls":
            _grow_tool_calls(message.setdefault("tool_calls", []), value)
        else:
            message[key] = value


def _grow_tool_calls(calls: list[dict[str, Any]], pieces: list[dict[str, Any]]) -> None:
    for piece in pieces:
        index = piece.get("index")
        if not isinstance(index, int):  # not numbered: what has an id begins a call, anything else goes on with the last
            index = len(calls) if piece.get("id") or not calls else len(calls) - 1
        if not 0 <= index < len(calls) + 64:  # an index far off is an engine's mistake, not a reason to make room
            continue
        while len(calls) <= index:
            calls.append({})
        call = calls[index]
        for key, value in piece.items():
            if key == "function":
                function = call.setdefault("function", {"name": "", "arguments": ""})
                function["name"] += value.get("name") or ""
                function["arguments"] += value.get("arguments") or ""
            elif key != "index" and value not in (None, ""):  # some repeat an empty id with every piece
                call[key] = value


def _grow_logprobs(had: dict[str, Any] | None, new: dict[str, Any] | None) -> dict[str, Any] | None:
    if not had or not new:
        return had or new
    grown = dict(had)
    for key, value in new.items():
        grown[key] = grown[key] + value if isinstance(value, list) and isinstance(grown.get(key), list) else value
    return grown
