"""May this caller at all: requests, tokens, money and runs at a time, by key, tenant and capability.

A run is reserved by an estimate and settled with the true count when it ends, so a bucket may owe for a moment and is then full again before
anybody passes. What never ran is given back. Everything is counted in a book (book.py): of this process, of all workers of this machine
(shared.py), and with leases (leases.py) of all machines.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from tidegate.admission.book import MONEY, NONE, REQUESTS, SECOND, TOKENS, Book, Full, Moved, Row, Seat, Short, Units, Unleased, Way
from tidegate.admission.leases import Leases
from tidegate.admission.plan import Plan, Subject, anything_is_limited, subjects
from tidegate.admission.prices import MOST_TOKENS, PARTS, Prices
from tidegate.admission.settings import LimitSettings
from tidegate.core.ask import Caller
from tidegate.core.chunk import Usage
from tidegate.core.errors import LimitsDown, RateLimited

log = logging.getLogger(__name__)

Header = tuple[bytes, bytes]
_NAMES = tuple(
    (kind, b"x-ratelimit-limit-" + name, b"x-ratelimit-remaining-" + name) for kind, name in ((REQUESTS, b"requests"), (TOKENS, b"tokens"))
)


class Ticket:
    """Leave to run. Exactly one of `settle`, `book` and `refund` takes effect, the first one called."""

    __slots__ = ("_entry", "_limits", "_plan", "_reserved", "_way")

    #: True for a ticket that has to be waited for: `ticket = await ticket.leased()`.
    waits: ClassVar[bool] = False

    def __init__(self, limits: Limits, plan: Plan, way: Way, reserved: Units, entry: int) -> None:
        self._limits: Limits | None = limits
        self._plan = plan
        self._way = way
        self._reserved = reserved
        self._entry = entry

    def leased(self) -> Awaitable[Ticket]:
        """Only of a ticket that waits."""
        raise AssertionError("this ticket does not wait")

    def settle(self, used_tokens: int) -> None:
        """Book the true count instead of the estimate; of money, what was reserved."""
        limits = self._limits
        if limits is not None:
            self._limits = None
            limits.settle(self._way, self._reserved, (1, used_tokens if used_tokens > 0 else 0, 0), self._entry)

    def book(self, usage: Usage, model: str = "") -> None:
        """Book what an engine counted, at the price of `model`."""
        self.settle(min(usage.prompt_tokens + usage.completion_tokens, MOST_TOKENS))

    def refund(self) -> None:
        """Nothing ran: give back the request, its tokens and its money."""
        limits = self._limits
        if limits is not None:
            self._limits = None
            limits.settle(self._way, self._reserved, NONE, self._entry)

    def headers(self) -> tuple[Header, ...]:
        """OpenAI's `x-ratelimit-*` headers, for the limits that are set; where there are several, of the one that is nearest."""
        return self._limits.headers(self._plan) if self._limits is not None else ()


class _Dear(Ticket):
    """Of a run whose money or time is counted."""

    __slots__ = ("_began", "_priced")

    def __init__(self, limits: Limits, plan: Plan, way: Way, reserved: Units, entry: int, began: int) -> None:
        super().__init__(limits, plan, way, reserved, entry)
        self._priced = plan.money
        self._began = began

    def settle(self, used_tokens: int) -> None:
        """See Ticket."""
        self._end((1, max(0, used_tokens), self._reserved[MONEY]))

    def book(self, usage: Usage, model: str = "") -> None:
        """See Ticket."""
        money = self._limits.prices.of(model).of_usage(usage) if self._priced and self._limits is not None else 0
        self._end((1, min(max(0, usage.prompt_tokens + usage.completion_tokens), MOST_TOKENS), money))

    def refund(self) -> None:
        """See Ticket."""
        self._end(NONE)

    def _end(self, used: Units) -> None:
        limits = self._limits
        if limits is not None:
            self._limits = None
            limits.settle(self._way, self._reserved, used, self._entry)
            limits.held(self._began)


class _Free(Ticket):
    """Of a caller without limits."""

    __slots__ = ()

    def __init__(self) -> None:
        pass

    def settle(self, used_tokens: int) -> None:
        pass

    def book(self, usage: Usage, model: str = "") -> None:
        pass

    def refund(self) -> None:
        pass

    def headers(self) -> tuple[Header, ...]:
        return ()


