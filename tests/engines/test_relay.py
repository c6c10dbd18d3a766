"""Chunks are taken in the turn of the read: the same ones however the bytes come, in order, and the end is never missed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import msgspec
import pytest

from tidegate.bench.scripted import Scripted
from tidegate.core.chunk import Chunk, Usage
from tidegate.core.errors import EngineCut, EngineRefused, EngineStalled, TidegateError
from tidegate.core.flight import Flight
from tidegate.engines.dialect import Dialect
from tidegate.engines.stream import Stream
from tidegate.engines.wire import Connection, Patience, Pool

from .conftest import BOUND_S, Build, ask

PATIENCE = Patience()
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(**delta: object) -> bytes:
    data = json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None if delta else "stop"}]})
    return f"data: {data}\n\n".encode()


def chunked(*bodies: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(body), body) for body in bodies) + b"0\r\n\r\n"


ANSWER = HEAD + chunked(event(content="one"), event(content=" two"), event(), b"data: [DONE]\n\n")


class Apart:
    """Answers with ANSWER in three writes: the head, up to `cut`, and the rest; each when it is told to."""

    def __init__(self, cut: int) -> None:
        self.cut = cut
        self.go_on = asyncio.Semaphore(0)
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            writer.write(HEAD)
            await self.go_on.acquire()
            writer.write(ANSWER[len(HEAD) : self.cut])
            await self.go_on.acquire()
            writer.write(ANSWER[self.cut :])
            await reader.read()
        finally:
            writer.close()


@asynccontextmanager
async def apart(cut: int) -> AsyncIterator[Apart]:
    server = Apart(cut)
    listening = await asyncio.start_server(server.answer, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()[:2]
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        listening.close()
        await listening.wait_closed()


@pytest.mark.parametrize("cut", range(len(HEAD), len(ANSWER), 5))
async def test_the_end_is_never_missed(build: Build, cut: int) -> None:
    """Wherever the answer is cut in two reads, also between [DONE] and the last chunk, it is taken whole and the relay returns."""
    got: list[Chunk] = []
    async with asyncio.timeout(BOUND_S), apart(cut) as server:
        engine = build("openai", url=server.url, first_token_s=100, inter_token_s=100, total_s=200)
        stream = await engine.start(ask(), Flight("test"))
        relaying = asyncio.ensure_future(stream.relay(got.extend))
        for _ in range(2):
            await asyncio.sleep(0.01)  # lets what was written arrive; where it is late, the cut is only another one
            server.go_on.release()
        await relaying
    assert "".join(chunk.text for chunk in got) == "one two"
    assert [chunk.finish for chunk in got if chunk.finish] == ["stop"]


async def test_a_taker_that_waits_gets_everything_in_order(build: Build, server: Scripted) -> None:
    """What `take` returns is awaited before it takes more; nothing is lost, doubled or out of order."""
    taken: list[str] = []
    busy = 0

    async def rest() -> None:
        nonlocal busy
        await asyncio.sleep(0.001)
        busy -= 1

    def take(batch: list[Chunk]) -> Awaitable[None] | None:
        nonlocal busy
        assert busy == 0, "it was given more while it waited"
        taken.extend(chunk.text for chunk in batch)
        if len(taken) % 3:
            return None
        busy += 1
        return rest()

    async with asyncio.timeout(BOUND_S):
        stream = await build("openai").start(ask("##i=1,n=60##"), Flight("test"))
        await stream.relay(take)
    whole = await build("openai").whole(ask("##n=60##"), Flight("test"))
    assert "".join(taken) == whole.text


class Fed:
    """A transport whose reads the test makes itself, several in one turn of the loop as libuv does where much is waiting."""

    def __init__(self) -> None:
        self.paused = self.closed = False

    def get_extra_info(self, name: str) -> None:
        return None

    def write(self, data: bytes) -> None:
        return None

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True

    close = abort


def fed_stream(patience: Patience = PATIENCE) -> tuple[Stream, Connection, Fed]:
    """A stream whose head was read, with its connection."""
    transport = Fed()
    conn = Connection(Pool("The engine", "http://127.0.0.1:1", patience))
    conn.connection_made(transport)  # type: ignore[arg-type]
    conn.pool._all.add(conn)
    reply = conn.send(b"", asyncio.get_running_loop(), 60.0)
    conn.data_received(HEAD)
    stream = Stream(reply, Dialect("The engine"), Flight("test"), patience, prompt_bytes=1, max_event_bytes=1 << 20, max_answer_bytes=1 << 26)
    return stream, conn, transport


def words(first: int, count: int) -> bytes:
    events = b"".join(event(content=f"{number} ") for number in range(first, first + count))
    return b"%x\r\n%b\r\n" % (len(events), events)


async def test_many_reads_in_one_turn_wait_for_a_busy_taker() -> None:
    """Reads that come before the relay's task can run are kept, not given to a taker that is busy; soon the socket is paused."""
    stream, conn, transport = fed_stream()
    taken: list[str] = []
    room = asyncio.Event()

    def take(batch: list[Chunk]) -> Awaitable[object] | None:
        taken.append("".join(chunk.text for chunk in batch))
        return room.wait()

    relaying = asyncio.ensure_future(stream.relay(take))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    sent = 0
    while not transport.paused:
        assert sent < 10_000, "the socket is never paused"
        conn.data_received(words(sent, 100))
        sent += 100
    assert "".join(taken) == "".join(f"{number} " for number in range(100))
    room.set()
    conn.data_received(chunked(event(), b"data: [DONE]\n\n"))
    async with asyncio.timeout(BOUND_S):
        await relaying
    assert "".join(taken) == "".join(f"{number} " for number in range(sent))


