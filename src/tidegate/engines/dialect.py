"""OpenAI's streaming dialect, as its many speakers speak it: one event's JSON -> one Chunk, and the judgement of how the stream ended.

Decoding is typed and partial: only what decides something is looked at, and the payload itself travels on as `Chunk.raw`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tidegate.core.chunk import Chunk, End, Usage
from tidegate.core.errors import EngineCut, EngineEmpty, EngineError, EngineRefused
from tidegate.engines.refusal import code_of

#: Finish reasons as engines name them -> ours.
_ENDS: dict[str, End] = {
    "stop": "stop", "eos": "stop", "eos_token": "stop", "stop_sequence": "stop", "end_turn": "stop",
    "length": "length", "max_tokens": "length", "model_length": "length",
    "tool_calls": "tool_calls", "function_call": "tool_calls",
    "content_filter": "content_filter",
}  # fmt: skip
#: Finish reasons by which an engine says that it gave up.
_GIVEN_UP = frozenset({"abort", "error", "cancelled", "insufficient_system_resource"})


class _Delta(msgspec.Struct, gc=False):
    # `content` is a string nearly everywhere, a list of parts with one provider
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    delta: _Delta | None = None
    message: _Delta | None = None
    text: Any = None
    finish_reason: str | None = None


class _CachedTokens(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None


class _Payload(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Payload).decode


def estimate_tokens(text_bytes: int) -> int:
    """Tokens of a text of so many UTF-8 bytes: four bytes each, about right for English and Chinese alike. Always marked as an estimate."""
    return (text_bytes + 3) // 4


class Dialect:
    """Reads one answer, event by event or whole, and remembers what is needed to judge its end."""

    __slots__ = ("finish", "label", "odd_finish", "over", "said", "text_bytes", "thought", "usage")

    def __init__(self, label: str) -> None:
        self.label = label
        self.finish: End | None = None
        self.odd_finish: str | None = None
        self.usage: Usage | None = None
        self.over = False  # `[DONE]` was said
        self.said = False  # text or a tool call
        self.thought = False  # reasoning
        self.text_bytes = 0

    def chunk(self, data: bytes, at_ns: int) -> Chunk | None:
        """The chunk of one event; None for `[DONE]`.

        Raises EngineError for an error event and for broken JSON, EngineCut where the engine gave up, EngineEmpty where it said nothing.
        """
        if data == b"[DONE]":
            self.over = True
            return None
        try:
            payload = _decode(data)
        except msgspec.ValidationError:
            return Chunk(at_ns, "notice", "", data)  # JSON, but of a shape we do not know: passed on
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise EngineError(f"{self.label} sent an event that is not JSON.", hint="Its log may say why.") from None
        if payload.error:
            raise self.error(payload.error)
        chunk = Chunk(at_ns, "notice", "", data)
        if payload.usage is not None:
            chunk.usage = self._read_usage(payload.usage)
            chunk.kind = "usage"
        for choice in payload.choices or ():
            # with n > 1 the others travel in `raw` only: one flight has one text
            if choice.index == 0:
                self._read_choice(choice, choice.delta, chunk)
        return chunk

    def whole(self, body: bytes) -> str:
        """The text of a non-streamed answer; sets finish and usage. Raises as `chunk` does."""
        try:
            payload = _decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise EngineError(f"{self.label} did not answer with an OpenAI-shaped JSON object.", hint="Check url.") from None
        if payload.error:
            raise self.error(payload.error)
        if not payload.choices:
            raise EngineError(f"{self.label} answered without choices.", hint="Is this an OpenAI-compatible engine?")
        if payload.usage is not None:
            self._read_usage(payload.usage)
        chunk = Chunk(0, "notice")
        choice = next((c for c in payload.choices if c.index == 0), payload.choices[0])
        choice.finish_reason = choice.finish_reason or "stop"
        self._read_choice(choice, choice.message, chunk)
        self.over = True
        return chunk.text if chunk.kind == "text" else ""

    def best_usage(self, prompt_bytes: int) -> Usage:
        """What the engine counted; where it has not, an estimate, marked as such."""
        return self.usage or Usage(estimate_tokens(prompt_bytes), estimate_tokens(self.text_bytes), exact=False)

    def error(self, error: Any) -> EngineError:
        """The EngineError of an `error` member, whatever its shape."""
        said = error if isinstance(error, dict) else {"message": error}
        message = str(said.get("message") or "no reason given")[:2000]
        status = said.get("status") or said.get("code")
        return EngineRefused(
            f"{self.label} reports an error: {message}",
            engine_status=status if isinstance(status, int) and 400 <= status <= 599 else 502,
            engine_code=code_of(said),
            hint="The engine's log has the details.",
        )

    def error_event(self, data: bytes) -> EngineError:
        """The EngineError of an event that is named `error`."""
        try:
            said = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            said = data.decode("utf-8", "replace")
        return self.error(said.get("error", said) if isinstance(said, dict) else said)

    def empty(self) -> EngineEmpty:
        """The EngineEmpty of this engine."""
        return EngineEmpty(f"{self.label} ended its answer without saying anything.", hint="Look at the prompt and the stop strings.")

    def _read_choice(self, choice: _Choice, delta: _Delta | None, chunk: Chunk) -> None:
        text = choice.text
        if delta is not None:
            text = delta.content or delta.refusal
            if delta.tool_calls or delta.function_call:
                self.said = True
                chunk.kind = "tool_call"
                self.text_bytes += len(msgspec.json.encode(delta.tool_calls or delta.function_call))
            thoughts = delta.reasoning_content or delta.reasoning
            if thoughts:
                self.thought = True
                if isinstance(thoughts, str):
                    self.text_bytes += len(thoughts)
                    if not text:
                        chunk.kind = "reasoning"
                        chunk.text = thoughts
        if text:
            if not isinstance(text, str):
                text = _text_of_parts(text)
            if text:
                self.said = True
                self.text_bytes += len(text) if text.isascii() else len(text.encode())
                chunk.kind = "text"
                chunk.text = text
        if choice.finish_reason:
            chunk.finish = self._read_finish(choice.finish_reason)

    def _read_finish(self, reason: str) -> End:
        if reason in _GIVEN_UP:
            raise EngineCut(f"{self.label} gave the answer up (finish_reason {reason!r}).", hint="The engine's log has the details.")
        end = _ENDS.get(reason)
        if end is None:
            end = "stop"
            self.odd_finish = reason
        if end in ("stop", "tool_calls") and not self.said:
            raise self.empty()
        self.finish = end
        return end

    def _read_usage(self, usage: _Usage) -> Usage:
        details = usage.prompt_tokens_details
        cached = details.cached_tokens if details is not None else 0
        self.usage = Usage(usage.prompt_tokens or 0, usage.completion_tokens or 0, cached or 0)
        return self.usage


def _text_of_parts(parts: Any) -> str:
    """The text of a `content` that is a list of parts (`{"type": "text", "text": ...}`)."""
    if not isinstance(parts, list):
        return ""
    return "".join(p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str))