class _Waiting(_Free):
    """A ticket that has to be leased first."""

    __slots__ = ("_lease",)
    waits: ClassVar[bool] = True

    def __init__(self, lease: Callable[[], Awaitable[Ticket]]) -> None:
        self._lease = lease

    def leased(self) -> Awaitable[Ticket]:
        """Ask the store that all machines share. Raises as `admit` does."""
        return self._lease()


_FREE = _Free()


class Limits:
    """The door's first question. Everything runs on the event loop's thread."""

    def __init__(
        self, settings: LimitSettings | None = None, *, prices: Prices | None = None, book: Book | None = None, leases: Leases | None = None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._settings = settings or LimitSettings()
        self.prices = prices or Prices()
        self._leases = leases
        self._unlimited = not anything_is_limited(self._settings)
        self.book = book or Book(self._settings.most_subjects)
        self.take, self.settle = self.book.take, self.book.settle
        self._clock_ns = clock_ns
        self._last = 0
        self._machines = self._settings.machines if leases is not None else 1
        #: A model without a price: money that a key of its own accord is limited in cannot be counted then.
        self.unpriced = ""
        #: By key id, or by key id and capability; forgotten all at once where there are too many.
        self._plans: dict[str | tuple[str, str], Plan] = {}
        self.book.on_move = self._plans.clear
        self._full_until = 0
        #: How long a run takes, in nanoseconds: a moving mean, for those who wait for one to end.
        self._hold = SECOND
        if leases is not None:
            leases.attach(self.book, self.now)

    def now(self) -> int:
        """The instant in nanoseconds. A clock that falls back goes on from where it was: nobody is locked out until it has caught up."""
        now = self._clock_ns()
        if now < self._last:
            clock_ns, behind = self._clock_ns, self._last - now
            self._clock_ns = lambda: clock_ns() + behind
            return self._last
        self._last = now
        return now

    def admit(self, caller: Caller, prompt_tokens: int, answer_tokens: int = 0, model: str = "", capability: str = "") -> Ticket:
        """Reserve one run with an estimate of its tokens. A ticket that `waits` has to be waited for.

        Raises RateLimited with the time after which this very request would pass, and LimitsDown where what is shared cannot be reached and
        `limits.when_lost` is `refuse`.
        """
        if self._unlimited and not caller.limited:
            return _FREE
        plan = self._plans.get(caller.key_id if not capability else (caller.key_id, capability))
        if plan is None or plan.caller is not caller:
            plan = self._plan(caller, capability)
        # What a caller says it will need is a claim: less than nothing would be a gift.
        tokens = prompt_tokens + answer_tokens
        units = (1, tokens if tokens > 0 else 0, 0)
        now = self._clock_ns()
        if now < self._last:
            now = self.now()
        self._last = now
        if plan.quick:
            try:
                return Ticket(self, plan, plan.whole, units, self.take(plan.whole, units, now))
            except Short as short:
                raise self._refused(plan, plan.whole, short) from None
            except Moved:
                pass
        if not plan.subjects:
            return _FREE
        if plan.money:
            units = (1, units[1], self.prices.of(model).of(prompt_tokens, answer_tokens))
        if self._leases is not None:
            return self._admit_leased(self._leases, plan, units, now)
        return self._take(plan, plan.whole, units, now)

    def _take(self, plan: Plan, way: Way, units: Units, now: int) -> Ticket:
        while True:
            try:
                entry = self.take(way, units, now)
                break
            except Short as short:
                raise self._refused(plan, way, short) from None
            except Moved:  # the record of one of them was idle for long, and is another's now
                shares = way is plan.share
                plan = self._plan(plan.caller, plan.capability, anew=True)
                way = plan.share if shares else plan.whole
        if plan.money or plan.seated:
            return _Dear(self, plan, way, units, entry, now)
        return Ticket(self, plan, way, units, entry)

    def _admit_leased(self, leases: Leases, plan: Plan, units: Units, now: int) -> Ticket:
        if not leases.up:
            self.book.fell_back()
            return _FREE if leases.pass_through() else self._take(plan, plan.share, units, now)
        try:
            entry, due = self.book.draw(plan.leased, units, now)
        except Short as short:
            raise self._refused(plan, plan.leased, short) from None
        except Unleased:
            return _Waiting(lambda: self._lease(leases, plan, units))
        except Moved:
            return self._admit_leased(leases, self._plan(plan.caller, plan.capability, anew=True), units, now)
        if due:
            leases.renew_soon(plan)
        if plan.money or plan.seated:
            return _Dear(self, plan, plan.leased, units, entry, now)
        return Ticket(self, plan, plan.leased, units, entry)

    async def _lease(self, leases: Leases, plan: Plan, units: Units) -> Ticket:
        """Others wait for units too, and may be quicker: so more than one try."""
        for _ in range(4):
            await leases.ask(plan, units)
            ticket = self._admit_leased(leases, plan, units, self.now())
            if not ticket.waits:
                return ticket
        raise self._refused(plan, plan.leased, Short(0 if plan.leased[1] else -1, SECOND))

    def held(self, began: int) -> None:
        """A run that began then is over."""
        self._hold += (self.now() - began - self._hold) // 16

    def headers(self, plan: Plan) -> tuple[Header, ...]:
        """See Ticket."""
        words, now = self.book.words, self.now()
        leases = self._leases
        found: list[Header] = []
        for kind, limit_name, left_name in _NAMES:
            nearest: tuple[int, int] | None = None
            for word, of, price, _, _, at, limit in plan.whole[1]:
                if of == kind:
                    if leases is not None:
                        left = leases.left(at, kind, limit)
                    else:
                        full_since = now - words[word]
                        left = limit if full_since >= 0 else limit + full_since // price
                        left = left if left > 0 else 0
                    if nearest is None or left < nearest[0]:
                        nearest = left, limit
            if nearest is not None:
                found += ((limit_name, b"%d" % nearest[1]), (left_name, b"%d" % nearest[0]))
        return tuple(found)

    @property
    def shared(self) -> bool | None:
        """Whether all machines count together at this moment; None where they are not to."""
        return None if self._leases is None else self._leases.up

    async def keep(self) -> None:
        """What has to be done all the time. Until cancelled."""
        if self._leases is not None:
            await self._leases.keep()

    async def close(self) -> None:
        """Before the end, once nothing runs any more: what this machine has leased goes back."""
        if self._leases is not None:
            await self._leases.close()

    def figures(self) -> dict[str, Any]:
        """For /health: what the limits are counted over, and whether that can be reached."""
        told: dict[str, Any] = {"subjects": self.book.count(), "most_subjects": self._settings.most_subjects}
        return told if self._leases is None else told | self._leases.figures()

    # -- plans

    def _plan(self, caller: Caller, capability: str, *, anew: bool = False) -> Plan:
        """Raises RateLimited where the book is full."""
        key = caller.key_id if not capability else (caller.key_id, capability)
        plan = self._plans.get(key)
        if plan is not None and not anew and plan.caller == caller:  # keys were read anew, and this one is as it was
            plan.caller = caller
            return plan
        found = subjects(self._settings, caller, capability)
        if len(self._plans) >= self._settings.most_subjects:
            self._plans.clear()
        try:
            plan = Plan(caller, capability, found, self.book, self._machines, self.now())
        except Full:
            if self.now() > self._full_until:
                self._full_until = self.now() + 60 * SECOND
                log.warning("more than %d keys, tenants and capabilities are in use: raise limits.most_subjects", self._settings.most_subjects)
            raise RateLimited(
                "More keys are in use at this moment than are counted.", hint="Try again in a minute; the operator raises limits.most_subjects.",
                retry_after_s=60.0,
            ) from None
        if plan.money and self.unpriced:
            raise LimitsDown(
                f"Money is limited for this key, but {self.unpriced!r} has no price: what it uses cannot be counted.",
                hint=f'The operator adds [prices."{self.unpriced}"], 0 where it costs nothing, or takes the limit from the key.',
            )
        plan.quick = bool(found) and self._leases is None and not plan.money and not plan.seated
        self._plans[key] = plan
        return plan

    def _refused(self, plan: Plan, way: Way, short: Short) -> RateLimited:
        if short.row < 0:
            seat = Seat(*way[0][-1 - short.row])
            return _limited(plan.subject_at(seat.at), f"{seat.most} requests at a time", max(1.0, self._hold / SECOND / seat.most))
        row = Row(*way[1][short.row])
        limit = row.limit / (self._machines if way is plan.share else 1)
        if row.kind == MONEY:
            said = f"{limit / PARTS:.8g} {self.prices.currency} per day"
        else:
            said = f"{limit:.10g} {'requests' if row.kind == REQUESTS else 'tokens'} per minute"
        return _limited(plan.subject_at(row.at), said, short.wait / SECOND)


def _limited(whose: Subject, limit: str, wait_s: float) -> RateLimited:
    return RateLimited(
        f"The limit of {whose} is used up: {limit}.",
        hint=f"Try again in {wait_s:.1f} s, or ask the operator for a higher limit.",
        retry_after_s=wait_s,
    )
