"""The contract of every engine adapter, against the scripted engine: the same tests for all of them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from tidegate.bench.scripted import Scripted
from tidegate.core.chunk import Chunk
from tidegate.core.errors import (
    ContextTooLong,
    EngineCut,
    EngineDown,
    EngineEmpty,
    EngineError,
    EngineRefused,
    EngineStalled,
    TidegateError,
)
from tidegate.core.flight import Flight
from tidegate.engines.openai_http import OpenAIHttp

from .conftest import Build, ask, complete, until
from .reading import collect, decided, read, text_of

TEN = " the quick brown fox jumps over lazy dogs and then"


def adapter_of(engine: OpenAIHttp) -> str:
    return engine.settings.adapter


# -- answers


async def test_a_stream(engine: OpenAIHttp) -> None:
    """A stream gives its text in order, its finish, exact usage though the caller did not ask for it, and the payloads as they came."""
    chunks = await read(engine, ask("##n=10##"))
    assert text_of(chunks) == TEN
    assert [chunk.finish for chunk in chunks if chunk.finish] == ["stop"]
    usage = chunks[-1].usage
    assert usage is not None
    assert (chunks[-1].kind, usage.completion_tokens, usage.exact) == ("usage", 10, True)
    assert all(chunk.raw is not None and "choices" in msgspec.json.decode(chunk.raw) for chunk in chunks)


async def test_a_whole_answer(engine: OpenAIHttp) -> None:
    """A whole answer has the text, the end, the usage, and an OpenAI-shaped body that says the same."""
    answer = await engine.whole(ask("##n=10##"), Flight("test"))
    assert (answer.text, answer.end, answer.usage.completion_tokens, answer.usage.exact) == (TEN, "stop", 10, True)
    assert answer.raw is not None
    body = msgspec.json.decode(answer.raw)
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": TEN}
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 10


async def test_completions(engine: OpenAIHttp) -> None:
    """The older completions API works both ways."""
    assert text_of(await read(engine, complete("##n=10##"))) == TEN
    answer = await engine.whole(complete("##n=10##"), Flight("test"))
    assert answer.raw is not None
    assert (answer.text, msgspec.json.decode(answer.raw)["choices"][0]["text"]) == (TEN, TEN)


async def test_a_tool_call(engine: OpenAIHttp) -> None:
    """Tool calls pass through; a whole answer carries the call in one piece."""
    chunks = await read(engine, ask("##n=6,m=tools##"))
    assert [chunk.kind for chunk in chunks[:6]] == ["tool_call"] * 6
    assert [chunk.finish for chunk in chunks if chunk.finish] == ["tool_calls"]
    answer = await engine.whole(ask("##n=6,m=tools##"), Flight("test"))
    assert (answer.end, answer.text) == ("tool_calls", "")
    assert answer.raw is not None
    (call,) = msgspec.json.decode(answer.raw)["choices"][0]["message"]["tool_calls"]
    assert call["id"] == "call_1"
    assert call["function"] == {"name": "get_weather", "arguments": '{"city":"Paris é","n":12}'}


async def test_reasoning_is_not_text(engine: OpenAIHttp) -> None:
    """Reasoning comes as its own kind and is not part of the answer's text."""
    chunks = await read(engine, ask("##n=10,m=reasoning##"))
    assert text_of(chunks) == " over lazy dogs and then"
    assert "".join(chunk.text for chunk in chunks if chunk.kind == "reasoning") == " the quick brown fox jumps"
    assert (await engine.whole(ask("##n=10,m=reasoning##"), Flight("test"))).text == " over lazy dogs and then"


async def test_fields_pass_through(engine: OpenAIHttp, server: Scripted) -> None:
    """What the caller asked for reaches the engine as it is; model and stream are the engine's own."""
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    wants: dict[str, Any] = {"response_format": schema, "seed": 7, "top_k": 3}
    await read(engine, ask("##n=1##", stream_options={"odd": True}, **wants))
    sent = server.bodies[-1]
    assert {key: sent[key] for key in wants} == wants
    assert (sent["model"], sent["stream"]) == ("m", True)
    assert sent["stream_options"] == {"odd": True, "include_usage": True}


async def test_max_tokens_ends_in_length(engine: OpenAIHttp) -> None:
    """An answer that was bounded ends in `length`."""
    answer = await engine.whole(ask("##n=10##", max_tokens=3), Flight("test"))
    assert (answer.text, answer.end) == (" the quick brown", "length")


