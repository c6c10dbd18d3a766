"""Dialects, event by event: OpenAI's, the others, and what real engines were recorded to say."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.core.chunk import Chunk, ToolDelta, Usage
from tidegate.core.errors import EngineCut, EngineEmpty, EngineError, EngineRefused, TidegateError
from tidegate.engines.dialect import Dialect
from tidegate.engines.gather import Gathered

from . import recorded


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


@pytest.mark.parametrize("where", [b'{"x": "\xff"}', b'{"\xff": 1}', b'{"choices": 7, "x": "\xff"}', b'{"choices": 7, "x"', b'{"n": [1e999, NaN]}'])
def test_junk_where_nobody_looks_is_an_error_too(where: bytes) -> None:
    """The client gets the whole payload, so all of it has to be JSON in UTF-8: in a stream and in a whole answer."""
    with pytest.raises(EngineError, match="not JSON"):
        Dialect("E").chunk(where, 0)
    with pytest.raises(EngineError, match="JSON"):
        Dialect("E").whole(where)


@pytest.mark.parametrize("odd", [b'{"type": "ping"}', b"[1, 2]", b'{"choices": [{"index": "zero"}]}', b"7"])
def test_what_we_do_not_know_is_passed_on(odd: bytes) -> None:
    """JSON of a shape nobody told us is a notice with its payload."""
    chunk = Dialect("E").chunk(odd, 0)
    assert chunk is not None
    assert (chunk.kind, chunk.raw) == ("notice", odd)


# -- what is told beside the text


def test_parts_of_thinking_are_reasoning() -> None:
    """A list of parts may hold reasoning, itself a list of parts."""
    chunk = Dialect("E").chunk(delta(content=[{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]), 0)
    assert chunk is not None
    assert (chunk.kind, chunk.text) == ("reasoning", "hm")


def test_tool_deltas() -> None:
    """A call's id and name come once, its arguments grow; a null or missing member is nothing."""
    dialect = Dialect("E")
    first = dialect.chunk(delta(tool_calls=[{"index": 2, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}]), 0)
    second = dialect.chunk(delta(tool_calls=[{"index": 2, "id": "", "function": {"name": None, "arguments": '{"a":'}}]), 0)
    assert first is not None
    assert second is not None
    assert first.tools == [ToolDelta(2, "c", "f", "")]
    assert second.tools == [ToolDelta(2, "", "", '{"a":')]


def test_tool_calls_that_nobody_numbers() -> None:
    """Without an index, a new id is the next call and a piece without one goes on with the last."""
    dialect = Dialect("E")
    whole = [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in ("a", "b")]
    first = dialect.chunk(delta(tool_calls=whole), 0)
    second = dialect.chunk(delta(tool_calls=[{"function": {"arguments": "x"}}, {"id": "c", "function": {"arguments": {"n": 1}}}]), 0)
    assert first is not None
    assert second is not None
    assert [call.index for call in first.tools or ()] == [0, 1]
    assert second.tools == [ToolDelta(1, "", "", "x"), ToolDelta(2, "c", "", '{"n":1}')]


def test_the_older_function_call() -> None:
    """`function_call` is a tool call without an id."""
    chunk = Dialect("E").chunk(delta(function_call={"name": "f", "arguments": "{}"}), 0)
    assert chunk is not None
    assert chunk.tools == [ToolDelta(0, "", "f", "{}")]


@pytest.mark.parametrize("index", [-1, 1 << 70, None, "one"])
def test_a_call_with_an_impossible_number_is_still_one_call(index: object) -> None:
    """A number that cannot be meant is none: the call gets the next, streamed and put together."""
    pieces = [{"index": index, "id": "c", "function": {"name": "f", "arguments": "{"}}, {"index": index, "function": {"arguments": "}"}}]
    dialect, whole = Dialect("E"), Gathered()
    found: list[ToolDelta] = []
    for piece in pieces:
        payload = delta(tool_calls=[piece])
        chunk = dialect.chunk(payload, 0)
        assert chunk is not None
        found += chunk.tools or ()
        whole.add(payload)
    assert [(call.index, call.arguments) for call in found] == [(0, "{"), (0, "}")]
    calls = msgspec.json.decode(whole.json())["choices"][0]["message"].get("tool_calls")
    assert calls == ([{"id": "c", "function": {"name": "f", "arguments": "{}"}}] if not isinstance(index, int) else [])


