"""The ladder: where the full answer fails, the next rung that the failure leaves standing answers, down to a message with a ticket.

A rung is tried only where it does not rest on what has failed already: no second call to an engine that is down, no second search in a database
that does not answer. Once text has been told to the client nobody steps down any more: an answer is not begun twice. The caller's own mistakes
(a wrong field, a wrong key, the caller's own limits) are answers of their own and lead to no rung.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tidegate.core.ask import Ask, Emit, Landing
from tidegate.core.chunk import Chunk, Usage
from tidegate.core.errors import (
    Busy,
    ClientGone,
    ContextTooLong,
    DeadlineExceeded,
    EngineError,
    NoAnswer,
    NotFound,
    OutputInvalid,
    SettingsError,
    StoreDown,
    Superseded,
    TidegateError,
)
from tidegate.core.flight import Flight
from tidegate.core.plugins import load
from tidegate.core.ports import Stage
from tidegate.pipeline.capability import Capability
from tidegate.pipeline.parts import Parts
from tidegate.pipeline.rungs import FULL, NOTES, Rung
from tidegate.pipeline.runner import Step, run
from tidegate.pipeline.stages.create_ticket import CreateTicketStage

log = logging.getLogger(__name__)

Part = Literal["retrieval", "engine", "context", "output", "house"]

#: Waits for a slot of a model. Raises Busy, DeadlineExceeded.
Enter = Callable[[str], Awaitable[None]]

#: What a rung may take of the time that is left, where its author says nothing: above a rung that needs an engine too, and above none.
SHARE, LAST_SHARE = 0.6, 0.95
#: Statuses below 500 with which an engine says something about itself, not about the request: it does not know its model, it timed out, it failed
#: in its middle (TGI, when its memory is full), it is busy.
_ENGINES_OWN = frozenset({404, 408, 424, 429})


def failed_part(error: TidegateError) -> Part | None:
    """What has failed, so that rungs which rest on it are passed over. None: a mistake of the caller's own, for which nobody steps down."""
    if isinstance(error, StoreDown):
        return "retrieval"
    if isinstance(error, DeadlineExceeded):
        return "retrieval" if error.stage == "retrieve" else "engine"
    if isinstance(error, ContextTooLong):
        return "context"
    if isinstance(error, OutputInvalid):
        return "output"
    if isinstance(error, EngineError):
        return "engine" if error.http_status >= 500 or error.http_status in _ENGINES_OWN else None
    if isinstance(error, NotFound | Busy):  # nobody serves the model, or it is so busy that nobody may wait for it
        return "engine"
    if isinstance(error, ClientGone | Superseded):
        return None
    return "house" if error.http_status >= 500 else None


@dataclass(frozen=True, slots=True)
class _Way:
    """A rung with its stages: `steps` as they are, `found` where passages were found already, `left_out` where none can be or may be."""

    rung: str
    model: str
    share: float
    note: str
    steps: Sequence[Step]
    found: Sequence[Step]
    left_out: Sequence[Step]


