"""Of which embedder a collection's vectors are: one at a time, and a way from one to another that nobody can search on."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import psycopg
import pytest

from tidegate.core.document import Document, NewPassage, Unembedded
from tidegate.core.errors import OtherEmbedder
from tidegate.core.ports import DocumentStore, Vectors, VectorStore
from tidegate.stores.systems.memory import Memory

OLD, NEW = "old/1", "new/2"


class Store(VectorStore, DocumentStore, Protocol):
    """Both, as every system has them."""


def axis(*numbers: int) -> Vectors:
    return np.eye(384, dtype=np.float32)[list(numbers)].reshape(len(numbers), 384)


def a_document(source: str = "a.md", fingerprint: str = OLD) -> Document:
    return Document(collection="c", source=source, title="A", sha256="1", fingerprint=fingerprint)


@pytest.fixture(params=["memory", "postgres"])
def moving(request: pytest.FixtureRequest) -> Store:
    """Each system whose collections can go over to another embedder: not Qdrant."""
    return Memory() if request.param == "memory" else request.getfixturevalue("postgres")


async def test_a_collection_has_the_fingerprint_of_its_first_document(store: Store) -> None:
    """A search says it, and other collections have their own."""
    assert await store.fingerprint("c") == ""
    await store.replace_document(a_document(), [NewPassage("one")], axis(0))
    assert await store.fingerprint("c") == (await store.search("c", axis(0)[0], 1)).fingerprint == OLD
    assert (await store.search("d", axis(0)[0], 1)).fingerprint == ""


async def test_vectors_of_another_embedder_are_refused_whole(store: Store) -> None:
    """Nothing of the document is stored, and the error says both and the way out."""
    await store.replace_document(a_document(), [NewPassage("one")], axis(0))
    with pytest.raises(OtherEmbedder, match="old/1, and new/2 runs") as refused:
        await store.replace_document(a_document("b.md", NEW), [NewPassage("two")], axis(1))
    assert "--reembed" in (refused.value.hint or "")
    assert [one.source for one in await store.list_documents("c")] == ["a.md"]


async def test_an_emptied_collection_goes_over_at_once(moving: Store) -> None:
    """Where no document is left, there is nothing to embed anew."""
    await moving.replace_document(a_document(), [NewPassage("one")], axis(0))
    await moving.delete_document("c", "a.md")
    assert await moving.unembedded("c", NEW, 9) == []
    assert await moving.fingerprint("c") == NEW


async def test_all_vectors_go_over_and_nobody_searches_meanwhile(moving: Store) -> None:
    """Document by document; the fingerprint that searches are told is nobody's until the last one is done. Ids, tags and text stay."""
    for at, source in enumerate(("a.md", "b.md")):
        passages = [NewPassage(f"{source} 1", heading="H"), NewPassage(f"{source} 2")]
        await moving.replace_document(a_document(source), passages, axis(2 * at, 2 * at + 1))
    before = {passage.text: passage.id for passage in (await moving.search("c", axis(0)[0], 9)).passages}
    version = await moving.index_version("c")
    (first,) = await moving.unembedded("c", NEW, 1)
    assert (first.source, first.title, [one[1:] for one in first.passages]) == ("a.md", "A", [("H", "a.md 1"), ("", "a.md 2")])
    assert await moving.reembed_document(first, NEW, axis(10, 11))
    found = await moving.search("c", axis(10)[0], 9)
    assert found.fingerprint == f">{NEW}"
    (second,) = await moving.unembedded("c", NEW, 9)
    assert await moving.reembed_document(second, NEW, axis(12, 13))
    assert await moving.unembedded("c", NEW, 9) == []
    found = await moving.search("c", axis(11)[0], 1)
    assert (found.fingerprint, found.passages[0].text, found.passages[0].score) == (NEW, "a.md 2", 1.0)
    assert {passage.text: passage.id for passage in (await moving.search("c", axis(0)[0], 9)).passages} == before
    assert await moving.index_version("c") != version


async def test_a_document_that_changed_meanwhile_is_given_again(moving: Store) -> None:
    """Vectors of a text that is no longer there are not stored; what the new embedder stored itself is done."""
    await moving.replace_document(a_document(), [NewPassage("one")], axis(0))
    (given,) = await moving.unembedded("c", NEW, 9)
    await moving.replace_document(a_document(fingerprint=NEW), [NewPassage("two")], axis(1))
    assert not await moving.reembed_document(given, NEW, axis(2))
    assert await moving.unembedded("c", NEW, 9) == []
    assert (await moving.search("c", axis(1)[0], 1)).passages[0].text == "two"


async def test_the_old_embedder_stores_nothing_on_the_way(moving: Store) -> None:
    """Else the way would never end."""
    await moving.replace_document(a_document(), [NewPassage("one")], axis(0))
    assert len(await moving.unembedded("c", NEW, 9)) == 1
    with pytest.raises(OtherEmbedder, match="being embedded anew, by new/2"):
        await moving.replace_document(a_document("b.md"), [NewPassage("two")], axis(1))


async def test_a_document_that_is_gone_is_not_embedded(moving: Store) -> None:
    """Deleted after it was given."""
    assert not await moving.reembed_document(Unembedded("c", "a.md", "A", 1, [("x", "", "one")]), NEW, axis(0))


def test_what_was_stored_before_is_of_the_embedder_that_there_was(migrated_dsn: str) -> None:
    """The migration names the fingerprint that the embedder has: an upgrade asks nobody to embed anew."""
    from importlib import resources

    from tidegate.retrieval.embedder_texts import FINGERPRINT

    script = (resources.files("tidegate.stores") / "sql" / "migrations" / "0006-fingerprint.sql").read_text()
    with psycopg.connect(migrated_dsn) as link:
        link.execute("insert into tidegate.collections (name, changes, index_version) values ('before', 1, '1-x')")
        link.execute(script.encode())
        assert link.execute("select fingerprint from tidegate.collections where name = 'before'").fetchone() == (FINGERPRINT,)
        link.rollback()
