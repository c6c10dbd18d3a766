"""Many documents at once: several are read, the embedder is never without work, and what is embedded is written, all side by side.

What lies between the steps is bounded in passages, so memory is too, whatever the number of documents and whichever step is the slow one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from tidegate.core.document import Document, NewPassage
from tidegate.core.errors import BadRequest, OtherEmbedder, StoreDown
from tidegate.core.ports import Vectors

T = TypeVar("T")

#: Passages that are read and not yet stored: about 4 KB each, vector and places included.
PASSAGES_AT_ONCE = 2_000
#: Texts given to the embedder at once; it sorts and batches them itself. Small documents share a call.
EMBED_BATCH = 64
#: Calls to the embedder at once: while it answers one, the next one lies there.
EMBED_CALLS = 2
#: Documents that are written at once: one waits for the disk, the next is sent.
WRITERS = 2
#: Pauses between two tries of a part that is down, in seconds: the first one, and the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0


class Ready(msgspec.Struct, frozen=True):
    """A document that was read and cut, with the texts that stand for its passages before the embedder. `content_sha256`: hex digest of the file,
    where the file itself is to be kept."""

    path: Path
    document: Document
    passages: list[NewPassage]
    texts: list[str]
    notes: list[str]
    content_sha256: str | None = None


class Steps(msgspec.Struct, frozen=True):
    """What is done to a document. All but `failed` may raise BadRequest, which costs this document only, and whatever else, which ends the run.

    - `read`: as many as there are work at the same time; None: there is nothing to store.
    - `embed`: unit vectors of texts, in their order.
    - `write`: store it whole.
    - `failed`: hears of the document that BadRequest was raised for.
    """

    read: Sequence[Callable[[Path], Awaitable[Ready | None]]]
    embed: Callable[[list[str]], Awaitable[Vectors]]
    write: Callable[[Ready, Vectors], Awaitable[None]]
    failed: Callable[[Path, BadRequest], None]


async def run(paths: Iterable[Path], steps: Steps) -> None:
    """All of them, in no order. Raises what a step raised first; then nothing more is begun, and what was not written is dropped."""
    pipe = _Pipe(deque(paths), steps)
    try:
        await pipe.run()
    except BaseExceptionGroup as group:
        raise _first(group) from None


async def patiently(call: Callable[[], Awaitable[T]], patience_s: float) -> T:
    """What `call` gives, tried again while a part is down, for so long. Raises what the last try raised. `call` may be done twice."""
    end_ns = time.perf_counter_ns() + int(patience_s * 1e9)
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return await call()
        except StoreDown as down:
            if isinstance(down, OtherEmbedder) or time.perf_counter_ns() + pause_s * 1e9 > end_ns:
                raise
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class Room:
    """A bound on what is held at once. What is larger than all of it passes when nothing else is there."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held = 0
        self._turn = asyncio.Lock()
        self._changed = asyncio.Condition()

    async def take(self, amount: int) -> None:
        """Waits until there is room; who came first goes first, so that the many small ones do not keep a large one out."""
        async with self._turn, self._changed:
            await self._changed.wait_for(lambda: self._held == 0 or self._held + amount <= self._size)
            self._held += amount

    async def give(self, amount: int) -> None:
        async with self._changed:
            self._held -= amount
            self._changed.notify_all()


class _Pipe:
    """The queues between the steps. They need no bound of their own: what is in them has its place in the room."""

    def __init__(self, paths: deque[Path], steps: Steps) -> None:
        self._paths = paths
        self._steps = steps
        self._room = Room(PASSAGES_AT_ONCE)
        self._read: asyncio.Queue[Ready | None] = asyncio.Queue()
        self._embedded: asyncio.Queue[tuple[Ready, Vectors] | None] = asyncio.Queue()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as writers:
            for _ in range(WRITERS):
                writers.create_task(self._writer())
            async with asyncio.TaskGroup() as embedders:
                for _ in range(EMBED_CALLS):
                    embedders.create_task(self._embedder())
                async with asyncio.TaskGroup() as readers:
                    for read in self._steps.read:
                        readers.create_task(self._reader(read))
                for _ in range(EMBED_CALLS):  # one end for each that listens
                    self._read.put_nowait(None)
            for _ in range(WRITERS):
                self._embedded.put_nowait(None)

    async def _reader(self, read: Callable[[Path], Awaitable[Ready | None]]) -> None:
        while self._paths:
            path = self._paths.popleft()
            async with self._for_its_own(path):
                ready = await read(path)
                if ready is not None:
                    await self._room.take(len(ready.passages))
                    self._read.put_nowait(ready)

    async def _embedder(self) -> None:
        while batch := await self._batch():
            texts = [text for ready in batch for text in ready.texts]
            try:
                await self._embed(batch, texts)
            except BadRequest:  # of one of them
                for ready in batch:
                    try:
                        await self._embed([ready], ready.texts)
                    except BadRequest as error:
                        self._steps.failed(ready.path, error)
                        await self._room.give(len(ready.passages))

    async def _batch(self) -> list[Ready]:
        """One document at least, and as many more as are there and go into one call; [] at the end."""
        batch: list[Ready] = []
        texts = 0
        while texts < EMBED_BATCH and (not batch or not self._read.empty()):
            ready = await self._read.get()
            if ready is None:
                if batch:
                    self._read.put_nowait(None)  # for the next look
                break
            batch.append(ready)
            texts += len(ready.texts)
        return batch

    async def _embed(self, batch: list[Ready], texts: list[str]) -> None:
        rows = np.concatenate([await self._steps.embed(texts[at : at + EMBED_BATCH]) for at in range(0, len(texts), EMBED_BATCH)])
        at = 0
        for ready in batch:
            self._embedded.put_nowait((ready, rows[at : at + len(ready.texts)]))
            at += len(ready.texts)

    async def _writer(self) -> None:
        while (one := await self._embedded.get()) is not None:
            ready, vectors = one
            async with self._for_its_own(ready.path):
                await self._steps.write(ready, vectors)
            await self._room.give(len(ready.passages))

    @contextlib.asynccontextmanager
    async def _for_its_own(self, path: Path) -> AsyncIterator[None]:
        try:
            yield
        except BadRequest as error:
            self._steps.failed(path, error)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