async def test_the_time_is_on_the_flight(engine: OpenAIHttp) -> None:
    """Connect, send and first byte are laps, and a stream's chunks are stamped between the first byte and now."""
    flight = Flight("test")
    chunks = await read(engine, ask("##n=3,t=20,i=5##"), flight)
    laps = dict(flight.laps)
    assert list(laps) == ["engine.connect", "engine.send", "engine.first_byte"]
    assert laps["engine.first_byte"] >= 19_000_000
    stamps = [chunk.at_ns for chunk in chunks]
    assert stamps == sorted(stamps)
    assert flight.last_ns <= stamps[0] <= stamps[-1] <= time.perf_counter_ns()
    assert flight.engine == "test"


async def test_one_read_is_one_batch(engine: OpenAIHttp) -> None:
    """All events that one read completed come as one batch."""
    stream = await engine.start(ask("##n=10##"), Flight("test"))
    batches = [batch async for batch in stream]
    assert len(batches) == 1
    assert len(batches[0]) == 12


# -- odd but good


@pytest.mark.parametrize(
    "fault", ["utf8_split", "crlf", "cr", "bom", "comments", "multiline", "ids", "dribble", "early_head", "until_close", "two_choices"]
)
async def test_odd_streams_are_read(engine: OpenAIHttp, fault: str) -> None:
    """However the bytes arrive, the text is the same and not a character of it is broken."""
    chunks = await read(engine, ask(f"##n=16,m={fault}##"))
    assert text_of(chunks) == f"{TEN} café 你好 runs off 😀 far"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 16


async def test_a_missing_done_is_noted(engine: OpenAIHttp) -> None:
    """finish_reason and a proper end of the body are a clean end without [DONE]; the flight says so."""
    flight = Flight("test")
    chunks = await read(engine, ask("##n=10,m=no_done##"), flight)
    assert text_of(chunks) == TEN
    assert "engine_done_missing" in decided(flight)


