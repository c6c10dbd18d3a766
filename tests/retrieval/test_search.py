"""Search: a question to passages, and how well that works on the example documents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tidegate.core.ask import Ask, Caller, Deadline, Passage
from tidegate.core.errors import BadRequest, EmbedderDown, SettingsError, StoreDown
from tidegate.core.flight import Flight
from tidegate.core.search import ANY, Filter, Found, Ranking
from tidegate.retrieval.embedder import LocalEmbedder
from tidegate.retrieval.ingest import ingest
from tidegate.retrieval.rerank import Second
from tidegate.retrieval.search import COVERED, Search, Searched, Steps
from tidegate.retrieval.settings import RetrievalSettings
from tidegate.stores.systems.memory import Memory

EXAMPLES = Path(__file__).parents[2] / "examples"
DOCUMENTS = EXAMPLES / "documents"
COLLECTION = "harbour-mutual"
QUESTIONS: list[dict[str, Any]] = [json.loads(line) for line in (EXAMPLES / "questions.jsonl").read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def store(embedder: LocalEmbedder) -> Memory:
    store = Memory()
    report = asyncio.run(ingest([DOCUMENTS], collection=COLLECTION, embedder=embedder, store=store, base=DOCUMENTS))
    assert (report.failed, report.skipped, report.notes) == ([], [], [])
    return store


@pytest.fixture
def search(embedder: LocalEmbedder, store: Memory) -> Search:
    return Search(embedder, store, RetrievalSettings(collection=COLLECTION))


NEAREST = Steps(hybrid=False, rerank="off")


async def test_by_vectors_alone_the_nearest_passage_comes_first(search: Search) -> None:
    """Passages come by nearness, as many as asked for, with where they stand; nothing else has a say."""
    found = await search.find("How long is the waiting period for childbirth?", k=3, steps=NEAREST)
    first = found.passages[0]
    assert (first.document, first.title) == ("health-cover.md", "Health cover and waiting periods")
    assert "9 months" in first.text
    assert [passage.score for passage in found.passages] == sorted((passage.score for passage in found.passages), reverse=True)
    assert len(found.passages) == 3
    assert ([leg.leg for leg in found.legs], found.reranker, found.scores) == (["vector"], "off", [])
    assert list(found.took_ns) == ["embed", "store", "fuse", "choose"]


async def test_the_road_of_a_question_is_told(search: Search) -> None:
    """Both legs with what each found, the reranker with its scores in falling order, and whose the time was."""
    found = await search.find("How long is the waiting period for childbirth?", k=3)
    assert found.passages[0].document == "health-cover.md"
    assert [leg.leg for leg in found.legs] == ["vector", "words"]
    assert all(len(leg.ids) > 3 for leg in found.legs), "more are looked for than are asked for"
    assert (found.reranker, found.not_reranked) == ("features", "")
    assert found.scores == sorted(found.scores, reverse=True)
    assert list(found.took_ns) == ["embed", "store", "fuse", "rerank", "choose"]
    stand = found.stands(found.passages[0].id)
    assert stand["vector"].score == found.passages[0].score
    assert stand["words"].coverage is not None
    assert found.stands("nobody") == {}


async def test_tags_limit_what_is_searched(search: Search) -> None:
    """Only passages with the tag are found, however near others are."""
    found = (await search.find("水管爆裂最高赔多少？", wanted=Filter({"lang": "en"}))).passages
    assert {passage.tags["lang"] for passage in found} == {"en"}
    assert (await search.find("水管爆裂", wanted=Filter({"lang": "fr"}))).passages == []


async def test_a_question_without_words_is_refused(search: Search) -> None:
    """White space is no question."""
    with pytest.raises(BadRequest, match="empty"):
        await search.find(" \n")


async def test_the_index_version_follows_the_content(embedder: LocalEmbedder, tmp_path: Path) -> None:
    """The version changes with the collection's content and only then."""
    store = Memory()
    search = Search(embedder, store, RetrievalSettings())
    file = tmp_path / "a.md"
    versions = []
    for text in ("one", "one", "two"):
        file.write_text(text)
        await ingest([file], collection="default", embedder=embedder, store=store)
        versions.append((await search.find("x")).index_version)
    assert versions[0] == versions[1] != versions[2]


