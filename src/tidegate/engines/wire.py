"""HTTP/1.1 towards an engine, at byte level: a keep-alive pool per host, and an instant for everything that happens on the socket.

What the product measures happens here, so nothing lies between us and the socket: no compression, no redirects, no task per request, one
write per request, one future to wait on, one timer for all answers of a pool. A `Connection` turns bytes into a `Reply`;
whoever holds the reply reads pieces of its body, each with the instant of the read that brought it. A reader that falls behind pauses the
socket.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from tidegate.core.errors import EngineCut, EngineDown, EngineError, EngineStalled
from tidegate.core.flight import Flight

#: A piece of a body: the instant (perf_counter_ns) of the read that brought it, and its bytes.
Piece = tuple[int, bytes]

#: What no engine is to blame for: this process, or this machine, has no descriptor, memory or port left for one more connection.
_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})

#: Bytes that may wait unread for a slow reader before the socket is paused. One more read may come on top.
HIGH_WATER_BYTES = 64 * 1024
#: Bytes of response head (or of trailers and chunk extensions) that are read before the engine is given up.
MAX_HEAD_BYTES = 64 * 1024
#: A stream that is over for us still owes its last chunk: this long is waited for it before the connection is closed instead of kept.
DRAIN_S = 1.0
#: A kept connection that dies within this time of a request was dead before; one that dies later died at work, and is not tried again.
STALE_S = 1.0
#: An instant that never comes.
_NEVER_NS = 1 << 62


class Patience(msgspec.Struct, frozen=True):
    """How long each part of an answer may take, in seconds."""

    connect_s: float = 5.0
    first_token_s: float = 120.0
    inter_token_s: float = 30.0
    total_s: float = 600.0
    keepalive_s: float = 60.0


class Reply:
    """An answer as it comes in. Read `status` and `headers` once `head_ns` is set; then `take()` and `wait()` in turns until `done`.

    Headers have lower-case names. `error` is set where the answer will not become whole.
    """

    __slots__ = (
        "_conn", "_deadline_ns", "_draining", "_loop", "_paused", "_pool", "_size", "_stall", "_total_ns", "_waiter",
        "done", "error", "first_byte_ns", "head_ns", "headers", "listener", "pieces", "sent_ns", "stale", "status",
    )

    def __init__(self, conn: Connection, loop: asyncio.AbstractEventLoop, sent_ns: int, total_ns: int) -> None:
        self._conn: Connection | None = conn
        self._pool = conn.pool
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None
        self._deadline_ns = total_ns
        self._draining = False
        self._stall = ""
        self._total_ns = total_ns
        self._paused = False
        self.sent_ns = sent_ns
        self.first_byte_ns = 0
        self.head_ns = 0
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.pieces: list[Piece] = []
        self._size = 0  # bytes in pieces
        #: Asked before a reader that waits is woken, in the turn of the read itself; True: it took what came, nobody has to wake.
        self.listener: Callable[[], bool] | None = None
        self.done = False
        self.stale = False
        self.error: EngineError | None = None

    # -- the reader's side

    def take(self) -> list[Piece]:
        """The pieces that are there, which are then no longer here; lets a paused socket run on."""
        pieces = self.pieces
        self.pieces = []
        self._size = 0
        if self._paused:
            self._paused = False
            if self._conn is not None:
                self._conn.transport.resume_reading()
        return pieces

    def wait(self, until_ns: int, waits_for: str) -> asyncio.Future[None]:
        """A future that is done when something happened: a head, a piece, the end, an error, or `until_ns` passed (which sets `error`).

        `waits_for` completes the sentence "The engine was silent while we waited for ...". One reader at a time.
        """
        waiter = self._waiter = self._loop.create_future()
        self._stall = waits_for
        self._deadline_ns = until_ns = until_ns if until_ns < self._total_ns else self._total_ns
        if until_ns < self._pool.fires_ns:
            self._pool.watch(until_ns)
        return waiter

    def extend(self, until_ns: int, waits_for: str) -> None:
        """A reader that waits goes on waiting, until then and for this."""
        self._stall = waits_for
        self._deadline_ns = until_ns = until_ns if until_ns < self._total_ns else self._total_ns
        if until_ns < self._pool.fires_ns:  # the first token may have had more time than the next
            self._pool.watch(until_ns)

    def abort(self) -> None:
        """Close the connection at once, unless the answer is whole (then the connection is no longer ours). Wakes a reader that waits."""
        conn = self._conn
        if conn is not None:
            conn.drop()
            self.fail(EngineCut(f"The answer of {conn.pool.label} was given up on our side."))

    def drain(self) -> None:
        """We are done before the engine's last chunk: give it a moment to arrive, so that the connection can be kept."""
        if self._conn is None:
            return
        self.take()
        self._draining = True
        self._deadline_ns = time.perf_counter_ns() + int(DRAIN_S * 1e9)
        if self._deadline_ns < self._pool.fires_ns:
            self._pool.watch(self._deadline_ns)

    # -- the connection's side

    def wake(self) -> None:
        """Something happened, which a listener that takes it all keeps to itself."""
        if self.listener is None or not self.listener():
            self.rouse()

    def rouse(self) -> None:
        """Pause a socket whose reader is behind, and wake the reader."""
        conn = self._conn
        if self._size > HIGH_WATER_BYTES and not self._paused and conn is not None:
            self._paused = True
            conn.transport.pause_reading()
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def complete(self) -> bool:
        """The whole answer is here. Returns whether the socket was paused."""
        self._conn = None
        self.done = True
        paused = self._paused
        self._paused = False
        self.wake()
        return paused

    def fail(self, error: EngineError) -> None:
        self._conn = None
        if self.error is None and not self.done:
            self.error = error
        self.wake()

    # -- the pool's side

    def due_ns(self) -> int:
        """When something has to happen if nothing else does. Where nobody waits a slow reader is to blame, not the engine: then the total alone."""
        return self._deadline_ns if self._draining or self._waiter is not None else self._total_ns

    def expire(self, now_ns: int) -> None:
        """That instant came."""
        conn = self._conn
        if conn is None:
            return
        if self._draining:
            self.abort()
            return
        self._conn = None
        conn.drop()
        what = self._stall if now_ns < self._total_ns else "the end of the answer (total_s)"
        self.fail(EngineStalled(f"{conn.pool.label} was silent while we waited for {what}.", hint=_STALL_HINT))


