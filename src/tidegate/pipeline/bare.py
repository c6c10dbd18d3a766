"""Whether an engine's own event or answer says nothing but what was looked at: only then it may leave as it came where terms are banned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from tidegate.core.chunk import Chunk

#: Members of an event that hold no text of the model.
_ENVELOPE = frozenset({
    "id", "object", "created", "model", "usage", "system_fingerprint", "service_tier", "timings", "obfuscation", "provider", "prompt_token_ids",
    "kv_transfer_params",
})  # fmt: skip
_CHOICE = frozenset({"index", "delta", "text", "finish_reason", "native_finish_reason", "logprobs", "token_ids", "prompt_token_ids", "matched_stop"})
_BARE: tuple[bool, list[str]] = (True, [])
_encode = msgspec.json.Encoder().encode
_THOUGHTS = ("reasoning_content", "reasoning")


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
    delta: _OnlyText | None = None
    message: _OnlyText | None = None
    text: str | None = None
    index: Literal[0] | None = None
    finish_reason: str | None = None
    native_finish_reason: str | None = None
    logprobs: _Nothing = None
    prompt_logprobs: _Nothing = None
    stop_reason: int | None = None
    matched_stop: int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _OnlyBody(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """An answer or event that tells one text, and of the rest only what the engine or who runs it makes, not the model."""

    choices: Annotated[list[_OnlyChoice], msgspec.Meta(max_length=1)] = []
    id: str | None = None
    object: str | None = None
    created: float | None = None
    model: str | None = None
    usage: msgspec.Raw = msgspec.Raw()
    system_fingerprint: str | None = None
    service_tier: str | None = None
    provider: str | None = None
    obfuscation: str | None = None
    timings: msgspec.Raw = msgspec.Raw()
    kv_transfer_params: msgspec.Raw = msgspec.Raw()
    prompt_logprobs: _Nothing = None
    prompt_token_ids: list[int] | None = None


_decode_only = msgspec.json.Decoder(_OnlyBody).decode


def says_only(raw: bytes, text: str) -> bool:
    """Whether an engine's event or whole answer says this text, and of the model nothing beside it. False too where only a closer look can tell."""
    try:
        choices = _decode_only(raw).choices
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    if not choices:
        return not text
    choice = choices[0]
    said, delta, message = choice.text, choice.delta, choice.message
    if delta is not None:
        return not said and message is None and (delta.content or "") == text
    if message is not None:
        return not said and (message.content or "") == text
    return (said or "") == text


class Bare:
    """Remembers the last event that was bare: one that differs from it in its text alone is bare too."""

    __slots__ = ("_after", "_before", "_kind")

    def __init__(self) -> None:
        self._before = self._after = b""
        self._kind = ""

    def check(self, chunk: Chunk) -> tuple[bool, list[str]]:
        """True where the event tells nothing else; and the texts of its log-probabilities, which nobody looked at yet."""
        raw = chunk.raw
        assert raw is not None
        kind, text = chunk.kind, chunk.text
        if text and kind == self._kind and raw == self._before + _encode(text) + self._after:
            return _BARE
        if kind == "text" and says_only(raw, text):
            self._remember(chunk, raw)
            return _BARE
        if not text and says_only(raw, ""):  # an end, a count
            return _BARE
        try:
            event = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False, []
        bare, beside = _is_bare(event, chunk)
        if bare and not beside and kind in ("text", "reasoning"):
            self._remember(chunk, raw)
        return bare, beside

    def _remember(self, chunk: Chunk, raw: bytes) -> None:
        said = _encode(chunk.text)
        before, found, after = raw.rpartition(said)
        # where the text stands twice (the model's name may be its word) nothing is remembered
        self._kind, self._before, self._after = (chunk.kind, before, after) if found and raw.count(said) == 1 else ("", b"", b"")


def _is_bare(event: Any, chunk: Chunk) -> tuple[bool, list[str]]:
    if not isinstance(event, dict) or any(event[name] not in (None, "", [], {}) for name in event.keys() - _ENVELOPE - {"choices"}):
        return False, []
    choices = event.get("choices") or []
    if not isinstance(choices, list) or len(choices) > 1:
        return False, []
    for choice in choices:
        if not isinstance(choice, dict) or choice.get("index") not in (0, None):
            return False, []
        if any(choice[name] not in (None, "", [], {}) for name in choice.keys() - _CHOICE) or isinstance(choice.get("matched_stop"), str):
            return False, []
        delta = choice.get("delta") or {}
        if not isinstance(delta, dict) or not _tells(chunk, delta, choice.get("text")):
            return False, []
        return True, list(texts_in(choice.get("logprobs")))
    return True, []


def _tells(chunk: Chunk, delta: dict[str, Any], text: Any) -> bool:
    said = [value for value in (text, delta.get("content"), delta.get("refusal")) if value]
    thoughts = [value for value in (delta.get(name) for name in _THOUGHTS) if value]
    tools = delta.get("tool_calls")
    if any(delta[name] not in (None, "", [], {}) for name in delta.keys() - {"role", "content", "refusal", "tool_calls", *_THOUGHTS}):
        return False
    if chunk.kind == "text":
        return not thoughts and not tools and all(value == chunk.text for value in said)
    if chunk.kind == "reasoning":
        return not said and not tools and all(value == chunk.text for value in thoughts)
    if said or thoughts:
        return False
    if not tools:
        return True
    looked_at = {chunk_text for tool in chunk.tools or () for chunk_text in (tool.id, tool.name, tool.arguments)} | {"function"}
    return all(value in looked_at for value in texts_in(tools))


def texts_in(value: Any) -> Iterator[str]:
    """Every text in a JSON value, names of members left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from texts_in(one)
    elif isinstance(value, list):
        for one in value:
            yield from texts_in(one)
