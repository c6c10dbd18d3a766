"""A whole answer of an engine: whether it may pass at one look, else taken apart into the chunks that a stream of it would have had."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import msgspec

from tidegate.core.ask import EngineAnswer
from tidegate.core.chunk import Chunk, ToolDelta
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


#: A member that says nothing.
_Nothing = Annotated[str, msgspec.Meta(max_length=0)] | Annotated[list[None], msgspec.Meta(max_length=0)] | None


class _OnlyText(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: _Nothing = None
    reasoning_content: _Nothing = None
    reasoning: _Nothing = None
    tool_calls: _Nothing = None
    function_call: _Nothing = None
    annotations: _Nothing = None
    audio: _Nothing = None


class _OnlyChoice(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    message: _OnlyText | None = None
    text: str | None = None
    index: Literal[0] = 0
    finish_reason: str | None = None
    native_finish_reason: str | None = None
    logprobs: _Nothing = None
    prompt_logprobs: _Nothing = None
    stop_reason: int | None = None
    matched_stop: int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _OnlyBody(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """An answer that tells one text, and of the rest only what the engine or who runs it makes, not the model."""

    choices: Annotated[list[_OnlyChoice], msgspec.Meta(max_length=1)]
    id: str | None = None
    object: str | None = None
    created: float | None = None
    model: str | None = None
    usage: msgspec.Raw = msgspec.Raw()
    system_fingerprint: str | None = None
    service_tier: str | None = None
    provider: str | None = None
    timings: msgspec.Raw = msgspec.Raw()
    kv_transfer_params: msgspec.Raw = msgspec.Raw()
    prompt_logprobs: _Nothing = None
    prompt_token_ids: list[int] | None = None


_decode_only = msgspec.json.Decoder(_OnlyBody).decode


def passes(control: Control, answer: EngineAnswer) -> bool:
    """Whether one look says that nothing in the answer is watched for. False: it has to be looked through."""
    if control.triggers or (control.terms is not None and not control.terms.glance.clears(answer.text)):
        return False
    return answer.raw is None or says_only(answer.raw, answer.text)


def says_only(raw: bytes, text: str) -> bool:
    """Whether an engine's whole answer says this text, and of the model nothing beside it."""
    try:
        choices = _decode_only(raw).choices
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    if not choices:
        return False
    message, said = choices[0].message, choices[0].text
    if message is not None:
        return not said and (message.content or "") == text
    return said == text


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