async def test_every_example_question_names_a_fact_of_its_document(store: Memory) -> None:
    """The expected answer stands in the expected document: a wrong expectation would make the recall below worthless."""
    documents = {key[1]: " ".join(passage.text for passage in stored.passages.values()) for key, stored in store._documents.items()}
    assert [one["question"] for one in QUESTIONS if one["answer"] not in documents[one["documents"][0]]] == []


@pytest.mark.parametrize("language", ["en", "zh"])
async def test_the_right_document_is_among_the_first_four(search: Search, language: str) -> None:
    """Recall@4 on the example questions: at least 0.95 in English, 0.88 in Chinese (three of its 25 ask across languages, and miss)."""
    asked = [one for one in QUESTIONS if one["kind"] == language]
    missed = [one["question"] for one in asked if one["documents"][0] not in [p.document for p in (await search.find(one["question"], k=4)).passages]]
    assert len(missed) / len(asked) <= {"en": 0.05, "zh": 0.12}[language], missed


async def test_recall_over_all_questions(search: Search) -> None:
    """Recall@4 over all example questions, both languages, paraphrases and cross-language ones included, is at least 0.9."""
    hits = [one["documents"][0] in [p.document for p in (await search.find(one["question"], k=4)).passages] for one in QUESTIONS]
    assert len(hits) >= 40
    assert sum(hits) / len(hits) >= 0.9


# -- the steps, on a store that is told what it finds


class Told:
    """A store and an embedder that give what they are told."""

    model, dimensions, fingerprint = "m", 384, "f"

    def __init__(self, found: Found) -> None:
        self.found = found
        self.asked: dict[str, Any] = {}

    async def embed(self, texts: Sequence[str], kind: str) -> Any:
        return np.ones((len(texts), 384), np.float32)

    async def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [1] * len(texts)

    async def search(
        self, collection: str, vector: Any, k: int, wanted: Filter = ANY, *, words: Sequence[str] = (), exact: bool = False
    ) -> Found:
        self.asked = {"k": k, "words": list(words), "vector": vector is not None}
        return self.found

    async def explain(self, collection: str, vector: Any, k: int, wanted: Filter = ANY) -> list[str]:
        return []

    async def index_version(self, collection: str) -> str:
        return "1"


class Judge:
    """A reranker that turns the order round, or fails."""

    name = "judge"

    def __init__(self, fails: StoreDown | None = None) -> None:
        self.fails = fails
        self.closed = False

    async def scores(self, question: str, found: Found, ask: Ask | None = None) -> list[float]:
        if self.fails is not None:
            raise self.fails
        return [float(at) for at in range(len(found.passages))]

    async def close(self) -> None:
        self.closed = True


def told(*scores: float, coverage: Sequence[float] = ()) -> Told:
    passages = [Passage(f"p{at}", "d.md", "T", f"Only this one says word{at}, and no other does.", score) for at, score in enumerate(scores)]
    ids = [passage.id for passage in passages]
    legs = [Ranking("vector", ids, list(scores))]
    if coverage:
        legs.append(Ranking("words", ids, [2.0] * len(ids), list(coverage)))
    return Told(Found(passages, "1", legs=legs))


def road(told: Told, judge: Judge | None = None, **settings: Any) -> Search:
    rerankers = {"judge": Second(judge)} if judge is not None else {}
    return Search(told, told, RetrievalSettings.model_validate({"rerank": "judge" if judge else "off", **settings}), rerankers)


def ids(found: Searched) -> list[str]:
    return [passage.id for passage in found.passages]


async def test_what_is_looked_for_is_more_than_what_is_given_on() -> None:
    """Candidates as the settings say, at least as many as are asked for; words only where both ways are wanted."""
    store = told(0.9, 0.8, 0.7)
    assert ids(await road(store, candidates=30).find("word1 here", k=2)) == ["p0", "p1"]
    assert store.asked == {"k": 30, "words": ["word1", "word", "1", "here"], "vector": True}
    await road(store, candidates=2).find("word1", k=50, steps=Steps(hybrid=False))
    assert store.asked == {"k": 50, "words": [], "vector": True}