async def test_a_body_that_never_ends(engine: OpenAIHttp, server: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """After [DONE] the answer is whole at once; a connection whose body does not end soon is closed, not kept."""
    monkeypatch.setattr("tidegate.engines.wire.DRAIN_S", 0.05)
    assert text_of(await read(engine, ask("##n=10,m=no_end##"))) == TEN
    assert server.active == 1
    await until(lambda: server.active == 0 and engine.pool.open_connections == 0)


async def test_a_missing_finish_is_noted(engine: OpenAIHttp) -> None:
    """[DONE] without a finish_reason is taken as a stop; the flight says so."""
    flight = Flight("test")
    chunks = await read(engine, ask("##n=10,m=no_finish##"), flight)
    assert [chunk.finish for chunk in chunks if chunk.finish] == ["stop"]
    assert "engine_finish_missing" in decided(flight)


async def test_missing_usage_is_estimated(engine: OpenAIHttp) -> None:
    """Where the engine tells no usage, a token an event is the estimate; it comes last and is marked; whole answers likewise."""
    flight = Flight("test")
    chunks = await read(engine, ask("##n=10,m=no_usage##"), flight)
    assert (chunks[-1].kind, chunks[-1].raw) == ("usage", None)
    usage = chunks[-1].usage
    assert usage is not None
    assert not usage.exact
    assert usage.completion_tokens == 10
    assert "usage_estimated" in decided(flight)
    assert not (await engine.whole(ask("##n=10,m=no_usage##"), Flight("test"))).usage.exact


# -- bad ends


@pytest.mark.parametrize("fault", ["cut", "cut_event", "reset", "end_early", "abort"])
async def test_a_cut_is_never_a_success(engine: OpenAIHttp, fault: str) -> None:
    """What came before the cut is delivered, then EngineCut; a whole answer is EngineCut alone."""
    stream = await engine.start(ask(f"##n=10,k=4,i=1,m={fault}##"), Flight("test"))
    got: list[Chunk] = []
    with pytest.raises(EngineCut):
        await collect(stream, got)
    assert text_of(got) == " the quick brown fox"
    assert not any(chunk.finish for chunk in got)
    with pytest.raises(EngineCut):
        await engine.whole(ask(f"##n=10,k=4,m={fault}##"), Flight("test"))


@pytest.mark.parametrize("fault", ["stall", "stall_comments"])
async def test_a_stall(build: Build, engine: OpenAIHttp, server: Scripted, fault: str) -> None:
    """Silence after a token is EngineStalled, keep-alive comments or not, and the engine's connection is closed."""
    engine = build(adapter_of(engine), first_token_s=100.0, inter_token_s=0.1)
    with pytest.raises(EngineStalled, match="next token"):
        await read(engine, ask(f"##n=10,m={fault}##"))
    await until(lambda: server.active == 0)
    assert server.aborted == 1


async def test_no_answer_at_all(build: Build, engine: OpenAIHttp, server: Scripted) -> None:
    """An engine that never answers is EngineStalled after first_token_s."""
    engine = build(adapter_of(engine), first_token_s=0.1, total_s=0.2)
    with pytest.raises(EngineStalled):
        await engine.start(ask("##m=hang##"), Flight("test"))
    with pytest.raises(EngineStalled):
        await engine.whole(ask("##m=hang##"), Flight("test"))
    await until(lambda: server.active == 0)


async def test_the_total_bounds_a_stream_that_talks_for_ever(build: Build, server: Scripted) -> None:
    """A stream that never falls silent ends at total_s all the same."""
    engine = build(total_s=0.2)
    with pytest.raises(EngineStalled, match="total_s"):
        await read(engine, ask("##n=100000,i=2##"))
    await until(lambda: server.active == 0)


async def test_a_stream_that_nobody_reads_ends_at_its_total(build: Build, server: Scripted) -> None:
    """A stream that was forgotten, neither read nor aborted, holds its engine no longer than total_s."""
    stream = await build(total_s=0.2).start(ask("##n=100000,i=2##"), Flight("test"))
    await until(lambda: server.active == 0)
    with pytest.raises(EngineStalled, match="total_s"):
        await collect(stream, [])


@pytest.mark.parametrize("fault", ["empty", "silent"])
async def test_an_empty_answer(engine: OpenAIHttp, fault: str) -> None:
    """An answer that says nothing is EngineEmpty, streamed and whole, and no finish is told before."""
    stream = await engine.start(ask(f"##m={fault}##"), Flight("test"))
    got: list[Chunk] = []
    with pytest.raises(EngineEmpty):
        await collect(stream, got)
    assert not any(chunk.finish for chunk in got)
    with pytest.raises(EngineEmpty):
        await engine.whole(ask(f"##m={fault}##"), Flight("test"))


async def test_an_error_event(engine: OpenAIHttp) -> None:
    """An error inside a stream comes after the text before it, with the engine's status and code."""
    stream = await engine.start(ask("##n=10,k=4,m=error_event##"), Flight("test"))
    got: list[Chunk] = []
    with pytest.raises(EngineRefused, match="the engine died") as caught:
        await collect(stream, got)
    assert text_of(got) == " the quick brown fox"
    assert (caught.value.http_status, caught.value.public_code) == (503, "engine_dead")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("junk_json", "not JSON"),
        ("bad_utf8", "not JSON"),
        ("bad_chunk", "does not speak HTTP"),
        ("gzip", "compresses"),
        ("content_type", "text/html"),
        ("redirect", "redirects are not followed"),
        ("huge_head", "response head"),
    ],
)
async def test_broken_bytes(engine: OpenAIHttp, server: Scripted, fault: str, words: str) -> None:
    """Bytes that are not what they should be are an EngineError that says what they are; broken HTTP costs the connection."""
    with pytest.raises(EngineError, match=words):
        await read(engine, ask(f"##n=10,m={fault}##"))
    assert text_of(await read(engine, ask("##n=10##"))) == TEN
    if fault in ("bad_chunk", "huge_head"):
        assert server.accepted == 2


async def test_a_line_without_end_does_not_eat_memory(build: Build, server: Scripted, engine: OpenAIHttp) -> None:
    """A gigabyte without a line end is refused once it passes the bound."""
    engine = build(adapter_of(engine), max_event_bytes=100_000, max_answer_bytes=100_000)
    with pytest.raises(EngineError, match=r"more than 100000|larger than 100000"):
        await read(engine, ask("##n=10,m=huge_line##"))
    with pytest.raises(EngineError, match=r"more than 100000|larger than 100000"):
        await engine.whole(ask("##n=10,m=huge_line##"), Flight("test"))
    await until(lambda: server.active == 0)
    assert server.written < 50 << 20


async def test_a_stream_without_end_is_given_up(build: Build, server: Scripted, engine: OpenAIHttp) -> None:
    """Small events that never end are refused once they pass the bound together, and the connection is closed."""
    engine = build(adapter_of(engine), max_answer_bytes=20_000)
    with pytest.raises(EngineError, match="a stream of more than 20000 bytes") as caught:
        await read(engine, ask("##n=100000##"))
    assert "max_answer_bytes" in str(caught.value.hint)
    await until(lambda: server.active == 0)


# -- refusals