class Ladder:
    """The rungs of one capability, built once."""

    def __init__(self, capability: Capability, stages: Sequence[Stage], parts: Parts) -> None:
        """Raises SettingsError where no engine serves the model of a rung that is not optional."""
        manifest = capability.manifest
        self._path = capability.path
        self._total_s = capability.budgets.total_s
        self._retrieves = any(stage.name == "retrieve" for stage in stages)
        self._drops = next((rung.says for rung in manifest.ladder if rung.rung == "no_retrieval"), "")
        self._message = manifest.ladder[-1]
        self._ticket = CreateTicketStage()
        self.left_out: list[str] = []
        rungs = [rung for rung in manifest.ladder[:-1] if self._served(rung, parts)]
        asking = [rung.rung != "faq" for rung in rungs]
        make = _Maker(capability, stages)
        self._full = make.way(FULL, manifest.model, manifest.budgets.full_share or (SHARE if any(asking) else LAST_SHARE), "")
        faq = load("tidegate.pipeline.stages", "faq")
        self._ways: list[_Way] = []
        for number, rung in enumerate(rungs):
            share = rung.share or (SHARE if any(asking[number + 1 :]) else LAST_SHARE)
            if rung.rung == "faq":
                steps = [Step(faq.build(capability, parts), None)]
                self._ways.append(_Way("faq", "", share, rung.says, steps, steps, steps))
            else:
                self._ways.append(make.way(rung.rung, rung.model or manifest.model, share, rung.says))

    def _served(self, rung: Rung, parts: Parts) -> bool:
        if rung.rung != "small_model":
            return True
        try:
            parts.engines.find(rung.model)
        except NotFound as error:
            if rung.optional:
                self.left_out.append(rung.model)
                return False
            raise SettingsError(
                f"The capability {self._path}: no engine serves {rung.model!r}, the model of its rung 'small_model'.",
                hint="Name a model of [engines], or set `optional = true` for this rung.",
            ) from error
        except EngineError:
            pass  # it is known, and may be admitted by the time that it is needed
        return True

    async def walk(self, ask: Ask, failed: TidegateError | None = None, enter: Enter | None = None) -> None:
        """Answer on the highest rung that can. `failed`: why the full answer cannot even begin, e.g. since its engine is too busy to wait for;
        `enter`: waits for a slot of a model, before a rung asks it and within the rung's time.

        Raises NoAnswer from the lowest rung, the caller's own mistakes as they are, and as stages do once text has been told.
        """
        walk = _Walk(ask, min(ask.deadline.left_s(), self._total_s), enter)
        error = failed or await walk.attempt(self._full, self._full.steps)
        if error is None:
            return
        first = error
        part = failed_part(error)
        if part is None or walk.told:
            raise error
        callers_own = part == "context" and not ask.passages  # a text of the caller's that no prompt would fit
        walk.note(self._full, part, error)
        above = FULL
        for way in self._ways:
            if why := self._passed_over(way, walk):
                ask.flight.decide("rung_passed_over", rung=way.rung, why=why)
                continue
            walk.step_down(above, way.rung, error)
            above = way.rung
            steps, notes = self._steps(way, walk)
            ask.landing = Landing(way.rung, " ".join(dict.fromkeys(notes)), first.public_code)
            error = await walk.attempt(way, steps)
            if error is None:
                return
            if walk.told or isinstance(error, ClientGone | Superseded):
                raise error
            walk.note(way, failed_part(error) or "engine", error)
        if callers_own:
            raise first
        raise await self._no_answer(walk, above, first, part, error)

    async def _no_answer(self, walk: _Walk, above: str, first: TidegateError, part: Part, error: TidegateError) -> NoAnswer:
        rung = self._message
        walk.step_down(above, "message", error)
        ticket = await self._ticket.give(walk.ask)
        answer = NoAnswer(
            rung.message, business_code=rung.code, status=OutputInvalid.status if part == "output" else NoAnswer.status, ticket=ticket,
            cause=first.public_code, hint=rung.hint or None, retry_after_s=walk.retry_after_s,
        )
        answer.__cause__ = first
        return answer

    def _passed_over(self, way: _Way, walk: _Walk) -> str:
        """Why this rung would fail for what failed already; empty where it may answer."""
        if not way.model:
            return ""
        if walk.house:
            return "Tidegate itself failed"
        if way.model in walk.models:
            return f"it asks {way.model!r} too"
        if way.rung == "no_retrieval" and not walk.retrieval and not (walk.context and walk.ask.passages):
            return "documents were not what failed"
        if walk.retrieval and self._retrieves and not self._drops:
            return "it searches documents too"
        return ""

    def _steps(self, way: _Way, walk: _Walk) -> tuple[Sequence[Step], list[str]]:
        """Its stages, and what its answer says of itself."""
        ask = walk.ask
        if not way.model:
            walk.forget_passages()
            return way.steps, [way.note]
        if way.rung == "no_retrieval" or (walk.retrieval and self._retrieves):
            walk.forget_passages()
            return way.left_out, [self._drops, way.note]
        return (way.found if ask.flight.index_version else way.steps), [way.note]


