"""The door's transport: head and body leave together, and nothing waits for Nagle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

from tidegate.api.auth import KeyRing
from tidegate.api.connection import Corked
from tidegate.api.exchange import House
from tidegate.api.server import Door, hoard_little, listening_socket
from tidegate.stores.systems.memory import Memory


class Recorder:
    """A transport that notes what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


async def test_head_and_first_piece_leave_in_one_write() -> None:
    """Two writes of uvicorn's are one of ours."""
    recorder = Recorder()
    corked = Corked(recorder, asyncio.get_running_loop())  # type: ignore[arg-type]
    corked.write(HEAD)
    corked.write(b"body")
    corked.write(b"more")
    await asyncio.sleep(0)
    assert recorder.written == [HEAD + b"body", b"more"]


async def test_a_head_without_a_body_leaves_at_once() -> None:
    """A stream whose first piece is late still shows its head."""
    recorder = Recorder()
    corked = Corked(recorder, asyncio.get_running_loop())  # type: ignore[arg-type]
    corked.write(HEAD)
    await asyncio.sleep(0)
    assert recorder.written == [HEAD]


async def test_what_is_whole_leaves_at_once() -> None:
    """A head that has its body with it does not wait for the end of the turn, and never overtakes one that waits."""
    recorder = Recorder()
    corked = Corked(recorder, asyncio.get_running_loop())  # type: ignore[arg-type]
    corked.pass_on(HEAD + b"body")
    assert recorder.written == [HEAD + b"body"]
    corked.write(HEAD)
    corked.pass_on(HEAD + b"next")
    assert recorder.written[1:] == [HEAD + HEAD + b"next"]


async def test_closing_loses_nothing() -> None:
    """A held head is written before the connection closes; the rest of the transport is the real one."""
    recorder = Recorder()
    corked = Corked(recorder, asyncio.get_running_loop())  # type: ignore[arg-type]
    corked.write(HEAD)
    corked.close()
    assert recorder.written == [HEAD]
    assert corked.is_closing()


def test_the_system_holds_little_for_a_client_that_does_not_read() -> None:
    """What can be written to it before it stands still is far from the megabytes of the system's own bound."""
    with listening_socket("127.0.0.1", 0, 16) as bound, socket.socket() as client:
        hoard_little(bound)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        client.connect(bound.getsockname())
        accepted, _ = bound.accept()
        with accepted:
            accepted.setblocking(False)
            written = 0
            with contextlib.suppress(BlockingIOError):
                while written < 4_000_000:
                    written += accepted.send(b"x" * 1000)
    assert written < 500_000


def test_accepted_connections_have_no_nagle_delay() -> None:
    """TCP_NODELAY is read back from a connection that the gateway's socket accepted."""
    with listening_socket("127.0.0.1", 0, 16) as bound, socket.create_connection(bound.getsockname()):
        accepted, _ = bound.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


async def test_a_gateway_without_capabilities_names_the_setting() -> None:
    """A list of none would help nobody."""
    house = House(KeyRing(Memory(), {}, refresh_s=1.0), [], b"secret", lambda flight_id, text: b"", 1000, 10.0)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def rest(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError(scope["path"])

    await Door(house, {}, {}, rest)({"type": "http", "method": "POST", "path": "/api/v1/support/answer", "headers": []}, receive, send)
    assert sent[0]["status"] == 404
    assert "capabilities.folders" in json.loads(sent[1]["body"])["error"]["hint"]
