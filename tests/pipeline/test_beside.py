"""Small answers beside a request: what comes of them where engines fail, and what they cost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tidegate.admission.gate import Gate
from tidegate.admission.settings import AdmissionSettings
from tidegate.core.ask import Ask, Caller, Deadline, EngineAnswer, EngineCall
from tidegate.core.chunk import Usage
from tidegate.core.errors import EngineDown
from tidegate.core.flight import Flight
from tidegate.core.ports import Engine
from tidegate.engines.cause import Cause
from tidegate.pipeline.beside import PARALLEL, Beside


class Stand:
    """An engine and the fleet of it. Fails at the bodies that say so; `running` is how many are asked at once, `most` how many ever were."""

    name = "stand"
    models = ("m",)

    def __init__(self) -> None:
        self.running = self.most = self.asked = 0

    def find(self, model: str | None, ask: Ask | None = None) -> tuple[Engine, str]:
        return self, "own"  # type: ignore[return-value]

    def instances(self, model: str | None, ask: Ask | None = None) -> Sequence[tuple[Engine, str]]:
        return [self.find(model)]

    def another(self, model: str | None, ask: Ask, tried: Sequence[Engine], cause: Cause, *, free: bool = False) -> None: ...

    def blame(self, engine: Engine) -> None: ...

    async def whole(self, call: EngineCall, flight: Flight) -> EngineAnswer:
        said = call.body["messages"][0]["content"]
        self.asked += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            if said == "hang":
                await asyncio.Event().wait()
            if said == "fail":
                raise EngineDown("Gone.")
            return EngineAnswer(said, "stop", Usage(10, 1))
        finally:
            self.running -= 1


def bodies(*said: str) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": one}], "max_tokens": 1} for one in said]


@pytest.fixture
def ask() -> Ask:
    return Ask(Flight("/test"), Caller("key", "tenant"), Deadline(100))


async def test_answers_come_in_the_order_of_what_was_asked(ask: Ask) -> None:
    """Some at the same time; an engine that fails once leaves one place empty; tokens are booked on the request, laps are not."""
    stand = Stand()
    answers = await Beside(stand)("m", bodies("a", "fail", "b", "c", "d", "e"), ask)
    assert [answer and answer.text for answer in answers] == ["a", None, "b", "c", "d", "e"]
    assert 1 < stand.most <= PARALLEL
    assert ask.aside is not None
    assert (ask.aside.prompt_tokens, ask.aside.completion_tokens) == (50, 5)
    assert ask.flight.laps == []


async def test_where_all_fail_the_engines_error_is_the_answer(ask: Ask) -> None:
    """Nobody takes silence for a judgement; nothing asked is nothing failed."""
    with pytest.raises(EngineDown):
        await Beside(Stand())("m", bodies("fail", "fail"), ask)
    assert await Beside(Stand())("m", [], ask) == []


async def test_calls_beside_wait_at_the_gate(ask: Ask) -> None:
    """With one slot, which the request has itself, one call runs at a time."""
    gate = Gate(AdmissionSettings.model_validate({}), {})
    gate.open(["m"], 1)
    own = gate.enter("m", ask.caller, prompt_tokens=1)
    stand = Stand()
    answers = await Beside(stand, gate)("m", bodies("a", "b", "c"), ask)
    assert [answer and answer.text for answer in answers] == ["a", "b", "c"]
    assert stand.most == 1
    own.leave()
    assert gate.counts()[next(iter(gate.counts()))][1:3] == [0, 0], "no place is left behind"


async def test_what_is_given_up_ends_at_the_engine(ask: Ask) -> None:
    """A time-out cancels every call; those that were answered are booked."""
    stand = Stand()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await Beside(stand)("m", bodies("a", "hang", "hang"), ask)
    assert stand.running == 0
    assert ask.aside is not None
    assert ask.aside.prompt_tokens == 10
