"""Search: a question to passages, and how well that works on the example documents."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tidegate.core.errors import BadRequest
from tidegate.core.search import Filter
from tidegate.retrieval.embedder import LocalEmbedder
from tidegate.retrieval.ingest import ingest
from tidegate.retrieval.search import Search
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


async def test_the_nearest_passage_comes_first(search: Search) -> None:
    """Passages come by nearness, as many as asked for, with where they stand."""
    found = (await search.find("How long is the waiting period for childbirth?", k=3)).passages
    assert (found[0].document, found[0].title) == ("health-cover.md", "Health cover and waiting periods")
    assert "9 months" in found[0].text
    assert [passage.score for passage in found] == sorted((passage.score for passage in found), reverse=True)
    assert len(found) == 3


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