@pytest.mark.parametrize(("failure", "why"), [(EmbedderDown("Gone."), "embedder_down"), (None, "slow")])
async def test_without_a_vector_words_are_searched_for_alone(failure: EmbedderDown | None, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the embedder is down or hangs; where words are not wanted, that is the search's failure."""
    store = told(0.0, coverage=[0.7])

    async def embed(texts: Sequence[str], kind: str) -> Any:
        if failure is not None:
            raise failure
        await asyncio.Event().wait()

    monkeypatch.setattr(store, "embed", embed)
    found = await road(store).find("word0", steps=Steps(seconds=0.01 if failure is None else 10.0))
    assert (ids(found), found.words_only, store.asked["vector"]) == (["p0"], why, False)
    if failure is not None:
        with pytest.raises(EmbedderDown):
            await road(store).find("word0", steps=Steps(hybrid=False))


async def test_of_a_book_the_first_pages_words_are_searched_for() -> None:
    """The rest costs nobody anything."""
    store = told(0.9)
    await road(store).find("word " * 1_600 + "beyond")
    assert store.asked["words"] == ["word"] * 1_600


async def test_a_reranker_has_the_last_word_on_the_order() -> None:
    """Its scores go with the passages that are given on."""
    found = await road(told(0.9, 0.8, 0.7), Judge()).find("q", k=2)
    assert (ids(found), found.scores, found.reranker) == (["p2", "p1"], [2.0, 1.0], "judge")


async def test_where_the_reranker_fails_the_fused_order_is_the_answer() -> None:
    """And what was found says why."""
    found = await road(told(0.9, 0.8, 0.7), Judge(StoreDown("Gone."))).find("q", k=2)
    assert (ids(found), found.scores, found.reranker, found.not_reranked) == (["p0", "p1"], [], "off", "store_down")


async def test_a_weak_passage_stays_where_words_cover_the_question() -> None:
    """`min_score` is cosine; a passage that holds most of the weight of the question's words is not thrown out for its vector."""
    found = await road(told(0.9, 0.3, 0.3, coverage=[0.1, COVERED, COVERED - 0.01])).find("q", k=3, steps=Steps(min_score=0.5))
    assert (sorted(ids(found)), found.weak) == (["p0", "p1"], 1)


async def test_a_reranker_that_nobody_opened_is_refused_by_name() -> None:
    """Not at the start, where it is a program's own: with the nearest name."""
    with pytest.raises(SettingsError, match="no reranker 'featurs'") as caught:
        await road(told(0.9)).find("q", steps=Steps(rerank="featurs"))
    assert "features" in str(caught.value.hint)


async def test_a_search_shows_less_where_it_is_to_compress() -> None:
    """The passage keeps its text; what the prompt shows is beside it, and how much was left out is counted."""
    store = told(0.9)
    text = "The office is open. Gulls cry. Ships pass. " * 3 + "Accidents are reported within word0 days."
    store.found = msgspec.structs.replace(store.found, passages=[msgspec.structs.replace(store.found.passages[0], text=text)])
    found = await road(store).find("accident reported", steps=Steps(compress=True))
    [passage] = found.passages
    assert passage.text == text
    assert passage.shown.endswith("Accidents are reported within word0 days.")
    assert found.left_out == len(text) - len(passage.shown) > 0
    assert (await road(store).find("accident reported")).passages[0].shown == ""


async def test_a_request_has_laps_for_the_steps_and_rerankers_are_closed_with_the_search() -> None:
    """Whose the time was stands in the flight: the embedder's, the store's, the reranker's."""
    ask, judge = Ask(Flight("/test"), Caller("key", "tenant"), Deadline(100)), Judge()
    search = road(told(0.9, 0.8), judge)
    found = await search.find("q", ask=ask)
    assert [part for part, _ in ask.flight.laps] == ["retrieve.embed", "retrieve.store", "retrieve.rerank"]
    assert all(took >= 0 for took in found.took_ns.values())
    await search.close()
    assert judge.closed
