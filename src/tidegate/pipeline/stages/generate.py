"""Has the model answer: streams where somebody listens, else takes the whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from tidegate.admission.gate import FREE, Gate, Place
from tidegate.core.ask import DEFAULT, Ask, EngineCall
from tidegate.core.chunk import Chunk
from tidegate.core.errors import EngineStalled, SettingsError, TidegateError
from tidegate.core.plugins import load
from tidegate.core.ports import Engine, EngineAnswer, Stage
from tidegate.guard.terms import TermList, Terms
from tidegate.pipeline.capability import Capability
from tidegate.pipeline.control import Control, Trigger
from tidegate.pipeline.hedge import Second, first_of
from tidegate.pipeline.legs import Legs
from tidegate.pipeline.parts import Engines, Parts
from tidegate.pipeline.retry import Plan, Retries
from tidegate.pipeline.whole import passes

#: Tokens that a template puts around each message and around all of them, as ChatML does.
_AROUND_MESSAGE, _AROUND_ALL = 5, 3
#: Tokens of a picture or a sound: engines make some hundreds of it, or some thousands, whatever its bytes are.
_MEDIA_TOKENS = 1024


class GenerateStage:
    """The engine's call in, text out; books tokens and usage on every end, also when the client leaves."""

    name = "generate"

    def __init__(
        self,
        engines: Engines,
        *,
        holds: bool = False,
        first_token_s: float | None = None,
        control: Control | None = None,
        max_resumes: int = 2,
        resume_wait_s: float = 10.0,
        retries: Retries | None = None,
        gate: Gate | None = None,
    ) -> None:
        """`control`: what watches the answer; `max_resumes`: how often an answer that broke off may go on; `resume_wait_s`: seconds that it waits for
        an engine to come back; `retries`: the budget that all stages share; `gate`: where a hedge needs a slot.
        """
        self._gate = gate
        self._engines = engines
        self._holds = holds  # a later stage judges the whole: nothing may leave before
        self._first_token_s = first_token_s
        self._control = control if control else None
        self._max_resumes = max_resumes
        self._resume_wait_s = resume_wait_s
        self._retries = retries if retries is not None else Retries()

    async def __call__(self, ask: Ask) -> None:
        call = ask.call
        assert call is not None, "a stage before `generate` makes the call"
        public = None if call.model == DEFAULT else call.model
        self._retries.request()
        engine, own_name = self._engines.find(public, ask)
        flight = ask.flight
        flight.model, flight.engine = own_name if call.model == DEFAULT else call.model, engine.name
        if own_name != call.model:
            call = EngineCall(call.kind, own_name, call.body)  # the caller's own bytes carry another name
        if ask.emit is None and self._first_token_s is None:
            await self._take_whole(ask, public, engine, call)
        else:
            await self._stream(ask, public, self._legs(ask, public, engine, call))

    def _legs(self, ask: Ask, public: str | None, engine: Engine, call: EngineCall) -> Legs:
        emit = None if self._holds else ask.emit
        return Legs(ask, self._engines, public, engine, call, emit, self._control, max_resumes=self._max_resumes, resume_wait_s=self._resume_wait_s)

    async def _take_whole(self, ask: Ask, public: str | None, engine: Engine, call: EngineCall) -> None:
        flight = ask.flight
        plan: Plan | None = None
        try:
            while True:
                try:
                    if self._retries.hedge_after_s and plan is None:
                        answer = await self._hedged(ask, public, engine, call)
                    else:
                        answer = await engine.whole(call, flight)
                    break
                except TidegateError as error:
                    plan = plan or Plan(self._engines, self._retries, public, ask)
                    engine, call = plan.next(engine, call, error)
        finally:  # also where it failed or the client left: the time until then was the engine's
            flight.lap("engine.answer")
        if self._control is not None and not passes(self._control, answer):
            answer = await self._legs(ask, public, engine, call).judge(answer)
        else:
            ask.text.append(answer.text)
        flight.usage, flight.end = answer.usage, answer.end
        ask.whole = answer

    async def _hedged(self, ask: Ask, public: str | None, engine: Engine, call: EngineCall) -> EngineAnswer:
        """The whole answer of whoever has it first."""
        flight = ask.flight
        asked_twice = False

        async def asked(one: Engine, own: EngineCall) -> tuple[Engine, EngineAnswer]:
            return one, await one.whole(own, flight)

        def second() -> tuple[Coroutine[Any, Any, tuple[Engine, EngineAnswer]], Callable[[], None]] | None:
            nonlocal asked_twice
            found = self._second(ask, public, engine, call)
            asked_twice = found is not None
            return (asked(found.engine, found.call), found.over) if found is not None else None

        who, answer = await first_of(asked(engine, call), second, self._retries.hedge_after_s)
        flight.engine = who.name
        if asked_twice:
            flight.decide("hedge_won", engine=who.name)
        return answer

    def _second(self, ask: Ask, public: str | None, engine: Engine, call: EngineCall) -> Second | None:
        """Whom to ask the same, where the budget has room for it and a slot is free: nobody waits for one, and nobody who waits loses one."""
        flight = ask.flight
        if not self._retries.hedges.has_one or self._engines.another(public, ask, [engine], "stalled") is None:
            return None
        found = self._engines.another(public, ask, [engine], "stalled", free=True)
        place = self._slot(ask, public, call) if found is not None else None
        if found is None or place is None:
            flight.decide("not_hedged", engine=engine.name, why="no slot is free")
            return None
        if not self._retries.hedges.take():  # another worker was first
            place.leave()
            return None
        flight.decide("hedged", engine=engine.name, next=found[0].name)
        return Second(found[0], call if found[1] == call.model else EngineCall(call.kind, found[1], call.body), place.leave)

    def _slot(self, ask: Ask, public: str | None, call: EngineCall) -> Place | None:
        if self._gate is None:
            return FREE
        wanted = call.body.get("max_completion_tokens") or call.body.get("max_tokens") or 0
        return self._gate.spare(
            public or DEFAULT,
            ask.caller,
            prompt_tokens=estimate_prompt_tokens(call),
            answer_tokens=wanted if isinstance(wanted, int) else 0,
            capability=ask.capability,
        )

    async def _stream(self, ask: Ask, public: str | None, legs: Legs) -> None:
        """Tell the answer; where a try fails before anything was told, by a new plan, within what is left of the first token's time."""
        plan: Plan | None = None
        left_s, began_ns = self._first_token_s, time.perf_counter_ns() if self._first_token_s is not None else 0
        while True:
            try:
                if left_s is None:
                    await self._run(ask, public, legs, None)
                else:
                    plan = plan or Plan(self._engines, self._retries, public, ask)
                    await self._try(ask, public, legs, left_s, plan)
                return
            except TidegateError as error:
                if legs.begun:
                    raise
                plan = plan or Plan(self._engines, self._retries, public, ask)
                if self._first_token_s is not None:
                    left_s = self._first_token_s - (time.perf_counter_ns() - began_ns) / 1e9
                    if left_s <= 0:
                        raise
                legs.turn_to(*plan.next(legs.engine, legs.call, error))

    async def _run(self, ask: Ask, public: str | None, legs: Legs, budget: asyncio.Timeout | None) -> None:
        after_s = self._retries.hedge_after_s
        if not after_s:
            await legs.run(budget)
        else:
            await legs.run(budget, hedge=(after_s, lambda: self._second(ask, public, legs.engine, legs.call)))

    async def _try(self, ask: Ask, public: str | None, legs: Legs, left_s: float, plan: Plan) -> None:
        """One try within the time that is left for the first token. It has all of it where nobody else could be asked, else its share."""
        loop, early = asyncio.get_running_loop(), None
        began_s, engine = loop.time(), legs.engine
        try:
            async with asyncio.timeout(left_s) as budget:
                if self._retries.try_share < 1.0:
                    early = loop.call_later(left_s * self._retries.try_share, _give_up_early, plan, legs, budget)
                await self._run(ask, public, legs, budget)
        except TimeoutError:
            if not budget.expired():  # somebody else's time-out is not ours to rename
                raise
            self._engines.blame(engine)
            raise EngineStalled(
                f"The engine {engine.name} gave no token within {loop.time() - began_s:.3g} s.",
                hint="Raise budgets.first_token_s in capability.toml or tidegate.toml, or look at the engine's queue under /health.",
            ) from None
        finally:
            if early is not None:
                early.cancel()


