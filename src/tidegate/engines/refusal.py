"""What an engine's refusal means to the caller: an answer other than 2xx, or an error inside a stream that began well."""

from __future__ import annotations

import datetime
import email.utils
import math
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
#: Seconds of `Retry-After` that are passed on at most: whoever obeys a longer one is as good as gone, and no engine knows next year.
MAX_RETRY_AFTER_S = 86_400.0

#: Words by which engines name an error, where they give no status: OpenAI's, Anthropic's, Google's and Cohere's types and codes.
_STATUS_OF = {
    "invalid_request_error": 400, "invalid_prompt": 400, "bad_request": 400, "INVALID_ARGUMENT": 400, "FAILED_PRECONDITION": 400,
    "context_length_exceeded": 400, "exceed_context_size_error": 400, "authentication_error": 401, "invalid_api_key": 401, "UNAUTHENTICATED": 401,
    "permission_error": 403, "PERMISSION_DENIED": 403, "not_found_error": 404, "not_found": 404, "model_not_found": 404, "NOT_FOUND": 404,
    "request_too_large": 413, "rate_limit_error": 429, "rate_limit_exceeded": 429, "insufficient_quota": 429, "RESOURCE_EXHAUSTED": 429,
    "too_many_requests": 429, "server_error": 500, "api_error": 500, "internal_error": 500, "internal_server_error": 500, "INTERNAL": 500,
    "overloaded_error": 503, "overloaded": 503, "unavailable": 503, "unavailable_error": 503, "UNAVAILABLE": 503,
    "timeout_error": 504, "DEADLINE_EXCEEDED": 504,
}  # fmt: skip
#: llama.cpp's server says 500 where it throws while it reads the request. These beginnings are surely about the request.
_CALLERS_OWN = (
    "image input is not supported", "audio input is not supported", "video input is not supported",
    "Failed to parse messages: ", "Failed to parse tools: ", "Unknown reasoning format: ",
)  # fmt: skip


def refusal(label: str, status: int, headers: Mapping[bytes, bytes], body: bytes) -> TidegateError:
    """The error for an answer with this status: a redirect, our key refused, a prompt too long, or the engine's own words passed on."""
    if not 300 <= status <= 599:
        return EngineError(f"{label} answers with a status that is none ({status}).", hint="Is url of this engine the address of an HTTP server?")
    if status < 400:
        target = headers.get(b"location", b"").decode("latin-1")[:200]
        return EngineError(
            f"{label} redirects ({status}) to {target!r}; redirects are not followed.", hint="Set url of this engine to the final address."
        )
    error = _error_of(body)
    message = str(error.get("message") or body[:200].decode("utf-8", "replace") or "no reason given")[:_MAX_MESSAGE]
    if status == 500 and message.startswith(_CALLERS_OWN):
        status = 400
    told = headers.get(b"retry-after")
    return _judged(label, status, error, message, f"refused the request ({status})", retry_after_s(told) if told is not None else _retry_of(error))


def reported(label: str, error: Any) -> TidegateError:
    """The error for an `error` inside a stream whose head was a 200: its status by number or name where it gives one (else 502), its code, and
    when to come back where it says so."""
    said = error if isinstance(error, dict) else {"message": error}
    message = str(said.get("message") or said.get("detail") or "no reason given")[:_MAX_MESSAGE]
    status = _status_of(said)
    if status == 500 and message.startswith(_CALLERS_OWN):
        status = 400
    return _judged(label, status, said, message, "reports an error", _retry_of(said))


def code_of(error: Mapping[str, Any]) -> str | None:
    """The machine code of an engine's error: its `code`, or its `type` (Google's `status`) where the code is a number or missing."""
    return next((c[:64] for c in (error.get("code"), error.get("type"), error.get("status")) if isinstance(c, str) and c), None)


def retry_after_s(value: bytes | None) -> float | None:
    """Seconds of a `Retry-After` header, which is a number or a date (RFC 9110, 10.2.3), at most MAX_RETRY_AFTER_S; None where it is neither."""
    if value is None:
        return None
    text = value.decode("latin-1").strip()
    seconds = _seconds(text)
    if seconds is not None:
        return seconds
    try:
        when = email.utils.parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    if not when.tzinfo:
        return None
    return min(MAX_RETRY_AFTER_S, max(0.0, (when - datetime.datetime.now(datetime.UTC)).total_seconds()))


