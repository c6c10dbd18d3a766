"""The embedder's process as its callers see it: a unix socket that only its owner may open."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from tidegate.core.errors import BadRequest, LocalPartError, TidegateError
from tidegate.retrieval.e5_runtimes import Runtime
from tidegate.retrieval.embedder import LocalEmbedder
from tidegate.retrieval.embedder_wire import (
    CALLS,
    MAX_TEXTS,
    Answer,
    Call,
    Cancel,
    Count,
    Counts,
    Embed,
    Failed,
    Figures,
    Frames,
    Info,
    Malformed,
    Vectors,
    frame,
)

log = logging.getLogger(__name__)

#: Calls of one connection that may run; beyond, it is not read.
MAX_CALLS_PER_CONNECTION = 64
#: Calls of all connections that may wait; beyond, they are refused as busy.
MAX_CALLS = 256
_READ_BYTES = 1 << 18


async def serve(
    socket_path: str | Path, cache_dir: Path, threads: int, ready: Callable[[], None] | None = None, *,
    max_length: int = 512, batch_tokens: int = 512, runtime: Runtime = "onnxruntime",
) -> None:
    """Load the model, then serve until cancelled; the socket appears when the first call can be answered, then `ready` is called.

    Raises LocalPartError where the model cannot be loaded, the socket cannot be made, or another process serves on it.
    """
    embedder = LocalEmbedder(cache_dir, threads=threads, max_length=max_length, batch_tokens=batch_tokens, runtime=runtime)
    await serve_embedder(embedder, socket_path, ready)


async def serve_embedder(embedder: LocalEmbedder, socket_path: str | Path, ready: Callable[[], None] | None = None) -> None:
    """As `serve`, for an embedder that is already made; it is closed at the end."""
    path = Path(socket_path)
    connections: set[asyncio.Task[None]] = set()
    office = _Office(embedder)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        task.add_done_callback(connections.discard)
        await _Connection(office, reader, writer).run()

    try:
        await embedder.start()
        listener, inode = _listen(path)
        server = await asyncio.start_unix_server(connected, sock=listener)
        try:
            if ready is not None:
                ready()
            await asyncio.get_running_loop().create_future()  # until cancelled
        finally:
            server.close()
            _unlink(path, inode)
            for task in connections:
                task.cancel()
            await asyncio.gather(*connections, return_exceptions=True)
    finally:
        await embedder.close()


def _listen(path: Path) -> tuple[socket.socket, int]:
    """A listening socket at `path`, mode 0600, and its inode. It takes its place by a rename: nobody ever meets it half made."""
    listener = socket.socket(socket.AF_UNIX)
    half_made = path.with_name(path.name + ".new")
    try:
        if _answers(path):
            raise LocalPartError(f"Another embedder serves on {path}.", hint="Stop it, or name another socket: embedder.socket.")
        half_made.unlink(missing_ok=True)
        listener.bind(str(half_made))
        half_made.chmod(0o600)
        listener.listen(128)
        half_made.replace(path)
    except OSError as error:
        listener.close()
        raise LocalPartError(
            f"The embedder's socket {path} cannot be made: {error}.",
            hint="Its folder must exist and be writable, and its path be shorter than 100 bytes.",
        ) from error
    except LocalPartError:
        listener.close()
        raise
    return listener, path.stat().st_ino


def _unlink(path: Path, inode: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_ino == inode:  # and not the socket of one that took our place
            path.unlink()


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True


class _Office:
    """Answers calls, whoever sent them, and knows how many wait."""

    def __init__(self, embedder: LocalEmbedder) -> None:
        self._embedder = embedder
        self._waiting = 0

    async def answer(self, call: Call) -> Answer:
        """Never raises, except when cancelled."""
        if isinstance(call, Info):
            return Figures(call.id, await self._embedder.figures())
        if self._waiting >= MAX_CALLS:
            return Failed(call.id, "busy", f"The embedder has {MAX_CALLS} calls waiting.", "Ask again in a moment.")
        self._waiting += 1
        try:
            return await self._compute(call)
        except BadRequest as error:
            return Failed(call.id, "refused", error.message, error.hint or "")
        except TidegateError as error:
            return Failed(call.id, "broken", error.message, error.hint or "")
        except Exception as error:  # whatever the model's runtime raises must reach the caller and not end the process
            log.exception("The embedder failed.")
            return Failed(call.id, "broken", f"The embedder failed: {type(error).__name__}.", "Its log has the details.")
        finally:
            self._waiting -= 1

    async def _compute(self, call: Embed | Count) -> Answer:
        if len(call.texts) > MAX_TEXTS:
            raise BadRequest(f"{len(call.texts)} texts in one call; the embedder takes {MAX_TEXTS}.", hint="Send them in several.")
        if isinstance(call, Count):
            return Counts(call.id, await self._embedder.count_tokens(call.texts))
        vectors = await self._embedder.embed(call.texts, call.kind)
        return Vectors(call.id, vectors.astype("<f4", copy=False).tobytes(), self._embedder.fingerprint)


class _Connection:
    """One caller. Its calls run side by side; when it leaves, they are dropped."""

    def __init__(self, office: _Office, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._office = office
        self._reader = reader
        self._writer = writer
        self._running: dict[int, asyncio.Task[None]] = {}
        self._room = asyncio.Semaphore(MAX_CALLS_PER_CONNECTION)

    async def run(self) -> None:
        try:
            async for message in self._messages():
                await self._take(message)
        except (Malformed, msgspec.DecodeError) as error:
            # A decode error names the field, never its content.
            log.warning("A connection to the embedder was closed: it sent %s.", error)
        except (ConnectionError, asyncio.CancelledError):
            pass  # the caller died, or the server goes down; nobody awaits this task's result
        finally:
            for task in self._running.values():
                task.cancel()
            self._writer.close()

    async def _messages(self) -> AsyncIterator[Call | Cancel]:
        frames = Frames()
        while data := await self._reader.read(_READ_BYTES):
            for message in frames.feed(data):
                yield CALLS.decode(message)

    async def _take(self, message: Call | Cancel) -> None:
        if isinstance(message, Cancel):
            if message.id in self._running:
                self._running[message.id].cancel()
            return
        if message.id in self._running:
            raise Malformed("the id of a call that still runs")
        await self._room.acquire()
        task = asyncio.ensure_future(self._answer(message))
        self._running[message.id] = task
        task.add_done_callback(lambda _: self._done(message.id))

    async def _answer(self, call: Call) -> None:
        answer = await self._office.answer(call)
        with contextlib.suppress(ConnectionError):  # the caller died
            self._writer.write(frame(answer))
            await self._writer.drain()

    def _done(self, call_id: int) -> None:
        del self._running[call_id]
        self._room.release()
