"""The committed questions for judging retrieval: their form, and that their answers stand in the documents they name."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tidegate.core.errors import BadRequest
from tidegate.retrieval.quality import Question

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
needs_data = pytest.mark.skipif(not (DATA / "retrieval").is_dir(), reason="no ../shared/data beside this checkout")


@pytest.fixture(scope="module")
def questions() -> ModuleType:
    """The loader, which is a program of its own beside the package."""
    spec = importlib.util.spec_from_file_location("benchmark_questions", ROOT / "benchmarks" / "questions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where the types of a struct are looked up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["bank", "names"])
def test_a_set_has_its_form(questions: ModuleType, name: str) -> None:
    """At least 220 questions, each once, with ids in order, short answers without markup, and no document twice."""
    found = questions.load(name)
    assert len(found) >= 220
    assert [one.id for one in found] == [f"{name}-{number:03d}" for number in range(1, len(found) + 1)]
    assert len({one.question.casefold() for one in found}) == len(found)
    for one in found:
        assert one.set == name
        assert one.question.strip() == one.question != ""
        assert one.kind
        assert one.documents
        assert len(set(one.documents)) == len(one.documents)
        for words in (one.answer, *one.also):
            assert 0 < len(words) <= 200, one.id
            assert words.strip() == words, one.id
            assert not set("\n`") & set(words), one.id
            assert "**" not in words, one.id


def test_the_bank_is_asked_about_everywhere(questions: ModuleType) -> None:
    """The set spreads over the collection, and the other one over several corpora."""
    bank = questions.load("bank")
    assert {one.corpus for one in bank} == {"tau2_banking"}
    assert len({document for one in bank for document in one.documents}) >= 120
    assert {one.corpus for one in questions.load("names")} == {"tau2_banking", "xquad.en", "xquad.zh", "laws_zh"}


@needs_data
@pytest.mark.parametrize("name", ["bank", "names"])
def test_answers_stand_in_their_documents(questions: ModuleType, name: str) -> None:
    """Word for word: each document holds an answer, the first one the first, and no words are in none."""
    found = questions.load(name)
    corpora = questions.resolve(found, DATA)
    for one in found:
        bodies = [corpora[one.corpus][document] for document in one.documents]
        assert all(any(words in body for body in bodies) for words in (one.answer, *one.also)), one.id
        assert all(any(words in body for words in (one.answer, *one.also)) for body in bodies), one.id
        assert one.answer in bodies[0], one.id


def test_a_document_that_is_not_there_is_named(questions: ModuleType, tmp_path: Path) -> None:
    """With the question that asks for it."""
    (tmp_path / "retrieval").mkdir()
    (tmp_path / "retrieval" / "xquad.en.json").write_text('{"data": [{"paragraphs": [{"context": "a"}]}]}')
    with pytest.raises(BadRequest, match=r"names-001: xquad\.en holds no 7/7"):
        questions.resolve([Question("?", ["0/0", "7/7"], id="names-001", corpus="xquad.en")], tmp_path)
