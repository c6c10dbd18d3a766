"""The door: hot routes as raw ASGI in front of one FastAPI app that carries everything else."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

import uvicorn
from starlette.exceptions import HTTPException

from tidegate.api.connection import Adopted, Connection
from tidegate.api.exchange import Exchange, House, Receive, Scope, Send
from tidegate.api.leave import STREAMS
from tidegate.api.openai import MODELS
from tidegate.api.peers import Peers
from tidegate.api.settings import ServerSettings
from tidegate.api.turn import Turn
from tidegate.api.websocket import HOT_PATHS, Session
from tidegate.api.websocket_connection import SocketConnection
from tidegate.core.errors import NotFound
from tidegate.core.plugins import nearest

_NO_CAPABILITY = "This gateway has no capabilities: capabilities.folders is empty."

#: Routes behind which the name of what is meant stands.
_WITH_NAMES = (STREAMS, MODELS)

Route = Callable[[Exchange], Awaitable[None]]
Asgi = Callable[[Any, Any, Any], Awaitable[None]]


class Door:
    """An ASGI app. A path that is hot is answered here; a capability's path is too; the rest goes on."""

    def __init__(self, house: House, hot: Mapping[str, Route], capabilities: Mapping[str, Route], rest: Asgi) -> None:
        self._house = house
        self._hot = dict(hot)
        self._capabilities = {f"/api/v1/{path}": route for path, route in capabilities.items()}
        self._sockets = {path: route for path, route in self._hot.items() if path in HOT_PATHS} | self._capabilities
        self._rest = rest
        #: What a connection may begin without ASGI, by the path as it was sent.
        self.hot = {path.encode(): self._begins(route) for path, route in (self._hot | self._capabilities).items() if path.isascii()}

    def _begins(self, route: Route) -> Callable[[Turn], Coroutine[Any, Any, None]]:
        house = self._house
        return lambda turn: Exchange(house, turn.scope, turn.receive, turn.send).run(route)  # type: ignore[arg-type]

    @property
    def paths(self) -> list[str]:
        """The paths that are answered here."""
        return [*self._hot, *self._capabilities]

    def takes_socket(self, raw_path: bytes) -> bool:
        """Whether a WebSocket may be opened on a path."""
        return unquote(raw_path.decode("latin-1")) in self._sockets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            route = self._hot.get(path) or self._capabilities.get(path)
            for root in _WITH_NAMES:
                if route is None and path.startswith(root + "/"):
                    route = self._hot.get(root)
            if route is None and path.startswith("/v1/"):
                route = self._unknown("route", list(self._hot))
            elif route is None and scope["method"] == "POST" and path.startswith("/api/v1/") and path.count("/") == 4:
                route = self._unknown("capability", list(self._capabilities))
            if route is not None:
                await Exchange(self._house, scope, receive, send).run(route)
                return
            receive = _bounded(receive, scope["headers"], self._house.max_body_bytes)
        elif scope["type"] == "websocket":
            await Session(self._house, scope, receive, send, self._sockets[scope["path"]]).run()
            return
        await self._rest(scope, receive, send)

    def _unknown(self, what: str, known: list[str]) -> Route:
        async def route(exchange: Exchange) -> None:
            raise NotFound(f"There is no {what} {exchange.path[:200]}.", hint=nearest(exchange.path, known) if known else _NO_CAPABILITY)

        return route


def _bounded(receive: Receive, headers: list[tuple[bytes, bytes]], limit: int) -> Receive:
    """`receive` of a request whose body may have `limit` bytes: FastAPI reads a whole body before it asks for a key."""
    told = next((int(value) for name, value in headers if name == b"content-length"), 0)  # digits only: the parser saw to that
    size = 0

    async def bounded() -> dict[str, Any]:
        nonlocal size
        message = await receive() if told <= limit else {}
        size += len(message.get("body", b""))
        if max(size, told) > limit:
            raise HTTPException(413)
        return message

    return bounded


#: Bytes that the system may hold unsent for one client, beside those on their way. Left to itself it holds megabytes for a client that does not
#: read (net.ipv4.tcp_wmem), and we see it stand still only after them: tens of thousands of tokens that nobody may ever read.
UNSENT_BYTES = 64 * 1024


def hoard_little(bound: socket.socket) -> None:
    """Have the system hold no more than UNSENT_BYTES for each client of a listening socket, where it knows how (Linux, macOS)."""
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if option is not None and bound.family in (socket.AF_INET, socket.AF_INET6):
        bound.setsockopt(socket.IPPROTO_TCP, option, UNSENT_BYTES)  # accepted sockets inherit it


def listening_socket(host: str, port: int, backlog: int, *, shared: bool = False) -> socket.socket:
    """A bound socket with TCP_NODELAY: without IPPROTO_TCP on a socket made by hand, tokens stall for 40 ms. Raises OSError.

    `shared`: others may listen on the same port, and the kernel deals connections out among them (SO_REUSEPORT).
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
        bound.listen(backlog)
    except OSError:
        bound.close()
        raise
    return bound


class _Server(uvicorn.Server):
    """uvicorn's own signal handling raises the signal again once it has stopped, which would end the process before the spool is drained.

    `on_stop` is called when the stop begins: what would otherwise hold it open for the whole grace time (open pages) ends then.
    """

    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], None], settings: ServerSettings) -> None:
        super().__init__(config)
        self._on_stop = on_stop
        self._request_s = settings.deadline_s
        self._socket_idle_s = settings.socket_idle_s

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # uvicorn's ticks are 0.1 s
            now_s = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.look(now_s, self.config.timeout_keep_alive, self._request_s)
                elif isinstance(connection, SocketConnection):
                    connection.look(now_s, self.config.timeout_keep_alive, self._socket_idle_s)
        return await super().on_tick(counter)

    async def adopt(self, connection: socket.socket, request: bytes) -> None:
        """Go on with a client's connection that another worker hands over, and its request."""
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: Adopted(request, config=self.config, server_state=self.server_state, app_state=self.lifespan.state), connection
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


async def serve(app: Asgi, settings: ServerSettings, bound: socket.socket, on_stop: Callable[[], None], peers: Peers | None = None) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP; running answers get `server.grace_s` to finish, a second SIGINT hastens. `peers`: the other workers."""
    hoard_little(bound)
    config = uvicorn.Config(
        app, http=Connection, loop="none", lifespan="off", log_config=None, access_log=False, server_header=False, ws="none", proxy_headers=False,
        ws_max_size=settings.max_body_bytes, ws_per_message_deflate=False, ws_ping_interval=None, timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=settings.grace_s, backlog=settings.backlog,
    )
    server = _Server(config, on_stop, settings)
    if peers is not None:
        peers.adopt = server.adopt
    await server.serve(sockets=[bound])
