"""A client of Valkey's and Redis' protocol: one connection on which commands are pipelined, each answered in its turn.

RESP2 (https://valkey.io/topics/protocol): a command is a list of byte strings; replies come in the order of the commands. What is written
in one turn of the event loop leaves in one packet.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, cast
from urllib.parse import unquote, urlsplit

from tidegate.core.errors import SettingsError

_MOST_BYTES = 64 << 20  # of a reply that is not whole yet
_MOST_DEPTH = 16

Reply = int | bytes | None | list[Any] | Exception


class RespError(Exception):
    """The server refused a command; the message begins with its code, as in `NOSCRIPT No matching script`."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = message.split(" ", 1)[0]


class Broken(Exception):
    """The connection ended, or what came over it is no reply."""


class Replies:
    """Bytes to replies, however they are cut. An error reply is a RespError in its place."""

    def __init__(self) -> None:
        self._waiting = bytearray()

    def feed(self, data: bytes) -> list[Reply]:
        """The replies that are whole now. Raises Broken."""
        waiting = self._waiting
        waiting += data
        found: list[Reply] = []
        at = 0
        while at < len(waiting) and (read := self._read(at, 0)) is not None:
            reply, at = read
            found.append(reply)
        del waiting[:at]
        if len(waiting) > _MOST_BYTES:
            raise Broken(f"a reply is larger than {_MOST_BYTES} bytes")
        return found

    def _read(self, at: int, depth: int) -> tuple[Reply, int] | None:
        """The reply that begins at `at` and where it ends; None where it is not whole."""
        end = self._waiting.find(b"\r\n", at)
        if end < 0:
            return None
        kind, line = self._waiting[at : at + 1], bytes(self._waiting[at + 1 : end])
        end += 2
        match kind:
            case b"+":
                return line, end
            case b"-":
                return RespError(line.decode("utf-8", "replace")), end
            case b":":
                return _number(line), end
            case b"$":
                return self._string(_number(line), end)
            case b"*":
                return self._list(_number(line), end, depth)
        raise Broken(f"a reply begins with {bytes(kind)!r}")

    def _string(self, size: int, at: int) -> tuple[Reply, int] | None:
        if size < 0:
            return None, at
        if size > _MOST_BYTES:
            raise Broken(f"a reply of {size} bytes was announced")
        if len(self._waiting) < at + size + 2:
            return None
        if self._waiting[at + size : at + size + 2] != b"\r\n":
            raise Broken("a string does not end where its length says")
        return bytes(self._waiting[at : at + size]), at + size + 2

    def _list(self, count: int, at: int, depth: int) -> tuple[Reply, int] | None:
        if count < 0:
            return None, at
        if count > _MOST_BYTES or depth >= _MOST_DEPTH:
            raise Broken(f"a list of {count} at depth {depth} was announced")
        items = []
        for _ in range(count):
            read = self._read(at, depth + 1) if at < len(self._waiting) else None
            if read is None:
                return None
            item, at = read
            items.append(item)
        return items, at


def _number(line: bytes) -> int:
    try:
        return int(line) if len(line) < 24 else _no_number(line)
    except ValueError:
        return _no_number(line)


def _no_number(line: bytes) -> int:
    raise Broken(f"{line[:40]!r} is no number")


def command(*words: bytes | str | float) -> bytes:
    """A command as it is sent."""
    pieces = [b"*%d\r\n" % len(words)]
    for word in words:
        raw = word if isinstance(word, bytes) else str(word).encode()
        pieces.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
    return b"".join(pieces)


class Connection(asyncio.Protocol):
    """An open connection. Made by `connect`."""

    def __init__(self) -> None:
        self._replies = Replies()
        self._waiting: deque[asyncio.Future[Reply]] = deque()
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self.lost = ""

    def send(self, *words: bytes | str | float) -> asyncio.Future[Reply]:
        """Send a command with what else is sent in this turn. The future raises RespError or Broken; cancelling it leaves the others their turn."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply] = loop.create_future()
        if self._transport is None or self.lost:
            future.set_exception(Broken(self.lost or "not connected"))
            return future
        if not self._out:
            loop.call_soon(self._flush)
        self._out.append(command(*words))
        self._waiting.append(future)
        return future

    def _flush(self) -> None:
        if self._transport is not None and self._out and not self.lost:
            self._transport.write(b"".join(self._out))
        self._out = []

    def close(self, why: str = "closed") -> None:
        """Whoever waits gets Broken."""
        self._end(why)
        if self._transport is not None:
            self._transport.abort()

    def _end(self, why: str) -> None:
        self.lost = self.lost or why
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_exception(Broken(self.lost))

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def data_received(self, data: bytes) -> None:
        try:
            for reply in self._replies.feed(data):
                if not self._waiting:
                    raise Broken("a reply came that nobody asked for")
                future = self._waiting.popleft()
                if future.done():
                    continue
                if isinstance(reply, Exception):
                    future.set_exception(reply)
                else:
                    future.set_result(reply)
        except Broken as broken:
            self.close(str(broken))

    def connection_lost(self, error: Exception | None) -> None:
        self._end(f"the connection ended ({error})" if error else "the connection ended")


class Address(NamedTuple):
    """Where a server is: a host and port, or a socket file."""

    host: str
    port: int
    path: str
    tls: bool
    login: tuple[str, ...]
    database: int


def address_of(url: str) -> Address:
    """From `redis://[user:password@]host[:port][/database]`, `rediss://` with TLS, or `unix:///path`; `valkey` for `redis` is the same.

    Raises SettingsError.
    """
    hint = "Write valkey://host:6379/0, rediss://user:password@host:6380, or unix:///run/valkey.sock."
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
        scheme, path = parts.scheme.replace("valkey", "redis"), parts.path.strip("/")
        database = 0 if scheme == "unix" or not path else int(path)
    except ValueError as error:
        raise SettingsError(f"valkey.url is no address: {error}.", hint=hint) from None
    if scheme not in ("redis", "rediss", "unix") or (scheme != "unix" and not parts.hostname) or (scheme == "unix" and not parts.path):
        raise SettingsError("valkey.url is no address of a Valkey server.", hint=hint)
    login = tuple(unquote(part) for part in (parts.username, parts.password) if part)
    return Address(parts.hostname or "", port, parts.path if scheme == "unix" else "", scheme == "rediss", login, database)


async def connect(address: Address, first: Sequence[Sequence[bytes | str]] = ()) -> Connection:
    """Connect, log in, choose the database and send `first`. Raises OSError, RespError, Broken. The caller bounds the time."""
    loop = asyncio.get_running_loop()
    if address.path:
        _, connection = await loop.create_unix_connection(Connection, address.path)
    else:
        context = ssl.create_default_context() if address.tls else None
        _, connection = await loop.create_connection(Connection, address.host, address.port, ssl=context)
    try:
        commands: list[Sequence[bytes | str]] = [*first]
        if address.database:
            commands.insert(0, ("SELECT", str(address.database)))
        if address.login:
            commands.insert(0, ("AUTH", *address.login))
        await asyncio.gather(*(connection.send(*words) for words in commands))
    except BaseException:
        connection.close("not opened")
        raise
    return connection