async def test_a_taker_that_is_through_gets_no_more() -> None:
    """A read in the same turn as the one at which the taker raised reaches it no more."""
    stream, conn, _ = fed_stream()
    taken: list[str] = []

    def take(batch: list[Chunk]) -> None:
        taken.extend(chunk.text for chunk in batch)
        raise ValueError("mine")

    relaying = asyncio.ensure_future(stream.relay(take))
    await asyncio.sleep(0)
    for number in range(3):
        conn.data_received(words(number, 1))
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(ValueError, match="mine"):
            await relaying
    assert taken == ["0 "]


async def test_silence_after_a_token_is_seen_long_before_the_first_ones_time() -> None:
    """The first token may take its time; once it came, in the turn of its read, the next one has its own shorter time."""
    stream, conn, _ = fed_stream(Patience(first_token_s=10 * BOUND_S, inter_token_s=0.1, total_s=20 * BOUND_S))
    taken: list[str] = []
    relaying = asyncio.ensure_future(stream.relay(lambda batch: taken.extend(chunk.text for chunk in batch)))
    await asyncio.sleep(0)
    conn.data_received(words(0, 1))
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(EngineStalled, match="next token"):
            await relaying
    assert taken == ["0 "]


async def test_what_the_taker_raises_is_raised_and_frees_the_engine(build: Build, server: Scripted) -> None:
    """An error of the taker's comes out of `relay`, not out of the socket."""

    def take(batch: list[Chunk]) -> None:
        if any(chunk.text for chunk in batch):
            raise ValueError("mine")

    async with asyncio.timeout(BOUND_S):
        stream = await build("openai").start(ask("##i=5,n=1000##"), Flight("test"))
        with pytest.raises(ValueError, match="mine"):
            await stream.relay(take)
        stream.abort()
        while server.active:  # noqa: ASYNC110 - the server's counter has no event
            await asyncio.sleep(0.005)


async def test_silence_between_tokens_is_a_stall_however_many_came_before(build: Build) -> None:
    """The time-out counts from the last token, though no task woke up for it."""
    got: list[Chunk] = []
    async with asyncio.timeout(BOUND_S):
        stream = await build("openai", inter_token_s=0.2).start(ask("##i=50,n=20,m=stall,k=10##"), Flight("test"))
        with pytest.raises(EngineStalled, match="next token"):
            await stream.relay(got.extend)
    assert sum(bool(chunk.text) for chunk in got) == 10


async def test_comments_after_tokens_that_came_one_by_one_are_no_sign_of_life(build: Build) -> None:
    """Keep-alive comments do not put the time-out off, also where the tokens before them were taken without waking a task."""
    got: list[Chunk] = []
    async with asyncio.timeout(BOUND_S):
        stream = await build("openai", inter_token_s=0.3).start(ask("##i=10,n=20,m=stall_comments,k=10##"), Flight("test"))
        with pytest.raises(EngineStalled, match="next token"):
            await stream.relay(got.extend)
    assert sum(bool(chunk.text) for chunk in got) == 10


