"""The words' leg of a search: BM25 over what is stored now, whatever came, changed and went; and in PostgreSQL, which of it is read."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import numpy as np
import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.core.document import NewPassage
from tidegate.core.search import ANY, Filter, Found, Ranking
from tidegate.stores import words as word_leg
from tidegate.stores.bm25 import LENGTH_MOST, bm25
from tidegate.stores.migrate import migrate
from tidegate.stores.settings import StoreSettings
from tidegate.stores.systems.memory import Memory
from tidegate.stores.systems.postgres import Postgres

from .test_documents import a_document, axis

Store = Memory | Postgres


@pytest.fixture(params=["memory", "postgres"])
def store(request: pytest.FixtureRequest) -> Store:
    """The systems that count words alike."""
    return Memory() if request.param == "memory" else request.getfixturevalue("postgres")


def worded(*texts: str) -> list[NewPassage]:
    return [NewPassage(text, words=text.split()) for text in texts]


async def put(store: Store, source: str, *texts: str, **fields: object) -> None:
    await store.replace_document(a_document(source, **fields), worded(*texts), axis(*range(len(texts))))


async def by_words(store: Store, asked: str, k: int = 9, wanted: Filter = ANY, collection: str = "c") -> tuple[Found, dict[str, float]]:
    """What was found, and the scores of the words' leg by text."""
    found = await store.search(collection, axis(300)[0], k, wanted, words=asked.split())
    texts = {passage.id: passage.text for passage in found.passages}
    leg = words_of(found)
    return found, {texts[id]: score for id, score in zip(leg.ids, leg.scores, strict=True)}


def words_of(found: Found) -> Ranking:
    assert [leg.leg for leg in found.legs] == ["vector", "words"]
    return found.legs[1]


async def test_the_best_by_words_come_with_their_scores(store: Store) -> None:
    """In the order of BM25, as a plain count gives it; a passage without a word of the question is not among them."""
    texts = ["red fish red", "red", "a blue fish in the sea", "grey"]
    await put(store, "a", *texts)
    _, scores = await by_words(store, "red fish")
    expected = bm25(["red", "fish"], {text: text.split() for text in texts})
    assert scores == pytest.approx({text: one.score for text, one in expected.items()})
    assert list(scores) == sorted(expected, key=lambda text: -expected[text].score)


async def test_the_best_are_worth_more_than_their_share(store: Store) -> None:
    """Worked by hand: of two passages of two words each, one holds the word: ln(1 + 1.5 / 1.5) * 2.2 / 2.2."""
    await put(store, "a", "red fish", "blue sea")
    _, scores = await by_words(store, "red")
    assert scores == pytest.approx({"red fish": np.log(2)})


async def test_coverage_is_the_share_of_the_weight_that_is_held(store: Store) -> None:
    """Both words of two: 1; beside a word that nobody has, which weighs as the rarest: less."""
    await put(store, "a", "red fish", "red", "blue", "grey")
    both, _ = await by_words(store, "red fish")
    assert words_of(both).coverage[0] == pytest.approx(1)
    of_three, _ = await by_words(store, "red fish whale")
    rare, frequent = np.log(1 + 3.5 / 1.5), np.log(1 + 2.5 / 2.5)
    assert words_of(of_three).coverage == pytest.approx([(rare + frequent) / (2 * rare + frequent), frequent / (2 * rare + frequent)])


async def test_what_only_words_found_comes_after_what_is_near(store: Store) -> None:
    """Each passage once, with its nearness as its score."""
    await put(store, "a", "near", "far red")
    found = await store.search("c", axis(0)[0], 1, words=["red"])
    assert [(passage.text, passage.score) for passage in found.passages] == [("near", 1.0), ("far red", 0.0)]
    assert [len(leg.ids) for leg in found.legs] == [1, 1]
    found = await store.search("c", axis(0)[0], 2, words=["red"])
    assert [passage.text for passage in found.passages] == ["near", "far red"]


async def test_without_words_only_the_vectors_speak(store: Store) -> None:
    """One leg; and words that nobody has find nothing."""
    await put(store, "a", "red")
    assert [leg.leg for leg in (await store.search("c", axis(0)[0], 1)).legs] == ["vector"]
    assert (await by_words(store, "whale"))[1] == {}
    assert words_of((await by_words(store, "red", collection="none"))[0]).ids == []


