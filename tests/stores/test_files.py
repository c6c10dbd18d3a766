"""FileStore: one suite over every system that serves it; and the migration that brings its table."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Protocol

import psycopg
import pytest

from tidegate.core.document import Box, NewPassage, passage_ids
from tidegate.core.ports import FileStore, Vectors
from tidegate.stores.migrate import migrate
from tidegate.stores.settings import StoreSettings
from tidegate.stores.systems.postgres import Postgres

from .test_documents import Store, a_document, axis

FILE = b"%PDF-1.7 \x00\xff of the first version"
NEWER = b"%PDF-1.7 of the second"
PASSAGES = [NewPassage("one", 3, "Cover", boxes=[Box(3, 72.0, 90.5, 300.0, 102.0)]), NewPassage("two")]
IDS = passage_ids(a_document(), PASSAGES)
VECTORS: Vectors = axis(0, 1)


class Both(Store, FileStore, Protocol):
    """As every system has them."""


def digest(file: bytes) -> str:
    return hashlib.sha256(file).hexdigest()


async def test_a_passage_leads_to_its_file(store: Both) -> None:
    """By id, in the order that was asked for: text, place, and the digest that the bytes are read by."""
    await store.replace_document(a_document(), PASSAGES, VECTORS, file=FILE)
    two, one = await store.stored_passages("c", [IDS[1], "none", IDS[0]])
    assert (one.source, one.title, one.text, one.page, one.heading, one.boxes) == ("a.md", "A", "one", 3, "Cover", PASSAGES[0].boxes)
    assert (two.text, two.page, two.boxes) == ("two", None, [])
    assert one.file_sha256 == digest(FILE)
    assert await store.read_file(digest(FILE)) == FILE


async def test_a_document_without_a_file_says_so(store: Both) -> None:
    """None where none was given."""
    await store.replace_document(a_document(), PASSAGES, VECTORS)
    assert [passage.file_sha256 for passage in await store.stored_passages("c", IDS)] == [None, None]


@pytest.mark.parametrize("newer", [NEWER, None])
async def test_a_new_version_takes_the_file_of_the_old_one_away(store: Both, newer: bytes | None) -> None:
    """Also where the new version's own is not kept: its places are not those of the old picture."""
    await store.replace_document(a_document(), PASSAGES, VECTORS, file=FILE)
    await store.replace_document(a_document(sha256="2"), PASSAGES, VECTORS, file=newer)
    (passage, _) = await store.stored_passages("c", IDS)
    assert passage.file_sha256 == (digest(newer) if newer else None)
    assert await store.read_file(digest(FILE)) is None


async def test_a_file_goes_with_its_document(store: Both) -> None:
    """And no sooner than the last document that has it."""
    await store.replace_document(a_document(), PASSAGES, VECTORS, file=FILE)
    await store.replace_document(a_document("b.pdf"), PASSAGES, VECTORS, file=FILE)
    await store.delete_document("c", "a.md")
    assert await store.stored_passages("c", IDS) == []
    assert await store.read_file(digest(FILE)) == FILE
    await store.delete_document("c", "b.pdf")
    assert await store.read_file(digest(FILE)) is None


async def test_passages_are_those_of_their_collection(store: Both) -> None:
    """An id of another collection is not found; neither is one that holds what no database can."""
    await store.replace_document(a_document(), PASSAGES, VECTORS, file=FILE)
    assert await store.stored_passages("d", IDS) == []
    assert await store.stored_passages("c", ["\0", "'; drop table tidegate.files"]) == []
    assert await store.read_file("\0") is None


async def test_file_and_places_are_of_one_version(postgres: Postgres) -> None:
    """Whoever looks while versions take turns never sees the places of one with the file of another."""
    versions = [(1.0, FILE), (2.0, NEWER)]
    places = {digest(file): top for top, file in versions}
    done = False

    async def write() -> None:
        nonlocal done
        for n in range(20):
            top, file = versions[n % 2]
            passages = [NewPassage("one", 1, boxes=[Box(1, 0.0, top, 9.0, 9.0)]), NewPassage("two")]
            await postgres.replace_document(a_document(sha256=str(n)), passages, VECTORS, file=file)
        done = True

    async def look() -> None:
        while not done:
            for passage in await postgres.stored_passages("c", IDS[:1]):
                assert passage.file_sha256 is not None
                assert passage.boxes[0].top == places[passage.file_sha256]

    await asyncio.gather(write(), look(), look())


async def test_a_database_of_before_gets_its_table(empty_dsn: str) -> None:
    """Its documents are as they were, without files, until they are ingested again."""
    migrate(empty_dsn)
    with psycopg.connect(empty_dsn, autocommit=True) as link:
        link.execute("drop table tidegate.files")
        link.execute("delete from tidegate._yoyo_migration where migration_id = '0007-files'")
        link.execute("insert into tidegate.documents (collection, source, title, sha256, size_bytes) values ('c', 'a.md', 'A', '1', 9)")
        link.execute("select tidegate.passages_partition('c')")
        link.execute(
            "insert into tidegate.passages (id, document_id, collection, ordinal, text, embedding)"
            " select %s, id, 'c', 0, 'one', array_fill(0.1, array[384])::halfvec from tidegate.documents", [IDS[0]],
        )
    assert migrate(empty_dsn) == ["0007-files"]
    store = Postgres(StoreSettings(dsn=empty_dsn))
    try:
        assert [passage.file_sha256 for passage in await store.stored_passages("c", IDS)] == [None]
        await store.replace_document(a_document(sha256="2"), PASSAGES, VECTORS, file=FILE)
        assert [passage.file_sha256 for passage in await store.stored_passages("c", IDS)] == [digest(FILE)] * 2
    finally:
        await store.close()
