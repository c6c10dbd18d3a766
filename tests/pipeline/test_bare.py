"""Events that say more than their chunk do not leave as they came where terms are banned."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tidegate.core.chunk import Chunk, ToolDelta
from tidegate.guard.terms import TermList, Terms
from tidegate.pipeline.bare import Bare
from tidegate.pipeline.control import Control
from tidegate.pipeline.told import Told
from tidegate.pipeline.watch import Watch


def event(delta: dict[str, Any], *, top: dict[str, Any] | None = None, **choice: Any) -> bytes:
    return json.dumps({"id": "x", "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": None, **choice}], **(top or {})}).encode()


TOOL = ToolDelta(0, "i", "f", "{}")


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(1, "text", "hé\n", event({"content": "hé\n"})),
        Chunk(1, "text", "hi", event({"role": "assistant", "content": "hi", "refusal": None, "tool_calls": []})),
        Chunk(1, "text", "hi", b'{"choices":[{"index":0,"text":"hi"}],"usage":{"total_tokens":1},"timings":{"a":1}}'),
        Chunk(1, "reasoning", "hm", event({"reasoning_content": "hm", "reasoning": "hm"})),
        Chunk(1, "tool_call", "", event({"tool_calls": [{"index": 0, "id": "i", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}),
              tools=[TOOL]),
        Chunk(1, "notice", "", event({"role": "assistant"})),
        Chunk(1, "notice", "", event({}, finish_reason="stop")),
        Chunk(1, "usage", "", b'{"choices":[],"usage":{"total_tokens":1}}'),
    ],
)  # fmt: skip
def test_bare_events(chunk: Chunk) -> None:
    """What the usual engines send says what its chunk tells, and leaves untouched."""
    assert Bare().check(chunk) == (True, [])


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(1, "text", "hi", event({"content": "hi", "reasoning": "bad"})),
        Chunk(1, "text", "hi", event({"content": "hi", "reasoning_details": [{"text": "bad"}]})),
        Chunk(1, "text", "hi", event({"content": "hi"}, message="bad")),
        Chunk(1, "text", "hi", event({"content": "hi"}, top={"also": "bad"})),
        Chunk(1, "text", "hi", b'{"choices":[{"index":0,"delta":{"content":"hi"}},{"index":1,"delta":{"content":"bad"}}]}'),
        Chunk(1, "tool_call", "", event({"content": "bad", "tool_calls": [{"function": {"name": "f"}}]}), tools=[TOOL]),
        Chunk(1, "tool_call", "", event({"tool_calls": [{"function": {"name": "f", "note": "bad"}}]}), tools=[TOOL]),
        Chunk(1, "notice", "", event({"audio": {"transcript": "bad"}})),
        Chunk(1, "notice", "", b'{"type":"odd","text":"bad"}'),
        Chunk(1, "notice", "", b"[1]"),
    ],
)
def test_events_that_say_more(chunk: Chunk) -> None:
    """Another text anywhere in it."""
    assert Bare().check(chunk)[0] is False


def test_one_that_differs_in_its_text_alone() -> None:
    """It is compared with the last one; one that says more is not taken for it."""
    bare = Bare()
    for text in ("one", "two", '"', "é", "three"):
        raw = json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}, ensure_ascii=False).encode()
        assert bare.check(Chunk(1, "text", text, raw)) == (True, [])
    more = json.dumps({"choices": [{"index": 0, "delta": {"content": "a", "reasoning": "bad"}}]}).encode()
    assert bare.check(Chunk(1, "text", "a", more))[0] is False


def test_reasoning_that_differs_in_its_text_alone() -> None:
    """Its events have a frame of their own, in which no answer's text is bare."""
    bare = Bare()
    for text in ("one", "two", "three"):
        assert bare.check(Chunk(1, "reasoning", text, event({"reasoning": text}))) == (True, [])
    assert bare.check(Chunk(1, "text", "bad", event({"reasoning": "bad"})))[0] is False
    assert bare.check(Chunk(1, "reasoning", "bad", event({"content": "bad"})))[0] is False
    assert bare.check(Chunk(1, "notice", "", event({"content": "bad"})))[0] is False
    assert bare.check(Chunk(1, "notice", "bad", event({"content": "bad"})))[0] is False


@pytest.mark.parametrize(("token", "leaves"), [("good", True), ("bad", False)])
def test_alternatives_in_log_probabilities(token: str, leaves: bool) -> None:
    """An event with a term among its alternatives leaves without them."""
    told = Told()
    watch = Watch(Control(Terms([TermList(["bad"])])), told)
    raw = event({"content": "hi"}, logprobs={"content": [{"token": "hi", "top_logprobs": [{"token": token, "logprob": -1.0}]}]})
    out: list[Chunk] = []
    told.add("hi ", None)
    watch.take(Chunk(1, "text", "hi ", event({"content": "hi "})), out)
    told.add("hi", None)
    watch.take(Chunk(1, "text", "hi", raw), out)
    assert out[-1].text == "hi"
    assert (out[-1].raw is not None) == leaves
