"""Responses that are written past ASGI: the same bytes as by it, and not at all where only ASGI knows how to wait."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httptools
import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tidegate.api.response import cycle_of, write_head, write_last, write_piece, write_whole


class Client:
    """The far end: what it received, parsed as HTTP."""

    def __init__(self) -> None:
        self.bytes = b""
        self.closed = False
        self.body = b""
        self.headers: dict[bytes, bytes] = {}
        self.complete = False

    def write(self, data: bytes) -> None:
        self.bytes += data

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True

    def parse(self) -> None:
        httptools.HttpResponseParser(self).feed_data(self.bytes)


def a_cycle(client: Any, *, keep_alive: bool = True, method: str = "POST", version: str = "1.1") -> RequestResponseCycle:
    return RequestResponseCycle(
        scope={"http_version": version, "method": method}, transport=client, flow=FlowControl(client), logger=logging.getLogger(),  # type: ignore[typeddict-item]
        access_logger=logging.getLogger(), access_log=False, default_headers=[(b"date", b"today")], message_event=asyncio.Event(),
        expect_100_continue=False, keep_alive=keep_alive, on_response=lambda: None,
    )


async def test_a_whole_response() -> None:
    """Head and body in one write, with uvicorn's own headers; the cycle knows that it is over."""
    client = Client()
    cycle = a_cycle(client)
    assert write_whole(cycle, 200, [(b"x-a", b"1")], b"body")
    client.parse()
    assert (client.body, client.complete, client.closed) == (b"body", True, False)
    assert client.headers == {b"date": b"today", b"x-a": b"1", b"content-length": b"4"}
    assert await cycle.receive() == {"type": "http.disconnect"}


async def test_a_stream() -> None:
    """Pieces are chunks, an empty piece is none, the last one ends the body."""
    client = Client()
    cycle = a_cycle(client)
    assert write_head(cycle, 200, [], b"")
    assert write_piece(cycle, b"one ")
    assert write_piece(cycle, b"")
    client.parse()
    assert not client.complete
    assert write_last(cycle, b"two")
    client.body = b""
    client.parse()
    assert (client.body, client.complete) == (b"one two", True)


async def test_a_stream_to_http_1_0_is_plain() -> None:
    """HTTP/1.0 knows no chunks: the pieces come as they are, and the end is the connection's."""
    client = Client()
    cycle = a_cycle(client, keep_alive=False, version="1.0")
    assert write_head(cycle, 200, [], b"one ")
    assert write_piece(cycle, b"two ")
    assert write_last(cycle, b"three")
    head, _, body = client.bytes.partition(b"\r\n\r\n")
    assert body == b"one two three"
    assert b"transfer-encoding" not in head
    assert client.closed
    assert await cycle.receive() == {"type": "http.disconnect"}


async def test_a_connection_that_ends_is_closed_and_said_so() -> None:
    """A client that did not want to keep the connection gets `connection: close` and the end."""
    client = Client()
    assert write_whole(a_cycle(client, keep_alive=False), 503, [], b"")
    client.parse()
    assert client.headers[b"connection"] == b"close"
    assert client.closed


@pytest.mark.parametrize("why", ["slow", "gone"])
async def test_a_client_that_is_slow_or_gone_is_left_to_asgi(why: str) -> None:
    """Nothing is written where the client's buffer is full or the client has left: ASGI waits, or drops."""
    client = Client()
    cycle = a_cycle(client)
    assert write_head(cycle, 200, [], b"x")
    written = client.bytes
    if why == "slow":
        cycle.flow.pause_writing()
    else:
        cycle.disconnected = True
    assert not write_piece(cycle, b"y")
    assert not write_last(cycle, b"z")
    assert client.bytes == written


async def test_what_asgi_began_asgi_ends() -> None:
    """A response that began by ASGI is not gone on with past it."""
    client = Client()
    cycle = a_cycle(client)
    await cycle.send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    assert not write_piece(cycle, b"body")
    assert not write_last(cycle, b"body")
    assert not write_whole(cycle, 200, [], b"")


async def test_only_uvicorns_own_cycle_is_written_to() -> None:
    """Another server and HEAD go by ASGI."""

    async def send(message: object) -> None: ...

    assert cycle_of(send) is None
    assert cycle_of(a_cycle(Client(), method="HEAD").send) is None
    assert cycle_of(a_cycle(Client()).send) is not None
