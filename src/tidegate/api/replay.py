"""Kept streams: events that wait for a client that left, so that it can come back and get the rest, nothing lost and nothing twice.

Every event of a kept stream carries `id: TRACE_ID.N`, N counted from 1. A client that comes back says the last one that it has. Events that no
reader was given are never thrown away: where they have no room, the engine waits. Those that were given stay while there is room, because what
was on its way to a client that broke off is lost to it.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict, deque
from collections.abc import Awaitable, Generator
from itertools import islice
from typing import Any, Literal, NamedTuple, Protocol

from tidegate.api.settings import StreamSettings
from tidegate.api.whereabouts import MOST_REMEMBERED, Whereabouts
from tidegate.core.ask import Caller
from tidegate.core.chunk import End
from tidegate.core.errors import BadRequest, NotFound, ResumeLost
from tidegate.core.flight import Flight

#: Bytes that are given to a reader at once.
SLICE_BYTES = 64 * 1024
_POSITION = re.compile(r"([0-9a-f]{32})\.([0-9]{1,12})")

#: Why a reader stopped: it has everything, its client left, or a newer one took over.
Outcome = Literal["end", "gone", "taken"]


class Position(NamedTuple):
    """Where in which stream a client is: the event number `after` is the last one that it has."""

    stream: str
    after: int


def position(last_event_id: bytes) -> Position:
    """What a `Last-Event-ID` says. Raises BadRequest."""
    found = _POSITION.fullmatch(last_event_id.decode("latin-1"))
    if found is None:
        raise BadRequest(
            "`Last-Event-ID` is no event id of a stream of ours.", hint="Send the last `id:` that the stream carried.", param="last-event-id"
        )
    return Position(found[1], int(found[2]))


class Sink(Protocol):
    """A client's connection."""

    @property
    def full(self) -> bool:
        """Whether so much waits for the client that nothing more is to be written."""
        ...

    def put(self, piece: bytes) -> None:
        """Write now."""
        ...


class Run(Sink, Protocol):
    """The request whose answer is kept, and its own client."""

    flight: Flight

    def give_up(self) -> None:
        """Nobody came back: cancel it."""
        ...

    def client_taken(self) -> None:
        """Its own client was replaced by a newer reader: end that response."""
        ...


class Reader:
    """A client that reads a kept stream. `given`: the number of the last event that was written to it; `done`: how it ended."""

    __slots__ = ("done", "given", "given_bytes", "sink", "stream")

    def __init__(self, stream: KeptStream, sink: Sink, after: int, after_bytes: int) -> None:
        self.stream = stream
        self.sink = sink
        self.given = after
        self.given_bytes = after_bytes
        self.done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def push(self) -> None:
        """Give the client what there is, as far as it has room."""
        stream = self.stream
        sink = self.sink
        while self.given < stream.last and not sink.full and not self.done.done():
            piece, self.given = stream.slice(self.given)
            self.given_bytes += len(piece)
            if self.given > stream.given:
                stream.given, stream.given_bytes = self.given, self.given_bytes
            sink.put(piece)
        if stream.ended and self.given == stream.last and not sink.full:
            self.leave("end")
        stream.wake()

    def leave(self, outcome: Outcome = "gone") -> None:
        """The client reads no more. May be called twice."""
        if self.done.done():
            return
        self.done.set_result(outcome)
        if self.stream.reader is self:
            self.stream.reader = None
            self.stream.idle_since_s = asyncio.get_running_loop().time()
            self.stream.streams.released()