async def test_cancelling_the_relay_frees_the_engine(build: Build, server: Scripted) -> None:
    """The connection is gone as soon as the task is cancelled."""
    async with asyncio.timeout(BOUND_S):
        stream = await build("openai").start(ask("##i=5,n=100000##"), Flight("test"))
        relaying = asyncio.ensure_future(stream.relay(lambda batch: None))
        await asyncio.sleep(0)
        relaying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await relaying
        while server.active:  # noqa: ASYNC110 - the server's counter has no event
            await asyncio.sleep(0.005)


async def test_a_payload_on_several_lines_leaves_on_one(build: Build) -> None:
    """A payload that came on several `data:` lines would, joined as it came, end the line on which it leaves."""
    got: list[Chunk] = []
    async with asyncio.timeout(BOUND_S):
        await (await build("openai").start(ask("##n=3,m=multiline##"), Flight("test"))).relay(got.extend)
    payloads = [chunk.raw for chunk in got if chunk.raw is not None]
    assert len(payloads) == 5
    assert not any(b"\n" in payload for payload in payloads)
    assert "".join(chunk.text for chunk in got) == " the quick brown"


# -- dialects over the wire


@asynccontextmanager
async def saying(*payloads: str, named: bool = False, done: bool = True) -> AsyncIterator[str]:
    """An engine that answers everything with these events, in one write; `done`: its body ends."""
    events = [(f"event: {json.loads(one).get('type', 'x')}\n" if named else "") + f"data: {one}\n\n" for one in payloads]
    body = b"".join(b"%x\r\n%b\r\n" % (len(one.encode()), one.encode()) for one in events) + (b"0\r\n\r\n" if done else b"")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + body)
        await reader.read()
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield "http://{}:{}".format(*listening.sockets[0].getsockname()[:2])
    finally:
        listening.close()
        await listening.wait_closed()


ANTHROPIC = (
    '{"type":"message_start","message":{"id":"m","usage":{"input_tokens":3,"output_tokens":1}}}',
    '{"type":"ping"}',
    '{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"hi"}}',
    '{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":5}}',
    '{"type":"message_stop"}',
)
RESPONSES = (
    '{"type":"response.created","response":{}}',
    '{"type":"response.output_text.delta","delta":"hi"}',
    '{"type":"response.completed","response":{"usage":{"input_tokens":3,"output_tokens":5}}}',
)
COHERE = (
    '{"type":"message-start","delta":{}}',
    '{"type":"content-delta","index":0,"delta":{"message":{"content":{"text":"hi"}}}}',
    '{"type":"message-end","delta":{"finish_reason":"COMPLETE","usage":{"tokens":{"input_tokens":3,"output_tokens":5}}}}',
)
GEMINI = (
    '{"candidates":[{"content":{"parts":[{"text":"hi"}]}}],"usageMetadata":{"promptTokenCount":3,"candidatesTokenCount":1}}',
    '{"candidates":[{"finishReason":"STOP"}],"usageMetadata":{"promptTokenCount":3,"candidatesTokenCount":5}}',
)


async def said(build: Build, url: str, flight: Flight | None = None) -> tuple[list[Chunk], TidegateError | None]:
    got: list[Chunk] = []
    async with asyncio.timeout(BOUND_S):
        try:
            await (await build("openai", url=url).start(ask(), flight or Flight("test"))).relay(got.extend)
        except TidegateError as error:
            return got, error
    return got, None


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("events", [ANTHROPIC, RESPONSES, COHERE, GEMINI], ids=["anthropic", "responses", "cohere", "gemini"])
async def test_a_dialect_ends_with_its_own_last_word(build: Build, events: tuple[str, ...], named: bool) -> None:
    """Nobody says [DONE] there: the last word ends the stream at once, though the body goes on, and nothing is missing."""
    flight = Flight("test")
    async with saying(*events, named=named, done=False) as url:
        got, error = await said(build, url, flight)
    assert error is None
    assert "".join(chunk.text for chunk in got) == "hi"
    assert [chunk.finish for chunk in got if chunk.finish] == ["stop"]
    assert (got[-1].kind, got[-1].usage) == ("usage", Usage(3, 5))
    assert not [what for _, what, _ in flight.decisions if what.startswith(("engine_", "usage_"))]


