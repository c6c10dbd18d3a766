"""Clients that leave at random moments: before their request is whole, before the first token, between tokens, while they read nothing."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections import Counter
from typing import NamedTuple

import msgspec

_RESET = struct.pack("ii", 1, 0)
_MOMENTS = ("in_the_request", "at_once", "after_a_while", "after_some_bytes", "while_reading_nothing", "half_closed", "at_the_end")


class Wish(NamedTuple):
    """What one client does. `reset`: it leaves by a reset instead of a close; `comes_back`: it resumes where it was kept."""

    moment: str
    stream: bool
    order: str
    wait_s: float
    most_bytes: int
    reset: bool
    leave: str
    comes_back: bool


class Left(msgspec.Struct):
    """What happened: clients by the moment at which they left, requests that were sent whole, and how many clients came back."""

    moments: Counter[str] = msgspec.field(default_factory=Counter)
    sent: int = 0
    came_back: int = 0
    failed: Counter[str] = msgspec.field(default_factory=Counter)


async def leave_at_random(
    host: str, port: int, key: str, *, clients: int, at_once: int = 200, seed: int = 1, policies: tuple[str, ...] = (), longest_s: float = 0.3
) -> Left:
    """Send that many clients, each with a chat request for the scripted engine. The same seed makes the same clients.

    `policies`: leave policies that the gateway lets callers choose; `longest_s`: seconds that a client waits at most before it leaves.
    """
    draw = random.Random(seed)  # noqa: S311 - repeatable, not secret
    left = Left()
    room = asyncio.Semaphore(at_once)

    async def one(wish: Wish) -> None:
        async with room:
            try:
                await _Leaver(host, port, key, left).live(wish)
            except OSError as error:
                left.failed[type(error).__name__] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(one(_wish(draw, policies, longest_s)))
    return left


def _wish(draw: random.Random, policies: tuple[str, ...], longest_s: float) -> Wish:
    moment = draw.choice(_MOMENTS)
    stays = moment in ("at_the_end", "half_closed")
    first_ms = draw.choice((0, 5, 50, 50 if stays else 5000))
    words = draw.randint(1, 30) if stays else 5000
    return Wish(
        moment, draw.random() < 0.75, f"##t={first_ms},i={draw.choice((1, 3, 10))},n={words}##", draw.random() * longest_s, draw.randint(1, 20_000),
        draw.random() < 0.3, draw.choice(policies) if policies else "", draw.random() < 0.3,
    )  # fmt: skip


class _Leaver:
    """One client."""

    def __init__(self, host: str, port: int, key: str, left: Left) -> None:
        self._address = (host, port)
        self._key = key
        self._left = left
        self._loop = asyncio.get_running_loop()
        self._read = b""

    async def live(self, wish: Wish) -> None:
        fields = {"model": "scripted", "stream": wish.stream, "messages": [{"role": "user", "content": wish.order}]}
        request = self._request("POST", "/v1/chat/completions", json.dumps(fields).encode(), f"x-tidegate-leave: {wish.leave}\r\n" * bool(wish.leave))
        with socket.socket() as connection:
            connection.setblocking(False)
            await self._loop.sock_connect(connection, self._address)
            if wish.moment == "in_the_request":
                request = request[: -1 - int(wish.wait_s * 100) % 40]
            await self._loop.sock_sendall(connection, request)
            self._left.sent += wish.moment != "in_the_request"
            self._left.moments[wish.moment] += 1
            await self._until(connection, wish)
            if wish.reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        if wish.comes_back and b"\nid: " in self._read:
            await self._come_back()

    async def _until(self, connection: socket.socket, wish: Wish) -> None:
        """The moment to leave."""
        if wish.moment == "half_closed":
            connection.shutdown(socket.SHUT_WR)
        if wish.moment in ("half_closed", "at_the_end"):
            await self._take(connection, 10_000_000, 30.0)
        elif wish.moment == "after_some_bytes":
            await self._take(connection, wish.most_bytes, wish.wait_s)
        elif wish.moment != "at_once":
            await asyncio.sleep(wish.wait_s)

    async def _take(self, connection: socket.socket, most: int, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                while len(self._read) < most and not self._read.endswith((b"0\r\n\r\n", b"}\n")):
                    data = await self._loop.sock_recv(connection, 65536)
                    if not data:
                        return
                    self._read += data
        except TimeoutError:
            return

    async def _come_back(self) -> None:
        last_id = self._read.rsplit(b"\nid: ", 1)[1].split(b"\n")[0].decode()
        request = self._request("GET", "/v1/streams/" + last_id[:32], b"", f"Last-Event-ID: {last_id}\r\n" * (len(last_id) > 33))
        with socket.socket() as connection:
            connection.setblocking(False)
            await self._loop.sock_connect(connection, self._address)
            await self._loop.sock_sendall(connection, request)
            self._left.came_back += 1
            self._read = b""
            await self._take(connection, 20_000, 0.5)

    def _request(self, method: str, path: str, body: bytes, more: str) -> bytes:
        head = f"{method} {path} HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {self._key}\r\n{more}Content-Length: {len(body)}\r\n\r\n"
        return head.encode() + body
