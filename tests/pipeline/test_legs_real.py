"""Terms, triggers and cuts on the real llama.cpp with the packaged model."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from tests.embedded_engine import needs_engine

from tidegate.core.ask import Ask, Caller, Deadline, EngineCall
from tidegate.core.chunk import Chunk, Usage
from tidegate.core.errors import EngineCut
from tidegate.core.flight import Flight
from tidegate.core.ports import EngineStream
from tidegate.engines.adapters.llama_cpp import LlamaCpp
from tidegate.engines.fleet import Fleet
from tidegate.engines.settings import EngineSettings
from tidegate.guard.terms import TermList, Terms
from tidegate.pipeline.control import Control, Trigger
from tidegate.pipeline.stages.create_ticket import CreateTicketStage
from tidegate.pipeline.stages.generate import GenerateStage

pytestmark = [
    pytest.mark.local,
    needs_engine,
]

TOKENS = 48


@pytest.fixture
async def fleet(llama_url: str, llama_key: str) -> AsyncIterator[Fleet]:
    # Several slots with different pasts would give other first texts: one request at a time, each with the same way through the cache.
    settings = EngineSettings(adapter="llama_cpp", url=llama_url, models={"small": "smollm2"}, api_key=llama_key, conformance="off")
    fleet = Fleet({"local": settings})
    yield fleet
    await fleet.close()


class Heard:
    """A client that listens."""

    def __init__(self) -> None:
        self.text = ""

    def emit(self, batch: list[Chunk]) -> None:
        self.text += "".join(chunk.text for chunk in batch if chunk.kind == "text")


async def tell(fleet: Fleet, content: str, control: Control | None = None) -> tuple[str, Ask]:
    heard = Heard()
    ask = Ask(Flight("/test"), Caller("key", "tenant"), Deadline(100), emit=heard.emit)
    ask.call = EngineCall("chat", "small", {"messages": [{"role": "user", "content": content}], "max_tokens": TOKENS, "temperature": 0})
    await GenerateStage(fleet, control=control)(ask)
    assert "".join(ask.text) == heard.text
    return heard.text, ask


def decisions(ask: Ask, what: str) -> list[dict[str, Any]]:
    return [facts for _, name, facts in ask.flight.decisions if name == what]


async def test_a_forbidden_word_never_arrives_and_the_answer_goes_on(fleet: Fleet) -> None:
    """The words that the model would say are banned one after the other: the answer goes on without each, to its end."""
    question = "Tell me about the sea."
    whole, _ = await tell(fleet, question)
    words = [word for word in re.findall(r"[A-Za-z]{4,}", whole) if whole.count(word) == 1][:3]
    assert len(words) == 3
    for word in words:
        text, ask = await tell(fleet, question, Control(Terms([TermList([word])]), max_step_backs=8))
        before = whole[: whole.index(word)].rstrip()
        assert word.casefold() not in re.findall(r"[a-z]+", text.casefold())
        assert text.startswith(before)
        assert decisions(ask, "term_banned")
        assert len(text) > len(before) + 10, "it goes on"
        assert ask.flight.end in ("stop", "length")
        assert ask.flight.usage.completion_tokens <= TOKENS


async def test_a_word_of_the_model_starts_a_stage(fleet: Fleet) -> None:
    """The ticket stands where the word would have stood, and the model goes on behind it."""
    question = "Tell me about the sea."
    whole, _ = await tell(fleet, question)
    word = next(word for word in re.findall(r" [a-z]{4,}", whole) if whole.count(word) == 1)
    trigger = Trigger(CreateTicketStage(), "create_ticket", text=word, insert=" (ticket {given})")
    text, ask = await tell(fleet, question, Control(triggers=(trigger,)))
    before = whole[: whole.index(word)]
    assert text.startswith(f"{before} (ticket {ask.ticket})")
    assert len(text) > len(before) + len(ask.ticket) + 20
    # The model may say the word again behind the ticket: then it hands over again. The word itself never leaves.
    assert word not in text[len(before) :]
    assert len(decisions(ask, "triggered")) == len(decisions(ask, "inserted")) + len(decisions(ask, "trigger_repeated"))


class Breaking:
    """A stream that breaks off after twelve chunks."""

    def __init__(self, stream: EngineStream) -> None:
        self.stream = stream
        self.told = 0

    @property
    def usage(self) -> Usage:
        return self.stream.usage

    def abort(self) -> None:
        self.stream.abort()

    async def relay(self, take: Callable[[list[Chunk]], Awaitable[None] | None]) -> None:
        def some(batch: list[Chunk]) -> Awaitable[None] | None:
            rest = take(batch)
            self.told += len(batch)
            if self.told >= 12:
                raise EngineCut("broken off by the test")
            return rest

        await self.stream.relay(some)


async def test_a_cut_is_not_seen(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken off after some tokens, the answer is told to its end by what the engine says to exactly that prefix, and counts as one."""
    whole, clean = await tell(fleet, "Tell me about the sea.")
    start = LlamaCpp.start

    async def breaks(self: LlamaCpp, call: EngineCall, flight: Flight) -> EngineStream:
        return Breaking(await start(self, call, flight))

    monkeypatch.setattr(LlamaCpp, "start", breaks)
    text, ask = await tell(fleet, "Tell me about the sea.")
    assert len(decisions(ask, "resumed")) == 1
    assert text[:30] == whole[:30]
    assert abs(ask.flight.usage.completion_tokens - clean.flight.usage.completion_tokens) <= TOKENS // 4
    assert ask.flight.end == clean.flight.end
