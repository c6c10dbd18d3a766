"""POST /api/v1/GROUP/NAME: business fields in, business fields out, as JSON or streamed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from tidegate.admission.gate import FREE, Place
from tidegate.admission.limits import Limits
from tidegate.api.errors import RUNG
from tidegate.api.exchange import Exchange, Header, asking
from tidegate.api.fields import decode_object
from tidegate.api.leave import resume, resumes
from tidegate.api.openai import settle
from tidegate.api.waiting import admitted, enter, leave, turn
from tidegate.core.ask import Ask, Landing, Passage
from tidegate.core.chunk import Chunk, Usage
from tidegate.core.errors import Busy
from tidegate.core.ports import Stage
from tidegate.pipeline.capability import Capability
from tidegate.pipeline.entrance import Entrance
from tidegate.pipeline.ladder import Ladder
from tidegate.pipeline.rungs import FULL
from tidegate.pipeline.runner import Step, run
from tidegate.pipeline.stages.generate import text_of


class CapabilityRoute:
    """One capability. Streams where the caller accepts `text/event-stream`: events `rung` (below the full
    answer), `passages`, `token`, `answer`, `error`."""

    def __init__(
        self, capability: Capability, stages: Sequence[Stage], limits: Limits, ladder: Ladder | None = None, entrance: Entrance | None = None
    ) -> None:
        """`ladder`: the rungs below the full answer, where the capability has any; `entrance`: the door, where there is one."""
        self._entrance = entrance if entrance is not None and not entrance.open else None
        self._capability = capability
        self._ladder = ladder
        self._limits = limits
        self._asks = any(stage.name == "generate" for stage in stages)
        self._leave = capability.manifest.leave
        budgets = capability.budgets
        self._steps = [Step(stage, budgets.retrieve_s if stage.name == "retrieve" else budgets.total_s) for stage in stages]

    async def __call__(self, exchange: Exchange) -> None:
        exchange.need_post()
        exchange.flight.capability = self._capability.path
        caller = await asking(exchange)
        body = await exchange.body()
        if (at := resumes(exchange)) is not None:
            await resume(exchange, caller, at, body)
            return
        ask = exchange.new_ask(caller)
        ask.capability = self._capability.path
        try:
            ask.input = decode_object(body)
            if self._entrance is not None:
                self._entrance.admit(ask, "", ask.input)
            self._capability.check_input(ask.input)
        finally:  # a body that is refused took its time too
            ask.flight.lap("parse")
        manifest = self._capability.manifest
        ticket = self._limits.admit(caller, len(body) // 4, manifest.generate.max_tokens, manifest.model, self._capability.path)
        if ticket.waits:
            ticket = await ticket.leased()
        ask.flight.lap("limits")
        ask.stream = ask.flight.stream = _accepts_events(exchange)
        held, busy = Held(), None
        try:
            try:
                held.place = self._enter(exchange, ask, body, manifest.model)
            except Busy as error:
                busy = self._unless_ladder(error)
            admission = admitted(ticket, held.place)
            exchange.watch()
            if (cutting := exchange.converse(barge_in=self._capability.manifest.generate.barge_in)) is not None:
                await cutting
            if ask.stream:
                ask.shows_usage = "always" if _wants_usage(exchange) else "last"
                exchange.opening = admission.headers
                exchange.stay(self._leave.policy, self._leave.tokens)
                events = Events(exchange, ask, self._rung)
                ask.emit = events.emit
                await self._run(exchange, ask, body, held, busy)
                await events.end(self._answer(ask))
            else:
                await self._run(exchange, ask, body, held, busy)
                await exchange.json(200, msgspec.json.encode(self._answer(ask)), [*admission.headers(), *self._rung(ask)])
        finally:
            settle(ticket, exchange)
            leave(held.place, ask.flight)

    def _enter(self, exchange: Exchange, ask: Ask, body: bytes, model: str) -> Place:
        """What asks no model waits for none. Where a lower rung may answer, only a slot in time for the first token is waited for."""
        if not self._asks:
            return FREE
        within_s = self._capability.budgets.first_token_s if self._ladder is not None else 0.0
        return enter(exchange.house.gate, ask, model, len(body) // 4, self._capability.manifest.generate.max_tokens, within_s)

    def _unless_ladder(self, busy: Busy) -> Busy:
        """Where a lower rung may answer at once, nobody is sent away."""
        if self._ladder is None:
            raise busy
        return busy

    async def _run(self, exchange: Exchange, ask: Ask, body: bytes, held: Held, busy: Busy | None) -> None:
        if self._ladder is None:
            if held.place.waits:
                await turn(held.place, ask.flight)
            await run(ask, self._steps)
            return
        held.model = self._capability.manifest.model

        async def slot(model: str) -> None:
            """Wait for one of this model, in place of one of another."""
            if model != held.model:
                leave(held.place, ask.flight)
                held.place, held.model = FREE, model
                held.place = self._enter(exchange, ask, body, model)
            if held.place.waits:
                await turn(held.place, ask.flight, self._capability.budgets.first_token_s)

        await self._ladder.walk(ask, busy, slot)

    def _rung(self, ask: Ask) -> list[Header]:
        """The header that names the rung, where there is a ladder."""
        return [] if self._ladder is None else [(RUNG, (ask.landing.rung if ask.landing is not None else FULL).encode())]

    def _answer(self, ask: Ask) -> dict[str, Any]:
        return {
            **(ask.answer if ask.answer is not None else {"answer": "".join(ask.text)}),
            **({"ticket": ask.ticket} if ask.ticket else {}),
            **({"ladder": _landing(ask.landing)} if ask.landing is not None else {}),
            **(ask.notes or {}),
            "trace_id": ask.flight.id,
            "capability_sha256": self._capability.sha256,
            "index_version": ask.flight.index_version or None,
            "usage": _usage(ask.flight.usage),
        }


class Held:
    """The place that a request has at the gate, and for which model: a rung that asks another one has another place."""

    __slots__ = ("model", "place")

    def __init__(self) -> None:
        self.place = FREE
        self.model = ""


class Events:
    """The event stream of a capability. The rung and the passages go out with the first token, the checked answer last."""

    def __init__(self, exchange: Exchange, ask: Ask, rung: Callable[[Ask], list[Header]]) -> None:
        """`rung` makes the header that names the rung: which one it is, the first event knows."""
        self._exchange = exchange
        self._ask = ask
        self._rung = rung
        self._begun = False
        self._counts = ask.shows_usage == "always"

    def emit(self, batch: list[Chunk]) -> Awaitable[None] | None:
        text = text_of(batch)
        if not text:
            return None
        said: dict[str, Any] = {"text": text}
        if self._counts and self._ask.running is not None:
            said["usage"] = _usage(batch[-1].usage or self._ask.running.usage)
        token = event("token", said)
        return self._exchange.write(token) if self._begun else self._begin(token)

    async def end(self, answer: dict[str, Any]) -> None:
        last = event("answer", answer)
        if not self._begun and (rest := self._begin(b"")):
            await rest
        await self._exchange.end_stream(last)

    def _begin(self, token: bytes) -> Awaitable[None] | None:
        self._begun = True
        landing = self._ask.landing
        piece = (event("rung", _landing(landing)) if landing is not None else b"") + self._passages() + token
        return self._exchange.write(piece) if self._exchange.started else self._exchange.start_stream(piece, self._rung(self._ask))

    def _passages(self) -> bytes:
        if not self._ask.passages:
            return b""
        return event("passages", {"passages": [_shown(n, passage) for n, passage in enumerate(self._ask.passages, 1)]})


def _landing(landing: Landing) -> dict[str, str]:
    return {"rung": landing.rung, "note": landing.note, "cause": landing.cause}


def _shown(n: int, passage: Passage) -> dict[str, Any]:
    return {
        "n": n, "id": passage.id, "document": passage.document, "title": passage.title, "page": passage.page, "boxes": passage.boxes,
        "text": passage.text, "score": round(passage.score, 4),
    }


def event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens, "total_tokens": usage.total_tokens,
        "exact": usage.exact,
    }


def _wants_usage(exchange: Exchange) -> bool:
    """Business fields have no place for it: a header asks."""
    return exchange.headers.get(b"x-tidegate-continuous-usage") == b"1"


def _accepts_events(exchange: Exchange) -> bool:
    return b"text/event-stream" in exchange.headers.get(b"accept", b"")
