"""VectorStore and DocumentStore: one suite over every system that serves them."""

from __future__ import annotations

import asyncio
from typing import Protocol

import numpy as np
import pytest

from tidegate.core.document import Box, Document, NewPassage, passage_ids
from tidegate.core.errors import BadRequest, SettingsError
from tidegate.core.ports import DocumentStore, Vectors, VectorStore
from tidegate.core.search import Filter


class Store(VectorStore, DocumentStore, Protocol):
    """Both, as every system has them."""


@pytest.fixture
def store(passage_store: Store) -> Store:
    return passage_store


def axis(*numbers: int) -> Vectors:
    """Unit vectors along the given axes."""
    return np.eye(384, dtype=np.float32)[list(numbers)].reshape(len(numbers), 384)


def a_document(source: str = "a.md", **fields: object) -> Document:
    known = {"collection": "c", "source": source, "title": "A", "sha256": "1", "size_bytes": 9, "tags": {"lang": "en"}}
    return Document(**known | fields)  # type: ignore[arg-type]


def texts(*words: str) -> list[NewPassage]:
    return [NewPassage(word) for word in words]


async def test_the_nearest_passages_come_first(store: Store) -> None:
    """Order and score are those of cosine similarity, in half precision."""
    near = np.zeros((1, 384), np.float32)
    near[0, :2] = 0.8, 0.6
    await store.replace_document(a_document(), [NewPassage("one", page=3), NewPassage("two"), NewPassage("three")], axis(0, 1, 2))
    found = (await store.search("c", near[0], 2)).passages
    assert [passage.text for passage in found] == ["one", "two"]
    assert [passage.score for passage in found] == pytest.approx([0.8, 0.6], abs=1e-3)
    assert (found[0].document, found[0].title, found[0].page, found[0].tags) == ("a.md", "A", 3, {"lang": "en"})


async def test_a_passage_knows_its_places(store: Store) -> None:
    """The boxes come back as they were stored, and a passage that only moved is where it is now."""
    first, second = [Box(1, 72.0, 100.5, 500.0, 120.0), Box(2, 72.0, 72.0, 500.0, 90.0)], [Box(3, 1.0, 2.0, 3.0, 4.5)]
    for boxes in (first, second):
        await store.replace_document(a_document(), [NewPassage("one", page=1, boxes=boxes), NewPassage("none")], axis(0, 1))
        assert [passage.boxes for passage in (await store.search("c", axis(0)[0], 2)).passages] == [boxes, []]


async def test_scores_stay_between_0_and_1(store: Store) -> None:
    """An opposite passage scores 0, not -1."""
    await store.replace_document(a_document(), texts("same", "opposite"), axis(0, 0) * np.array([[1], [-1]], np.float32))
    assert [passage.score for passage in (await store.search("c", axis(0)[0], 9)).passages] == [1.0, 0.0]


async def test_a_search_sees_its_collection_and_tags_only(store: Store) -> None:
    """All given tags must fit; a passage's own tags win over its document's."""
    passages = [NewPassage("en"), NewPassage("zh", tags={"lang": "zh"})]
    await store.replace_document(a_document("a", tags={"lang": "en", "kind": "faq"}), passages, axis(0, 1))
    await store.replace_document(a_document("b", tags={"lang": "en"}), texts("other"), axis(2))
    await store.replace_document(a_document("a", collection="d"), texts("elsewhere"), axis(0))

    async def found(**tags: str) -> set[str]:
        return {passage.text for passage in (await store.search("c", axis(0)[0], 9, Filter(tags))).passages}

    assert await found() == {"en", "zh", "other"}
    assert await found(lang="en") == {"en", "other"}
    assert await found(lang="en", kind="faq") == {"en"}
    assert await found(lang="zh") == {"zh"}
    assert await found(lang="fr") == set()
    assert await found(lang="\0") == set()


