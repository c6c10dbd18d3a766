"""Waiting for a slot: a request enters the gate before anything runs for it, waits for its turn, and leaves whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from tidegate.admission.gate import FREE, Gate, Place
from tidegate.admission.limits import Ticket
from tidegate.api.client import Header
from tidegate.core.ask import Ask
from tidegate.core.errors import Busy, TidegateError
from tidegate.core.flight import Flight

#: Seconds between two looks at the forecast of a request that need not wait.
LOOK_S = 0.25
#: Tells how long a request waited for a slot, in milliseconds; only where it waited.
QUEUE = b"x-tidegate-queue-ms"


def enter(gate: Gate | None, ask: Ask, model: str, prompt_tokens: int, answer_tokens: int, within_s: float = 0.0) -> Place:
    """A place that runs, or waits (see `turn`). `answer_tokens`: the most that were asked for, 0 where that was not said; `within_s`: the longest
    wait that is of use, 0 for the gate's own bound.

    Raises Busy, DeadlineExceeded.
    """
    if gate is None:
        return FREE
    try:
        place = gate.enter(
            model, ask.caller, prompt_tokens=prompt_tokens, answer_tokens=answer_tokens, capability=ask.capability,
            request=ask.flight.request_sha256, deadline_ns=ask.deadline.at_ns, within_ns=int(within_s * 1e9), tells=ask.stream,
        )
    except TidegateError as error:
        _note_refusal(ask.flight, error)
        raise
    if place.tells:
        ask.on_first_token = place.first_token
    return place


async def turn(place: Place, flight: Flight, within_s: float = 0.0) -> None:
    """Wait until the place has its slot. `within_s`: who waits has something better to do than to wait longer than this, and goes as soon as the
    forecast says so; 0: waits. Raises Busy then, and where shorter requests put it beyond the bound; DeadlineExceeded where its time passed."""
    if place.waits:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place.on_turn = partial(_wake, woken)
        try:
            while within_s and not woken.done():
                if place.outlook_ns() > within_s * 1e9:
                    place.leave()
                    raise _in_vain(flight, within_s)
                await asyncio.wait((woken,), timeout=LOOK_S)
            await woken
        finally:  # also where the client left, or the deadline came
            flight.lap("queue")
    if place.error is not None:
        _note_refusal(flight, place.error)
        raise place.error
    flight.decide(
        "queued", waited_s=round(place.waited_ns / 1e9, 6), forecast_s=round(place.forecast_ns / 1e9, 6), ahead=place.ahead,
        tenant_class=place.flow.key[0], **({"booked": True} if place.booked else {}),
    )


def leave(place: Place, flight: Flight) -> None:
    """The request is over: its slot, or its place in the queue, is the next one's. To be called when its usage is booked."""
    if place.counts:
        usage, seen = flight.usage, len(flight.token_ns)
        place.leave(usage.total_tokens or seen, usage.completion_tokens if usage.total_tokens else seen)


class Admission(Protocol):
    """What makes the headers of an answer that tell of its admission: a ticket, or one with a place."""

    def headers(self) -> Sequence[Header]: ...


class Admitted:
    """A ticket, and the place that was waited for."""

    __slots__ = ("_place", "_ticket")

    def __init__(self, ticket: Ticket, place: Place) -> None:
        self._ticket = ticket
        self._place = place

    def headers(self) -> Sequence[Header]:
        """The limits, and the time in the queue where the request waited."""
        place = self._place
        waited_ns = 0 if place.waits else place.waited_ns
        return (*self._ticket.headers(), (QUEUE, b"%d" % (waited_ns // 1_000_000))) if waited_ns else self._ticket.headers()


def admitted(ticket: Ticket, place: Place) -> Admission:
    """Where nothing bounds the model the ticket says all."""
    return Admitted(ticket, place) if place.counts else ticket


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():  # else the request is on its way out already
        woken.set_result(None)


def _in_vain(flight: Flight, within_s: float) -> Busy:
    error = Busy(
        f"No slot is free within {within_s:g} s.", hint="Try again later, or raise budgets.first_token_s in capability.toml or tidegate.toml."
    )
    _note_refusal(flight, error)
    return error


def _note_refusal(flight: Flight, error: TidegateError) -> None:
    seconds = error.retry_after_s
    flight.decide("not_queued", code=error.public_code, **({} if seconds is None else {"retry_after_s": round(seconds, 3)}))
