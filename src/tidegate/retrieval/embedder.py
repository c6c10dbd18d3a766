"""The embedder in this process: one thread computes, in small steps, and a question's step always goes before a passage's."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from tidegate.core.errors import StoreDown
from tidegate.core.ports import Vectors
from tidegate.retrieval.e5_model import E5Model, Window, batches, load_model
from tidegate.retrieval.embedder_texts import DIMENSIONS, FINGERPRINT, MODEL, PREFIX, TextKind, check_texts

Result = TypeVar("Result")
#: Work in steps of about one batch; its value is the result.
Steps = Generator[None, None, Result]

#: Which step goes next; within one rank everybody in turn.
URGENT, PATIENT = 0, 1
#: Tokenizing this many characters takes about as long as a batch.
_STEP_CHARS = 20_000


class _Job(Generic[Result]):
    def __init__(self, rank: int, steps: Steps[Result]) -> None:
        self.rank = rank
        self.steps = steps
        self.future: Future[Result] = Future()

    def advance(self) -> bool:
        """One step. True where more are to come."""
        if self.future.cancelled():
            self.steps.close()
            return False
        try:
            next(self.steps)
        except StopIteration as end:
            _settle(self.future.set_result, end.value)
            return False
        except BaseException as error:  # noqa: BLE001 - whatever happened belongs to the one who asked, not to this thread
            _settle(self.future.set_exception, error)
            return False
        return True


def _settle(settle: Callable[[Any], None], value: Any) -> None:
    with contextlib.suppress(InvalidStateError):  # cancelled since it was last looked at: nobody waits
        settle(value)


class LocalEmbedder:
    """Implements `core.ports.Embedder` by a model in this process. The event loop never waits for it.

    A text longer than `max_length` tokens is read in windows; its vector is the mean of theirs, weighted by their tokens.
    A call whose task is cancelled is dropped at its next step.
    """

    model = MODEL
    dimensions = DIMENSIONS
    fingerprint = FINGERPRINT

    def __init__(
        self, cache: Path, *, threads: int = 0, max_length: int = 512, batch_tokens: int = 512,
        load: Callable[[Path, int], E5Model] = load_model,
    ) -> None:
        """`cache`: folder for the built model. `threads` 0: half of the cores. Nothing heavy happens before `start` or the first call."""
        self.threads = threads or max(1, len(os.sched_getaffinity(0)) // 2)
        self._cache = cache
        self._max_length = max_length
        self._batch_tokens = batch_tokens
        self._load = load
        self._model: E5Model | None = None
        self._load_s = 0.0
        self._began_ns = time.perf_counter_ns()
        self._counted = {"query": 0, "passage": 0}
        self._calls = 0
        self._turn = itertools.count()
        self._queue: queue.PriorityQueue[tuple[int, int, _Job[Any] | None]] = queue.PriorityQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    async def start(self) -> None:
        """Load the model, built first where it is not in the cache. Raises LocalPartError."""
        await self._call(URGENT, self._starting())

    async def embed(self, texts: Sequence[str], kind: TextKind) -> Vectors:
        """Unit vectors, float32 (texts, 384). Raises BadRequest for a text that is too long or not Unicode, LocalPartError."""
        check_texts(texts)
        return await self._call(URGENT if kind == "query" else PATIENT, self._embedding(list(texts), kind))

    async def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Tokens that the model reads for each text: the prefix and the two markers included, windows not. Raises as `embed` does."""
        check_texts(texts)
        return await self._call(URGENT, self._counting(list(texts)))

    async def figures(self) -> dict[str, Any]:
        """Live figures for /health. `queries`, `passages`: texts since the start; `calls`: that run or wait now."""
        return {
            "up": True, "model": self.model, "dimensions": self.dimensions, "fingerprint": self.fingerprint, "pid": os.getpid(),
            "threads": self.threads, "max_length": self._max_length, "rss_bytes": _rss_bytes(), "load_s": round(self._load_s, 3),
            "uptime_s": (time.perf_counter_ns() - self._began_ns) // 1_000_000_000, "queries": self._counted["query"],
            "passages": self._counted["passage"], "calls": self._calls,
        }

    async def close(self) -> None:
        """Stop after the running step; calls that still wait get StoreDown."""
        self._closed = True
        if self._thread is not None:
            self._queue.put((-1, 0, None))
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    async def _call(self, rank: int, steps: Steps[Result]) -> Result:
        if self._closed:
            raise _closed()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="embedder", daemon=True)
            self._thread.start()
        job = _Job(rank, steps)
        self._queue.put((rank, next(self._turn), job))
        self._calls += 1
        try:
            return await asyncio.wrap_future(job.future)
        finally:
            self._calls -= 1

    def _work(self) -> None:
        while True:
            rank, _, job = self._queue.get()
            if job is None:
                break
            if job.advance():
                self._queue.put((rank, next(self._turn), job))
        while not self._queue.empty():
            _, _, job = self._queue.get()
            if job is not None:
                _settle(job.future.set_exception, _closed())

    def _ready(self) -> E5Model:
        if self._model is None:
            began_ns = time.perf_counter_ns()
            self._model = self._load(self._cache, self.threads)
            self._load_s = (time.perf_counter_ns() - began_ns) / 1e9
        return self._model

    def _starting(self) -> Steps[None]:
        self._ready()
        yield

    def _encoding(self, texts: list[str], prefix: str) -> Steps[list[list[int]]]:
        encode = self._ready().encode
        found, chars = [], 0
        for text in texts:
            if chars + len(text) > _STEP_CHARS and chars:
                yield
                chars = 0
            chars += len(text)
            found.append(encode(prefix + text))
        return found

    def _counting(self, texts: list[str]) -> Steps[list[int]]:
        return [len(ids) + 2 for ids in (yield from self._encoding(texts, PREFIX["passage"]))]

    def _embedding(self, texts: list[str], kind: TextKind) -> Steps[Vectors]:
        model = self._ready()
        windows: list[Window] = []
        for text, ids in enumerate((yield from self._encoding(texts, PREFIX[kind]))):
            windows += model.windows(text, ids, self._max_length)
        vectors = np.zeros((len(texts), DIMENSIONS), np.float32)
        for batch in batches(windows, self._batch_tokens):
            for window, mean in zip(batch, model.run(batch), strict=True):
                vectors[window.text] += window.weight * mean
            yield
        self._counted[kind] += len(texts)
        # The factor by which a sum of windows is larger than their mean goes away here too.
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors


def _closed() -> StoreDown:
    return StoreDown("The embedder was closed.", hint="The process that holds it is going down; ask again.")


def _rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