async def test_without_a_vector_words_alone_find(store: Store) -> None:
    """Within the filter, of the collection's state; without words nothing is found."""
    passages = [NewPassage("red fish", words=["red", "fish"]), NewPassage("red", words=["red"]), NewPassage("blue", words=["blue"])]
    await store.replace_document(a_document(), passages, axis(0, 1, 2))
    await store.replace_document(a_document("b.md", tags={"lang": "zh"}), [NewPassage("fish", words=["fish"])], axis(0))
    found = await store.search("c", None, 2, Filter({"lang": "en"}), words=["red", "fish"])
    assert [passage.text for passage in found.passages] == ["red fish", "red"]
    assert [leg.leg for leg in found.legs] == ["words"]
    assert found.index_version == await store.index_version("c")
    assert (await store.search("c", None, 2)).passages == []
    assert (await store.search("none", None, 2, words=["red"])).passages == []


async def test_a_collection_that_is_not_there_is_empty(store: Store) -> None:
    """No passages and version 0, no error."""
    assert (await store.search("none", axis(0)[0], 3)).passages == []
    assert await store.index_version("none") == "0"


async def test_the_digest_tells_whether_a_document_changed(store: Store) -> None:
    """None before, the last digest after, None again when it is deleted."""
    assert await store.document_sha("c", "a.md") is None
    await store.replace_document(a_document(), texts("x"), axis(0))
    assert await store.document_sha("c", "a.md") == "1"
    await store.replace_document(a_document(sha256="2"), texts("x"), axis(0))
    assert await store.document_sha("c", "a.md") == "2"
    await store.delete_document("c", "a.md")
    assert await store.document_sha("c", "a.md") is None


async def test_unchanged_passages_keep_their_id(store: Store) -> None:
    """Replacing says what was added, kept and removed; what stayed has the id it had, also in another order."""
    first = await store.replace_document(a_document(), texts("one", "two", "three"), axis(0, 1, 2))
    assert (first.added, first.kept, first.removed, first.version, first.notes) == (3, 0, 0, 1, [])
    before = {passage.text: passage.id for passage in (await store.search("c", axis(0)[0], 9)).passages}
    second = await store.replace_document(a_document(), texts("three", "four", "one"), axis(2, 3, 0))
    assert (second.added, second.kept, second.removed, second.version) == (1, 2, 1, 2)
    after = {passage.text: passage.id for passage in (await store.search("c", axis(0)[0], 9)).passages}
    assert set(after) == {"one", "three", "four"}
    assert (after["one"], after["three"]) == (before["one"], before["three"])


async def test_a_kept_passage_takes_new_tags_page_and_vector(store: Store) -> None:
    """The id stands for the text alone."""
    await store.replace_document(a_document(), [NewPassage("one", page=1)], axis(0))
    await store.replace_document(a_document(title="B", tags={"lang": "zh"}), [NewPassage("one", page=2)], axis(5))
    (found,) = (await store.search("c", axis(5)[0], 9)).passages
    assert (found.score, found.page, found.title, found.tags) == (1.0, 2, "B", {"lang": "zh"})


async def test_the_same_text_twice_is_two_passages(store: Store) -> None:
    """In one document, in two documents and in two collections."""
    for document in (a_document(), a_document("b.md"), a_document(collection="d")):
        await store.replace_document(document, texts("x", "x"), axis(0, 0))
    found = (await store.search("c", axis(0)[0], 9)).passages + (await store.search("d", axis(0)[0], 9)).passages
    assert len({passage.id for passage in found}) == 6


async def test_a_document_may_have_no_passages(store: Store) -> None:
    """An empty file is remembered, so that it is not read again."""
    await store.replace_document(a_document(), [], np.empty((0, 384), np.float32))
    assert await store.document_sha("c", "a.md") == "1"


async def test_the_index_version_changes_with_the_content(store: Store) -> None:
    """Each change of a collection gives a version never seen before, and leaves other collections alone."""
    await store.replace_document(a_document(collection="d"), texts("x"), axis(0))
    other = await store.index_version("d")
    versions = [await store.index_version("c")]
    await store.replace_document(a_document(), texts("x"), axis(0))
    versions.append(await store.index_version("c"))
    await store.replace_document(a_document(), texts("y"), axis(0))
    versions.append(await store.index_version("c"))
    await store.delete_document("c", "a.md")
    versions.append(await store.index_version("c"))
    assert len(set(versions)) == 4
    assert not await store.delete_document("c", "a.md")
    assert await store.index_version("c") == versions[-1]
    assert await store.index_version("d") == other