class KeptStream:
    """The events of one answer. `first`, `last`: the numbers of the oldest and newest event that is there; `given`: of the newest that any
    reader was given, and `given_bytes` how many bytes of events there were up to it."""

    __slots__ = (
        "_added", "_events", "_id", "_size", "_waiters", "caller", "end", "ended", "first", "flight", "given", "given_bytes", "id",
        "idle_since_s", "last", "reader", "run", "streams",
    )

    def __init__(self, streams: KeptStreams, stream_id: str, caller: Caller, run: Run) -> None:
        self.streams = streams
        self.id = stream_id
        self._id = stream_id.encode()
        self.caller = (caller.tenant, caller.key_id)
        self.run: Run | None = run
        self.flight = run.flight
        self.first = 1
        self.last = self.given = self.given_bytes = 0
        self._added = 0  # bytes of all events, those that are gone too
        self.ended = False
        self.end: End = "error"
        self.idle_since_s = 0.0
        self._events: deque[bytes] = deque()
        self._size = 0
        self._waiters: list[asyncio.Future[None]] = []
        self.reader: Reader | None = Reader(self, run, 0, 0)

    # -- the run's side

    def add(self, piece: bytes) -> Awaitable[None] | None:
        """Whole events. None, or what to await until there is room for more."""
        self._number(piece)
        if self.reader is not None:
            self.reader.push()
        return None if self._has_room() else _Room(self)

    def finish(self, piece: bytes, end: End) -> None:
        """The last events, however it ended."""
        self._number(piece)
        self._waiters.clear()  # who still stands there was cancelled
        self.ended = True
        self.end = end
        self.idle_since_s = asyncio.get_running_loop().time()
        if self.reader is not None:
            self.reader.push()

    def _number(self, piece: bytes) -> None:
        size = 0
        for event in piece.split(b"\n\n"):
            if event:
                self.last += 1
                numbered = b"id: %b.%d\n%b\n\n" % (self._id, self.last, event)
                self._events.append(numbered)
                size += len(numbered)
        self._size += size
        self._added += size
        self.streams.size += size

    def _has_room(self) -> bool:
        """Make room by forgetting what was given. False where what is left is still too much."""
        streams, settings = self.streams, self.streams.settings
        if streams.size > settings.replay_total_bytes:
            streams.evict()
        reader = self.reader
        floor, floor_bytes = (self.given, self.given_bytes) if reader is None else (reader.given, reader.given_bytes)
        while self.first <= floor and (self._size > settings.replay_bytes or streams.size > settings.replay_total_bytes):
            self._forget_first()
        # half of the room is for what was given, because that may have been lost on its way
        return self._added - floor_bytes <= settings.replay_bytes // 2 and streams.size <= settings.replay_total_bytes

    def _forget_first(self) -> None:
        size = len(self._events.popleft())
        self.first += 1
        self._size -= size
        self.streams.size -= size

    def wake(self) -> None:
        """Let the run go on where there is room again."""
        if self._waiters and self._has_room():
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def wait(self) -> asyncio.Future[None]:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    # -- the readers' side

    def attach(self, sink: Sink, after: int) -> Reader:
        """A client that has the events up to `after` reads on; whoever read before is ended. Raises ResumeLost, BadRequest."""
        if after + 1 < self.first:
            raise ResumeLost(
                f"The events of this stream before number {self.first} are no longer there.",
                hint="Ask anew; streams.replay_bytes bounds what is held.",
            )
        if after > self.last:
            raise BadRequest("This stream has not got so far.", hint="Send the last `id:` that the stream carried.", param="last-event-id")
        older = self.reader
        before = self._added - self._size + sum(map(len, islice(self._events, after + 1 - self.first)))
        self.reader = reader = Reader(self, sink, after, before)
        if older is not None:
            older.leave("taken")
            if self.run is not None and older.sink is self.run:
                self.run.client_taken()
        return reader

    def slice(self, after: int) -> tuple[bytes, int]:
        """The next events, about SLICE_BYTES of them, and the number of the last one of them."""
        if after + 1 == self.last:  # a reader that keeps up
            return self._events[-1], self.last
        taken: list[bytes] = []
        size = 0
        for event in islice(self._events, after + 1 - self.first, None):
            taken.append(event)
            size += len(event)
            if size >= SLICE_BYTES:
                break
        return b"".join(taken), after + len(taken)

    def clear(self) -> None:
        self.streams.size -= self._size
        self._size = 0
        self._events.clear()
        self._waiters.clear()


