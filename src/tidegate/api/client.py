"""One client, as a response reaches it: by uvicorn's own connection where there is one, else by ASGI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tidegate.api.coalesce import Coalesced
from tidegate.api.connection import COMMENT, CONTINUE, Connection
from tidegate.api.response import cycle_of, write_head, write_last, write_piece
from tidegate.api.settings import StreamSettings
from tidegate.api.turn import Turn
from tidegate.core.flight import Flight

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]

SSE_HEADERS: list[Header] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
#: Bytes that uvicorn lets wait for a client before it says that the client is slow.
BUFFER_BYTES = 65_536


class Client:
    """The side of an exchange on which bytes go out. `gone`: the client left. `started`: the head is out. `wrote`: since it was last looked at."""

    flight: Flight
    # Defaults of the class: what a request never sets costs it nothing.
    gone = started = wrote = False
    status = 0
    _since_ns = 0  # since when nothing was written, or nothing read
    _unread = 0
    _held: Coalesced | None = None  # events that wait

    def __init__(self, receive: Receive, send: Send, streams: StreamSettings) -> None:
        self._receive = receive
        self._send = send
        self._streams = streams
        self._cycle = cycle = cycle_of(send)
        connection = cycle.connection if type(cycle) is Turn else getattr(cycle.on_response, "__self__", None) if cycle is not None else None
        self._connection = connection if isinstance(connection, Connection) else None

    def _open(self, piece: bytes, headers: Sequence[Header]) -> Awaitable[None] | None:
        """The head of a stream to the client, and what comes first."""
        self.started = True
        self.status = 200
        cycle = self._cycle
        headers = [*SSE_HEADERS, (b"x-request-id", self.flight.id.encode()), *headers]
        if cycle is not None:
            if self._streams.buffer_bytes != BUFFER_BYTES:
                cycle.transport.set_write_buffer_limits(high=self._streams.buffer_bytes)
            if write_head(cycle, 200, headers, piece):
                return None
        head = self._offer({"type": "http.response.start", "status": 200, "headers": headers})
        return self._offer_piece(piece) if head is None else self._write_after(head, piece)

    def _offer_piece(self, piece: bytes) -> Awaitable[None] | None:
        return self._offer({"type": "http.response.body", "body": piece, "more_body": True})

    def _offer(self, message: dict[str, Any]) -> Awaitable[None] | None:
        """Run `send` as far as it goes without waiting, which is nearly always to its end: a token leaves in the turn that read it."""
        sending: Coroutine[Any, Any, None] = self._send(message)  # type: ignore[assignment]
        try:
            waits_for = sending.send(None)
        except StopIteration:
            return None
        return _Rest(sending, waits_for)

    async def _write_after(self, head: Awaitable[None], piece: bytes) -> None:
        await head
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _close(self, last: bytes) -> None:
        """The last bytes of a stream, as soon as the client has room for them."""
        if self._held:
            last = self._take_held() + last
        cycle = self._cycle
        if cycle is None:
            await self._send({"type": "http.response.body", "body": last})
            return
        while cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        write_last(cycle, last)

    # -- a client that reads slowly

    @property
    def full(self) -> bool:
        """Whether so much waits for the client that nothing more is to be written."""
        return self._cycle is None or self._cycle.flow.write_paused

    def put(self, piece: bytes) -> None:
        """Events of a kept stream to this client."""
        self.wrote = True
        if self._cycle is not None:
            write_piece(self._cycle, piece)

    def _unread_for_ns(self, cycle: RequestResponseCycle, now_ns: int) -> int:
        """For how long a client with a full buffer has not read a byte."""
        unread = cycle.transport.get_write_buffer_size()
        if unread != self._unread or not self._since_ns:
            self._unread = unread
            self._since_ns = now_ns
        return now_ns - self._since_ns

    def _hold(self, piece: bytes) -> bool:
        """Keep a piece until the client reads on. False where too much is held already, merged as it is."""
        held = self._held or Coalesced()
        if held.size + len(piece) > self._streams.coalesce_bytes:
            return False
        held.add(piece)
        self._held = held
        return True

    def _take_held(self) -> bytes:
        held, self._held = self._held, None
        return held.take() if held is not None else b""

    async def write_when_room(self, piece: bytes) -> None:
        """Write as soon as the client has room, or not at all where it leaves."""
        cycle = self._cycle
        assert cycle is not None, "waits for a connection of ours"
        while cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        write_piece(cycle, piece)

    # -- a client that is perhaps gone

    def probe(self) -> bool:
        """Write something that a client which reads on overlooks, to learn whether it is there. False where nothing can be written."""
        cycle = self._cycle
        assert cycle is not None, "a connection asks"
        if not cycle.response_started:
            if cycle.scope["http_version"] != "1.1":
                return False
            cycle.transport.write(CONTINUE)
        elif not cycle.flow.write_paused:  # else enough is on its way that a client which left will answer
            return write_piece(cycle, COMMENT)
        return True


class Room:
    """Awaited, a piece is written as soon as the client has room. Not a coroutine: it may be dropped without being awaited."""

    __slots__ = ("_client", "_piece")

    def __init__(self, client: Client, piece: bytes) -> None:
        self._client = client
        self._piece = piece

    def __await__(self) -> Generator[Any, Any, None]:
        return self._client.write_when_room(self._piece).__await__()


class _Rest:
    """The rest of a coroutine that was begun outside a task and has come to wait for something."""

    __slots__ = ("_coroutine", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._waits_for
        while True:
            try:
                value = yield waits_for
            except BaseException as error:  # noqa: BLE001 - a cancel belongs to the coroutine, as in any await
                resume = partial(self._coroutine.throw, error)
            else:
                resume = partial(self._coroutine.send, value)
            try:
                waits_for = resume()
            except StopIteration:
                return
