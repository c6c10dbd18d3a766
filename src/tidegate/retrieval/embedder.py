"""The embedder in this process: one thread computes questions, another one passages, in small steps.

A question never waits for passages. The thread of the passages has a lower priority, so that where processors are short it is the one that
waits: for questions, and for all else on the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from tidegate.core.errors import EmbedderDown, StoreDown
from tidegate.core.ports import Vectors
from tidegate.retrieval.e5_model import E5Model, Window, batches, load_model
from tidegate.retrieval.e5_runtimes import Runtime
from tidegate.retrieval.embedder_texts import DIMENSIONS, FINGERPRINT, MODEL, PREFIX, TextKind, check_texts

Result = TypeVar("Result")
#: Work in steps of about one batch; its value is the result.
Steps = Generator[None, None, Result]

#: Threads that compute; in each, everybody in turn.
Lane = Literal["questions", "passages"]
#: Added to the niceness of the thread of passages.
_PATIENCE = 10
#: Counting more characters than a question may have is not urgent.
_QUESTION_CHARS = 2_000
#: Tokenizing this many characters takes about as long as a batch.
_STEP_CHARS = 20_000


class _Job(Generic[Result]):
    def __init__(self, steps: Steps[Result]) -> None:
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
        runtime: Runtime = "onnxruntime", load: Callable[[Path, int], E5Model] | None = None,
    ) -> None:
        """`cache`: folder for the built model. `threads`: of one step; 0: half of the cores. `load`: in place of `load_model`.

        Nothing heavy happens before `start` or the first call.
        """
        self.threads = threads or max(1, len(os.sched_getaffinity(0)) // 2)
        self._cache = cache
        self._max_length = max_length
        self._batch_tokens = batch_tokens
        self._runtime = runtime
        self._load = load or functools.partial(load_model, runtime=runtime)
        self._model: E5Model | None = None
        self._load_s = 0.0
        self._began_ns = time.perf_counter_ns()
        self._counted = {"query": 0, "passage": 0}
        self._calls = 0
        self._queues: dict[Lane, queue.SimpleQueue[_Job[Any] | None]] = {"questions": queue.SimpleQueue(), "passages": queue.SimpleQueue()}
        self._threads: dict[Lane, threading.Thread] = {}
        self._closed = False

    async def start(self) -> None:
        """Load the model, built first where it is not in the cache. Raises LocalPartError."""
        await self._call("questions", self._starting())

    async def embed(self, texts: Sequence[str], kind: TextKind) -> Vectors:
        """Unit vectors, float32 (texts, 384). Raises BadRequest for a text that is too long or not Unicode, LocalPartError."""
        check_texts(texts)
        return await self._call("questions" if kind == "query" else "passages", self._embedding(list(texts), kind))

    async def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Tokens that the model reads for each text: the prefix and the two markers included, windows not. Raises as `embed` does."""
        check_texts(texts)
        lane: Lane = "questions" if sum(map(len, texts)) <= _QUESTION_CHARS else "passages"
        return await self._call(lane, self._counting(list(texts)))

    async def figures(self) -> dict[str, Any]:
        """Live figures for /health. `queries`, `passages`: texts since the start; `calls`: that run or wait now."""
        return {
            "up": True, "model": self.model, "dimensions": self.dimensions, "fingerprint": self.fingerprint,
            "runtime": self._runtime, "pid": os.getpid(), "threads": self.threads, "max_length": self._max_length,
            "rss_bytes": _rss_bytes(), "load_s": round(self._load_s, 3),
            "uptime_s": (time.perf_counter_ns() - self._began_ns) // 1_000_000_000, "queries": self._counted["query"],
            "passages": self._counted["passage"], "calls": self._calls,
        }

    async def close(self) -> None:
        """Stop after the running step; calls that still wait get StoreDown."""
        self._closed = True
        for lane, thread in self._threads.items():
            self._queues[lane].put(None)
            await asyncio.to_thread(thread.join)
        self._threads.clear()

    async def _call(self, lane: Lane, steps: Steps[Result]) -> Result:
        if lane == "passages" and self._model is None and not self._closed:
            await self.start()  # by the other thread: what the runtime starts has that one's priority
        if self._closed:
            raise _closed()
        if lane not in self._threads:
            self._threads[lane] = threading.Thread(target=self._work, args=(lane,), name=f"embedder-{lane}", daemon=True)
            self._threads[lane].start()
        job = _Job(steps)
        self._queues[lane].put(job)
        self._calls += 1
        try:
            return await asyncio.wrap_future(job.future)
        finally:
            self._calls -= 1

    def _work(self, lane: Lane) -> None:
        waiting = self._queues[lane]
        if lane == "passages":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _PATIENCE)  # Linux: of the thread
        while (job := waiting.get()) is not None and not self._closed:
            if job.advance():
                waiting.put(job)
        left = [job]
        while not waiting.empty():
            left.append(waiting.get())
        for job in left:
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
        if not np.isfinite(vectors).all():  # a store would keep it, and every search would compare with it
            raise EmbedderDown("The embedder computed something that is no number.", hint="Start it again; if it stays, install its packages anew.")
        # The factor by which a sum of windows is larger than their mean goes away here too.
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors


def _closed() -> StoreDown:
    return StoreDown("The embedder was closed.", hint="The process that holds it is going down; ask again.")


def _rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
