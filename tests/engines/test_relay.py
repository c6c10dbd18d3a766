"""Chunks are taken in the turn of the read: the same ones however the bytes come, in order, and the end is never missed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import pytest

from tidegate.bench.scripted import Scripted
from tidegate.core.chunk import Chunk
from tidegate.core.errors import EngineStalled
from tidegate.core.flight import Flight

from .conftest import BOUND_S, Build, ask

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
        with pytest.raises(EngineStalled):
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