@pytest.mark.parametrize("events", [ANTHROPIC[:-2], RESPONSES[:-1], COHERE[:-1], GEMINI[:-1]], ids=["anthropic", "responses", "cohere", "gemini"])
async def test_a_dialect_that_does_not_say_how_it_ended_was_cut(build: Build, events: tuple[str, ...]) -> None:
    """A body that ends well before the dialect's last word is a cut, after the text that came."""
    async with saying(*events) as url:
        got, error = await said(build, url)
    assert isinstance(error, EngineCut)
    assert "".join(chunk.text for chunk in got) == "hi"


async def test_an_end_without_figures_ends_with_the_body(build: Build) -> None:
    """Gemini's finish without figures may be followed by them: the body's end is the end, and the count is an estimate."""
    flight = Flight("test")
    async with saying(GEMINI[0], '{"candidates":[{"finishReason":"STOP","content":{"parts":[{"text":"!"}]}}]}') as url:
        got, error = await said(build, url, flight)
    assert error is None
    assert [chunk.finish for chunk in got if chunk.finish] == ["stop"]
    assert got[-1].usage == Usage(3, 2, exact=False)
    assert [what for _, what, _ in flight.decisions] == ["usage_estimated"]


async def test_an_error_of_a_dialect_comes_after_its_text(build: Build) -> None:
    """An error event, by its name or by its type, keeps its status and when to come back."""
    broken = '{"type":"error","error":{"type":"rate_limit_error","message":"slow down","retry_after":7}}'
    for named in (False, True):
        async with saying(*ANTHROPIC[:3], broken, named=named) as url:
            got, error = await said(build, url)
        assert "".join(chunk.text for chunk in got) == "hi"
        assert isinstance(error, EngineRefused)
        assert (error.http_status, error.public_code, error.retry_after_s) == (429, "rate_limit_error", 7.0)


async def test_a_cut_after_n_tokens_counts_n(build: Build) -> None:
    """Where the engine had no time to tell, a token an event is booked, marked as an estimate; token ids and figures make it exact."""
    async with asyncio.timeout(BOUND_S):
        stream = await build("openai").start(ask("##n=20,k=7,m=cut##"), Flight("test"))
        with pytest.raises(EngineCut):
            await stream.relay(lambda batch: None)
    assert (stream.usage.completion_tokens, stream.usage.exact) == (7, False)


async def test_half_a_surrogate_pair_is_noted(build: Build) -> None:
    """Half a pair is replaced, payloads can be read by every JSON reader, and the flight counts."""
    flight = Flight("test")
    got: list[Chunk] = []
    async with asyncio.timeout(BOUND_S):
        await (await build("openai").start(ask("##n=3,m=surrogates##"), flight)).relay(got.extend)
    assert "".join(chunk.text for chunk in got) == "\ufffd the\ufffd quick\ufffd brown"
    assert all(msgspec.json.decode(chunk.raw) for chunk in got if chunk.raw is not None)
    assert ("engine_surrogates_replaced", {"count": 3}) in [(what, facts) for _, what, facts in flight.decisions]


async def test_busy_in_the_middle(build: Build) -> None:
    """A 429 inside a stream comes after its text, with its status, its code and when to come back."""
    got: list[Chunk] = []
    async with asyncio.timeout(BOUND_S):
        stream = await build("openai").start(ask("##n=8,k=3,m=busy_event##"), Flight("test"))
        with pytest.raises(EngineRefused, match="slow down") as caught:
            await stream.relay(got.extend)
    assert "".join(chunk.text for chunk in got) == " the quick brown"
    assert (caught.value.http_status, caught.value.public_code, caught.value.retry_after_s) == (429, "rate_limit_exceeded", 7.0)


async def test_a_picture_for_a_model_of_text(build: Build) -> None:
    """What llama.cpp calls its own failure is the caller's 400."""
    with pytest.raises(EngineRefused, match="image input is not supported") as caught:
        await build("openai").start(ask("##m=image_llama##"), Flight("test"))
    assert caught.value.http_status == 400