async def test_words_obey_the_filter(store: Store) -> None:
    """Tags, superseded documents and collections; what counts how rare a word is stays the same."""
    await put(store, "old", "red one", tags={"t": "1"})
    await put(store, "new", "red two", tags={"t": "2"}, supersedes=("old",))
    await put(store, "elsewhere", "red three", collection="d")
    assert set((await by_words(store, "red"))[1]) == {"red two"}
    every = (await by_words(store, "red", wanted=Filter(superseded=True)))[1]
    assert set(every) == {"red one", "red two"}
    assert (await by_words(store, "red", wanted=Filter({"t": "1"}, superseded=True)))[1] == {"red one": every["red one"]}
    assert set((await by_words(store, "red", collection="d"))[1]) == {"red three"}


async def test_k_are_found_where_more_hold_the_words(store: Store) -> None:
    """The best of them."""
    await put(store, "a", *(f"red {'x ' * n}" for n in range(20)))
    _, scores = await by_words(store, "red", 3)
    assert list(scores) == ["red ", "red x ", "red x x "]


async def test_a_passage_of_very_many_words_counts_as_one_of_the_most_there_is_room_for(store: Store) -> None:
    """70,000 words are stored and found."""
    await store.replace_document(a_document(), [NewPassage("many", words=["red"] * 70_000), *worded("red sea")], axis(0, 1))
    _, scores = await by_words(store, "red")
    expected = bm25(["red"], {"many": ["red"] * LENGTH_MOST, "red sea": ["red", "sea"]})
    assert scores == pytest.approx({text: one.score for text, one in expected.items()})


DOCUMENTS = st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=6).map(" ".join), max_size=4)
CHANGES = st.lists(st.tuples(st.sampled_from("xyz"), st.none() | DOCUMENTS), min_size=1, max_size=8)


@pytest.fixture
def runner_and_postgres(clean_dsn: str) -> Iterator[tuple[asyncio.Runner, Postgres]]:
    with asyncio.Runner() as runner:
        postgres = Postgres(StoreSettings(dsn=clean_dsn))
        yield runner, postgres
        runner.run(postgres.close())