async def test_too_many_requests(engine: OpenAIHttp) -> None:
    """The engine's 429 keeps its status, code, words and Retry-After."""
    for how in (read(engine, ask("##m=rate_limit##")), engine.whole(ask("##m=rate_limit##"), Flight("test"))):
        with pytest.raises(EngineRefused, match="slow down") as caught:
            await how
        assert (caught.value.http_status, caught.value.public_code, caught.value.retry_after_s) == (429, "rate_limit_exceeded", 7.0)


@pytest.mark.parametrize(("fault", "status"), [("server_error", 500), ("overloaded", 503)])
async def test_engine_errors(engine: OpenAIHttp, fault: str, status: int) -> None:
    """Other refusals keep the engine's status, with a JSON body or without."""
    with pytest.raises(EngineRefused) as caught:
        await read(engine, ask(f"##m={fault}##"))
    assert caught.value.http_status == status


@pytest.mark.parametrize(("fault", "figures"), [("context", ("8192", "9000")), ("context_llama", ("8192", "9000"))])
async def test_a_prompt_too_long(engine: OpenAIHttp, fault: str, figures: tuple[str, ...]) -> None:
    """A prompt that does not fit is ContextTooLong, with both figures, however the engine says it."""
    with pytest.raises(ContextTooLong) as caught:
        await engine.whole(ask(f"##m={fault}##"), Flight("test"))
    assert all(figure in caught.value.message for figure in figures)
    assert caught.value.http_status == 400


async def test_a_key_that_the_engine_refuses(engine: OpenAIHttp) -> None:
    """The engine's 401 is our mistake, not the caller's: 502, and the hint names the setting."""
    with pytest.raises(EngineError) as caught:
        await read(engine, ask("##m=refuse_key##"))
    assert caught.value.http_status == 502
    assert "api_key" in (caught.value.hint or "")


async def test_the_api_key_is_sent(build: Build, server: Scripted, engine: OpenAIHttp) -> None:
    """api_key goes to the engine as a bearer token."""
    server.api_key = "sesame"
    with pytest.raises(EngineError, match="key"):
        await read(engine, ask())
    named = build(adapter_of(engine), api_key="sesame")
    assert text_of(await read(named, ask("##n=10##"))) == TEN


# -- cancel, back-pressure, connections


async def test_abort_frees_the_engine(engine: OpenAIHttp, server: Scripted) -> None:
    """abort() closes the engine's connection; it may be called twice, and iterating then just ends."""
    stream = await engine.start(ask("##n=100000,i=2##"), Flight("test"))
    await anext(stream)
    stream.abort()
    stream.abort()
    await until(lambda: server.active == 0)
    assert server.aborted == 1
    assert [batch async for batch in stream] == []
    assert stream.usage.completion_tokens >= 1


async def test_abort_wakes_a_reader(engine: OpenAIHttp, server: Scripted) -> None:
    """abort() from elsewhere ends an iteration that waits for the next token."""
    stream = await engine.start(ask("##n=2,i=60000##"), Flight("test"))
    await anext(stream)
    waiting = asyncio.ensure_future(anext(stream, None))
    await asyncio.sleep(0)
    stream.abort()
    assert await asyncio.wait_for(waiting, 5) is None
    await until(lambda: server.active == 0)


@pytest.mark.parametrize("orders", ["##t=60000##", "##n=100000,i=2##", "##m=early_head,t=60000##"])
@pytest.mark.parametrize("how", ["stream", "whole"])
async def test_cancel_frees_the_engine(engine: OpenAIHttp, server: Scripted, orders: str, how: str) -> None:
    """Cancelling the task frees the engine: before the head, before the first token, in the stream, and in a whole answer."""
    work = asyncio.create_task(read(engine, ask(orders)) if how == "stream" else engine.whole(ask(orders), Flight("test")))
    await until(lambda: server.active == 1)
    await asyncio.sleep(0.02)  # let some of it arrive; right at any moment
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    await until(lambda: server.active == 0)
    assert server.aborted == 1


async def test_abort_after_the_end_spares_the_connection(engine: OpenAIHttp, server: Scripted) -> None:
    """abort() after a clean end does nothing: the connection is used again."""
    for _ in range(3):
        stream = await engine.start(ask("##n=3##"), Flight("test"))
        assert [batch async for batch in stream]
        stream.abort()
    assert server.accepted == 1


async def test_connections_are_kept(engine: OpenAIHttp, server: Scripted) -> None:
    """Answers, refusals and error events in a row share one connection."""
    for orders in ("", "##m=rate_limit##", "", "##m=no_done##", "##i=1,n=3##"):
        try:
            await read(engine, ask(orders))
            await engine.whole(ask(orders), Flight("test"))
        except TidegateError:
            pass
    assert server.accepted == 1