_STALL_HINT = "Is the engine overloaded or hung? Its time-outs are first_token_s, inter_token_s and total_s of [engines.NAME]."


class Connection(asyncio.Protocol):
    """One socket to the engine, and the reply that it is busy with."""

    __slots__ = (
        "_barren", "_interim", "_keep", "_now_ns", "_overrun", "_parser", "_until_eof", "_whole",
        "idle_ns", "lost", "pool", "reply", "transport", "uses",
    )  # fmt: skip

    transport: asyncio.Transport

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.reply: Reply | None = None
        self.uses = 0
        self.idle_ns = 0
        self.lost = False
        self._parser = httptools.HttpResponseParser(self)
        self._now_ns = 0
        self._barren = 0  # bytes that brought no body since the last that did
        self._interim = False  # in a 1xx response
        self._whole = False  # the message is complete
        self._keep = False  # and the engine keeps the connection
        self._overrun = False  # the engine sends more than it was asked for
        self._until_eof = False  # the body has no length: it ends with the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports are none of asyncio's classes
        sock = transport.get_extra_info("socket")
        if sock is not None:
            # a delayed write meets a delayed acknowledgement: 40 ms
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, request: bytes, loop: asyncio.AbstractEventLoop, total_s: float) -> Reply:
        """Write a whole request. The connection must be idle."""
        self.uses += 1
        self._barren = 0
        self._whole = self._until_eof = False
        if not self.lost:
            self.transport.write(request)
        sent_ns = time.perf_counter_ns()
        reply = Reply(self, loop, sent_ns, sent_ns + int(total_s * 1e9))
        if self.lost:  # between being made and being used
            reply.fail(self._died())
        else:
            self.reply = reply
        return reply

    def drop(self) -> None:
        """Close at once; nobody hears of it."""
        self.reply = None
        self.transport.abort()

    # -- asyncio's side

    def data_received(self, data: bytes) -> None:
        self._now_ns = now_ns = time.perf_counter_ns()
        reply = self.reply
        if reply is None:  # an engine that speaks unasked cannot be trusted with the next request
            self.transport.abort()
            return
        if not reply.first_byte_ns:
            reply.first_byte_ns = now_ns
        self._barren += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._whole:
                why = "it switches to another protocol" if isinstance(error, httptools.HttpParserUpgrade) else str(error)
                self._fail(EngineError(f"{self.pool.label} does not speak HTTP/1.1 as it should: {why}.", hint=_NOT_HTTP_HINT))
                return
            self._overrun = True
        if self._whole:
            self._release(reply)
        elif self._barren > MAX_HEAD_BYTES:
            self._fail(EngineError(f"{self.pool.label} sent a response head of more than {MAX_HEAD_BYTES} bytes.", hint=_NOT_HTTP_HINT))
        elif reply.head_ns and (reply.listener is None or not reply.listener()):
            reply.rouse()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.pool.forget(self)
        reply = self.reply
        if reply is None:
            return
        self.reply = None
        if self._until_eof and exc is None and not self._whole:
            reply.complete()
        elif not reply.first_byte_ns:
            reply.stale = self.uses > 1 and time.perf_counter_ns() - reply.sent_ns < STALE_S * 1e9
            reply.fail(self._died())
        else:
            reply.fail(EngineCut(f"{self.pool.label} closed the connection before the end of its answer.", hint=_CRASH_HINT))

    # -- httptools' side

    def on_message_begin(self) -> None:
        if self._whole:
            self._overrun = True

    def on_header(self, name: bytes, value: bytes) -> None:
        reply = self.reply
        if reply is not None and not reply.head_ns:  # what comes behind the body tells nothing about it any more
            reply.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        reply = self.reply
        if reply is None or self._whole:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            self._interim = True
            reply.headers.clear()
            return
        reply.status = status
        reply.head_ns = self._now_ns
        headers = reply.headers
        coding = headers.get(b"transfer-encoding")
        self._until_eof = coding is None and b"content-length" not in headers
        if coding is not None and coding != b"chunked" and coding.lower() != b"chunked":
            headers.setdefault(b"content-encoding", coding)  # compressed on the way, which is no better
        self._barren = 0

    def on_body(self, data: bytes) -> None:
        reply = self.reply
        if reply is not None and not self._whole and not self._interim:
            self._barren = 0
            reply.pieces.append((self._now_ns, data))
            reply._size += len(data)

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
        elif not self._whole:
            self._whole = True
            self._keep = self._parser.should_keep_alive()  # only here: the parser is about to forget the message

    # --

    def _release(self, reply: Reply) -> None:
        """The answer is whole: the reply keeps its pieces, the pool gets the connection back."""
        self.reply = None
        if reply.complete():
            self.transport.resume_reading()
        if self._keep and not self._overrun:
            self.pool.put_back(self)
        else:
            self.transport.close()

    def _died(self) -> EngineDown:
        died = EngineDown(f"{self.pool.label} closed the connection without an answer.", hint=_CRASH_HINT)
        died.reached = True
        return died

    def _fail(self, error: EngineError) -> None:
        reply = self.reply
        self.reply = None
        self.transport.abort()
        if reply is not None:
            reply.fail(error)