@pytest.mark.parametrize("few", [0, 10**9], ids=["from-the-best", "from-all-that-fit"])
@pytest.mark.parametrize("read_most", [30_000, 3], ids=["all-read", "the-rarest-read"])
def test_after_any_changes_the_scores_are_those_of_a_plain_count(
    runner_and_postgres: tuple[asyncio.Runner, Postgres], few: int, read_most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents come, change and go in any order; then SQL says what Python says over what is there. Words that are too frequent to be read
    count all the same for those that hold a rarer one; and nothing of what went is left in the tables."""
    runner, postgres = runner_and_postgres
    monkeypatch.setattr(word_leg, "FEW", few)
    monkeypatch.setattr(word_leg, "READ_MOST", read_most)
    number = 0

    @given(changes=CHANGES, asked=st.lists(st.sampled_from("abcdefghz"), min_size=1, max_size=4, unique=True))
    @settings(max_examples=40, deadline=None)
    def check(changes: list[tuple[str, list[str] | None]], asked: list[str]) -> None:
        nonlocal number
        number += 1
        collection = f"c{number}"
        now: dict[str, list[str]] = {}

        async def run() -> tuple[Found, dict[str, float]]:
            for source, texts in changes:
                if texts is None:
                    await postgres.delete_document(collection, source)
                    now.pop(source, None)
                else:
                    await put(postgres, source, *texts, collection=collection, tags={"t": "1"})
                    now[source] = texts
            return await by_words(postgres, " ".join(asked), 99, Filter({"t": "1"}), collection)

        found, _ = runner.run(run())
        everywhere = {f"{source} {at}": text.split() for source, texts in now.items() for at, text in enumerate(texts)}
        expected = sorted(((one.score, one.coverage) for one in bm25(asked, everywhere).values()), reverse=True)
        leg = words_of(found)
        said = list(zip(leg.scores, leg.coverage, strict=True))
        if read_most == 30_000:
            assert np.allclose(said, expected)
        else:  # those that hold no word that is read are not among them
            assert all(any(np.allclose(one, other) for other in expected) for one in said)
            assert bool(said) == bool(expected)
        for source in now:
            runner.run(postgres.delete_document(collection, source))

    check()
    with psycopg.connect(postgres.settings.dsn) as link:
        for table in ("postings", "words"):
            assert link.execute(f"select count(*) from tidegate.{table}".encode()).fetchone() == (0,)
        assert link.execute("select max(worded), max(words_total) from tidegate.collections").fetchone() == (0, 0)


async def test_both_ways_find_the_same(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the best on; from the best on until enough were looked at, and then from all that fit; and from all that fit."""
    rng = random.Random(3)
    for at in range(60):
        await put(postgres, f"{at}", " ".join(rng.choices("abcdefghij", k=6)), tags={"t": str(at % 20)})
    found = []
    for few, walk in ((0, 5000), (0, 2), (10**9, 5000)):
        monkeypatch.setattr(word_leg, "FEW", few)
        monkeypatch.setattr(word_leg, "WALK", walk)
        found.append((await by_words(postgres, "a b c", wanted=Filter({"t": "7"})))[1])
    assert found[0]
    assert found[1] == pytest.approx(found[0])
    assert found[2] == pytest.approx(found[0])


async def test_an_edit_changes_the_words_of_what_it_changed_only(postgres: Postgres) -> None:
    """A passage that stays keeps the number by which its words know it; one whose words are read in another way has the new ones."""
    await put(postgres, "a", "red", "blue")

    async def numbers() -> dict[str, int]:
        with psycopg.connect(postgres.settings.dsn) as link:
            return dict(link.execute("select text, number from tidegate.passages").fetchall())

    before = await numbers()
    await put(postgres, "a", "red", "green")
    after = await numbers()
    assert after["red"] == before["red"]
    assert set(after) == {"red", "green"}
    await postgres.replace_document(a_document("a"), [NewPassage("red", words=["rot"])], axis(0))
    assert (await by_words(postgres, "red"))[1] == {}
    assert set((await by_words(postgres, "rot"))[1]) == {"red"}


async def test_writers_at_the_same_time_count_every_word(postgres: Postgres) -> None:
    """The first twelve writes of a new collection, four of them of documents that another one writes: as many passages as there are."""
    await asyncio.gather(*(put(postgres, f"{at % 8}", "red blue", "green red") for at in range(12)))
    found, scores = await by_words(postgres, "red", 99)
    expected = bm25(["red"], {f"{at}{text}": text.split() for at in range(8) for text in ("red blue", "green red")})
    assert sorted(words_of(found).scores) == pytest.approx(sorted(one.score for one in expected.values()))
    assert len(words_of(found).ids) == 16
    assert len(scores) == 2


async def test_a_search_sees_one_state_in_both_legs(postgres: Postgres) -> None:
    """While a document changes between two texts, the words' leg never knows one that the index version does not."""
    await put(postgres, "a", "red 0")
    done = False

    async def write() -> None:
        nonlocal done
        for at in range(1, 30):
            await put(postgres, "a", f"red {at}")
        done = True

    writing = asyncio.ensure_future(write())
    while not done:
        found = await postgres.search("c", axis(0)[0], 5, words=["red"])
        assert len(found.passages) == 1
        assert [leg.ids for leg in found.legs] == [[found.passages[0].id]] * 2
    await writing


async def test_what_was_stored_before_words_is_found_by_its_vector(empty_dsn: str) -> None:
    """A collection of an earlier schema: the words' leg is empty, until its documents are read again."""
    migrate(empty_dsn)
    store = Postgres(StoreSettings(dsn=empty_dsn))
    await store.replace_document(a_document(), [NewPassage("red")], axis(0))
    with psycopg.connect(empty_dsn, autocommit=True) as link:
        link.execute("drop table tidegate.postings, tidegate.words; drop sequence tidegate.passage_numbers")
        link.execute("alter table tidegate.passages drop number, drop words, drop words_digest")
        link.execute("alter table tidegate.collections drop worded, drop words_total")
        link.execute("delete from tidegate._yoyo_migration where migration_id = '0005-words'")
    assert migrate(empty_dsn) == ["0005-words"]
    found, scores = await by_words(store, "red")
    assert ([passage.text for passage in found.passages], scores) == (["red"], {})
    await put(store, "a.md", "red")
    assert (await by_words(store, "red"))[1] == pytest.approx({"red": np.log(1 + 0.5 / 1.5)})
    await store.close()
