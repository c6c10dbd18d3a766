"""What an engine's answer other than 2xx means to the caller."""

from __future__ import annotations

import datetime
import email.utils
from collections.abc import Mapping
from typing import Any

import msgspec

from tidegate.core.errors import ContextTooLong, EngineError, EngineRefused, TidegateError

_HINTS = {
    404: "Does the engine serve this model under this name? See models of [engines.NAME].",
    429: "The engine is at its limit. Come back after Retry-After, or ask for less.",
    503: "The engine is busy or not ready. Try again shortly; see /health.",
}
#: How much of an engine's message is passed on.
_MAX_MESSAGE = 2000


def refusal(label: str, status: int, headers: Mapping[bytes, bytes], body: bytes) -> TidegateError:
    """The error for an answer with this status: a redirect, our key refused, a prompt too long, or the engine's own words passed on."""
    if status < 400:
        target = headers.get(b"location", b"").decode("latin-1")[:200]
        return EngineError(
            f"{label} redirects ({status}) to {target!r}; redirects are not followed.", hint="Set url of this engine to the final address."
        )
    error = _error_of(body)
    message = str(error.get("message") or body[:200].decode("utf-8", "replace") or "no reason given")[:_MAX_MESSAGE]
    if status in (401, 403):
        # passed on, it would tell the caller that the caller's own key is wrong
        return EngineError(f"{label} refuses Tidegate's key ({status}): {message}", hint="Set api_key of this engine.")
    if status in (400, 413, 422) and _is_context(error, message):
        return _context_too_long(label, error, message)
    param = error.get("param")
    return EngineRefused(
        f"{label} refused the request ({status}): {message}",
        engine_status=status,
        engine_code=code_of(error),
        hint=_HINTS.get(status, "The engine's own words say what it minds." if status < 500 else "See the engine's log, and /health."),
        param=param if isinstance(param, str) else None,
        retry_after_s=retry_after_s(headers.get(b"retry-after")),
    )


def code_of(error: Mapping[str, Any]) -> str | None:
    """The machine code of an engine's error: its `code`, or its `type` where the code is a number or missing."""
    return next((c for c in (error.get("code"), error.get("type")) if isinstance(c, str) and c), None)


def retry_after_s(value: bytes | None) -> float | None:
    """Seconds of a `Retry-After` header, which is a number or a date (RFC 9110, 10.2.3); None where it is neither."""
    if value is None:
        return None
    text = value.decode("latin-1").strip()
    if text.isdecimal():
        return float(text)
    try:
        when = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, (when - datetime.datetime.now(datetime.UTC)).total_seconds()) if when.tzinfo else None


def _error_of(body: bytes) -> dict[str, Any]:
    """The error in its usual shapes: {"error": {...}}, {"error": "..."}, {"message": ...}, {"detail": ...}."""
    try:
        said = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    if not isinstance(said, dict):
        return {}
    error = said.get("error", said)
    if not isinstance(error, dict):
        return {"message": error, "type": said.get("error_type")}  # TGI
    return error if error.get("message") else {**error, "message": error.get("detail")}


def is_context(message: str) -> bool:
    """True where an engine says by these words that the prompt does not fit its context."""
    return any(words in message for words in _CONTEXT)


#: vLLM's, SGLang's, TGI's (twice) and TensorRT-LLM's words.
_CONTEXT = (
    "maximum context length", "context length of", "longer than the model's context length", "`inputs` must have less than",
    "`inputs` tokens + `max_new_tokens` must be", "exceeds maximum input length",
)


def _is_context(error: dict[str, Any], message: str) -> bool:
    # OpenAI's code, llama.cpp's type, or the words of the others
    return error.get("code") == "context_length_exceeded" or error.get("type") == "exceed_context_size_error" or is_context(message)


def _context_too_long(label: str, error: dict[str, Any], message: str) -> ContextTooLong:
    tokens, context = error.get("n_prompt_tokens"), error.get("n_ctx")
    if isinstance(tokens, int) and isinstance(context, int):
        message = f"The prompt has {tokens} tokens, but the model's context holds {context}."
    else:
        message = f"{label}: {message}"
    return ContextTooLong(message, hint="Shorten the prompt, or use a model with a larger context.", param="messages")