_CRASH_HINT = "Did it crash? Its log knows."
_NOT_HTTP_HINT = "Is url of this engine the address of an OpenAI-compatible HTTP server?"


class Pool:
    """Keep-alive connections to one host.

    `label` names the engine in errors ("The engine 'local'"). Nothing is connected before the first request.
    """

    def __init__(self, label: str, url: str, patience: Patience, *, ca_file: str | None = None, max_idle: int = 256) -> None:
        parts = urlsplit(url)
        self.label = label
        self.patience = patience
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.netloc = parts.netloc
        self._tls = ssl.create_default_context(cafile=ca_file) if parts.scheme == "https" else None
        self._idle: deque[Connection] = deque()
        self._max_idle = max_idle
        self._keepalive_ns = int(patience.keepalive_s * 1e9)
        self._all: set[Connection] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: When the timer fires: the earliest instant at which any answer has waited too long, as far as was known when it was set.
        self.fires_ns = _NEVER_NS

    @property
    def open_connections(self) -> int:
        return len(self._all)

    async def send(self, request: bytes, flight: Flight, *, first_token_s: float | None = None) -> Reply:
        """Send a request, wait for the head of its answer. Puts `engine.connect`, `engine.send`, `engine.first_byte` on the flight.

        Raises EngineDown, EngineStalled, EngineError. A kept connection that turns out dead before any byte of an answer is replaced once.
        """
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        patience_s = first_token_s or self.patience.first_token_s
        conn = self._take_idle()
        while True:
            if conn is None:
                try:
                    conn = await self._connect(loop)
                finally:
                    flight.lap("engine.connect")
            else:
                flight.lap("engine.connect")
            reply = conn.send(request, loop, self.patience.total_s)
            flight.lap("engine.send", reply.sent_ns)
            try:
                until_ns = reply.sent_ns + int(patience_s * 1e9)
                while not reply.head_ns and reply.error is None:
                    await reply.wait(until_ns, "its first byte (first_token_s)")
            except asyncio.CancelledError:
                reply.abort()
                raise
            finally:
                flight.lap("engine.first_byte", reply.first_byte_ns)
            if reply.error is None or reply.head_ns:
                return reply
            if not reply.stale:
                raise reply.error
            flight.decide("engine_connection_stale", uses=conn.uses)
            conn = None

    def put_back(self, conn: Connection) -> None:
        if len(self._idle) >= self._max_idle or not self._keepalive_ns:
            conn.transport.close()
            return
        conn.idle_ns = time.perf_counter_ns()
        self._idle.append(conn)

    def forget(self, conn: Connection) -> None:
        self._all.discard(conn)
        if conn.idle_ns and conn in self._idle:
            self._idle.remove(conn)

    async def close(self) -> None:
        """Close every connection, busy ones too."""
        self._idle.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self.fires_ns = _NEVER_NS
        for conn in list(self._all):
            conn.transport.abort()
        for _ in range(100):  # the loop closes sockets in its next turns
            if not self._all:
                return
            await asyncio.sleep(0)

    def watch(self, at_ns: int) -> None:
        """Look at all answers at this instant, if nothing makes it earlier."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
        self.fires_ns = at_ns
        self._timer = self._loop.call_later(max(0.0, (at_ns - time.perf_counter_ns()) / 1e9), self._look)

    def _look(self) -> None:
        """The timer fired. Most often the answer for which it was set is long over: then it is only set for the next."""
        self._timer = None
        self.fires_ns = _NEVER_NS
        now_ns = time.perf_counter_ns()
        next_ns = _NEVER_NS
        for conn in list(self._all):
            reply = conn.reply
            if reply is None:
                continue
            due_ns = reply.due_ns()
            if due_ns <= now_ns:
                reply.expire(now_ns)
            elif due_ns < next_ns:
                next_ns = due_ns
        if next_ns < self.fires_ns:
            self.watch(next_ns)

    def _take_idle(self) -> Connection | None:
        idle = self._idle
        while idle:
            conn = idle.pop()  # the one used last is the likeliest to be alive
            if conn.transport.is_closing():
                continue
            if time.perf_counter_ns() - conn.idle_ns > self._keepalive_ns:
                conn.transport.close()
                continue
            return conn
        return None

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> Connection:
        extra: dict[str, Any] = {"ssl": self._tls, "server_hostname": self.host} if self._tls else {}
        where = f"{self.label} at {self.host}:{self.port}"
        try:
            async with asyncio.timeout(self.patience.connect_s):
                _, conn = await loop.create_connection(lambda: Connection(self), self.host, self.port, **extra)
        except TimeoutError:
            raise EngineDown(
                f"{where} did not accept a connection within {self.patience.connect_s:g} s.", hint="A firewall, or a host that is down?"
            ) from None
        except socket.gaierror as error:
            raise EngineDown(f"{where} cannot be reached: the host name does not resolve ({error.strerror}).", hint="Check url.") from None
        except ssl.SSLError as error:
            reason = getattr(error, "verify_message", "") or error.reason or str(error)
            raise EngineDown(f"{where} cannot be trusted: TLS failed ({reason}).", hint="Check url and ca_file.") from None
        except ConnectionRefusedError:
            raise EngineDown(f"{where} refuses connections.", hint="Is the engine running, and on this port?") from None
        except OSError as error:
            if error.errno in _OURS:
                full = EngineDown(
                    f"The gateway has no room for one more connection to {self.label}: {error.strerror or error}.",
                    hint="Raise its limit of open files (LimitNOFILE, ulimit -n), or lower the engine's slots.", retry_after_s=1.0,
                )
                full.ours = True
                raise full from None
            raise EngineDown(f"{where} cannot be reached: {error.strerror or error}.", hint="Check url and the network.") from None
        # Only now is it ours: uvloop tells no `connection_lost` where the caller leaves between the connection's making and here.
        if not conn.lost:
            self._all.add(conn)
        return conn
