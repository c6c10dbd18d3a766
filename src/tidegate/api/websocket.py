"""The WebSocket twin of the streaming routes: one message is one request, one text frame is one event, over the very routes that serve POST.

A message is walked as an Exchange of its own, whose response's bytes become frames. So keys, limits, flights, leaving and slow readers are
those of SSE, and a frame holds what SSE carries as data.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec

from tidegate.api.conversations import BARGE_IN, CONVERSATION
from tidegate.api.exchange import SSE_HEADERS, Exchange, Header, House, Receive, Scope, Send, asking
from tidegate.api.websocket_connection import SocketConnection
from tidegate.core.errors import TidegateError

log = logging.getLogger(__name__)

Route = Callable[[Exchange], Awaitable[None]]

#: The OpenAI-compatible routes that stream; a capability's route always does.
HOT_PATHS = ("/v1/chat/completions", "/v1/completions")
#: Browsers cannot set headers on a WebSocket, but they can offer subprotocols: this one, and the key.
SUBPROTOCOL = "tidegate"
_KEY = "key."
_REVOKED = frozenset({401, 403})
_OF_THE_SOCKET = frozenset({b"connection", b"upgrade", b"accept"})


class Session:
    """One socket, from its handshake to its end. Requests run one at a time: a new message cuts the one that runs."""

    def __init__(self, house: House, scope: Scope, receive: Receive, send: Send, route: Route) -> None:
        socket = getattr(receive, "__self__", None)
        assert isinstance(socket, SocketConnection), "a WebSocket comes by way of api/connection.py"
        self._socket = socket
        self._house = house
        self._receive = receive
        self._send = send
        self._route = route
        self._offered: list[str] = scope.get("subprotocols", [])
        self._scope = {**scope, "type": "http", "method": "POST", "headers": _headers(scope["headers"], self._offered)}
        self._running: Message | None = None

    async def run(self) -> None:
        """Shake hands, then answer messages until somebody leaves."""
        await self._receive()
        if not await self._is_known():
            return
        await self._send({"type": "websocket.accept", "subprotocol": SUBPROTOCOL if SUBPROTOCOL in self._offered else None})
        try:
            while (message := await self._receive())["type"] != "websocket.disconnect":
                if not self._socket.stopping:
                    await self._begin(message["bytes"])
            await self._leave()
        except asyncio.CancelledError:  # the server's grace is over
            self._socket.close(1013, "Tidegate is stopping.")
            await self._stop()
            raise
        except Exception:  # the last door: the log gets the traceback
            log.exception("unexpected error on a WebSocket")
            self._socket.close(1011, "Something went wrong inside Tidegate.")
            await self._stop()

    async def _is_known(self) -> bool:
        """Whether a handshake comes with a good key. Else it was answered as any request without one, and its flight booked."""
        handshake = {**self._scope, "method": "GET"}
        exchange = Exchange(self._house, handshake, self._receive, self._refuse)
        try:
            await asking(exchange)
        except TidegateError as error:
            await exchange.run(_fails_with(error))
            return False
        return True

    async def _refuse(self, message: dict[str, Any]) -> None:
        await self._send({**message, "type": "websocket." + message["type"]})

    async def _begin(self, body: bytes) -> None:
        message = Message(self._house, self._scope, self._socket, body)
        flight = message.exchange.flight
        flight.decide("websocket")
        older = self._running
        if older is not None:
            if older.exchange.supersede(flight.id):
                flight.decide("barge_in", superseded=[older.exchange.flight.id])
            await older.wait()  # so that its last frame goes before the first of the new one
            flight.lap("read")
        self._running = message
        self._socket.begin()
        message.start(self._route, self._ended)

    def _ended(self, message: Message) -> None:
        if self._running is not message:
            return
        self._running = None
        if message.status in _REVOKED:
            self._socket.close(1008, "The key is not good any more.")
        self._socket.rest()

    async def _leave(self) -> None:
        """The client is gone: what that means for a request that runs is the exchange's to say."""
        if self._running is not None:
            self._running.leave()
            await self._running.wait()

    async def _stop(self) -> None:
        if self._running is not None:
            self._running.stop()
            await self._running.wait()


