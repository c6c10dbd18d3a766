"""A gateway in the test's own loop, on real sockets and with the scripted engine behind it: what it holds can be looked at, not only felt."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httptools
import pytest
import uvicorn
import uvloop
from tests.waiting import until as until
from uvicorn.server import ServerState

from tidegate.admission.limits import Limits
from tidegate.api.auth import KeyRing
from tidegate.api.capabilities import CapabilityRoute
from tidegate.api.connection import Adopted, Connection
from tidegate.api.control import NewKey, make_key
from tidegate.api.exchange import House
from tidegate.api.leave import STREAMS, streams_route
from tidegate.api.openai import GenerationRoute
from tidegate.api.peers import Peers
from tidegate.api.server import Door, Route, listening_socket
from tidegate.api.settings import StreamSettings
from tidegate.api.whereabouts import Whereabouts
from tidegate.bench.scripted import Scripted, start
from tidegate.core.flight import FlightRecord
from tidegate.core.plugins import load
from tidegate.core.ports import KeptText
from tidegate.engines.fleet import Fleet
from tidegate.engines.settings import EngineSettings
from tidegate.pipeline.capability import Capability
from tidegate.pipeline.parts import Parts
from tidegate.pipeline.stages.generate import GenerateStage
from tidegate.stores.systems.memory import Memory

BOUND_S = 20.0
#: An order for a stream that is faster than anybody reads it: about 4 MB a second, without end as far as a test goes.
FAST = f"##i=0.05,n=100000,w={'x' * 180}##"


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}  # as the product runs


class Notes:
    """A FlightSink: all flights, by id."""

    def __init__(self) -> None:
        self.flights: dict[str, FlightRecord] = {}
        self.booked = 0

    def finished(self, record: FlightRecord, kept: KeptText | None = None) -> None:
        self.booked += 1
        self.flights[record.id] = record

    @property
    def last(self) -> FlightRecord:
        return list(self.flights.values())[-1]


class Times(NamedTuple):
    """Settings of `[server]`."""

    deadline_s: float = 60.0
    head_wait_s: float = 2.0
    keepalive_s: float = 15.0


class Worker(NamedTuple):
    """What several gateways in one loop share, as workers do."""

    whereabouts: Whereabouts
    folder: Path
    store: Memory
    keys: dict[str, str]


class Gateway:
    """The door on a real socket."""

    def __init__(
        self, engine: Scripted, streams: StreamSettings, capability: Capability | None, times: Times, worker: Worker | None = None
    ) -> None:
        """`worker`: where it is one of several."""
        self.engine = engine
        self.worker = worker
        self.notes = Notes()
        self.store = worker.store if worker is not None else Memory()
        self.keys: dict[str, str] = worker.keys if worker is not None else {}
        self.peers = Peers(worker.folder, worker.whereabouts.worker, 2_000_000) if worker is not None else None
        fleet = Fleet({"scripted": EngineSettings(adapter="scripted", url=engine.url, models=["scripted"], max_idle=4096)})
        self.fleet = fleet
        self.keyring = KeyRing(self.store, {}, refresh_s=60.0)
        self.house = House(
            self.keyring, [self.notes], b"secret", lambda flight_id, text: b"", 1_000_000, times.deadline_s, streams, times.head_wait_s,
            times.keepalive_s, None, self.peers, worker.whereabouts if worker is not None else None,
        )  # fmt: skip
        limits = Limits()
        generate = GenerateStage(fleet)
        capabilities: dict[str, Route] = {}
        if capability is not None:
            stages = [load("tidegate.pipeline.stages", name).build(capability, Parts(fleet, None)) for name in capability.manifest.stages]
            capabilities[capability.path] = CapabilityRoute(capability, stages, limits)
        hot: dict[str, Route] = {
            "/v1/chat/completions": GenerationRoute("chat", limits, generate), "/v1/completions": GenerationRoute("completion", limits, generate),
            STREAMS: streams_route,
        }  # fmt: skip
        self.config = uvicorn.Config(
            Door(self.house, hot, capabilities, _no_rest), http=Connection, loop="none", lifespan="off", log_config=None, access_log=False, ws="none",
            proxy_headers=False,  # as the product: what wraps the door would hide which routes begin without ASGI
        )
        self.config.load()
        self.state = ServerState()
        self.host = ""
        self.port = 0
        self.clients: list[Client] = []
        self._server: asyncio.Server | None = None
        self._time: asyncio.Task[None] | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        for name, tenant in {} if self.keys else {"data": "one", "same": "one", "other": "two"}.items():
            self.keys[name], record = make_key(NewKey(tenant=tenant, role="data", name="", requests_per_minute=0, tokens_per_minute=0))
            await self.store.add_key(record)
        await self.keyring.refresh()
        loop = asyncio.get_running_loop()
        if self.peers is not None:
            self.peers.adopt = self._adopt
            self.peers.listen()
            self._serving = loop.create_task(self.peers.serve())
        listening = listening_socket("127.0.0.1", 0, 4096)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)  # what the system buffers would hide what we hold
        self._server = await loop.create_server(
            lambda: Connection(config=self.config, server_state=self.state, app_state={}), sock=listening, backlog=4096
        )
        self.host, self.port = self._server.sockets[0].getsockname()
        self._time = loop.create_task(self.house.keep_time())

    async def _adopt(self, connection: socket.socket, request: bytes) -> None:
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: Adopted(request, config=self.config, server_state=self.state, app_state={}), connection
        )

    async def stop(self) -> None:
        assert self._server is not None
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        assert self._time is not None
        self._server.close()
        self._time.cancel()
        await asyncio.gather(self._time, return_exceptions=True)
        for connection in list(self.state.connections):
            connection.transport.abort()
        for task in list(self.state.tasks):
            task.cancel()
        await asyncio.gather(*self.state.tasks, return_exceptions=True)
        for client in self.clients:
            client.socket.close()
        await self.fleet.close()
        await self._server.wait_closed()

    async def client(self, *, receive_buffer: int = 0) -> Client:
        client = Client(self)
        self.clients.append(client)
        await client.connect(receive_buffer)
        return client

    async def ask(self, order: str, *, key: str = "data", headers: str = "", stream: bool = True, **more: Any) -> Client:
        """A client that has sent a chat request."""
        client = await self.client(**more)
        await client.post({"messages": [{"role": "user", "content": order}], "stream": stream, "model": "scripted"}, key=key, headers=headers)
        return client

    @property
    def connections(self) -> list[Connection]:
        return [connection for connection in self.state.connections if isinstance(connection, Connection)]

    async def settled(self, flights: int) -> None:
        """Wait until nothing runs and so many flights are booked."""
        await until(lambda: not self.house.running and self.engine.active == 0 and self.notes.booked >= flights)


async def _no_rest(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("only hot routes are tried here")


class Client:
    """A client at byte level: what it has read, as HTTP."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.bytes = b""
        self.body = b""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self._parser = httptools.HttpResponseParser(self)
        self.socket: socket.socket

    async def connect(self, receive_buffer: int) -> None:
        self.socket = socket.socket()
        self.socket.setblocking(False)
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await asyncio.get_running_loop().sock_connect(self.socket, (self.gateway.host, self.gateway.port))

    async def post(self, fields: Any, *, key: str = "data", headers: str = "", path: str = "/v1/chat/completions") -> None:
        await self.send("POST", path, json.dumps(fields).encode(), key=key, headers=headers)

    async def send(
        self, method: str, path: str, body: bytes = b"", *, key: str = "data", headers: str = "", version: str = "1.1", cut: int = 0
    ) -> None:
        """`cut`: bytes at the end of the body that are not sent."""
        head = f"{method} {path} HTTP/{version}\r\nHost: gateway\r\nAuthorization: Bearer {self.gateway.keys[key]}\r\n{headers}"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[: len(body) - cut]
        await asyncio.get_running_loop().sock_sendall(self.socket, request)

    async def read(self, most: int = 65536) -> bytes:
        """One read; b"" where the gateway closed."""
        async with asyncio.timeout(BOUND_S):
            data = await asyncio.get_running_loop().sock_recv(self.socket, most)
        self.bytes += data
        if data:
            self._parser.feed_data(data)
        else:
            self.complete = True
        return data

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert await self.read(), f"the gateway closed: {self.bytes[-300:]!r}"

    async def rest(self) -> bytes:
        """The whole body."""
        while not self.complete:
            await self.read()
        return self.body

    def leave(self, *, reset: bool = False) -> None:
        if reset:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.socket.close()

    # -- what was read

    @property
    def events(self) -> list[bytes]:
        """Whole events, comments left out."""
        return [event for event in self.body.split(b"\n\n")[:-1] if not event.startswith(b":")]

    @property
    def last_id(self) -> str:
        return _field(self.events[-1], b"id: ")

    @property
    def text(self) -> str:
        return "".join(_text(event) for event in self.events)

    def error(self) -> dict[str, Any]:
        """The error event, or the error body."""
        found: dict[str, Any] = json.loads(_field(self.events[-1], b"data: ") if self.events else self.body)["error"]
        return found

    # -- httptools' side

    def on_message_begin(self) -> None:
        self.status = 0

    def on_status(self, status: bytes) -> None:
        self.status = self._parser.get_status_code()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = self._parser.get_status_code() != 100


def _field(event: bytes, name: bytes) -> str:
    return next((line.removeprefix(name).decode() for line in event.split(b"\n") if line.startswith(name)), "")


def _text(event: bytes) -> str:
    data = _field(event, b"data: ")
    if not data.startswith("{"):
        return ""
    said = json.loads(data)
    if "text" in said:
        return str(said["text"])
    return "".join(choice["delta"].get("content") or "" for choice in said.get("choices", ()))


Open = Callable[..., Any]


@pytest.fixture
async def engine() -> AsyncIterator[Scripted]:
    server = await start(backlog=4096)
    yield server
    await server.close()


@pytest.fixture
async def open_gateway(engine: Scripted) -> AsyncIterator[Open]:
    """Starts gateways with settings of `[streams]`, and `head_wait_s`, `keepalive_s`, `deadline_s`."""
    started: list[Gateway] = []

    async def begin(capability: Capability | None = None, *, worker: Worker | None = None, **settings: Any) -> Gateway:
        times = Times(**{name: settings.pop(name) for name in Times._fields if name in settings})
        gateway = Gateway(engine, StreamSettings(**settings), capability, times, worker)
        await gateway.start()
        started.append(gateway)
        return gateway

    yield begin
    for gateway in started:
        await gateway.stop()