async def test_a_stale_connection_is_replaced_once(engine: OpenAIHttp, server: Scripted) -> None:
    """A kept connection that dies at the next request costs one more try; the flight says so."""
    await read(engine, ask("##m=stale##"))
    flight = Flight("test")
    assert text_of(await read(engine, ask("##n=10##"), flight)) == TEN
    assert server.accepted == 2
    assert "engine_connection_stale" in decided(flight)
    await engine.whole(ask("##m=stale##"), Flight("test"))
    server.refuse = 1
    with pytest.raises(EngineDown):  # the fresh one dies too: no third try
        await engine.whole(ask("##n=10##"), Flight("test"))


async def test_an_engine_that_dies_at_work_is_not_asked_again(build: Build, server: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept connection that dies long after the request was not stale: the engine had begun to work."""
    monkeypatch.setattr("tidegate.engines.wire.STALE_S", 0.02)
    engine = build()
    await read(engine, ask("##n=1##"))
    with pytest.raises(EngineDown):
        await read(engine, ask("##t=100,m=die##"))
    assert (server.requests, server.accepted) == (2, 1)


async def test_a_connection_that_the_engine_closed_is_not_used(engine: OpenAIHttp, server: Scripted) -> None:
    """A connection that closed while idle is simply gone."""
    await read(engine, ask("##m=close_idle##"))
    await until(lambda: engine.pool.open_connections == 0)
    flight = Flight("test")
    assert text_of(await read(engine, ask("##n=10##"), flight)) == TEN
    assert "engine_connection_stale" not in decided(flight)


async def test_a_fresh_connection_is_not_tried_twice(engine: OpenAIHttp, server: Scripted) -> None:
    """A connection that dies on its first request is EngineDown: the engine may have begun to work."""
    server.refuse = 1
    with pytest.raises(EngineDown):
        await read(engine, ask())
    assert server.requests == 0


async def test_a_slow_reader_keeps_memory_bounded(build: Build, engine: OpenAIHttp, server: Scripted) -> None:
    """A reader that does not read makes the engine wait: what was written stops growing far below the whole, and then all of it is read."""
    engine = build(adapter_of(engine), max_answer_bytes=1 << 30)
    tokens, event_bytes = 40_000, 400
    stream = await engine.start(ask(f"##n={tokens},w={'x' * 180}##"), Flight("test"))
    got = len(await anext(stream))
    stalled_at = -1
    while stalled_at != server.written:  # until the sockets' own buffers are full
        stalled_at = server.written
        await asyncio.sleep(0.05)
    assert server.active == 1
    assert stalled_at < tokens * event_bytes * 0.8
    assert sum(len(data) for _, data in stream._reply.pieces) < 512 * 1024
    async for batch in stream:
        got += len(batch)
    assert got == tokens + 2


async def test_a_slow_reader_is_no_stall(build: Build, server: Scripted) -> None:
    """The time that a reader takes is not the engine's silence."""
    engine = build(inter_token_s=0.1)
    stream = await engine.start(ask("##n=40000##"), Flight("test"))
    got = len(await anext(stream))
    await asyncio.sleep(0.3)
    async for batch in stream:
        got += len(batch)
    assert got == 40_002


async def test_many_at_once(engine: OpenAIHttp, server: Scripted) -> None:
    """Fifty streams at once are all whole, and nothing is mixed up."""
    words = [f"word{number}" for number in range(50)]
    results = await asyncio.gather(*(read(engine, ask(f"##n=20,i=1,w={word}##")) for word in words))
    assert [text_of(chunks) for chunks in results] == [word * 20 for word in words]
    assert server.active == 0


# -- beside the answers


async def test_figures(engine: OpenAIHttp) -> None:
    """Figures of a living engine say that it is up."""
    assert (await engine.figures())["up"] is True


async def test_figures_of_a_dead_engine(engine: OpenAIHttp, server: Scripted) -> None:
    """Figures never raise: a dead engine is `up: False` and why."""
    await server.close()
    figures = await engine.figures()
    assert figures["up"] is False
    assert "refuses connections" in figures["why"]


async def test_close_frees_everything(engine: OpenAIHttp, server: Scripted) -> None:
    """close() closes idle and busy connections."""
    await read(engine, ask("##n=1##"))
    await engine.start(ask("##n=100000,i=2##"), Flight("test"))
    await engine.close()
    await until(lambda: server.active == 0 and not server.connections)
    assert engine.pool.open_connections == 0
