"""Has the model answer: streams where somebody listens, else takes the whole."""

from __future__ import annotations

import asyncio

from tidegate.core.ask import Ask, EngineCall
from tidegate.core.chunk import Chunk
from tidegate.core.errors import EngineDown, EngineStalled, SettingsError
from tidegate.core.plugins import load
from tidegate.core.ports import Engine, EngineAnswer, Stage
from tidegate.guard.terms import TermList, Terms
from tidegate.pipeline.capability import Capability
from tidegate.pipeline.control import Control, Trigger
from tidegate.pipeline.legs import Legs, ask_next
from tidegate.pipeline.parts import Engines, Parts
from tidegate.pipeline.whole import passes

#: The public name of the first model of the first engine.
DEFAULT = "default"


class GenerateStage:
    """The engine's call in, text out; books tokens and usage on every end, also when the client leaves."""

    name = "generate"

    def __init__(
        self, engines: Engines, *, holds: bool = False, first_token_s: float | None = None, control: Control | None = None, max_resumes: int = 2,
        resume_wait_s: float = 10.0,
    ) -> None:
        """`control`: what watches the answer; `max_resumes`: how often an answer that broke off may go on; `resume_wait_s`: seconds that it waits for
        an engine to come back.
        """
        self._engines = engines
        self._holds = holds  # a later stage judges the whole: nothing may leave before
        self._first_token_s = first_token_s
        self._control = control if control else None
        self._max_resumes = max_resumes
        self._resume_wait_s = resume_wait_s

    async def __call__(self, ask: Ask) -> None:
        call = ask.call
        assert call is not None, "a stage before `generate` makes the call"
        public = None if call.model == DEFAULT else call.model
        engine, own_name = self._engines.find(public)
        flight = ask.flight
        flight.model, flight.engine = own_name if call.model == DEFAULT else call.model, engine.name
        if own_name != call.model:
            call = EngineCall(call.kind, own_name, call.body)  # the caller's own bytes carry another name
        if ask.emit is None and self._first_token_s is None:
            await self._take_whole(ask, public, engine, call)
        else:
            await self._stream(ask, self._legs(ask, public, engine, call))

    def _legs(self, ask: Ask, public: str | None, engine: Engine, call: EngineCall) -> Legs:
        emit = None if self._holds else ask.emit
        return Legs(
            ask, self._engines, public, engine, call, emit, self._control, max_resumes=self._max_resumes, resume_wait_s=self._resume_wait_s
        )

    async def _take_whole(self, ask: Ask, public: str | None, engine: Engine, call: EngineCall) -> None:
        flight = ask.flight
        try:
            answer: EngineAnswer
            try:
                answer = await engine.whole(call, flight)
            except EngineDown as error:
                engine, call, answer = await ask_next(
                    self._engines, public, engine, call, flight, error, lambda other, own: other.whole(own, flight)
                )
        finally:  # also where it failed or the client left: the time until then was the engine's
            flight.lap("engine.answer")
        if self._control is not None and not passes(self._control, answer):
            answer = await self._legs(ask, public, engine, call).judge(answer)
        else:
            ask.text.append(answer.text)
        flight.usage, flight.end = answer.usage, answer.end
        ask.whole = answer

    async def _stream(self, ask: Ask, legs: Legs) -> None:
        if self._first_token_s is None:
            await legs.run()
            return
        try:
            async with asyncio.timeout(self._first_token_s) as budget:
                await legs.run(budget)
        except TimeoutError:
            if not budget.expired():  # somebody else's time-out is not ours to rename
                raise
            raise EngineStalled(
                f"The engine {ask.flight.engine} gave no token within {self._first_token_s} s.",
                hint="Raise budgets.first_token_s in capability.toml, or look at the engine's queue under /health.",
            ) from None


def estimate_prompt_tokens(call: EngineCall) -> int:
    """About a token per four bytes of text, the usual figure for English; used to reserve, never to book what an engine counted."""
    size = len(call.raw) if call.raw is not None else len(str(call.body.get("messages") or call.body.get("prompt") or ""))
    return size // 4 + 1


def text_of(batch: list[Chunk]) -> str:
    """The answer text of a batch, without reasoning and notices."""
    return "".join(chunk.text for chunk in batch if chunk.kind == "text")


def build(capability: Capability, parts: Parts) -> Stage:
    """Raises SettingsError where a trigger names a stage that gives nothing."""
    return GenerateStage(
        parts.engines, holds=not capability.streams, first_token_s=capability.manifest.budgets.first_token_s,
        control=_control(capability, parts), max_resumes=parts.max_resumes, resume_wait_s=parts.resume_wait_s,
    )


def _control(capability: Capability, parts: Parts) -> Control:
    own, ban = capability.manifest.guard, parts.ban
    terms = Terms([*ban.lists, TermList(capability.terms, own.whole_words)]) if capability.terms else ban.terms
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
