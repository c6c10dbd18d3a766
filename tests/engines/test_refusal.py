"""An engine's refusal in the shapes in which engines refuse."""

from __future__ import annotations

import datetime
import email.utils

import msgspec
import pytest

from tidegate.core.errors import ContextTooLong, EngineError, EngineRefused, TidegateError
from tidegate.engines.refusal import MAX_RETRY_AFTER_S, refusal, reported, retry_after_s


@pytest.mark.parametrize(
    ("body", "words", "code"),
    [
        (b'{"error": {"message": "no", "type": "t", "code": "c", "param": "p"}}', "no", "c"),
        (b'{"error": "no"}', "no", None),
        (b'{"object": "error", "message": "no", "type": "BadRequestError", "code": 400}', "no", "BadRequestError"),
        (b'{"detail": "no"}', "no", None),
        (b'{"error": {"detail": "no"}}', "no", None),
        (b"<html>no</html>", "<html>no</html>", None),
        (b"", "no reason given", None),
        (b"[" * 5000, r"\[\[", None),
        (b"[1]", r"\[1\]", None),
        (b"\xff\xfe", "\ufffd", None),
    ],
)
def test_shapes(body: bytes, words: str, code: str | None) -> None:
    """Status, words and code are found wherever the engine puts them."""
    error = refusal("E", 422, {}, body)
    assert isinstance(error, EngineRefused)
    assert (error.http_status, error.engine_code) == (422, code)
    assert words.replace("\\", "") in error.message


@pytest.mark.parametrize(
    "body",
    [
        b'{"error": {"message": "too long", "code": "context_length_exceeded"}}',
        b'{"object": "error", "message": "This model\'s maximum context length is 10 tokens. However, you requested 20", "code": 400}',
        b'{"message": "The input (20 tokens) is longer than the model\'s context length of 10"}',
        b'{"error": {"code": 400, "message": "x", "type": "exceed_context_size_error", "n_prompt_tokens": 20, "n_ctx": 10}}',
    ],
)
def test_a_context_that_is_too_small(body: bytes) -> None:
    """OpenAI, vLLM, SGLang and llama.cpp each have their own way to say it."""
    assert isinstance(refusal("E", 400, {}, body), ContextTooLong)


def test_our_own_key() -> None:
    """401 and 403 are about the gateway's key and never look like the caller's fault."""
    for status in (401, 403):
        error = refusal("E", status, {}, b"")
        assert type(error) is EngineError
        assert error.http_status == 502


def test_a_long_message_is_cut() -> None:
    """A page of HTML is no message."""
    assert len(refusal("E", 500, {}, b"x" * 100_000).message) < 3000


def test_retry_after() -> None:
    """Seconds, a date, or nothing that can be understood."""
    assert retry_after_s(b"7") == 7.0
    assert retry_after_s(None) is None
    assert retry_after_s(b"soon") is None
    assert retry_after_s(b"Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    later = email.utils.format_datetime(datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=100), usegmt=True)
    assert 90 < (retry_after_s(later.encode()) or 0) <= 100


@pytest.mark.parametrize(
    ("told", "meant"),
    [
        (b" 7 ", 7.0),
        (b"1.5", 1.5),
        (b"0", 0.0),
        (b"-1", None),
        (b"", None),
        (b"1e3", None),
        (b"inf", None),
        (b"nan", None),
        (b"\xb2", None),
        (b"31536000", MAX_RETRY_AFTER_S),
        (b"9" * 400, MAX_RETRY_AFTER_S),
        (b"Fri, 31 Dec 9999 23:59:59 GMT", MAX_RETRY_AFTER_S),
        (b"Fri, 31 Feb 2020 99:99:99 GMT", None),
        (b"Mon, 01 Jan 2035 00:00:00", None),
        (b"Mon, 01 Jan 99999999999999999999 00:00:00 GMT", None),
    ],
)
def test_retry_after_is_bounded(told: bytes, meant: float | None) -> None:
    """A year is told as a day, what is no time is none, and nothing breaks on it."""
    assert retry_after_s(told) == meant


def test_a_limit_without_a_time() -> None:
    """429 without Retry-After stays 429, and no time is made up."""
    error = refusal("E", 429, {}, b"")
    assert (error.http_status, error.retry_after_s) == (429, None)


@pytest.mark.parametrize("status", [99, 150, 600, 999])
def test_a_status_that_is_none(status: int) -> None:
    """A number that is no status is said to be none, and becomes 502."""
    error = refusal("E", status, {}, b"{}")
    assert "a status that is none" in error.message
    assert error.http_status == 502


@pytest.mark.parametrize(
    "message",
    [
        "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj",
        "audio input is not supported - hint: if this is unexpected, you may need to provide the mmproj",
        "Failed to parse messages: Missing 'role' in message: {}",
        "Failed to parse tools: Missing tool function: {}",
        "Unknown reasoning format: odd",
    ],
)
def test_mistakes_of_callers_that_llama_cpp_calls_its_own(message: str) -> None:
    """llama.cpp says 500 where it cannot read a request: to the caller it is a 400. Any other 500 stays one."""
    error = {"code": 500, "message": message, "type": "server_error"}
    assert refusal("E", 500, {}, msgspec.json.encode({"error": error})).http_status == 400
    assert reported("E", error).http_status == 400
    assert refusal("E", 500, {}, msgspec.json.encode({"error": {**error, "message": "slot died: " + message}})).http_status == 500


@pytest.mark.parametrize(
    ("error", "kind", "status", "code", "retry"),
    [
        ({"message": "m", "type": "rate_limit_error", "retry_after": 7}, EngineRefused, 429, "rate_limit_error", 7.0),
        ({"message": "m", "code": "429", "retry_after_ms": 1500}, EngineRefused, 429, "429", 1.5),
        ({"message": "m", "code": "insufficient_quota"}, EngineRefused, 429, "insufficient_quota", None),
        ({"message": "m", "type": "overloaded_error"}, EngineRefused, 503, "overloaded_error", None),
        (
            {"message": "m", "code": 429, "status": "RESOURCE_EXHAUSTED", "details": [7, {"retryDelay": "34.5s"}]},
            EngineRefused, 429, "RESOURCE_EXHAUSTED", 34.5,
        ),
        ({"message": "m", "type": "authentication_error"}, EngineError, 502, "engine_error", None),
        ({"message": "m", "code": "context_length_exceeded"}, ContextTooLong, 400, "context_length_exceeded", None),
        ({"message": "prompt is too long: 9 tokens > 8", "type": "invalid_request_error"}, ContextTooLong, 400, "context_length_exceeded", None),
        ({"message": "x", "code": 400, "type": "exceed_context_size_error", "n_ctx": 8}, ContextTooLong, 400, "context_length_exceeded", None),
        ({"message": "m", "status": 200, "retry_after": "soon"}, EngineRefused, 502, "engine_refused", None),
        ({"message": "m", "retry_after": True, "details": "x"}, EngineRefused, 502, "engine_refused", None),
        ([1], EngineRefused, 502, "engine_refused", None),
        (7, EngineRefused, 502, "engine_refused", None),
    ],
)  # fmt: skip
def test_errors_inside_a_stream(error: object, kind: type[TidegateError], status: int, code: str, retry: float | None) -> None:
    """Status, code, time to come back and a prompt too long survive inside a stream that began with 200; our key refused stays our mistake."""
    found = reported("E", error)
    assert type(found) is kind
    assert (found.http_status, found.public_code, found.retry_after_s) == (status, code, retry)
