"""OpenAI's dialect, event by event."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tidegate.core.chunk import Usage
from tidegate.core.errors import EngineCut, EngineEmpty, EngineError, EngineRefused
from tidegate.engines.dialect import Dialect

RECORDED = Path(__file__).parents[3] / "shared" / "data" / "streaming" / "recorded_chunks"


def delta(finish: str | None = None, **fields: object) -> bytes:
    return msgspec.json.encode({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})


def test_text_and_payload() -> None:
    """A text delta is text, and its payload travels on as it came."""
    payload = delta(content="你好", role="assistant")
    chunk = Dialect("E").chunk(payload, 5)
    assert chunk is not None
    assert (chunk.kind, chunk.text, chunk.raw, chunk.at_ns, chunk.finish) == ("text", "你好", payload, 5, None)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning(name: str) -> None:
    """Reasoning is told apart from text, under both of its names."""
    chunk = Dialect("E").chunk(delta(**{name: "hm", "content": None}), 0)
    assert chunk is not None
    assert (chunk.kind, chunk.text) == ("reasoning", "hm")


def test_content_as_a_list_of_parts() -> None:
    """Text in parts is text."""
    chunk = Dialect("E").chunk(delta(content=[{"type": "thinking", "thinking": []}, {"type": "text", "text": "hi"}]), 0)
    assert chunk is not None
    assert chunk.text == "hi"


def test_completion_text() -> None:
    """The older completions API says `text`."""
    chunk = Dialect("E").chunk(b'{"choices": [{"text": "hi", "index": 0, "finish_reason": null}]}', 0)
    assert chunk is not None
    assert (chunk.kind, chunk.text) == ("text", "hi")


def test_tool_call() -> None:
    """A tool call is something said, though it has no text."""
    dialect = Dialect("E")
    chunk = dialect.chunk(delta(tool_calls=[{"index": 0, "function": {"arguments": "{"}}]), 0)
    assert chunk is not None
    assert chunk.kind == "tool_call"
    end = dialect.chunk(delta("tool_calls"), 0)
    assert end is not None
    assert end.finish == "tool_calls"


def test_usage_chunk() -> None:
    """The usage chunk has no choices and exact figures."""
    dialect = Dialect("E")
    chunk = dialect.chunk(
        b'{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 3}}}', 0
    )
    assert chunk is not None
    assert (chunk.kind, chunk.usage) == ("usage", Usage(9, 4, 3, exact=True))
    assert dialect.best_usage(1000) == Usage(9, 4, 3, exact=True)


def test_usage_beside_text_stays_text() -> None:
    """Where each event carries usage, text is still text."""
    event = b'{"choices": [{"index": 0, "delta": {"content": "a"}}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}'
    chunk = Dialect("E").chunk(event, 0)
    assert chunk is not None
    assert (chunk.kind, chunk.usage) == ("text", Usage(1, 1))


def test_usage_is_estimated_where_nothing_was_said() -> None:
    """Without the engine's word the count is a quarter of the bytes, and marked."""
    dialect = Dialect("E")
    dialect.chunk(delta(content="x" * 400), 0)
    assert dialect.best_usage(80) == Usage(20, 100, exact=False)


@pytest.mark.parametrize(
    ("reason", "end"),
    [
        ("stop", "stop"),
        ("eos_token", "stop"),
        ("length", "length"),
        ("max_tokens", "length"),
        ("content_filter", "content_filter"),
        ("odd", "stop"),
    ],
)
def test_finish_reasons(reason: str, end: str) -> None:
    """Each engine's word for an end becomes ours; one nobody knows is a stop, and remembered."""
    dialect = Dialect("E")
    dialect.chunk(delta(content="a"), 0)
    chunk = dialect.chunk(delta(reason), 0)
    assert chunk is not None
    assert chunk.finish == end
    assert dialect.odd_finish == ("odd" if reason == "odd" else None)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_engine_that_gives_up(reason: str) -> None:
    """A finish reason that means giving up is a cut."""
    dialect = Dialect("E")
    dialect.chunk(delta(content="a"), 0)
    with pytest.raises(EngineCut):
        dialect.chunk(delta(reason), 0)