@pytest.mark.parametrize("calls", [7, "x", [7, None], [{"function": "f", "index": "one"}], [{"index": None, "function": {"name": 7}}]])
def test_odd_tool_calls_do_no_harm(calls: object) -> None:
    """Tool calls of a shape that nobody knows are passed on in `raw`."""
    payload = delta(tool_calls=calls)
    chunk = Dialect("E").chunk(payload, 0)
    assert chunk is not None
    assert chunk.raw == payload


@pytest.mark.parametrize(
    "payload",
    [
        b'{"choices": [{"index": 0, "delta": {"content": "hi"}}], "usage": {"prompt_tokens": 1.0, "completion_tokens": "2"}}',
        b'{"choices": [{"index": null, "delta": {"content": "hi"}, "finish_reason": 7}]}',
        b'{"choices": [{"index": 0, "delta": {"content": "hi"}, "token_ids": "x"}], "timings": []}',
    ],
)
def test_an_odd_member_does_not_cost_the_text(payload: bytes) -> None:
    """Where one member is of another type than it should be, the others are read all the same."""
    chunk = Dialect("E").chunk(payload, 0)
    assert chunk is not None
    assert (chunk.kind, chunk.text, chunk.raw) == ("text", "hi", payload)


@pytest.mark.parametrize(
    ("told", "meant"),
    [
        (rb"half \ud83d", "half \ufffd"),
        (rb"\uDE00 other half", "\ufffd other half"),
        (rb"whole \ud83d\uDE00", "whole \U0001f600"),
        (rb"twice \ud83d\ud83d\ude00", "twice \ufffd\U0001f600"),
        (rb"no escape \\ud83d", "no escape \\ud83d"),
        (rb"NUL \u0000", "NUL \0"),
    ],
)
def test_halves_of_surrogate_pairs(told: bytes, meant: str) -> None:
    """Half a pair becomes U+FFFD, in the text and in the payload, which every JSON reader then takes; what is whole stays."""
    dialect = Dialect("E")
    chunk = dialect.chunk(b'{"choices": [{"index": 0, "delta": {"content": "' + told + b'"}}]}', 0)
    assert chunk is not None
    assert chunk.text == meant
    assert chunk.raw is not None
    assert msgspec.json.decode(chunk.raw)["choices"][0]["delta"]["content"] == meant
    assert dialect.surrogates == ("\ufffd" in meant)


# -- the frame that an answer's usual events share

FRAMES = (
    '{"id":"x","choices":[{"index":0,"delta":{"content":%s},"finish_reason":null}]}',
    '{"choices":[{"delta":{"x":{"content":"trap"},"content":%s},"index":0}],"usage":null}',
    '{"choices":[{"index":0,"delta":{"content":%s,"content":"last wins"}}]}',
    '{"content":"trap","choices":[{"index":0,"delta":{"role":"assistant","content":%s},"logprobs":null}]}',
)
_ODD = [" the", "a", "", '"', "\\", "\n", '"}}]}', "\0", "\x7f", "\u2028", "\ufffd", "😀", "x" * 33]
_TEXTS = st.one_of(st.text(max_size=40), st.sampled_from(_ODD))


@given(frame=st.sampled_from(FRAMES), texts=st.lists(st.tuples(_TEXTS, st.booleans()), max_size=8))
@settings(max_examples=300, deadline=None)
def test_a_known_frame_changes_nothing(frame: str, texts: list[tuple[str, bool]]) -> None:
    """An event read by the frame of those before it gives the chunk that decoding it gives."""
    dialect = Dialect("E")
    for _ in range(8):  # every eighth is tried
        dialect.chunk((frame % '" the"').encode(), 7)
    for text, escaped in texts:
        payload = (frame % json.dumps(text, ensure_ascii=escaped)).encode()
        assert dialect.chunk(payload, 7) == Dialect("E").chunk(payload, 7)


