"""The workers of one gateway among each other: a client's connection goes to the worker that keeps its stream, and a barge-in to all that it cuts.

Each worker listens on a unix socket in a folder that only its owner may enter. A connection is handed over whole: the open socket itself
(SCM_RIGHTS), and the request as it came. The worker that keeps the stream goes on as if the client had reached it, so nothing is copied, a slow
reader slows the stream, and a client that leaves is seen by whom it concerns. Who hands over keeps the connection until it is taken.

    message   kind (1 byte), length (4 bytes), then for `H` the request, with the socket; for `C` a conversation, a number and a trace_id
    answer    length (4 bytes), then for `H` nothing, for `C` the trace_ids that were cut
    go        for `H`, 1 byte: from here on the connection is the other's. Without it whoever handed it over has it still
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from tidegate.core.errors import SettingsError

log = logging.getLogger(__name__)

#: Seconds that another worker gets to take what it is handed: one that is stopped must not hold anybody.
PATIENCE_S = 2.0
#: Connections of other workers that are served at once; more wait in the socket's queue.
_MOST = 64
_HEAD = 5
_HAND_OVER, _CUT, _GO = b"H", b"C", b"G"

#: Takes a client's connection, and the bytes of its request.
Adopt = Callable[[socket.socket, bytes], Awaitable[None]]
#: Cuts what runs in a conversation and is older than this number, for a trace_id; gives the trace_ids of what it cut.
Cut = Callable[[tuple[str, str, str], int, str], list[str]]


class _Order(msgspec.Struct, array_like=True):
    conversation: tuple[str, str, str]
    number: int
    by: str


T = TypeVar("T")
_decode_order = msgspec.msgpack.Decoder(_Order).decode
_decode_ids = msgspec.msgpack.Decoder(list[str]).decode


class Peers:
    """The other workers as this one reaches them, and how they reach it: `adopt` and `cut` are set by whoever can."""

    def __init__(self, folder: Path, worker: int, most_bytes: int) -> None:
        """`folder`: short enough for the path of a socket; `most_bytes`: of a request."""
        self._folder = folder
        self._worker = worker
        self._most_bytes = most_bytes
        self._places = asyncio.Semaphore(_MOST)
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: socket.socket | None = None
        self.adopt: Adopt | None = None
        self.cut: Cut = lambda conversation, number, by: []

    def _path(self, worker: int) -> Path:
        return self._folder / f"worker-{worker}.sock"

    # -- to others

    async def hand_over(self, worker: int, connection: int, request: bytes) -> bool:
        """Give another worker a client's connection, by its file descriptor, and the request. False where it was not taken."""

        async def give(link: socket.socket) -> bool:
            head = _HAND_OVER + len(request).to_bytes(4, "big")
            sent = socket.send_fds(link, [head], [connection])  # a fresh socket has room for it
            await asyncio.get_running_loop().sock_sendall(link, head[sent:] + request)
            await _receive(link, 4)
            await asyncio.get_running_loop().sock_sendall(link, _GO)
            return True

        return await self._tell(worker, give) or False

    async def cut_in(self, workers: list[int], conversation: tuple[str, str, str], number: int, by: str) -> list[str]:
        """Have other workers cut what is older than `number` in a conversation; the trace_ids of what they cut."""
        order = msgspec.msgpack.encode(_Order(conversation, number, by))

        async def tell(link: socket.socket) -> list[str]:
            await asyncio.get_running_loop().sock_sendall(link, _CUT + len(order).to_bytes(4, "big") + order)
            return _decode_ids(await _receive(link, int.from_bytes(await _receive(link, 4), "big")))

        cut = await asyncio.gather(*(self._tell(worker, tell) for worker in workers))
        return [one for of_worker in cut for one in of_worker or ()]

    async def _tell(self, worker: int, tell: Callable[[socket.socket], Awaitable[T]]) -> T | None:
        """None where that worker is not there, or does not answer in time."""
        link = socket.socket(socket.AF_UNIX)
        link.setblocking(False)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.get_running_loop().sock_connect(link, str(self._path(worker)))
                return await tell(link)
        except (OSError, TimeoutError, EOFError, msgspec.MsgspecError) as error:
            log.warning("worker %d cannot be reached: %s", worker, error or type(error).__name__)
            return None
        finally:
            link.close()

    # -- from others

    def listen(self) -> None:
        """Others can reach this worker from now on. Raises SettingsError where the socket cannot be made."""
        path = self._path(self._worker)
        listening = socket.socket(socket.AF_UNIX)
        try:
            path.unlink(missing_ok=True)  # of a worker with our number that died
            listening.bind(str(path))
            path.chmod(0o600)
        except OSError as error:
            listening.close()
            raise SettingsError(
                f"The socket {path}, by which workers reach each other, cannot be made: {error}.",
                hint="Its folder must be writable; or set server.workers to 1.",
            ) from None
        listening.listen(_MOST)
        listening.setblocking(False)
        self._listening = listening

    async def serve(self) -> None:
        """Take what other workers hand over, until cancelled. `listen` comes first."""
        loop, listening = asyncio.get_running_loop(), self._listening
        assert listening is not None, "it listens"
        try:
            while True:
                await self._places.acquire()
                link, _ = await loop.sock_accept(listening)
                task = loop.create_task(self._answer(link))
                self._tasks.add(task)
                task.add_done_callback(self._answered)
        finally:
            listening.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._places.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("what another worker handed over was not taken", exc_info=error)

    async def _answer(self, link: socket.socket) -> None:
        given: list[socket.socket] = []
        try:
            async with asyncio.timeout(PATIENCE_S):
                kind, size = await self._head(link, given)
                told = await _receive(link, size)
                if kind == _CUT:
                    order = _decode_order(told)
                    answer = msgspec.msgpack.encode(self.cut(order.conversation, order.number, order.by))
                    await asyncio.get_running_loop().sock_sendall(link, len(answer).to_bytes(4, "big") + answer)
                elif kind == _HAND_OVER and len(given) == 1 and self.adopt is not None:
                    await asyncio.get_running_loop().sock_sendall(link, bytes(4))
                    await _receive(link, len(_GO))
                    await self.adopt(given[0], told)
                    given.clear()
        except (OSError, TimeoutError, EOFError, msgspec.MsgspecError) as error:
            log.warning("a worker that handed something over broke off: %s", error or type(error).__name__)
        finally:
            link.close()
            for one in given:
                one.close()

    async def _head(self, link: socket.socket, given: list[socket.socket]) -> tuple[bytes, int]:
        link.setblocking(False)
        await _readable(link)
        head, descriptors, _, _ = socket.recv_fds(link, _HEAD, 1)
        given.extend(socket.socket(fileno=descriptor) for descriptor in descriptors)
        head += await _receive(link, _HEAD - len(head)) if head else b""
        size = int.from_bytes(head[1:], "big")
        if len(head) < _HEAD or size > self._most_bytes:
            raise EOFError
        return head[:1], size


async def _readable(link: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(link, wake)
    try:
        await ready
    finally:
        loop.remove_reader(link)


async def _receive(link: socket.socket, size: int) -> bytes:
    """Exactly so many bytes. Raises EOFError."""
    loop = asyncio.get_running_loop()
    received = bytearray()
    while len(received) < size:
        data = await loop.sock_recv(link, min(size - len(received), 65_536))
        if not data:
            raise EOFError("it broke off")
        received += data
    return bytes(received)

