"""Kept streams: whatever happens in whatever order, a client that comes back has every event once and in order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from unittest import mock

import hypothesis
import pytest
from hypothesis import strategies as st

from tidegate.api import replay
from tidegate.api.replay import KeptStream, KeptStreams, Reader, position
from tidegate.api.settings import StreamSettings
from tidegate.core.ask import Caller
from tidegate.core.errors import BadRequest, NotFound, ResumeLost
from tidegate.core.flight import Flight

CALLER = Caller("key", "tenant")
ID = "0" * 31 + "7"


class Client:
    """A connection that takes `room` pieces before it is full."""

    def __init__(self, room: int = 1_000_000) -> None:
        self.flight = Flight("/v1/chat/completions")
        self.room = room
        self.pieces: list[bytes] = []
        self.given_up = False
        self.taken = False

    @property
    def full(self) -> bool:
        return self.room <= 0

    def put(self, piece: bytes) -> None:
        assert not self.full
        self.room -= 1
        self.pieces.append(piece)

    def give_up(self) -> None:
        self.given_up = True

    def client_taken(self) -> None:
        self.taken = True

    @property
    def events(self) -> list[bytes]:
        return b"".join(self.pieces).split(b"\n\n")[:-1]

    @property
    def numbers(self) -> list[int]:
        return [position(event.split(b"\n")[0].removeprefix(b"id: ")).after for event in self.events]


def kept(*, replay_bytes: int = 1_048_576, **settings: int | float) -> KeptStreams:
    return KeptStreams(StreamSettings.model_validate({"replay_bytes": max(16_384, replay_bytes), **settings}))


def opened(streams: KeptStreams, client: Client, stream_id: str = ID) -> KeptStream:
    stream = streams.open(stream_id, CALLER, client)
    assert stream is not None
    return stream


def event(n: int, size: int = 1) -> bytes:
    return b"data: %d %b\n\n" % (n, b"x" * size)


def reader_of(stream: KeptStream) -> Reader:
    assert stream.reader is not None
    return stream.reader


# -- one client, many returns


@hypothesis.given(st.integers(0, 2**32))
@hypothesis.settings(max_examples=400, deadline=None)
def test_any_interleaving_gives_every_event_once(seed: int) -> None:
    """Tokens, breaks, returns from the last event that arrived, slow reading and the end, in any order: the client has the whole."""
    with mock.patch.object(replay, "SLICE_BYTES", 100):  # a few events at once
        asyncio.run(any_interleaving(random.Random(seed).randint))


async def any_interleaving(draw: Callable[[int, int], int]) -> None:
    total = draw(1, 30)
    streams = kept()
    first = client = Client(draw(0, 5))
    stream = opened(streams, first)
    reader: Reader | None = reader_of(stream)
    arrived: list[bytes] = []  # what the client has of all its connections
    said = 0

    def arrive(some: int) -> None:
        """A prefix of what was written arrives; the rest is lost with the connection."""
        whole = client.events
        arrived.extend(whole[: some if some < len(whole) else len(whole)])

    for _ in range(draw(1, 60)):
        step = draw(0, 5)
        if step <= 2 and said < total:
            piece = b""
            for _ in range(draw(1, 3)):
                if said < total:
                    said += 1
                    piece += event(said)
            assert stream.add(piece) is None
            if said == total:
                stream.finish(b"data: [DONE]\n\n", "stop")
        elif step == 3 and reader is not None:  # the connection breaks: some of what was written is lost
            arrive(draw(0, len(client.events)))
            reader.leave()
            reader = None
        elif step == 4:  # it comes (back), also while the older connection still seems to be there
            if reader is not None:
                arrive(draw(0, len(client.events)))
            client = Client(draw(0, 5))
            reader = stream.attach(client, len(arrived))
            reader.push()
        elif reader is not None:  # it reads on
            client.room += draw(0, 5)
            reader.push()
    if said < total:
        stream.add(b"".join(event(n) for n in range(said + 1, total + 1)))
        stream.finish(b"data: [DONE]\n\n", "stop")
    if reader is None:
        client = Client()
        reader = stream.attach(client, len(arrived))
    client.room = 1_000_000
    reader.push()
    assert await reader.done == "end"
    arrive(len(client.events))
    texts = [one.partition(b"\ndata: ")[2] for one in arrived]
    assert texts == [b"%d x" % n for n in range(1, total + 1)] + [b"[DONE]"]
    assert [one.split(b"\n")[0] for one in arrived] == [b"id: %b.%d" % (ID.encode(), n) for n in range(1, total + 2)]


async def test_a_returning_client_reads_live() -> None:
    """Who comes back while the answer still runs gets the rest of what was said, and then each event as it comes."""
    streams = kept()
    first, second = Client(), Client()
    stream = opened(streams, first)
    stream.add(event(1) + event(2))
    reader_of(stream).leave()
    stream.add(event(3))
    stream.attach(second, 1).push()
    assert second.numbers == [2, 3]
    stream.add(event(4))
    assert second.numbers == [2, 3, 4]


async def test_the_newer_reader_wins() -> None:
    """The older of two readers is ended and told so; the newer goes on alone."""
    streams = kept()
    first, second, third = Client(), Client(), Client()
    stream = opened(streams, first)
    own = reader_of(stream)
    stream.add(event(1))
    middle = stream.attach(second, 0)
    middle.push()
    assert (await own.done, first.taken) == ("taken", True)
    stream.attach(third, 0).push()
    stream.add(event(2))
    assert (await middle.done, second.taken) == ("taken", False)
    assert (first.numbers, second.numbers, third.numbers) == ([1], [1], [1, 2])


# -- bounds


async def test_what_nobody_was_given_is_not_thrown_away() -> None:
    """Without a reader, the run is held up when half of the buffer is full, and goes on when somebody reads."""
    streams = kept(replay_bytes=16_384)
    client = Client()
    stream = opened(streams, client)
    reader_of(stream).leave()
    sent = 0
    room = None
    while room is None:
        sent += 1
        room = stream.add(event(sent, 1000))
    assert 8192 <= streams.size < 8192 + 1100
    waiting = asyncio.ensure_future(room)
    await asyncio.sleep(0)
    assert not waiting.done()
    back = Client()
    stream.attach(back, 0).push()
    await asyncio.wait_for(waiting, 5)
    assert back.numbers == list(range(1, sent + 1))


async def test_what_was_given_goes_first() -> None:
    """A stream that is read holds its bound; what was given longest ago goes first, and asking for it is answered honestly."""
    streams = kept(replay_bytes=16_384)
    stream = opened(streams, Client())
    for n in range(1, 101):
        assert stream.add(event(n, 1000)) is None
        assert streams.size <= 16_384
    back = Client()
    stream.attach(back, 95).push()
    assert back.numbers == [96, 97, 98, 99, 100]
    with pytest.raises(ResumeLost, match="before number 86"):
        stream.attach(Client(), 50)


async def test_all_streams_together_hold_their_bound() -> None:
    """Where all together are too large, finished streams that nobody reads go, the one that waits longest first; asking for one that went is
    answered honestly."""
    streams = kept(replay_total_bytes=16_384)
    ids = [f"{n:032x}" for n in range(5)]
    for n, stream_id in enumerate(ids):
        stream = opened(streams, Client(), stream_id)
        stream.add(event(1, 5000))
        stream.finish(b"data: [DONE]\n\n", "stop")
        stream.idle_since_s = n
        assert streams.size <= 16_384 + 5100
    streams.evict()
    assert len(streams) == 3
    with pytest.raises(ResumeLost):
        streams.find(ids[0], CALLER)
    assert streams.find(ids[4], CALLER).last == 2


async def test_one_large_piece_may_cost_many_streams() -> None:
    """Hundreds of finished streams go for one piece, also where a run waits for room; that one goes on once there is some."""
    streams = kept(replay_total_bytes=400_000, replay_bytes=131_072)
    for n in range(300):
        ended = opened(streams, Client(), f"{n:032x}")
        ended.add(event(1, 500))
        ended.finish(b"data: [DONE]\n\n", "stop")
    waits, talks = opened(streams, Client(), "e" * 32), opened(streams, Client(), "f" * 32)
    reader_of(waits).leave()
    room = waits.add(event(1, 66_000))
    assert room is not None
    waiting = asyncio.ensure_future(room)
    await asyncio.sleep(0)
    talks.add(event(1, 300_000))
    assert streams.size <= 400_000
    assert len(streams) < 100
    assert not waiting.done()
    waits.attach(Client(), 0).push()
    await asyncio.wait_for(waiting, 5)


@hypothesis.given(st.integers(0, 2**32))
@hypothesis.settings(max_examples=200, deadline=None)
def test_many_streams_share_their_room(seed: int) -> None:
    """Runs that wait, end, are cancelled and dropped, readers that come and go, and the time: what is counted is what is there, nobody waits
    for ever, and in the end nothing is left."""
    asyncio.run(many_streams(random.Random(seed)))


async def many_streams(rng: random.Random) -> None:
    total, one = rng.choice([16_384, 30_000, 100_000]), rng.choice([16_384, 40_000])
    streams = kept(replay_total_bytes=total, replay_bytes=one, replay_streams=rng.choice([2, 5, 40]))
    runs: list[tuple[KeptStream, asyncio.Task[None], list[tuple[Reader, Client, int]]]] = []
    now_s = asyncio.get_running_loop().time()

    async def run(stream: KeptStream, count: int, size: int) -> None:
        try:
            for n in range(1, count + 1):
                if (room := stream.add(event(n, rng.randint(1, size)))) is not None:
                    await room
            stream.finish(b"data: [DONE]\n\n", "stop")
        except asyncio.CancelledError:
            if rng.random() < 0.5:
                stream.finish(b"data: late\n\n", "error")
            else:
                streams.drop(stream)

    for number in range(rng.randint(10, 120)):
        step = rng.random()
        if step < 0.2:
            client = Client(rng.choice([0, 2, 1000]))
            stream = streams.open(f"{number:032x}", CALLER, client)
            if stream is None:
                continue
            readers = [(reader_of(stream), client, 0)]
            task = asyncio.ensure_future(run(stream, rng.randint(1, 20), rng.choice([1, 1000, 20_000])))
            client.give_up = task.cancel  # type: ignore[assignment, method-assign]
            runs.append((stream, task, readers))
            await asyncio.sleep(0)
        elif step > 0.9:
            streams.look(now_s + rng.choice([0, 0, 100]))
        elif runs:
            stream, task, readers = rng.choice(runs)
            reader, client, before = readers[-1]
            step = rng.random()
            if step < 0.3:
                reader.leave()
            elif step < 0.6:
                client.room += rng.randint(0, 4)
                reader.push()
            elif step < 0.85:
                has = before + rng.randint(0, len(client.numbers))
                client = Client(rng.choice([0, 1, 1000]))
                try:
                    reader = streams.find(stream.id, CALLER).attach(client, has)
                except ResumeLost:
                    continue
                readers.append((reader, client, has))
                reader.push()
            else:
                task.cancel()
        if rng.random() < 0.6:
            await asyncio.sleep(0)
        assert streams.size == sum(stream._size for stream in streams._streams.values())
    while any(not task.done() for _, task, _ in runs) or len(streams):
        for _, _, readers in runs:
            readers[-1][1].room = 1_000_000
            readers[-1][0].push()
        streams.look(now_s + 100)
        await asyncio.sleep(0)
    assert streams.size == 0
    for _, task, readers in runs:
        task.result()
        for reader, client, before in readers:
            assert reader.done.done()
            assert client.numbers == list(range(before + 1, before + 1 + len(client.numbers)))


async def test_a_stream_too_many_is_not_kept() -> None:
    """The number of streams is bounded; running ones are not thrown out for a new one."""
    streams = kept(replay_streams=2)
    first = opened(streams, Client(), "1" * 32)
    opened(streams, Client(), "2" * 32)
    assert streams.open("3" * 32, CALLER, Client()) is None
    first.finish(b"data: [DONE]\n\n", "stop")
    assert streams.open("3" * 32, CALLER, Client()) is not None
    with pytest.raises(ResumeLost):
        streams.find("1" * 32, CALLER)


async def test_nobody_comes_back() -> None:
    """After the grace time a running stream is given up and a finished one forgotten, both not before, and neither while it is read."""
    streams = kept(grace_s=10.0)
    clients = [Client(), Client(), Client()]
    running, ended, read = [opened(streams, client, f"{n}" * 32) for n, client in enumerate(clients)]
    for stream in (running, ended, read):
        stream.add(event(1))
    reader_of(running).leave()
    ended.finish(b"data: [DONE]\n\n", "stop")
    now_s = asyncio.get_running_loop().time()
    streams.look(now_s + 9.0)
    assert (clients[0].given_up, len(streams)) == (False, 3)
    streams.look(now_s + 11.0)
    assert [client.given_up for client in clients] == [True, False, False]
    assert len(streams) == 2
    with pytest.raises(ResumeLost):
        streams.find("1" * 32, CALLER)


async def test_a_stop_waits_for_nobody() -> None:
    """When the gateway stops, runs that nobody reads are given up at once; those that are read go on."""
    streams = kept(grace_s=10.0)
    clients = [Client(), Client()]
    unread, _ = [opened(streams, client, f"{n}" * 32) for n, client in enumerate(clients)]
    reader_of(unread).leave()
    streams.stopping = True
    streams.look(asyncio.get_running_loop().time())
    assert [client.given_up for client in clients] == [True, False]


# -- whose stream it is


@pytest.mark.parametrize("stranger", [Caller("other-key", "tenant"), Caller("key", "other-tenant"), Caller("other-key", "other-tenant")])
async def test_a_stream_is_its_callers_own(stranger: Caller) -> None:
    """Another key's or tenant's stream is as if there were none, also when it is gone."""
    streams = kept()
    stream = opened(streams, Client())
    with pytest.raises(NotFound) as other:
        streams.find(ID, stranger)
    streams.drop(stream)
    with pytest.raises(NotFound) as gone:
        streams.find(ID, stranger)
    with pytest.raises(NotFound) as none:
        streams.find("f" * 32, stranger)
    assert other.value.message == gone.value.message == none.value.message


async def test_nobody_is_ahead_of_the_stream() -> None:
    """A position that the stream has not reached is the caller's mistake."""
    stream = opened(kept(), Client())
    stream.add(event(1))
    with pytest.raises(BadRequest, match="not got so far"):
        stream.attach(Client(), 2)


@pytest.mark.parametrize("said", [b"", b"7", b"x.1", ID.encode(), ID.encode() + b".", ID.encode() + b".-1", ID.upper().encode() + b"x.1", b"\xff.1"])
def test_an_id_of_somebody_else_is_refused(said: bytes) -> None:
    """Only what we gave as an id is one."""
    with pytest.raises(BadRequest, match="no event id"):
        position(said)
    assert position(ID.encode() + b".12") == (ID, 12)
