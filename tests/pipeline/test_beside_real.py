"""The engine as a reranker, on the real llama.cpp: mechanics alone, for a model of 135 M parameters is no judge."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.embedded_engine import needs_engine

from tidegate.core.ask import Ask, Caller, Deadline, Passage
from tidegate.core.flight import Flight
from tidegate.core.search import Found
from tidegate.engines.fleet import Fleet
from tidegate.engines.settings import EngineSettings
from tidegate.pipeline.beside import Beside
from tidegate.retrieval.rerankers.engine import MOST, ByEngine

pytestmark = [pytest.mark.local, needs_engine]


@pytest.fixture
async def fleet(llama_url: str, llama_key: str) -> AsyncIterator[Fleet]:
    fleet = Fleet({
        "local": EngineSettings(adapter="llama_cpp", url=llama_url, models={"small": "smollm2"}, api_key=llama_key, conformance="off")
    })
    yield fleet
    await fleet.close()


async def test_the_engine_tells_how_probable_yes_is(fleet: Fleet) -> None:
    """One token and one prompt a passage, a probability for each of the first, and the tokens on the request."""
    ask = Ask(Flight("/test"), Caller("key", "tenant"), Deadline(200))
    texts = ["A car accident is to be reported within 7 days.", "The harbour was quiet.", *[f"Number {n}." for n in range(MOST)]]
    found = Found([Passage(str(at), "d", "T", text, 0.8) for at, text in enumerate(texts)])
    scores = await ByEngine(Beside(fleet), "small").scores("How soon do I report a car accident?", found, ask)
    assert all(0 <= score <= 1 for score in scores[:MOST])
    assert len(set(scores[:MOST])) > 1, "it read the passages"
    assert scores[MOST:] == [-1.0] * (len(texts) - MOST)
    assert ask.aside is not None
    assert ask.aside.completion_tokens == MOST