def test_a_stop_without_a_word_is_empty() -> None:
    """stop after no text is no success; length is one (the first token may be half a character)."""
    with pytest.raises(EngineEmpty):
        Dialect("E").chunk(delta("stop"), 0)
    chunk = Dialect("E").chunk(delta("length"), 0)
    assert chunk is not None
    assert chunk.finish == "length"


def test_other_choices_travel_in_raw_only() -> None:
    """With n > 1 the second choice adds no text and does not end the answer."""
    chunk = Dialect("E").chunk(b'{"choices": [{"index": 1, "delta": {"content": "b"}, "finish_reason": "stop"}]}', 0)
    assert chunk is not None
    assert (chunk.kind, chunk.text, chunk.finish) == ("notice", "", None)


def test_done() -> None:
    """[DONE] is no chunk but the end."""
    dialect = Dialect("E")
    assert dialect.chunk(b"[DONE]", 0) is None
    assert dialect.over


@pytest.mark.parametrize(
    ("error", "status", "code", "words"),
    [
        ({"message": "died", "code": "engine_dead", "status": 503}, 503, "engine_dead", "died"),
        ({"message": "busy", "code": 429, "type": "overloaded"}, 429, "overloaded", "busy"),
        ("plain words", 502, None, "plain words"),
        ({"odd": 1}, 502, None, "no reason given"),
    ],
)
def test_error_events(error: object, status: int, code: str | None, words: str) -> None:
    """An error inside a stream carries the engine's status and code where it gives them."""
    with pytest.raises(EngineRefused, match=words) as caught:
        Dialect("E").chunk(msgspec.json.encode({"error": error}), 0)
    assert (caught.value.http_status, caught.value.engine_code) == (status, code)


@pytest.mark.parametrize("junk", [b"{", b"", b"nonsense", b'{"odd": ' + b"[" * 9000, b'{"choices": [{"index": 0, "delta": {"content": "\xff"}}]}'])
def test_junk_is_an_error(junk: bytes) -> None:
    """Broken JSON and broken UTF-8 are never passed on."""
    with pytest.raises(EngineError, match="not JSON"):
        Dialect("E").chunk(junk, 0)


@pytest.mark.parametrize("odd", [b'{"type": "ping"}', b"[1, 2]", b'{"choices": [{"index": "zero"}]}', b"7"])
def test_what_we_do_not_know_is_passed_on(odd: bytes) -> None:
    """JSON of a shape nobody told us is a notice with its payload."""
    chunk = Dialect("E").chunk(odd, 0)
    assert chunk is not None
    assert (chunk.kind, chunk.raw) == ("notice", odd)


@pytest.mark.skipif(not RECORDED.is_dir(), reason="no ../shared/data beside this checkout")
def test_recorded_answers() -> None:
    """Recorded chat streams of OpenAI's dialect: their texts come out whole, each has an end, none raises."""
    seen = 0
    for path in sorted(RECORDED.glob("*.txt")):
        payloads = [line for line in path.read_bytes().split(b"\n") if line.startswith(b"{") and b'"choices"' in line]
        if len(payloads) < 6:
            continue
        dialect = Dialect("E")
        chunks = [dialect.chunk(payload, 0) for payload in payloads]
        kinds = {chunk.kind for chunk in chunks if chunk is not None}
        assert kinds & {"text", "tool_call"}, path.name
        told = [choice["delta"].get("content") for p in payloads for choice in msgspec.json.decode(p)["choices"] if choice.get("delta")]
        text = "".join(chunk.text for chunk in chunks if chunk is not None and chunk.kind == "text")
        if all(isinstance(t, str | None) for t in told) and "completion" not in path.name:
            assert text == "".join(t for t in told if t), path.name
        seen += 1
    assert seen >= 10
