"""Whether an engine's own event says nothing but what its chunk tells: only then it may leave as it came where terms are banned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


class Bare:
    """Remembers the last event that was bare: one that differs from it in its text alone is bare too."""

    __slots__ = ("_after", "_before")

    def __init__(self) -> None:
        self._before = self._after = b""

    def check(self, chunk: Chunk) -> tuple[bool, list[str]]:
        """True where the event tells nothing else; and the texts of its log-probabilities, which nobody looked at yet."""
        raw = chunk.raw
        assert raw is not None
        if chunk.kind == "text" and self._before and raw == self._before + _encode(chunk.text) + self._after:
            return _BARE
        try:
            event = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False, []
        bare, beside = _is_bare(event, chunk)
        if bare and not beside and chunk.kind == "text":
            said = _encode(chunk.text)
            before, found, after = raw.rpartition(said)
            # where the text stands twice (the model's name may be its word) nothing is remembered
            self._before, self._after = (before, after) if found and raw.count(said) == 1 else (b"", b"")
        return bare, beside


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