class KeptStreams:
    """All kept streams, within bounds of bytes and number. Finished ones that nobody reads go first, the oldest before the others."""

    def __init__(self, settings: StreamSettings, whereabouts: Whereabouts | None = None) -> None:
        """`whereabouts`: where several workers tell each other which streams they keep."""
        self.settings = settings
        self._whereabouts = whereabouts
        self.stopping = False  # nobody is waited for any more
        self.size = 0
        self._streams: dict[str, KeptStream] = {}
        self._gone: OrderedDict[str, tuple[str, str]] = OrderedDict()
        self._telling = False  # those that wait for room hear of it in the loop's next turn

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, stream_id: str, caller: Caller, run: Run) -> KeptStream | None:
        """A new stream with its first reader; None where there is no room for one more."""
        if len(self._streams) >= self.settings.replay_streams:
            idle = self._idle()
            if not idle:
                return None
            self._evict(idle[0])
        stream = self._streams[stream_id] = KeptStream(self, stream_id, caller, run)
        if self._whereabouts is not None:
            self._whereabouts.keep(stream_id, stream.caller)
        return stream

    def find(self, stream_id: str, caller: Caller) -> KeptStream | int:
        """The stream, or the number of the worker that keeps it. Raises NotFound also for a stream of another key (which must not be told from
        none), ResumeLost."""
        own = (caller.tenant, caller.key_id)
        stream = self._streams.get(stream_id)
        if stream is not None and stream.caller == own:
            return stream
        if self._gone.get(stream_id) == own:
            raise lost()
        if self._whereabouts is not None and (listed := self._whereabouts.find(stream_id, own)) is not None:
            if not listed.alive or listed.worker == self._whereabouts.worker:
                raise lost()
            return listed.worker
        raise NotFound("There is no such stream of yours.", hint="Streams are kept where their `leave` policy is `keep`, and for the same API key.")

    def drop(self, stream: KeptStream, *, remember: bool = True) -> None:
        """Forget a stream and its events. `remember`: a client that comes for it is told that it is gone."""
        if self._streams.pop(stream.id, None) is None:
            return
        self._forget(stream, remember=remember)
        if stream.reader is not None:
            stream.reader.leave("gone")
        self.released()

    def evict(self) -> None:
        """Drop finished streams until the total is within its bound, or none is left. Those that wait for room are told in the loop's next turn: one
        of them may be who makes this room."""
        total = self.settings.replay_total_bytes
        idle = self._idle() if self.size > total else []
        for stream in idle:
            if self.size <= total:
                break
            self._evict(stream)

    def _idle(self) -> list[KeptStream]:
        """Finished streams that nobody reads, the one that waits longest first."""
        return sorted((one for one in self._streams.values() if one.ended and one.reader is None), key=lambda one: one.idle_since_s)

    def _evict(self, stream: KeptStream) -> None:
        del self._streams[stream.id]
        self._forget(stream, remember=True)
        if not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._telling = False
        self.released()

    def _forget(self, stream: KeptStream, *, remember: bool) -> None:
        stream.clear()
        if self._whereabouts is not None:
            self._whereabouts.drop(stream.id, remember=remember)
        if remember:
            self._gone[stream.id] = stream.caller
            if len(self._gone) > MOST_REMEMBERED:
                self._gone.popitem(last=False)

    def released(self) -> None:
        """Something may have become free: let those that wait for room look again."""
        for stream in list(self._streams.values()):
            stream.wake()

    def look(self, now_s: float) -> None:
        """End what nobody came back for. To be called a few times a second."""
        if not self._streams:
            return
        for stream in list(self._streams.values()):
            if stream.reader is None and (self.stopping or now_s - stream.idle_since_s > self.settings.grace_s):
                if stream.ended:
                    self.drop(stream)
                elif stream.run is not None:
                    stream.run.give_up()
        self.released()


def lost() -> ResumeLost:
    """Of a stream that was there."""
    return ResumeLost("This stream is no longer there.", hint="Ask anew; streams.grace_s says how long a stream waits for its client.")


class _Room:
    """Awaited until a stream has room for more."""

    __slots__ = ("_stream",)

    def __init__(self, stream: KeptStream) -> None:
        self._stream = stream

    def __await__(self) -> Generator[Any, Any, None]:
        while not self._stream._has_room():
            yield from self._stream.wait()
