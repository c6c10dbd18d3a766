"""The example capabilities on the real embedded model: contracts are kept, and answers are as good as metrics.toml says."""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.embedded_engine import KEY, engine_child, needs_engine

from tidegate.core.ask import Ask, Caller, Deadline
from tidegate.core.flight import Flight
from tidegate.core.ports import Engine
from tidegate.engines.adapters.llama_cpp import LlamaCpp
from tidegate.engines.cause import Cause
from tidegate.engines.settings import EngineSettings
from tidegate.pipeline.capability import Capability, load_all
from tidegate.pipeline.parts import Parts
from tidegate.pipeline.settings import BudgetSettings
from tidegate.pipeline.stages import cite, contract, generate, prompt, retrieve
from tidegate.retrieval.embedder import LocalEmbedder
from tidegate.retrieval.ingest import ingest
from tidegate.retrieval.search import Search
from tidegate.retrieval.settings import RetrievalSettings
from tidegate.stores.systems.memory import Memory

pytestmark = [
    pytest.mark.local,
    pytest.mark.slow,
    needs_engine,
]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "capabilities"
DOCUMENTS = ROOT / "examples" / "documents"
ALL = load_all([str(FOLDER)], BudgetSettings(profile="embedded", retrieve_s=2.0, first_token_s=30.0))
STAGES: dict[str, Any] = {"retrieve": retrieve, "prompt": prompt, "generate": generate, "cite": cite, "contract": contract}


class One:
    """A fleet of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def find(self, model: str | None, ask: Ask | None = None) -> tuple[Engine, str]:
        return self._engine, "smollm2"

    def instances(self, model: str | None, ask: Ask | None = None) -> Sequence[tuple[Engine, str]]:
        return [self.find(model)]

    def another(self, model: str | None, ask: Ask, tried: Sequence[Engine], cause: Cause, *, free: bool = False) -> tuple[Engine, str] | None:
        return None

    def blame(self, engine: Engine) -> None: ...


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The engine's child process, as the product runs it."""
    with engine_child(1) as url:
        yield url


@pytest.fixture(scope="module")
def search() -> Iterator[Search]:
    embedder, store = LocalEmbedder(ROOT / ".tidegate" / "test-cache"), Memory()
    asyncio.run(ingest([DOCUMENTS], collection="harbour-mutual", embedder=embedder, store=store, base=DOCUMENTS))
    yield Search(embedder, store, RetrievalSettings())
    asyncio.run(embedder.close())


@pytest.fixture
async def parts(url: str, search: Search) -> AsyncIterator[Parts]:
    engine = LlamaCpp("local", EngineSettings(adapter="llama_cpp", url=url, models={"default": "smollm2"}, api_key=KEY))
    yield Parts(One(engine), search)
    await engine.close()


def cases(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / path / "prompts" / "v1" / "cases.jsonl").read_text("utf-8").splitlines()]


def metrics(path: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / path / "prompts" / "v1" / "metrics.toml").read_text("utf-8"))


async def answer(capability: Capability, parts: Parts, fields: dict[str, Any]) -> Ask:
    ask = Ask(Flight("test"), Caller("key", "tenant"), Deadline(60.0))
    ask.input = fields
    for name in capability.manifest.stages:
        await STAGES[name].build(capability, parts)(ask)
    return ask


async def test_every_assessment_keeps_the_contract_and_the_points_table(parts: Parts) -> None:
    """On the embedded model each case of underwriting/assess gives valid JSON with the decision and score of the points table."""
    for case in cases("underwriting/assess"):
        fields = (await answer(ALL["underwriting/assess"], parts, case["input"])).answer
        assert fields is not None  # the contract stage has checked it
        assert {name: fields[name] for name in case["expect"]} == case["expect"], case


async def test_answers_hold_the_right_figures_as_often_as_promised(parts: Parts) -> None:
    """support/answer on the embedded model: the share of cases with the right document read, and with the right figure in the answer."""
    read, right = [], []
    for case in cases("support/answer"):
        ask = await answer(ALL["support/answer"], parts, case["input"])
        assert ask.answer is not None
        read.append(case["expect"]["document"] in [one["document"] for one in ask.answer["citations"]])
        right.append(case["expect"]["answer_has"].lower() in ask.answer["answer"].lower())
    promised = metrics("support/answer")
    assert sum(read) / len(read) >= promised["document"]["min"]
    assert sum(right) / len(right) >= promised["answer_has"]["min"]


async def test_a_question_off_the_subject_is_not_answered_from_memory(parts: Parts) -> None:
    """No passage is near enough: the answer says so, and cites nothing."""
    ask = await answer(ALL["support/answer"], parts, {"question": "What is the capital of France?"})
    assert ask.answer is not None
    assert "Paris" not in ask.answer["answer"]
    assert "do not answer" in ask.answer["answer"]
    assert ask.answer["citations"] == []
