"""An engine's refusal in the shapes in which engines refuse."""

from __future__ import annotations

import datetime
import email.utils

import pytest

from tidegate.core.errors import ContextTooLong, EngineError, EngineRefused
from tidegate.engines.refusal import refusal, retry_after_s


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
