"""Writers of one collection at the same time, and searches beside them: no deadlock, nothing doubled, and every document whole."""

from __future__ import annotations

import asyncio

import numpy as np

from tidegate.core.document import Document, NewPassage
from tidegate.core.ports import Vectors
from tidegate.stores.settings import StoreSettings
from tidegate.stores.systems.postgres import Postgres


def axis(*numbers: int) -> Vectors:
    return np.eye(384, dtype=np.float32)[list(numbers)].reshape(len(numbers), 384)


def a_document(source: str, sha256: str, supersedes: str) -> Document:
    return Document(collection="c", source=source, title="A", sha256=sha256, supersedes=(supersedes,))


async def test_documents_that_supersede_each_other_are_written_at_once(clean_dsn: str) -> None:
    """Each locks the other's row after its own: the database breaks the knot, and the one that lost is written after all."""
    one, other = Postgres(StoreSettings(dsn=clean_dsn)), Postgres(StoreSettings(dsn=clean_dsn))

    async def write(store: Postgres, source: str, instead_of: str) -> None:
        for number in range(6):
            await store.replace_document(a_document(source, str(number), instead_of), [NewPassage(f"{source} {number}")], axis(number))

    try:
        await asyncio.gather(write(one, "a.md", "b.md"), write(other, "b.md", "a.md"))
        found = {document.source: (document.version, document.passages, document.superseded_by) for document in await one.list_documents("c")}
    finally:
        await one.close()
        await other.close()
    assert found == {"a.md": (6, 1, "b.md"), "b.md": (6, 1, "a.md")}


async def test_a_search_meets_a_document_whole_or_not_at_all(postgres: Postgres) -> None:
    """While it is deleted, stored and replaced all the time: one edition's passages, all of them, or none."""
    seen = []

    async def change() -> None:
        for number in range(15):
            edition = [NewPassage(f"edition {number} part {part}") for part in range(3)]
            await postgres.replace_document(Document(collection="c", source="a.md", title="A", sha256=str(number)), edition, axis(0, 1, 2))
            if number % 3 == 2:
                await postgres.delete_document("c", "a.md")

    changing = asyncio.create_task(change())
    while not changing.done():
        passages = (await postgres.search("c", axis(0)[0], 9)).passages
        seen.append((len({passage.text.split(" part")[0] for passage in passages}), len(passages)))
    await changing
    assert set(seen) <= {(0, 0), (1, 3)}
