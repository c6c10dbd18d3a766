"""Many documents at once: what goes on side by side, what is bounded, and whom an error costs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tidegate.core.document import Document, NewPassage
from tidegate.core.errors import BadRequest, StoreDown
from tidegate.core.ports import Vectors
from tidegate.retrieval import bulk
from tidegate.retrieval.bulk import Ready, Steps, patiently

PATHS = [Path(f"/d/{number:03}.md") for number in range(40)]


def a_document(path: Path, passages: int = 1) -> Ready:
    texts = [f"{path.stem} {number}" for number in range(passages)]
    document = Document(collection="c", source=str(path), title=path.stem, sha256="1")
    return Ready(path, document, [NewPassage(text) for text in texts], texts, [])


class Work:
    """Steps that note what they did. A text's vector is its length and its document's number."""

    def __init__(self, workers: int = 3) -> None:
        self.calls: list[list[str]] = []
        self.stored: dict[str, Vectors] = {}
        self.failures: dict[str, str] = {}
        self.steps = Steps([self.read] * workers, self.embed, self.write, self.failed)

    async def read(self, path: Path) -> Ready | None:
        await asyncio.sleep(0)
        return a_document(path)

    async def embed(self, texts: list[str]) -> Vectors:
        self.calls.append(texts)
        await asyncio.sleep(0)
        return np.array([[len(text), int(text.split()[0])] for text in texts], np.float32)

    async def write(self, ready: Ready, vectors: Vectors) -> None:
        await asyncio.sleep(0)
        assert ready.path.stem not in self.stored
        self.stored[ready.path.stem] = vectors

    def failed(self, path: Path, error: BadRequest) -> None:
        self.failures[path.stem] = error.message

    async def run(self, paths: list[Path] = PATHS) -> None:
        await asyncio.wait_for(bulk.run(paths, self.steps), 20)


async def test_each_document_is_stored_once_with_its_own_vectors() -> None:
    """Whatever the order and whoever shares a call."""
    work = Work()
    await work.run()
    assert {name: vectors[0, 1] for name, vectors in work.stored.items()} == {path.stem: int(path.stem) for path in PATHS}


async def test_files_are_read_side_by_side() -> None:
    """As many at once as there are readers: each waits here for the others."""
    work, together = Work(workers=3), asyncio.Barrier(3)

    async def read(path: Path) -> Ready | None:
        await together.wait()
        return a_document(path)

    work.steps = Steps([read] * 3, work.embed, work.write, work.failed)
    await work.run(PATHS[:6])
    assert len(work.stored) == 6


async def test_small_documents_share_a_call_to_the_embedder() -> None:
    """While it works on one call, what is read meanwhile is gathered for the next."""
    work, gate = Work(workers=1), asyncio.Event()

    async def embed(texts: list[str]) -> Vectors:
        await gate.wait()
        return await Work.embed(work, texts)

    async def read(path: Path) -> Ready | None:
        if path == PATHS[-1]:
            gate.set()
        return a_document(path)

    work.steps = Steps([read], embed, work.write, work.failed)
    await work.run()
    assert len(work.calls) < len(PATHS) / 4
    assert len(work.stored) == len(PATHS)


async def test_no_call_is_larger_than_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long document goes in parts."""
    monkeypatch.setattr(bulk, "EMBED_BATCH", 8)
    work = Work()

    async def read(path: Path) -> Ready | None:
        return a_document(path, 30)

    work.steps = Steps([read], work.embed, work.write, work.failed)
    await work.run(PATHS[:2])
    assert max(map(len, work.calls)) == 8
    assert [len(vectors) for vectors in work.stored.values()] == [30, 30]


async def test_what_is_held_at_once_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the writer is, no more passages than the bound are between it and the files; one document that is larger passes alone."""
    monkeypatch.setattr(bulk, "PASSAGES_AT_ONCE", 10)
    work, held, most = Work(), 0, [0]

    async def embed(texts: list[str]) -> Vectors:
        nonlocal held
        held += len(texts)
        most.append(held)
        return await Work.embed(work, texts)

    async def read(path: Path) -> Ready | None:
        return a_document(path, 25 if path == PATHS[7] else 3)

    async def write(ready: Ready, vectors: Vectors) -> None:
        nonlocal held
        for _ in range(10):
            await asyncio.sleep(0)
        held -= len(vectors)
        await Work.write(work, ready, vectors)

    work.steps = Steps([read] * 4, embed, write, work.failed)
    await work.run()
    assert len(work.stored) == len(PATHS)
    assert max(most) == 25
    assert sorted(most)[-2] <= 10


@pytest.mark.parametrize("step", ["read", "embed", "write"])
async def test_a_bad_document_costs_itself_alone(step: str) -> None:
    """Also where it shared a call with others."""
    work = Work()

    def bad(name: str) -> None:
        if name == "007":
            raise BadRequest("no good")

    async def read(path: Path) -> Ready | None:
        if step == "read":
            bad(path.stem)
        return await Work.read(work, path)

    async def embed(texts: list[str]) -> Vectors:
        for text in texts:
            if step == "embed":
                bad(text.split()[0])
        return await Work.embed(work, texts)

    async def write(ready: Ready, vectors: Vectors) -> None:
        if step == "write":
            bad(ready.path.stem)
        await Work.write(work, ready, vectors)

    work.steps = Steps([read] * 2, embed, write, work.failed)
    await work.run()
    assert work.failures == {"007": "no good"}
    assert len(work.stored) == len(PATHS) - 1


@pytest.mark.parametrize("step", ["read", "embed", "write"])
async def test_a_part_that_is_down_ends_the_run_with_its_error(step: str) -> None:
    """The error itself comes out, and no task is left behind."""
    work, before = Work(), asyncio.all_tasks()

    async def down(*_: Any) -> Any:
        raise StoreDown("gone")

    steps: dict[str, Callable[..., Awaitable[Any]]] = {"read": work.read, "embed": work.embed, "write": work.write, step: down}
    work.steps = Steps([steps["read"]] * 2, steps["embed"], steps["write"], work.failed)
    with pytest.raises(StoreDown, match="gone"):
        await work.run()
    assert asyncio.all_tasks() == before


async def test_a_run_that_is_cancelled_leaves_nothing_behind() -> None:
    """As Ctrl-C does it."""
    work, reached, before = Work(), asyncio.Event(), asyncio.all_tasks()

    async def embed(texts: list[str]) -> Vectors:
        reached.set()
        await asyncio.sleep(3600)
        raise AssertionError

    work.steps = Steps(work.steps.read, embed, work.write, work.failed)
    running = asyncio.create_task(work.run())
    await asyncio.wait_for(reached.wait(), 20)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert asyncio.all_tasks() == before


async def test_a_part_that_comes_back_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the patience lasts; with none, the first error is the last."""
    monkeypatch.setattr(bulk, "FIRST_PAUSE_S", 0.001)
    tries = 0

    async def third_time() -> int:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise StoreDown("gone")
        return tries

    assert await patiently(third_time, 60) == 3
    tries = 0
    with pytest.raises(StoreDown):
        await patiently(third_time, 0)
    assert tries == 1
