"""One client connection: uvicorn's HTTP/1.1, with bounds on what a client may send and how long it may take, and fewer writes."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Mapping
from typing import Any, Protocol, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tidegate.api.errors import error_bytes
from tidegate.api.turn import Turn
from tidegate.api.websocket_connection import serve_socket
from tidegate.core.errors import BadRequest, HeadTooLarge, TidegateError
from tidegate.core.flight import new_flight_id

log = logging.getLogger(__name__)

#: Bytes of a request's line and headers; one read of the socket may come on top. httptools itself knows no bound.
MAX_HEAD_BYTES = 64 * 1024
#: Requests that may wait behind the one that is answered before the socket is read no further. While it is read, we see the client leave.
MAX_PIPELINED = 8
#: What is written to find out whether a client that sends no more still reads: an interim response, which HTTP/1.1 allows at any time before
#: the response, and between the events of a stream a comment.
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
COMMENT = b":\n\n"
#: Seconds within which the reset of a client that left is looked for, at ever longer intervals; later writes meet it by themselves.
FIRST_LOOK_S, LAST_LOOK_S = 0.001, 1.0
_TCP_CLOSE = 7  # Linux, include/net/tcp_states.h


class Answering(Protocol):
    """A request that is answered on the connection, as far as the connection has to tell it something."""

    def probe(self) -> bool:
        """Write something that a client which reads on overlooks. False where nothing can be written."""
        ...

    def left(self) -> None:
        """The client left."""
        ...

    def has_room(self) -> None:
        """The client reads again."""
        ...


class Corked:
    """A transport that holds a response's head until its first body piece, so that both leave in one system call and one packet.

    uvicorn writes them apart, and uvloop sends each write at once. A head without a body piece leaves at the end of the loop's turn.
    """

    __slots__ = ("_head", "_loop", "_transport", "_write", "is_closing")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self.is_closing = transport.is_closing  # asked for every request: not by way of __getattr__
        self._write = transport.write
        self._loop = loop
        self._head = b""

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 100"):
            self._head = data
            self._loop.call_soon(self._uncork)
            return
        self._transport.write(data)

    def pass_on(self, data: bytes) -> None:
        """What has nothing to wait for: a head with its body, a piece of a stream."""
        if self._head:
            data, self._head = self._head + data, b""
        self._write(data)

    @property
    def raw(self) -> asyncio.Transport:
        """The transport itself, for a connection that goes on as something else."""
        return self._transport

    def close(self) -> None:
        self._uncork()
        self._transport.close()

    def _uncork(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            if not self.is_closing():  # the client may have left since
                self._transport.write(head)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(HttpToolsProtocol):
    """uvicorn's own, on a corked transport. `look` is called about once a second: one timer for all costs less than one for each."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, Corked(transport, self.loop)))
        #: Whoever is answered and wants to know what the client does.
        self.answering: Answering | None = None
        self._since_s = self.loop.time()  # since when it is the client's turn
        self._in_head = False
        self._head_bytes = 0
        self._hot: Mapping[bytes, Any] = getattr(self.app, "hot", {})

    def look(self, now_s: float, idle_s: float, request_s: float) -> None:
        """Close a connection on which nothing comes, or no whole request: idle for `idle_s`, or without the rest of a head for so long, or
        without the rest of a body for `request_s`."""
        waited_s = now_s - self._since_s
        cycle = self.cycle
        answered = cycle is None or cycle.response_complete
        if waited_s > (idle_s if answered else request_s) and (answered or cycle.more_body):
            if self.transport.is_closing() and waited_s > idle_s + request_s:  # the client does not read what is left, either
                self.transport.abort()
            else:
                self.transport.close()

    # -- to another worker

    def hold(self) -> bool:
        """Read no further, so that the connection may go to another worker with its one request. False where more of the client's was read, or
        something is still on its way to it."""
        if self.pipeline or self._in_head or self.transport.is_closing() or self.transport.get_write_buffer_size():
            return False
        self.flow.pause_reading()
        return True

    def let_go(self) -> None:
        """Another worker has the connection; here nothing of it is left, and nobody is told that the client left."""
        self.answering = None
        self.cycle.disconnected = True
        self.transport.abort()

    # -- asyncio's side

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        cycle = self.cycle
        if type(cycle) is Turn and not cycle.begun:  # it left in its body: that is booked like any other end
            self._begin(cycle)
        answering, self.answering = self.answering, None
        if answering is not None:
            answering.left()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.answering is not None:
            self.answering.has_room()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client sends no more: it left, or it only said so and reads on (`shutdown(SHUT_WR)`, as `nc -N` does). Nothing tells the two
        apart but writing: a client that left answers with a reset, within a round trip. True: the connection stays open."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or not self._probe():
            return None  # asyncio closes, which says that the client left
        cycle.keep_alive = False
        self._look_for_reset(FIRST_LOOK_S)
        return True

    def _probe(self) -> bool:
        if self.answering is not None:
            return self.answering.probe()
        if self.cycle.response_started or self.cycle.scope["http_version"] != "1.1":
            return False
        self.transport.write(CONTINUE)
        return True

    def _look_for_reset(self, after_s: float) -> None:
        if self.transport.is_closing():
            return
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
            self.transport.abort()
        elif after_s <= LAST_LOOK_S:
            self.loop.call_later(after_s, self._look_for_reset, 2 * after_s)

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
            if self._opens_socket():
                self._go_on_as_socket(rest)
            else:
                self._go_on_without_upgrade(rest)
        except httptools.HttpParserError as error:
            self._refuse(BadRequest(f"This is not HTTP/1.1: {error}.", hint="Send a whole HTTP/1.1 request; TLS ends in front of Tidegate."))
        else:
            if self._in_head:
                self._head_bytes += len(data)
                if self._head_bytes > MAX_HEAD_BYTES:
                    self._refuse(HeadTooLarge(f"The request's head is larger than {MAX_HEAD_BYTES} bytes.", hint="Send fewer headers."))

    def _opens_socket(self) -> bool:
        """Whether this is a WebSocket's handshake on a path that takes one, with nothing unanswered before it."""
        takes_socket = getattr(self.app, "takes_socket", None)
        headers = dict(self.headers)
        return (
            takes_socket is not None
            and headers.get(b"upgrade", b"").lower() == b"websocket"
            and b"sec-websocket-key" in headers
            and not headers.keys() & {b"content-length", b"transfer-encoding"}
            and self.parser.get_method() == b"GET"
            and self.parser.get_http_version() == "1.1"
            and (self.cycle is None or self.cycle.response_complete)
            and takes_socket(httptools.parse_url(self.url).path)
        )

    def _go_on_as_socket(self, rest: bytes) -> None:
        """The connection belongs to `api/websocket_connection.py` from here on; it gets the head as it came."""
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(HeadTooLarge(f"The request's head is larger than {MAX_HEAD_BYTES} bytes.", hint="Send fewer headers."))
            return
        self.connections.discard(self)
        url = httptools.parse_url(self.url)
        target = url.path + (b"?" + url.query if url.query else b"")
        lines = [b"GET %b HTTP/1.1" % target, *(name + b": " + value for name, value in self.headers)]
        transport = cast(Corked, self.transport).raw
        if not serve_socket(transport, b"\r\n".join([*lines, b"", b""]), rest, self.config, self.server_state, self.app_state, self.loop):
            self._refuse(HeadTooLarge("The handshake has too many headers, or one that is too long.", hint="Send fewer, and shorter ones."))

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Decline an upgrade by answering in HTTP/1.1, as every client that offers one has to expect (Java's offers h2c with each first
        request). The parser would leave out the request's body, so a new one reads the request as if nothing had been offered."""
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if method == b"CONNECT":
            self._refuse(BadRequest("This is no proxy.", hint="Send the request itself."))
            return
        lines = [b"%b %b HTTP/%b" % (method, self.url, version.encode())]
        lines += [name + b": " + value for name, value in self.headers if name not in (b"connection", b"upgrade", b"http2-settings")]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets its own
        self.data_received(b"\r\n".join([*lines, b"", rest]))

    def send_400_response(self, msg: str) -> None:
        self._refuse(BadRequest(msg))

    def _refuse(self, error: TidegateError) -> None:
        """Say why, and close: what comes next on this connection has no beginning."""
        trace_id = new_flight_id(time.time_ns())
        log.info("a connection was refused: %s", error.message, extra={"trace_id": trace_id})
        body = error_bytes(error, trace_id)
        self.transport.write(
            b"%bcontent-type: application/json\r\ncontent-length: %d\r\nx-request-id: %b\r\nconnection: close\r\n\r\n%b"
            % (STATUS_LINE[error.http_status], len(body), trace_id.encode(), body)
        )
        self.transport.close()

    # -- httptools' side

    def on_message_begin(self) -> None:
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._since_s = self.loop.time()
        self._in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self.parser.should_upgrade():
            return
        if self.url in self._hot and not self.expect_100_continue and self._takes_turn():
            return
        self._make_scope()
        super().on_headers_complete()
        if 0 < len(self.pipeline) < MAX_PIPELINED:
            self.flow.resume_reading()

    def _takes_turn(self) -> bool:
        """Answer without ASGI where nothing is special: a POST of HTTP/1.1 with nothing unanswered before it."""
        cycle, parser = self.cycle, self.parser
        if (cycle is not None and not cycle.response_complete) or parser.get_method() != b"POST" or parser.get_http_version() != "1.1":
            return False
        self.cycle = turn = Turn(self, self.url.decode("ascii"), self.headers, keep_alive=parser.should_keep_alive())
        if not turn.small:
            self._begin(turn)
        return True

    def _begin(self, turn: Turn) -> None:
        turn.begun = True
        turn.task = task = self.loop.create_task(self._hot[self.url](turn))
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request ended in an error of its own", exc_info=error)

    def _make_scope(self) -> None:
        """What ASGI wants to know."""
        self.scope = {
            "type": "http", "asgi": {"version": self.asgi_version, "spec_version": "2.3"}, "http_version": "1.1", "server": self.server,
            "client": self.client, "scheme": self.scheme or "http", "root_path": self.root_path, "headers": self.headers,
            "state": self.app_state.copy(),
        }  # type: ignore[typeddict-item]

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        if type(cycle) is Turn and not cycle.begun:
            cycle.body += body
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        cycle = self.cycle
        if type(cycle) is Turn and not cycle.begun:
            cycle.more_body = False
            self._begin(cycle)
        elif not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """As uvicorn's, without a timer for each idle connection: `look` sees to those."""
        self._since_s = self.loop.time()
        self.answering = None
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())


class Adopted(Connection):
    """A connection from another worker, with the request that was read there."""

    def __init__(self, request: bytes, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._request = request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.data_received(self._request)