@pytest.mark.parametrize("inside", [b"\xff", b"\xc3", b"\n", b"\0", b'"', b'\\"', b"\\x", b'","content":7,"x":"'])
def test_a_known_frame_lets_nothing_broken_pass(inside: bytes) -> None:
    """Bytes between the frame that are no JSON text are judged as they are without it."""
    dialect = Dialect("E")
    payload = FRAMES[0].encode().replace(b"%s", b'"%b"')
    for _ in range(8):
        dialect.chunk(payload % b" hi", 0)
    assert dialect._head_size
    framed, plain = (result_of(one, payload % inside) for one in (dialect, Dialect("E")))
    assert framed == plain


def result_of(dialect: Dialect, payload: bytes) -> Chunk | type[TidegateError] | None:
    try:
        return dialect.chunk(payload, 0)
    except TidegateError as error:
        return type(error)


# -- tokens


def test_a_token_an_event_where_nothing_was_told() -> None:
    """After N events of one token each the estimate is N, whatever their length in bytes; the prompt's is a quarter of its bytes."""
    dialect = Dialect("E")
    for text in (" the", "你", " internationalisation", "a", " 😀"):
        dialect.chunk(delta(content=text), 0)
    dialect.chunk(delta(reasoning_content="hm"), 0)
    dialect.chunk(delta(tool_calls=[{"index": 0, "function": {"arguments": "{"}}]), 0)
    dialect.chunk(delta(content=""), 0)
    assert dialect.best_usage(80) == Usage(20, 7, exact=False)


def test_an_event_of_many_tokens_counts_by_its_bytes() -> None:
    """An event too long to be one token counts four bytes a token."""
    dialect = Dialect("E")
    dialect.chunk(delta(content="x" * 400), 0)
    dialect.chunk(delta(content="你好" * 20), 0)
    assert dialect.best_usage(0).completion_tokens == 100 + 30


def test_token_ids_are_counted() -> None:
    """Ids of the tokens and of the prompt make an exact count at any moment; one event without ids makes it an estimate."""
    dialect = Dialect("E")
    first = dialect.chunk(b'{"prompt_token_ids": [1,2,3], "choices": [{"index": 0, "delta": {"content": "hi"}, "token_ids": [7, 8]}]}', 0)
    dialect.chunk(b'{"choices": [{"index": 0, "delta": {"content": ""}, "token_ids": [9]}]}', 0)
    assert first is not None
    assert first.token_ids == [7, 8]
    assert dialect.best_usage(1000) == Usage(3, 3, exact=True)
    dialect.chunk(delta(content="x"), 0)
    assert dialect.best_usage(1000) == Usage(3, 4, exact=False)


def test_figures_in_every_event_are_exact_at_any_moment() -> None:
    """Continuous usage and llama.cpp's timings count what was said so far; what comes after them without figures is added, marked."""
    dialect = Dialect("E")
    dialect.chunk(b'{"choices": [{"index": 0, "delta": {"content": "a"}}], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}', 0)
    assert dialect.best_usage(0) == Usage(5, 3)
    dialect.chunk(delta(content="b"), 0)
    assert dialect.best_usage(0) == Usage(5, 4, exact=False)
    dialect.chunk(
        b'{"choices": [{"index": 0, "delta": {"content": "c"}}], "timings": {"cache_n": 30, "prompt_n": 1, "predicted_n": 8}}', 0
    )
    assert dialect.best_usage(0) == Usage(31, 8, 30)


def test_figures_told_too_early_do_not_hold() -> None:
    """Usage that says no tokens after some were said gives the prompt's count, and the answer's stays an estimate."""
    dialect = Dialect("E")
    dialect.chunk(delta(content="a"), 0)
    dialect.chunk(b'{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 0}}', 0)
    assert dialect.usage is None
    assert dialect.best_usage(1000) == Usage(5, 1, exact=False)


