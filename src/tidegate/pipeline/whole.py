"""A whole answer of an engine: whether it may pass at one look, else taken apart into the chunks that a stream of it would have had."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from tidegate.core.ask import EngineAnswer
from tidegate.core.chunk import Chunk, ToolDelta
from tidegate.guard.escapes import Unescaped
from tidegate.pipeline.bare import says_only, texts_in
from tidegate.pipeline.control import Control


class _Function(msgspec.Struct):
    name: Any = None
    arguments: Any = None


class _Tool(msgspec.Struct):
    function: _Function | None = None


class _Message(msgspec.Struct):
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: list[_Tool] | None = None
    function_call: _Function | None = None


class _Choice(msgspec.Struct):
    message: _Message | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice] = []


_decode = msgspec.json.Decoder(_Body).decode


def passes(control: Control, answer: EngineAnswer) -> bool:
    """Whether one look says that nothing in the answer is watched for. False: it has to be looked through."""
    terms, raw = control.terms, answer.raw
    if terms is None or control.triggers or not terms.glance.clears(answer.text):
        return False
    if raw is None or says_only(raw, answer.text):
        return True
    cleared = {answer.text}
    for text in _texts_of(answer):
        if text not in cleared:
            if not terms.glance.clears(text):
                return False
            cleared.add(text)
    return True


def _texts_of(answer: EngineAnswer) -> Iterator[str]:
    """Each text of an answer that has more than one, first as it is looked at, then whatever its JSON holds."""
    for chunk in parts_of(answer):
        if chunk.text:
            yield chunk.text
        for tool in chunk.tools or ():
            yield tool.name
            yield Unescaped().feed(tool.arguments)
    yield from texts_in(msgspec.json.decode(answer.raw or b"null"))


def parts_of(answer: EngineAnswer) -> list[Chunk]:
    """Reasoning, text, tool calls and the end."""
    at_ns = time.perf_counter_ns()
    chunks: list[Chunk] = []
    tools: list[ToolDelta] = []
    for message in _messages(answer.raw):
        thoughts = message.reasoning_content or message.reasoning
        if isinstance(thoughts, str):
            chunks.append(Chunk(at_ns, "reasoning", thoughts))
        called = [tool.function for tool in message.tool_calls or ()] + [message.function_call]
        for index, function in enumerate(called):
            if function is not None:
                tools.append(ToolDelta(index, "", str(function.name or ""), str(function.arguments or "")))
    if answer.text:
        chunks.append(Chunk(at_ns, "text", answer.text))
    if tools:
        chunks.append(Chunk(at_ns, "tool_call", tools=tools))
    chunks.append(Chunk(at_ns, "notice", finish=answer.end))
    return chunks


def _messages(raw: bytes | None) -> list[_Message]:
    if raw is None:
        return []
    try:
        return [choice.message for choice in _decode(raw).choices if choice.message is not None]
    except (msgspec.MsgspecError, UnicodeDecodeError):  # of a shape that we do not know: its text is looked at all the same
        return []
