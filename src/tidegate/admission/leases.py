"""A limit that several machines share: each leases units and slots from one store, and spends them without asking.

What is leased was taken from the common bucket already, so all machines together never pass a limit, whatever gets lost: units of a machine
that dies, or of an answer that does not arrive, are missing until the bucket has refilled. A machine leases what it spent lately, twice, and at
most a tenth of a limit; near the end the store hands out less and less, down to single units. What lies idle for `IDLE_S` goes back. Slots
for runs are leased for `SLOTS_S` and renewed every `BEAT_S`; those of a machine that dies are free again after that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from tidegate.admission.book import (
    ASKED,
    BEAT,
    DRY,
    FRESH,
    LEFT,
    LOW,
    MOST_DEBT,
    READY,
    SECOND,
    SLOTS,
    SLOTS_DRY,
    SLOTS_UNTIL,
    TOUCHED,
    USED,
    WHO,
    Book,
)
from tidegate.admission.plan import PERIODS_S, Plan, Subject
from tidegate.core.errors import LimitsDown, StoreDown
from tidegate.core.ports import LeaseAnswer, LeaseAsk, LeaseStore, RateAsk

log = logging.getLogger(__name__)

BEAT_S = 1.0
IDLE_S = 5.0
SLOTS_S = 10.0
#: Seconds after an answer "no more" during which nobody asks again: units may come back before they are due.
_SHORTEST_DRY_S = 0.1
_LONGEST_DRY_S = 1.0
#: A first lease: enough not to ask again at once, too little to be missed elsewhere.
_FIRST = 16


class _Need:
    """What is waited for, of one subject: by kind, the least that is of use, and all together; and slots."""

    __slots__ = ("all", "least", "slots")

    def __init__(self) -> None:
        self.least = [0, 0, 0]
        self.all = [0, 0, 0]
        self.slots = 0


class Leases:
    """This process's way to the store."""

    def __init__(self, store: LeaseStore, when_lost: Literal["share", "refuse", "pass"], machines: int) -> None:
        self._store = store
        self._when_lost = when_lost
        self._machines = machines
        self.up = True
        self._why = ""
        self._lost_ns = 0
        self._book = Book(0)
        self._now: Callable[[], int] = lambda: 0
        #: By where their records are: whom this process drew for, and its digest.
        self._subjects: dict[int, tuple[int, Subject]] = {}
        self._known: dict[tuple[int, int], int] = {}  # what the store had left, by record and kind
        self._needs: dict[int, _Need] = {}  # by record
        self._next: asyncio.Future[None] | None = None
        self._asking: asyncio.Task[None] | None = None

    def attach(self, book: Book, now: Callable[[], int]) -> None:
        """`book` is where this machine counts, for all its workers."""
        self._book, self._now = book, now
        # Who has a run is not idle, also where runs are not limited: what that run's true count gives back or owes is for the store.
        book.counts_all = True

    # -- asking

    def renew_soon(self, plan: Plan) -> None:
        """Renew what is nearly spent, in the background."""
        hold_until = self._now() + SECOND
        for seat in plan.seats:
            self._book.add(seat.at, (), ((ASKED, hold_until),))
        self._want(plan, (0, 0, 0), 0)

    async def ask(self, plan: Plan, units: tuple[int, int, int]) -> None:
        """Lease what one more run of this plan needs. Returns when the store has answered, or is lost; whoever draws first has it."""
        # One who leaves must not take the answer from the others who wait for it.
        await asyncio.shield(self._want(plan, units, 1))

    def _want(self, plan: Plan, units: tuple[int, int, int], slots: int) -> asyncio.Future[None]:
        for seat, subject in zip(plan.seats, plan.subjects, strict=True):
            self._subjects[seat.at] = seat.who, subject
            need = self._needs.setdefault(seat.at, _Need())
            need.slots += slots
            for kind in range(3):
                if slots and subject.most[kind]:
                    one = min(units[kind], subject.most[kind])
                    need.least[kind] = min(need.least[kind], one) if need.all[kind] else one
                    need.all[kind] += one
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        future = self._next
        if self._asking is None:
            self._asking = asyncio.get_running_loop().create_task(self._ask_all())
        return future

    async def _ask_all(self) -> None:
        """One question after the other, each for all that has come up meanwhile."""
        future: asyncio.Future[None] | None = None
        try:
            while self._needs:
                future, self._next = self._next, None
                needs, self._needs = self._needs, {}
                await self._renew(needs)
                if future is not None and not future.done():
                    future.set_result(None)
        finally:
            self._asking = None
            for waited in (future, self._next):
                if waited is not None and not waited.done():
                    waited.set_result(None)
            self._next = None

    async def _renew(self, needs: Mapping[int, _Need], *, idle: bool = False) -> None:
        """`idle`: give everything back."""
        now = self._now()
        asked = [
            (at, self._ask_of(at, self._subjects[at][1], need, now, idle=idle)) for at, need in needs.items() if self._is_there(at)
        ]
        try:
            answers = await self._store.renew(self._book.name, SLOTS_S, [ask for _, ask in asked])
        except StoreDown as error:
            for at, ask in asked:  # a debt that may not have arrived is still owed; what was given may have arrived, and is not taken back
                owed = [(LEFT + kind, rate.give) for kind, rate in enumerate(ask.rates) if rate.give < 0]
                self._book.add(at, owed, ((ASKED, 0),))
            self._lose(error.message)
            return
        self._found()
        now = self._now()
        for (at, ask), answer in zip(asked, answers, strict=True):
            self._take(at, ask, answer, now)

    def _is_there(self, at: int) -> bool:
        """False where the record was given to another meanwhile."""
        who, _ = self._subjects.get(at, (0, None))
        return who != 0 and self._book.words[at + WHO] == who

    def _take(self, at: int, ask: LeaseAsk, answer: LeaseAnswer, now: int) -> None:
        """Write down what was leased."""
        adds, sets, short = [], [(BEAT, now)], False
        for kind, (rate, said) in enumerate(zip(ask.rates, answer.rates, strict=True)):
            if not rate.limit:
                continue
            adds.append((LEFT + kind, said.granted))
            self._known[at, kind] = said.left
            if said.granted:
                sets.append((LOW + kind, said.granted // 3))
            if said.granted < rate.need:
                dry_s = min(max(said.wait_s, _SHORTEST_DRY_S), _LONGEST_DRY_S)
                sets += [(DRY + kind, now + int(dry_s * SECOND)), (READY + kind, now + int(said.wait_s * SECOND))]
            short = short or said.granted < rate.want
        if ask.most:
            sets += [(SLOTS, answer.slots), (SLOTS_UNTIL, now + int(SLOTS_S * SECOND))]
            if answer.slots < ask.slots:
                sets.append((SLOTS_DRY, now + int(_SHORTEST_DRY_S * SECOND)))
        sets.append((ASKED, now + int(_SHORTEST_DRY_S * SECOND) if short else 0))
        self._book.add(at, adds, sets)
        self._book.add(at, (), [(FRESH + kind, self._book.words[at + LEFT + kind]) for kind in range(3)])

    def _ask_of(self, at: int, subject: Subject, need: _Need, now: int, *, idle: bool) -> LeaseAsk:
        words = self._book.words
        wanted = [0, 0, 0]
        for kind, limit in enumerate(subject.most[:3]):
            if limit and not idle:
                spent = words[at + FRESH + kind] - words[at + LEFT + kind]
                usual = min(max(2 * spent, min(_FIRST, limit // 50) * max(1, need.least[kind])), max(1, limit // 10))
                wanted[kind] = max(usual, need.all[kind])
        # Debts are paid, and more than is wanted goes back. It is off our book before it is on its way.
        calm = idle or now - words[at + TOUCHED] > SECOND
        given = self._book.give(at, [2 * units if calm else MOST_DEBT for units in wanted])
        rates = []
        for kind, limit in enumerate(subject.most[:3]):
            left = max(0, words[at + LEFT + kind])
            rates.append(RateAsk(
                limit, PERIODS_S[kind], max(0, need.least[kind] - left), max(0, need.all[kind] - left), max(0, wanted[kind] - left), given[kind]
            ))
        most, used = subject.most[3], words[at + USED]
        slots = min(most, used + need.slots + (0 if idle else used // 4 + 1)) if most else 0
        return LeaseAsk(f"{words[at + WHO]:x}", rates, most, used, slots)

    # -- keeping

    async def keep(self) -> None:
        """Look whether the store is there, also again when it was lost, renew slots, and give back what lies idle. Until cancelled."""
        while True:
            try:
                await self._store.renew(self._book.name, SLOTS_S, [])
                self._found()
                await self._beat()
            except StoreDown as error:
                self._lose(error.message)
            await asyncio.sleep(BEAT_S)

    async def _beat(self) -> None:
        words, now = self._book.words, self._now()
        fresh: dict[int, _Need] = {}
        idle: dict[int, _Need] = {}
        for at, (_, subject) in list(self._subjects.items()):
            if not self._is_there(at):
                del self._subjects[at]
                continue
            since = now - words[at + TOUCHED]
            leased = words[at + SLOTS] or any(words[at + LEFT + kind] for kind in range(3))
            if since > IDLE_S * SECOND and not words[at + USED]:
                if leased:
                    idle[at] = _Need()
                else:
                    del self._subjects[at]
            elif now - words[at + BEAT] > BEAT_S * SECOND / 2 and (subject.most[3] or any(words[at + LEFT + kind] < 0 for kind in range(3))):
                fresh[at] = _Need()
        if fresh:
            await self._renew(fresh)
        if idle:
            await self._renew(idle, idle=True)

    async def close(self) -> None:
        """Before the end."""
        await self.give_back()
        await self._store.close()

    async def give_back(self) -> None:
        """What is leased and not spent goes back, as far as the store can be reached."""
        if self._asking is not None:
            await asyncio.gather(self._asking, return_exceptions=True)
        if self.up and self._subjects:
            await self._renew({at: _Need() for at in self._subjects}, idle=True)

    # -- losing

    def pass_through(self) -> bool:
        """What `when_lost` says for a request that cannot be counted with the others: True to let it pass. Raises LimitsDown."""
        if self._when_lost == "refuse":
            raise LimitsDown(
                f"The limits that all machines share cannot be reached: {self._why}", hint="Try again shortly; see /health.", retry_after_s=1.0
            )
        return self._when_lost == "pass"

    def _lose(self, why: str) -> None:
        self._why = why
        if self.up:
            self.up = False
            self._lost_ns = time.perf_counter_ns()
            log.warning("limits are no longer shared by all machines (%s): %s", why.rstrip("."), _MEANS[self._when_lost])

    def _found(self) -> None:
        if not self.up:
            self.up = True
            log.warning("limits are shared by all machines again, after %.1f s", (time.perf_counter_ns() - self._lost_ns) / 1e9)

    def left(self, at: int, kind: int, limit: int) -> int:
        """Units that are left, as far as this machine knows."""
        return max(0, min(limit, self._book.words[at + LEFT + kind] + self._known.get((at, kind), 0)))

    def figures(self) -> dict[str, Any]:
        """For /health."""
        told: dict[str, Any] = {"shared": self.up, "machines": self._machines, "when_lost": self._when_lost}
        if not self.up:
            told |= {"why": self._why, "lost_s": round((time.perf_counter_ns() - self._lost_ns) / 1e9, 1), "means": _MEANS[self._when_lost]}
        return told


_MEANS = {
    "share": "this machine uses its own share of every limit",
    "refuse": "what is limited is refused with 503",
    "pass": "everything passes, and is not counted",
}
