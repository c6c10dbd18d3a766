"""Whole answers that pass at one look where terms are banned: those that say one text, and of the model nothing beside it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tidegate.core.ask import EngineAnswer
from tidegate.core.chunk import Usage
from tidegate.guard.terms import TermList, Terms
from tidegate.pipeline.bare import says_only
from tidegate.pipeline.control import Control, Trigger
from tidegate.pipeline.whole import passes

BAD = Control(Terms([TermList(["bad"])]))


def body(message: dict[str, Any], *, top: dict[str, Any] | None = None, **choice: Any) -> bytes:
    choices = [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop", **choice}]
    return json.dumps({"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": choices, "usage": {}, **(top or {})}).encode()


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (body({"content": "hé\n"}), "hé\n"),
        (body({"content": None}), ""),
        (body({"content": "hi", "refusal": None, "tool_calls": [], "audio": None, "reasoning": ""}, logprobs=None, stop_reason=2), "hi"),
        (body({"content": "hi"}, top={"system_fingerprint": "f", "service_tier": None, "timings": {"predicted_n": 1}}), "hi"),
        (b'{"object":"text_completion","choices":[{"index":0,"text":"hi","logprobs":null,"finish_reason":"length"}],"usage":null}', "hi"),
    ],
)
def test_what_the_usual_engines_answer(raw: bytes, text: str) -> None:
    """The text, and what frames it."""
    assert says_only(raw, text)


@pytest.mark.parametrize(
    "raw",
    [
        body({"content": "other"}),
        body({"content": "hi", "reasoning_content": "bad"}),
        body({"content": "hi", "refusal": "bad"}),
        body({"content": "hi", "role": "bad"}),
        body({"content": "hi", "note": "bad"}),
        body({"content": "hi", "tool_calls": [{"function": {"name": "bad"}}]}),
        body({"content": "hi", "annotations": ["bad"]}),
        body({"content": "hi"}, text="bad"),
        body({"content": "hi"}, logprobs={"content": [{"token": "bad"}]}),
        body({"content": "hi"}, matched_stop="bad"),
        body({"content": "hi"}, top={"note": "bad"}),
        b'{"choices":[{"message":{"content":"hi"}},{"message":{"content":"bad"}}]}',
        b'{"choices":[{"message":{"content":[{"type":"text","text":"hi"}]}}]}',
        b'{"choices":[{}]}', b'{"choices":[]}', b"{}", b"[]", b"hi", b'{"choices":[{"text":"\xff"}]}', b'{"usage":' + b"[" * 100_000,
    ],
)  # fmt: skip
def test_what_may_say_more(raw: bytes) -> None:
    """A text anywhere else, or a shape that nobody knows."""
    assert not says_only(raw, "hi")


@pytest.mark.parametrize(
    ("control", "text", "raw", "does"),
    [
        (BAD, "all good", body({"content": "all good"}), True),
        (BAD, "all good", None, True),
        (BAD, "all bad", body({"content": "all bad"}), False),
        (BAD, "all good", body({"content": "all good", "reasoning": "hm"}), True),
        (BAD, "all good", body({"content": "all good", "reasoning": "so bad"}), False),
        (BAD, "all good", body({"content": "all good", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": "good"}'}}]}), True),
        (BAD, "all good", body({"content": "all good", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": "\\u0062ad"}'}}]}), False),
        (BAD, "all good", body({"content": "all good", "tool_calls": [{"function": {"name": "bad", "arguments": ""}}]}), False),
        (BAD, "all good", body({"content": "all good"}, top={"note": ["is", {"x": "bad"}]}), False),
        (Control(triggers=(Trigger(None, "t", "<T>"),)), "all good", None, False),  # type: ignore[arg-type]
    ],
)
def test_what_passes(control: Control, text: str, raw: bytes | None, does: bool) -> None:
    """No term in the text, nor in any text beside it; no trigger that waits."""
    assert passes(control, EngineAnswer(text, "stop", Usage(1, 1), raw)) is does