def _judged(label: str, status: int, error: Mapping[str, Any], message: str, how: str, retry: float | None) -> TidegateError:
    if status in (401, 403):
        # passed on, it would tell the caller that the caller's own key is wrong
        refused = EngineError(f"{label} refuses Tidegate's key ({status}): {message}", hint="Set api_key of this engine.")
        refused.engine_status = status
        return refused
    if status in (400, 413, 422, 502) and _is_context(error, message):
        return _context_too_long(label, error, message)
    param = error.get("param")
    return EngineRefused(
        f"{label} {how}: {message}",
        engine_status=status,
        engine_code=code_of(error),
        hint=_HINTS.get(status, "The engine's own words say what it minds." if status < 500 else "See the engine's log, and /health."),
        param=param[:200] if isinstance(param, str) else None,
        retry_after_s=retry,
    )


def _status_of(error: Mapping[str, Any]) -> int:
    for name in ("status", "status_code", "http_status", "code"):
        value = error.get(name)
        if isinstance(value, str) and len(value) == 3 and value.isascii() and value.isdecimal():
            value = int(value)
        if isinstance(value, int) and 400 <= value <= 599:
            return value
    for name in ("code", "type", "status"):
        value = error.get(name)
        if isinstance(value, str) and value in _STATUS_OF:
            return _STATUS_OF[value]
    return 502


def _retry_of(error: Mapping[str, Any]) -> float | None:
    """When to come back, as an error's own body says it: `retry_after` (seconds), `retry_after_ms`, or Google's RetryInfo."""
    for name in ("retry_after", "retry_after_s", "retry_after_seconds"):
        seconds = _seconds(error.get(name))
        if seconds is not None:
            return seconds
    ms = _seconds(error.get("retry_after_ms"), 1000)
    if ms is not None:
        return ms
    details = error.get("details")
    for detail in details if isinstance(details, list) else ():
        delay = detail.get("retryDelay") if isinstance(detail, dict) else None
        if isinstance(delay, str) and delay.endswith("s"):
            return _seconds(delay[:-1])
    return None


def _seconds(value: Any, in_one: int = 1) -> float | None:
    """A number, or a text that is one, as seconds within bounds; None where it is something else, negative or without end."""
    if isinstance(value, str):
        if not value or not value.isascii() or not value.replace(".", "", 1).isdigit():
            return None
    elif not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        seconds = float(value) / in_one
    except OverflowError:
        return MAX_RETRY_AFTER_S if value > 0 else None  # a text does not overflow: it becomes infinite
    if math.isnan(seconds) or seconds < 0:
        return None
    return min(seconds, MAX_RETRY_AFTER_S)


def _error_of(body: bytes) -> dict[str, Any]:
    """The error in its usual shapes: {"error": {...}}, {"error": "..."}, {"message": ...}, {"detail": ...}, Google's [{"error": ...}]."""
    try:
        said = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    if isinstance(said, list) and said:
        said = said[0]
    if not isinstance(said, dict):
        return {}
    error = said.get("error", said)
    if not isinstance(error, dict):
        return {"message": error, "type": said.get("error_type")}  # TGI
    return error if error.get("message") else {**error, "message": error.get("detail")}


def is_context(message: str) -> bool:
    """True where an engine says by these words that the prompt does not fit its context."""
    return any(words in message for words in _CONTEXT)


#: How vLLM, SGLang, TGI, TensorRT-LLM, Anthropic and Google say it.
_CONTEXT = (
    "maximum context length", "context length of", "longer than the model's context length", "`inputs` must have less than",
    "`inputs` tokens + `max_new_tokens` must be", "exceeds maximum input length", "prompt is too long: ",
    "exceeds the maximum number of tokens allowed",
)  # fmt: skip


def _is_context(error: Mapping[str, Any], message: str) -> bool:
    # OpenAI's code, llama.cpp's type, or the words of the others
    return error.get("code") == "context_length_exceeded" or error.get("type") == "exceed_context_size_error" or is_context(message)


def _context_too_long(label: str, error: Mapping[str, Any], message: str) -> ContextTooLong:
    tokens, context = error.get("n_prompt_tokens"), error.get("n_ctx")
    if isinstance(tokens, int) and isinstance(context, int):
        message = f"The prompt has {tokens} tokens, but the model's context holds {context}."
    else:
        message = f"{label}: {message}"
    return ContextTooLong(message, hint="Shorten the prompt, or use a model with a larger context.", param="messages")