def _give_up_early(plan: Plan, legs: Legs, budget: asyncio.Timeout) -> None:
    """A try's share is over: give it up where another plan is there."""
    if not legs.begun and not budget.expired() and plan.is_there(legs.engine):
        budget.reschedule(asyncio.get_running_loop().time())


def estimate_prompt_tokens(call: EngineCall) -> int:
    """About a token per four bytes of text, the usual figure for English and about right for Chinese; used to reserve, never to book what an engine
    counted."""
    body = call.body
    messages = body.get("messages")
    if messages is None:
        return _bytes_of(body.get("prompt")) // 4 + 1
    size = 4 * _AROUND_ALL
    for message in messages:
        size += 4 * _AROUND_MESSAGE + _bytes_of(message.get("content"))
        if len(message) > 2:  # a name, calls of tools
            size += sum(_bytes_of(value) for name, value in message.items() if name not in ("role", "content"))
    tools = body.get("tools") or body.get("functions")
    return (size + (_bytes_of(tools) if tools else 0)) // 4


def _bytes_of(value: Any) -> int:
    """Of a text in UTF-8; of texts, parts of a message and token ids what stands for their tokens, at four bytes each."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "replace"))
    if isinstance(value, list):
        return sum(4 if isinstance(one, int) else _bytes_of_part(one) for one in value)
    return len(msgspec.json.encode(value)) if value else 0


def _bytes_of_part(part: Any) -> int:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        return _bytes_of(part)
    if isinstance(text := part.get("text"), str):
        return _bytes_of(text)
    return len(msgspec.json.encode(part)) if "function" in part else 4 * _MEDIA_TOKENS


def text_of(batch: list[Chunk]) -> str:
    """The answer text of a batch, without reasoning and notices."""
    return "".join(chunk.text for chunk in batch if chunk.kind == "text")


def build(capability: Capability, parts: Parts) -> Stage:
    """Raises SettingsError where a trigger names a stage that gives nothing."""
    return GenerateStage(
        parts.engines,
        holds=not capability.streams,
        first_token_s=capability.budgets.first_token_s,
        control=_control(capability, parts),
        max_resumes=parts.max_resumes,
        resume_wait_s=parts.resume_wait_s,
        retries=parts.retries,
        gate=parts.gate,
    )


def _control(capability: Capability, parts: Parts) -> Control:
    own, ban = capability.manifest.guard, parts.ban
    lists = [*ban.lists, TermList(capability.terms, own.whole_words)]
    terms = Terms(lists, parted=ban.parted_letters) if capability.terms else ban.terms
    return Control(
        terms,
        on_term=ban.on_term if own.on_term == "as_set" else own.on_term,
        max_step_backs=ban.max_step_backs if own.max_step_backs < 0 else own.max_step_backs,
        triggers=tuple(_trigger(capability, parts, number) for number in range(len(capability.manifest.triggers))),
    )


def _trigger(capability: Capability, parts: Parts, number: int) -> Trigger:
    asked = capability.manifest.triggers[number]
    stage = load("tidegate.pipeline.stages", asked.stage).build(capability, parts)
    if not hasattr(stage, "give"):
        raise SettingsError(
            f"The capability {capability.path}: the stage {asked.stage!r} of trigger {number + 1} gives nothing that could be put into an answer.",
            hint="create_ticket does.",
        )
    return Trigger(stage, asked.stage, asked.text, tuple(asked.token_ids), asked.keep, asked.then == "go_on", asked.insert)