def test_reasoning_that_is_counted_apart() -> None:
    """Reasoning belongs to the completion; a provider that counts it beside says so by its total."""
    inside, beside = Dialect("E"), Dialect("E")
    told = (
        b'{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": %d, "total_tokens": 15,'
        b' "completion_tokens_details": {"reasoning_tokens": 7}}}'
    )
    inside.chunk(told % 10, 0)
    beside.chunk(told % 3, 0)
    assert inside.usage == beside.usage == Usage(5, 10, reasoning_tokens=7)


# -- dialects other than OpenAI's


def events(*payloads: str) -> tuple[list[Chunk], Dialect, TidegateError | None]:
    return recorded.read([payload.encode() for payload in payloads])


def test_a_dialect_is_known_by_its_first_event() -> None:
    """The first event decides; its chunks have no payload, since it would not fit between OpenAI's."""
    chunks, dialect, error = events(
        '{"type":"message_start","message":{"id":"m","usage":{"input_tokens":9,"cache_read_input_tokens":2,"output_tokens":1}}}',
        '{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}',
        '{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"hi"}}',
    )
    assert error is None
    assert chunks == [Chunk(7, "text", "hi")]
    assert dialect.best_usage(1000) == Usage(11, 1, exact=False)  # the prompt as told; one event


def test_an_event_of_another_dialect_in_an_openai_stream_changes_nothing() -> None:
    """Once an answer speaks OpenAI's dialect, an odd event is passed on."""
    dialect = Dialect("E")
    dialect.chunk(delta(content="a"), 0)
    odd = b'{"type":"message_start","message":{}}'
    chunk = dialect.chunk(odd, 0)
    assert chunk is not None
    assert (chunk.kind, chunk.raw) == ("notice", odd)
    after = dialect.chunk(delta(content="b"), 0)
    assert after is not None
    assert after.text == "b"


@pytest.mark.parametrize(
    "first",
    [
        '{"type":"message_start","message":{}}',
        '{"type":"response.created","response":{}}',
        '{"type":"message-start","delta":{}}',
        '{"candidates":[{"content":{"parts":[{"text":"x"}]}}]}',
    ],
)
def test_what_a_dialect_does_not_know_is_passed_on(first: str) -> None:
    """An event that nobody knows travels inside a chunk that OpenAI's clients can read; junk is an error in every dialect."""
    odd = '{"type":"news","many":[1,2]}'
    chunks, _, error = events(first, odd)
    assert error is None
    assert chunks[-1].kind == "notice"
    assert chunks[-1].raw is not None
    assert msgspec.json.decode(chunks[-1].raw) == {
        "choices": [], "object": "chat.completion.chunk", "tidegate": {"engine_event": {"type": "news", "many": [1, 2]}},
    }  # fmt: skip
    for junk in ("{", "[" * 9000):
        assert isinstance(events(first, junk)[2], EngineError)


@pytest.mark.parametrize(
    ("last", "end"),
    [
        ('{"type":"message_delta","delta":{"stop_reason":"max_tokens"}}', "length"),
        ('{"type":"message_delta","delta":{"stop_reason":"refusal"}}', "content_filter"),
        ('{"type":"response.incomplete","response":{"incomplete_details":{"reason":"max_output_tokens"}}}', "length"),
        ('{"type":"response.incomplete","response":{"incomplete_details":{"reason":"content_filter"}}}', "content_filter"),
        ('{"type":"message-end","delta":{"finish_reason":"MAX_TOKENS"}}', "length"),
        ('{"candidates":[{"finishReason":"MAX_TOKENS"}]}', "length"),
        ('{"candidates":[{"finishReason":"SAFETY"}]}', "content_filter"),
        ('{"promptFeedback":{"blockReason":"OTHER"}}', "content_filter"),
    ],
)
def test_ends_of_the_dialects(last: str, end: str) -> None:
    """Each dialect's word for an end becomes ours."""
    chunks, dialect, error = events(FIRST[kind_of(last)], last)
    assert error is None
    assert [chunk.finish for chunk in chunks if chunk.finish] == [end]
    assert dialect.finish == end