class _Maker:
    """From a capability's stages to those of its rungs."""

    def __init__(self, capability: Capability, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self._model = capability.manifest.model
        self._retrieve_s = capability.budgets.retrieve_s
        self._speaks = "contract" not in capability.manifest.stages  # what is JSON has no room for a sentence of ours
        self._drops = next((rung.says for rung in capability.manifest.ladder if rung.rung == "no_retrieval"), NOTES["no_retrieval"])

    def way(self, rung: str, model: str, share: float, note: str) -> _Way:
        use = [] if model == self._model else [_UseModel(model)]
        without = [stage for stage in self._stages if stage.name != "retrieve"]
        said = _Preface(self._drops) if self._speaks else None
        return _Way(
            rung, model, share, note, self._steps(self._stages, use, None), self._steps(without, use, None), self._steps(without, use, said)
        )

    def _steps(self, stages: Sequence[Stage], use: Sequence[Stage], said: _Preface | None) -> list[Step]:
        """The rung has one timer for all; only a search has its own."""
        found: list[Step] = []
        for stage in stages:
            asks = stage.name == "generate"
            found += [Step(one, None) for one in (use if stage.name in ("fit", "generate") else ())]
            found.append(Step(stage, self._retrieve_s if stage.name == "retrieve" else None))
            found += [Step(said, None)] if asks and said is not None else []
        return found


class _Walk:
    """One request on its way down: what has failed, how much time is left, whether the client was told anything."""

    def __init__(self, ask: Ask, total_s: float, enter: Enter | None) -> None:
        self.ask = ask
        self._enter = enter
        self.told = False
        self.retrieval = self.context = self.house = False
        self.models: set[str] = set()
        self.retry_after_s: float | None = None
        self._emit = ask.emit
        self._end_s = asyncio.get_running_loop().time() + total_s
        self._spent: Usage | None = None
        self._notes = dict(ask.notes) if ask.notes else None  # those of the door stay, those of a rung's stages go with it

    async def attempt(self, way: _Way, steps: Sequence[Step]) -> TidegateError | None:
        """Walk the stages of a rung within its share of the time that is left, the wait for a slot included. What they raise is given back."""
        ask, loop = self.ask, asyncio.get_running_loop()
        left_s = self._end_s - loop.time()
        try:
            async with asyncio.timeout(left_s * way.share) as scope:
                if self._emit is not None:
                    ask.emit = _Teller(self, scope, self._emit, _preface(steps))
                if way.model and self._enter is not None:
                    await self._enter(way.model)
                await run(ask, steps)
        except TimeoutError:
            if not scope.expired():  # somebody else's time-out is not ours to rename
                raise
            return DeadlineExceeded(
                f"The rung {way.rung!r} of {ask.capability} did not answer within {left_s * way.share:.1f} s.",
                hint="Raise budgets.total_s or the rung's share in capability.toml, or look at the flight to see where the time went.",
            )
        except TidegateError as error:
            return error
        except Exception:  # whatever it is, a rung below may answer, and the log has the traceback
            log.exception("unexpected error in the rung %s of %s, trace_id %s", way.rung, ask.capability, ask.flight.id)
            return TidegateError("Something went wrong inside Tidegate.", hint="Give the operator this trace_id.")
        finally:
            ask.emit = self._emit
        if self._spent is not None:
            ask.flight.usage = _sum(self._spent, ask.flight.usage)
        return None

    def told_text(self, scope: asyncio.Timeout) -> None:
        """The first text leaves: from here on this rung has all the time that is left."""
        self.told = True
        scope.reschedule(self._end_s)

    def note(self, way: _Way, part: Part, error: TidegateError) -> None:
        """What the next rungs must not rest on."""
        if part == "retrieval":
            self.retrieval = True
        elif part == "house":
            self.house = True
        elif part == "context" and self.ask.passages:
            self.context = True
        elif way.model:
            self.models.add(way.model)
        if self.retry_after_s is None:
            self.retry_after_s = error.retry_after_s

    def step_down(self, above: str, to: str, error: TidegateError) -> None:
        """From one rung to the next: the flight says so, and nothing is left of what was not told."""
        ask, flight = self.ask, self.ask.flight
        flight.lap("ladder")
        flight.decide("stepped_down", rung=above, to=to, cause=error.public_code[:64])
        if flight.usage.total_tokens:  # tokens that nobody saw were made all the same
            self._spent = flight.usage if self._spent is None else _sum(self._spent, flight.usage)
        _forget(ask, flight)
        ask.notes = dict(self._notes) if self._notes else None
        if self._spent is not None:
            flight.usage = self._spent

    def forget_passages(self) -> None:
        """The next answer does not rest on documents."""
        self.ask.passages = []
        self.ask.flight.passage_ids = []
        self.ask.flight.index_version = ""


def _forget(ask: Ask, flight: Flight) -> None:
    ask.text.clear()
    ask.call = ask.whole = ask.answer = ask.running = None
    flight.token_ns.clear()
    flight.first_token_ns = 0
    flight.model = flight.engine = ""
    flight.usage, flight.end = Flight.usage, Flight.end


def _sum(one: Usage, other: Usage) -> Usage:
    exact = one.exact and (other.exact or not other.total_tokens)
    return Usage(
        one.prompt_tokens + other.prompt_tokens, one.completion_tokens + other.completion_tokens, one.cached_tokens + other.cached_tokens, exact,
        one.reasoning_tokens + other.reasoning_tokens,
    )


def _preface(steps: Sequence[Step]) -> str:
    return next((step.stage.note for step in steps if isinstance(step.stage, _Preface)), "")


class _Teller:
    """Between a rung and the client: notices the first text, and lets the rung's own sentence leave before it."""

    __slots__ = ("_emit", "_note", "_scope", "_walk")

    def __init__(self, walk: _Walk, scope: asyncio.Timeout, emit: Emit, note: str) -> None:
        self._walk = walk
        self._scope = scope
        self._emit = emit
        self._note = note

    def __call__(self, batch: list[Chunk]) -> Awaitable[None] | None:
        if not self._walk.told and any(chunk.text and chunk.kind == "text" for chunk in batch):
            self._walk.told_text(self._scope)
            if self._note:
                batch = [Chunk(time.perf_counter_ns(), "text", self._note), *batch]
        return self._emit(batch)


class _UseModel:
    """Has another model answer the call."""

    name = "use_model"

    def __init__(self, model: str) -> None:
        self._model = model

    async def __call__(self, ask: Ask) -> None:
        assert ask.call is not None, "a stage before `generate` makes the call"
        ask.call.model = self._model


class _Preface:
    """Puts a sentence before the answer's text; where it is streamed, `_Teller` has told it already."""

    name = "preface"

    def __init__(self, note: str) -> None:
        self.note = note.strip() + "\n\n"

    async def __call__(self, ask: Ask) -> None:
        ask.text.insert(0, self.note)