async def test_documents_are_listed_with_what_is_known_of_them(store: Store) -> None:
    """By collection and source; all fields, number of passages and time included."""
    await store.replace_document(a_document("b"), texts("x", "y"), axis(0, 1))
    await store.replace_document(a_document("a", tags={}), [], np.empty((0, 384), np.float32))
    await store.replace_document(a_document("a", collection="d"), texts("x"), axis(0))
    everything = await store.list_documents()
    assert [(one.collection, one.source, one.passages) for one in everything] == [("c", "a", 0), ("c", "b", 2), ("d", "a", 1)]
    b = everything[1]
    assert (b.title, b.sha256, b.size_bytes, b.tags, b.version) == ("A", "1", 9, {"lang": "en"}, 1)
    assert b.ingested_unix_s > 1_600_000_000
    assert await store.list_documents("d") == everything[2:]


async def test_characters_that_cannot_be_kept_are_marked_with_a_note(store: Store) -> None:
    """NUL and half surrogates in a PDF's text become U+FFFD, and the answer says so."""
    document = a_document("a\0.md", title="T\ud800", tags={"k\0": "v\0"})
    done = await store.replace_document(document, [NewPassage("x\0y", heading="\0"), NewPassage("fine")], axis(0, 1))
    assert len(done.notes) == 1
    assert "1 of 2 passages" in done.notes[0]
    (found, _) = (await store.search("c", axis(0)[0], 2, Filter({"k\0": "v\0"}))).passages
    assert (found.text, found.title, found.document) == ("x\ufffdy", "T\ufffd", "a\ufffd.md")
    assert await store.document_sha("c", "a\0.md") == "1"
    assert await store.delete_document("c", "a\0.md")


async def test_vectors_of_another_size_are_refused(store: Store) -> None:
    """The error names both sizes; nothing is stored."""
    with pytest.raises(SettingsError, match="3 numbers"):
        await store.replace_document(a_document(), texts("x"), np.ones((1, 3), np.float32))
    with pytest.raises(SettingsError, match="3 numbers"):
        await store.search("c", np.ones(3, np.float32), 1)
    assert await store.list_documents() == []


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
async def test_what_is_no_number_is_refused(store: Store, wrong: float) -> None:
    """In a passage's vector and in a question's; nothing is stored."""
    vectors = axis(0, 1)
    vectors[1, 7] = wrong
    with pytest.raises(BadRequest, match="no number"):
        await store.replace_document(a_document(), texts("x", "y"), vectors)
    with pytest.raises(BadRequest, match="no number"):
        await store.search("c", vectors[1], 1)
    assert await store.list_documents() == []


async def test_vectors_and_passages_must_be_as_many(store: Store) -> None:
    """A vector too few is a fault of the caller's and is said, not guessed at."""
    with pytest.raises(ValueError, match="2 passages came with 1 vectors"):
        await store.replace_document(a_document(), texts("x", "y"), axis(0))


async def test_two_writers_of_one_document_take_turns(store: Store) -> None:
    """The end is one writer's document whole, never a mixture."""
    one, two = texts(*"abcdef"), texts(*"defghi")
    await asyncio.gather(*(store.replace_document(a_document(), words, axis(*range(6))) for words in (one, two) * 5))
    found = {passage.text for passage in (await store.search("c", axis(0)[0], 99)).passages}
    assert found in ({*"abcdef"}, {*"defghi"})
    assert (await store.list_documents())[0].version == 10


def test_passage_ids_depend_on_place_and_text() -> None:
    """Stable over calls and over what stands around; 24 hex digits."""
    ids = passage_ids(a_document(), texts("x", "y", "x"))
    assert ids == passage_ids(a_document(title="other"), texts("x", "y", "x"))
    assert len({*ids}) == 3
    assert ids[1] == passage_ids(a_document(), texts("z", "y"))[1]
    assert {len(id) for id in ids} == {24}