@pytest.mark.parametrize(
    ("last", "error"),
    [
        ('{"type":"message_delta","delta":{"stop_reason":"end_turn"}}', EngineEmpty),
        ('{"type":"response.completed","response":{}}', EngineEmpty),
        ('{"type":"message-end","delta":{"finish_reason":"COMPLETE"}}', EngineEmpty),
        ('{"candidates":[{"finishReason":"STOP"}]}', EngineEmpty),
        ('{"type":"response.cancelled","response":{}}', EngineCut),
        ('{"type":"message-end","delta":{"finish_reason":"ERROR"}}', EngineCut),
        ('{"candidates":[{"finishReason":"MALFORMED_FUNCTION_CALL"}]}', EngineCut),
        ('{"type":"response.failed","response":{"error":{"code":"rate_limit_exceeded","message":"slow"}}}', EngineRefused),
        ('{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}', EngineRefused),
        ('{"candidates":[],"error":{"code":429,"status":"RESOURCE_EXHAUSTED","message":"quota"}}', EngineRefused),
    ],
)
def test_bad_ends_of_the_dialects(last: str, error: type[TidegateError]) -> None:
    """An answer that says nothing is empty, one that the engine gave up is cut, and its errors are its own, in every dialect."""
    assert isinstance(events(FIRST[kind_of(last)], last)[2], error)


FIRST = {
    "anthropic": '{"type":"message_start","message":{"id":"m"}}',
    "responses": '{"type":"response.created","response":{}}',
    "cohere": '{"type":"message-start","delta":{}}',
    "gemini": '{"candidates":[],"usageMetadata":{}}',
}


def kind_of(event: str) -> str:
    if "candidates" in event or "promptFeedback" in event:
        return "gemini"
    if "response." in event:
        return "responses"
    return "cohere" if "message-end" in event else "anthropic"


# -- recorded answers

needs_data = pytest.mark.skipif(not recorded.FOLDER.is_dir(), reason="no ../shared/data beside this checkout")
EXPECTED: dict[str, list[dict[str, Any]]] = msgspec.json.decode((Path(__file__).parent / "recorded.json").read_bytes())


@needs_data
def test_every_recording_is_in_the_table() -> None:
    """A recording that nobody judged fails here."""
    assert sorted(path.name.removesuffix(".chunks.txt") for path in recorded.FOLDER.glob("*.chunks.txt")) == sorted(EXPECTED)


@needs_data
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_recorded_answers(name: str) -> None:
    """Text, reasoning, tool calls with their arguments, usage, finish and error of every recorded answer are those of the table."""
    said = [recorded.summary(chunks, error) for chunks, _, error in map(recorded.read, recorded.answers(name))]
    assert msgspec.json.decode(msgspec.json.encode(said)) == EXPECTED[name]


@needs_data
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_recorded_answer_is_the_same_however_its_bytes_come(name: str) -> None:
    """Byte by byte or a few at a time, with any line end, behind a BOM, with comments between: the same chunks."""
    for answer in recorded.answers(name):
        chunks, _, error = recorded.read(answer)
        for line_end, size in ((b"\n", 1), (b"\r\n", 5), (b"\r", 7)):
            stream = b"\xef\xbb\xbf" + b"".join(b": hello%b" % line_end + b"data: " + one + line_end * 2 for one in answer)
            found = recorded.relay([stream[at : at + size] for at in range(0, len(stream), size)])
            assert (found[0], type(found[1])) == (chunks, type(error)), line_end