class Message:
    """One request on a socket: the `receive` and `send` of its exchange."""

    __slots__ = ("_body", "_left", "_socket", "_streams", "_task", "exchange", "status")

    def __init__(self, house: House, scope: Scope, socket: SocketConnection, body: bytes) -> None:
        self._socket = socket
        self._body: bytes | None = body
        self._left = asyncio.Event()
        self._streams = False
        self._task: asyncio.Task[None] | None = None
        self.status = 0
        self.exchange = Exchange(house, scope, self.receive, self.send)
        self.exchange.on_socket = True

    def start(self, route: Route, ended: Callable[[Message], None]) -> None:
        """Walk the route; `ended` is called when that is over."""
        self._task = asyncio.get_running_loop().create_task(self.exchange.run(route))

        def end(task: asyncio.Task[None]) -> None:
            self._left.set()  # whoever still waits for the client to leave
            ended(self)
            if not task.cancelled():
                task.result()

        self._task.add_done_callback(end)

    def leave(self) -> None:
        """The client is gone."""
        self._left.set()

    def stop(self) -> None:
        """The server stops."""
        if self._task is not None:
            self._task.cancel()

    async def wait(self) -> None:
        """Until the request has ended."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def receive(self) -> dict[str, Any]:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._streams = SSE_HEADERS[0] in message["headers"]
            return
        body: bytes = message["body"]
        socket = self._socket
        if not socket.writable.is_set():
            await socket.writable.wait()
        socket.write(frames(body) if self._streams else (self._whole(body),))

    def _whole(self, body: bytes) -> bytes:
        """A response that is no stream: an error before its beginning. A frame has no status line, so the error says it itself."""
        said = msgspec.json.decode(body)
        said["error"]["status"] = self.status
        return _frame(b"error" if self.exchange.flight.capability else b"", msgspec.json.encode(said))


def frames(piece: bytes) -> Iterator[bytes]:
    """The frames of whole server-sent events of ours: the data of each. An event that has a name becomes `{"event": NAME, "data": DATA}`."""
    if piece.startswith(b"data: ") and piece.find(b"\n") == len(piece) - 2:  # the usual piece: one event without a name
        yield _frame(b"", piece[6:-2])
        return
    for event in piece.split(b"\n\n"):
        name, data = b"", []
        for line in event.split(b"\n"):
            if line.startswith(b"data: "):
                data.append(line[6:])
            elif line.startswith(b"event: "):
                name = line[7:]
        if data:  # comments keep an HTTP connection alive; a socket has pings
            yield _frame(name, b"\n".join(data))


def _frame(name: bytes, data: bytes) -> bytes:
    if not data.isascii():  # text frames have to be UTF-8, whatever an engine said
        data = data.decode("utf-8", "replace").encode()
    return b'{"event":"%b","data":%b}' % (name, data) if name else data


def _headers(headers: list[Header], offered: list[str]) -> list[Header]:
    """The handshake's headers as those of each request."""
    kept = [header for header in headers if header[0] not in _OF_THE_SOCKET and not header[0].startswith(b"sec-websocket-")]
    if not any(name == CONVERSATION for name, _ in kept):  # the socket is the conversation, and a new message always cuts
        kept = [header for header in kept if header != (BARGE_IN, b"1")]
    kept.append((b"accept", SSE_HEADERS[0][1]))
    key = next((one.removeprefix(_KEY) for one in offered if one.startswith(_KEY)), "")
    if key and SUBPROTOCOL in offered and not any(name == b"authorization" for name, _ in kept):
        kept.append((b"authorization", b"Bearer " + key.encode("latin-1", "replace")))
    return kept


def _fails_with(error: TidegateError) -> Route:
    async def route(exchange: Exchange) -> None:
        raise error

    return route