@needs_data
def test_recorded_answers_put_together_say_the_same() -> None:
    """A whole answer gathered from a recorded stream has the text and the tool calls that its chunks had."""
    seen = 0
    for name in EXPECTED:
        chunks, _, error = recorded.read(recorded.answers(name)[0])
        if error is not None or any(chunk.raw is None for chunk in chunks) or "completion" in name or "mistral-reasoning" in name:
            continue  # another dialect; `text`, and a list of parts, are gathered as they are
        whole = Gathered()
        for chunk in chunks:
            whole.add(chunk.raw or b"")
        message = msgspec.json.decode(whole.json())["choices"][0]["message"]
        assert message["content"] == ("".join(chunk.text for chunk in chunks if chunk.kind == "text") or message["content"]), name
        calls = [(call["id"], call["function"]["name"], msgspec.json.decode(call["function"]["arguments"])) for call in message.get("tool_calls", [])]
        assert calls == recorded.tools_of(chunks), name
        seen += 1
    assert seen >= 18


@needs_data
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_recorded_answer_is_the_same_for_any_reads(data: st.DataObject) -> None:
    """Wherever reads are cut, the same chunks."""
    name = data.draw(st.sampled_from(SHORT))
    answer = data.draw(st.sampled_from(recorded.answers(name)))
    line_end = data.draw(st.sampled_from([b"\n", b"\r\n", b"\r"]))
    stream = b"".join(b"event: x%b" % line_end + b"data: " + one + line_end * 2 for one in answer)
    edges = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    chunks, _, error = recorded.read(answer)
    found = recorded.relay([stream[a:b] for a, b in itertools.pairwise([0, *edges, len(stream)])])
    assert (found[0], type(found[1])) == (chunks, type(error))


#: Recordings of each dialect that are short enough to be cut many times.
SHORT = (
    "alibaba__alibaba-tool-call", "anthropic__spliced-message-start", "anthropic__anthropic-mcp.1", "cohere__cohere-reasoning",
    "google__google-stream-no-args-tool-call", "mistral__mistral-reasoning", "openai__responses__github-copilot-id-rotation.1",
    "openai__responses__openai-error.1", "perplexity__perplexity-text",
)  # fmt: skip


# -- content

UTF8 = Path(__file__).parents[3] / "shared" / "data" / "streaming" / "utf8"


def utf8_cases() -> Iterator[tuple[bytes, bool]]:
    """The bytes of each case, and whether they are valid; those that JSON wants escaped are left out."""
    for line in (UTF8 / "flenniken_utf8tests.txt").read_text().splitlines():
        number, _, rest = line.partition(":")
        kind, _, value = rest.partition(":")
        if not number[:1].isdigit() or kind.split(" ")[0] not in ("valid", "invalid"):
            continue
        hexadecimal = value.partition(":")[0]
        content = bytes.fromhex(hexadecimal) if kind.endswith("hex") else value.encode()
        if not set(content) & {*range(32), 0x22, 0x5C}:
            yield content, kind.startswith("valid")


@pytest.mark.skipif(not UTF8.is_dir(), reason="no ../shared/data beside this checkout")
def test_naughty_strings_come_out_as_they_went_in() -> None:
    """Every naughty string as content, byte by byte: the text and the payload are what the engine sent."""
    for text in msgspec.json.decode((UTF8 / "blns.json").read_bytes()):
        for payload in (delta(content=text), json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode()):
            stream = b"data: " + payload + b"\n\n"
            (chunk,), error = recorded.relay([stream[at : at + 1] for at in range(len(stream))])
            assert error is None
            assert (chunk.text, chunk.raw) == (text, payload)


@pytest.mark.skipif(not UTF8.is_dir(), reason="no ../shared/data beside this checkout")
def test_bytes_that_are_no_utf8_are_never_passed_on() -> None:
    """Each case of the UTF-8 tests as content: valid ones come out as they are, the others end the answer with an error."""
    seen = {"valid": 0, "invalid": 0}
    for content, valid in utf8_cases():
        payload = b'{"choices":[{"index":0,"delta":{"content":"a' + content + b'"}}]}'
        chunks, error = recorded.relay([b"data: " + payload + b"\n\n"])
        if valid:
            assert (chunks[0].text, error) == ("a" + content.decode(), None), content
        else:
            assert (chunks, type(error)) == ([], EngineError), content
        seen["valid" if valid else "invalid"] += 1
    assert min(seen.values()) > 20
