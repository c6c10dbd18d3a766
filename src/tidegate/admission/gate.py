"""When a request may pass: at once where a slot is free, after a wait that was forecast, or later at a booked instant.

A lane stands before the slots of one model (or of several on the same engines). `enter` gives a place that runs or waits, or raises. Whoever has a
place leaves it exactly once, whatever happened; that frees the slot, or the place in the queue, and gives it to the next.

Everything is decided here and in the files that this one calls, in one thread, by the clock that is handed in: the simulator drives the same code in
virtual time.

    gate = Gate(settings, classes, clock_ns=clock)
    gate.open(["model"], slots=16)
    place = gate.enter("model", caller, prompt_tokens=900, answer_tokens=200)      # or Busy, DeadlineExceeded
    if place.waits:
        place.on_turn = wake         # called once: the place runs, or `place.error` says why not
    ...
    place.first_token()              # of one that entered with `tells`
    place.leave(tokens)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tidegate.admission.answers import Answers
from tidegate.admission.bookings import Bookings
from tidegate.admission.forecast import MOST_NS, ServiceTimes, bounded_ns, cost_of, first_ns, left_ns
from tidegate.admission.queue import Flow, FlowKey, Item, Queue
from tidegate.admission.settings import AdmissionSettings, ClassSettings
from tidegate.admission.speeds import Speeds
from tidegate.core.ask import Caller
from tidegate.core.errors import Busy, DeadlineExceeded, SettingsError, TidegateError

STANDARD = "standard"
#: Booked places are served by what newcomers leave of the slots, at least and at most by these shares: at the whole of it the least surprise would
#: make all later ones wait. What newcomers take is measured over about this time.
_BOOKED_LEAST, _BOOKED_MOST = 0.5, 0.9
_NEWCOMERS_NS = 30_000_000_000
#: Newcomers whose wait was over the bound make a forecast count for more, those in time for less: about one in fifteen may be late.
_LATE, _IN_TIME, _LEAST_TRUST = 0.98, 1.0012, 0.3
#: Who would have a slot within this share of the bound is near its turn.
_NEAR = 0.25
#: Places looked at, from a flow's last, for one that may be given up.
_LOOK_BACK = 8
_WAITS, _RUNS, _LEFT, _REFUSED = range(4)


class Place(Item):
    """A request's place. `forecast_ns`: the wait that was forecast; `waited_ns`: what it was; `ahead`: how many waited when it came."""

    __slots__ = (
        "_answers", "_lane", "_prompt_tokens", "_reads", "_share_ns", "_state", "_took_last", "_unread", "ahead", "booked", "deadline_ns",
        "entered_ns", "error", "forecast_ns", "on_turn", "request", "started_ns", "tells", "who",
    )

    who: str
    request: str
    _took_last: bool
    _share_ns: int
    _unread: int

    def __init__(
        self, lane: Lane, flow: Flow, answers: Answers, prompt_tokens: int, cost: float, now_ns: int, deadline_ns: int, tells: bool
    ) -> None:
        self._lane = lane
        self.flow = flow
        self._answers = answers
        self._prompt_tokens = prompt_tokens
        self.tells = tells
        self._reads = False
        self.cost = cost
        slot_ns = cost * lane.times.pace_ns
        self.slot_ns = int(slot_ns) if 1000.0 <= slot_ns < MOST_NS else bounded_ns(slot_ns)
        self.entered_ns = self.started_ns = now_ns
        self.deadline_ns = deadline_ns
        self._state = _WAITS
        self.forecast_ns = self.ahead = 0
        self.booked = False
        self.on_turn: Callable[[], None] | None = None
        self.error: TidegateError | None = None

    @property
    def waits(self) -> bool:
        """True until `on_turn` is called."""
        return self._state == _WAITS

    @property
    def counts(self) -> bool:
        """False where nothing is counted because the lane has no bound."""
        return True

    @property
    def waited_ns(self) -> int:
        """How long it waited for its slot."""
        return self.started_ns - self.entered_ns

    def first_token(self) -> None:
        """The first token of its answer is there. Only the first call of a place that `tells` and runs does something."""
        if self._reads:
            self._lane._first_token(self)

    def outlook_ns(self) -> int:
        """The whole wait of a place that waits, as it is forecast now, less the doubt."""
        return self._lane._outlook_ns(self)

    def leave(self, tokens: int = 0, answer_tokens: int | None = None) -> None:
        """The request is over, or its client left: free the slot, or the place in the queue. A second call does nothing.

        `tokens`: of prompt and answer, as they were in the end; 0 where nothing ran, whose time says nothing about slot times. `answer_tokens`: those
        of the answer; None: all but those that were told of the prompt.
        """
        state, self._state = self._state, _LEFT
        if state == _RUNS:
            self._lane._free(self, tokens, answer_tokens)
        elif state == _WAITS:
            self._lane._gone(self)


class _Free(Place):
    """The place of everybody in a lane without bound."""

    __slots__ = ()

    def __init__(self) -> None:
        self.forecast_ns = self.entered_ns = self.started_ns = self.ahead = self.slot_ns = 0
        self._state = _RUNS
        self.booked = self.tells = self._reads = False
        self.on_turn = self.error = None

    @property
    def counts(self) -> bool:
        return False

    def leave(self, tokens: int = 0, answer_tokens: int | None = None) -> None:
        """Nothing to free."""


FREE: Place = _Free()


class Lane:
    """The slots of one model, and who waits for them. `slots` 0: no bound, and nothing is counted."""

    def __init__(self, name: str, slots: int, settings: AdmissionSettings, clock_ns: Callable[[], int]) -> None:
        self.name = name
        self.slots = slots
        #: How many prompts are read at once in any case: so many engines there are.
        self.engines = 1
        self.running = 0
        self.queue = Queue()
        self.times = ServiceTimes()
        self.speeds = Speeds(clock_ns())
        self._bound_ns = int(settings.forecast_s * 1e9)
        self.bookings = Bookings(self.queue, settings.bookings, int(settings.booking_lapse_s * 1e9), self._bound_ns)
        self._most_waiting = settings.queue
        self._aging = settings.aging
        self._clock_ns = clock_ns
        self._predicted_ns, self._share_ns = 0, 0  # of all that run: their slot times, and what a share of the engines was when they began
        self._looked_ns = 0  # when places that wait were last looked at, whether they can still be served in time
        self._newcomers_ns, self._newcomers_since_ns = 0, clock_ns()  # slot time of those that began without a booking, and since when
        self._moved_ns = 0  # when the last free slot was taken last: since then nobody has left, where all are still taken
        self._full_ns = 0  # when a slot was freed last, if requests have waited since then
        #: With lending: slots of this lane that others have now, and slots that other workers claim, which are lent no more (see pool.py).
        self.lent = self.claimed = 0
        #: Told when somebody left; see Lending.
        self.on_leave: Callable[[], None] | None = None
        #: Since the start: places that ran, that waited before, that were refused, that were given up while they waited.
        self.entered = self.waited = self.refused = self.given_up = 0
        #: How far forecasts were off, as a mean over the newest, in nanoseconds.
        self.error_ns = 0.0
        self._trust = 1.0  # the part of the bound that a forecast may be: less where newcomers waited longer than that lately

    # -- in

    def enter(
        self, key: FlowKey, weight: float, who: str, prompt_tokens: int, answer_tokens: int = 0, *, sort: str = "", request: str = "",
        deadline_ns: int = 0, within_ns: int = 0, tells: bool = False,
    ) -> Place:
        """A place that runs or waits. `who`: the key for which a place is booked where this one is refused, and `request` what is the same where the
        very request comes back; `sort`: what kind it is, for how long its answers are; `answer_tokens`: the most that may be answered, 0 where that
        is not said; `deadline_ns`: by this clock, 0 for none; `within_ns`: the longest wait that is of use to this one, 0 for the lane's own bound;
        `tells`: the place will be told its first token, and its prompt counts as unread until then.

        Raises Busy where the wait would be too long, for the bound or for the deadline; DeadlineExceeded where that has passed.
        """
        if not self.slots:
            return FREE
        now_ns = self._clock_ns()
        if deadline_ns and deadline_ns <= now_ns:
            raise _too_late()
        answers = self.times.answers(sort, answer_tokens)
        answer = answers.expect(prompt_tokens)
        cost = cost_of(prompt_tokens, answer if answer < answer_tokens or answer_tokens <= 0 else answer_tokens, self.speeds.answer_cost)
        queue = self.queue
        place = Place(self, queue.flow(key, weight), answers, prompt_tokens, cost, now_ns, deadline_ns, tells)
        if self.running < self.slots and not self.bookings.count and not queue.waiting and self._may_read():
            queue.charge(place.flow, cost)
            self._start(place, now_ns)
            return place
        place.who, place.request = who, request
        return self._enter_full(place, now_ns, within_ns)

    def _enter_full(self, place: Place, now_ns: int, within_ns: int) -> Place:
        """All slots are taken, or places are booked."""
        queue, bookings, flow = self.queue, self.bookings, place.flow
        order = int(place.cost * self.times.pace_ns + self._aging * now_ns)
        if bookings.count:
            bookings.look(now_ns)
            if (booking := bookings.claim(place.who, place.request, place.cost, now_ns)) is not None:
                place.booked = True
                order = int(self._aging * min(booking.due_ns, now_ns))  # booked places among each other: by their instant
            if not queue.waiting and self.running < self.slots and self._may_read():
                queue.charge(flow, place.cost)
                self._start(place, now_ns)
                return place
        place.order = order
        place.ahead = queue.waiting
        ahead = queue.ahead(flow, order)
        first = self._first(now_ns)
        if place.booked:
            place.forecast_ns, _ = self._forecast_ns(place, ahead, first)
        else:
            bound_ns, deadline_ns = self._bound_ns, place.deadline_ns
            if 0 < within_ns < bound_ns:
                bound_ns = within_ns
            if deadline_ns and deadline_ns - now_ns < bound_ns:
                bound_ns = deadline_ns - now_ns
            most_ns = self.times.doubt * bound_ns * self._trust
            least_ns = self._wait_ns(ahead[0] + bookings.claimed * flow.soon_ns, first)  # of its own flow alone
            place.forecast_ns, with_booked_ns = (least_ns, least_ns) if least_ns > most_ns else self._forecast_ns(place, ahead, first)
            if with_booked_ns > most_ns:
                self.refused += 1
                raise self._busy(place, now_ns)
        if queue.waiting >= self._most_waiting and not self._make_room(place, now_ns):
            self.refused += 1
            raise self._busy(place, now_ns)
        queue.push(place)
        if flow.items[-1][2] is not place and not 0 < now_ns - self._looked_ns < self._bound_ns >> 7:
            self._looked_ns = now_ns
            self._give_up_last(flow, now_ns)
            if place.error is not None:  # when those behind it were given up, its own turn came to be the last
                raise place.error
        return place

    # -- out

    def _free(self, place: Place, tokens: int, answer_tokens: int | None) -> None:
        now_ns = self._clock_ns()
        took_ns = bounded_ns(now_ns - place.started_ns)
        speeds = self.speeds
        speeds.pass_time(now_ns, self.running, self.slots)
        if place._reads:
            place._reads = False
            speeds.leave(place._prompt_tokens)
        self.running -= 1
        self._predicted_ns -= place.slot_ns
        self._share_ns -= place._share_ns
        flow, queue = place.flow, self.queue
        flow.running -= 1
        self._learn(place, tokens, answer_tokens, took_ns, now_ns)
        if queue.waiting:
            self._dispatch(now_ns)
            if flow.items and not 0 <= now_ns - self._looked_ns < self._bound_ns >> 6:
                self._looked_ns = now_ns
                self._give_up_last(flow, now_ns)
        elif not self.running:
            queue.idle()
        if self.on_leave is not None:
            self.on_leave()

    def _learn(self, place: Place, tokens: int, answer_tokens: int | None, took_ns: int, now_ns: int) -> None:
        """What the request says about the next ones, and what it is charged for in the end."""
        queue = self.queue
        full_ns, self._full_ns = self._full_ns, now_ns if queue.waiting else 0
        if tokens <= 0:
            queue.settle(place.flow, -place.cost)
            return
        if answer_tokens is None:
            answer_tokens = max(0, tokens - place._prompt_tokens)
        prompt_tokens, speeds = tokens - answer_tokens, self.speeds
        place._answers.learn(place._prompt_tokens, answer_tokens)
        speeds.end(answer_tokens)
        cost = cost_of(prompt_tokens, answer_tokens, speeds.answer_cost)
        full_ns = max(0, now_ns - full_ns) * self.slots if full_ns else 0
        share_ns = bounded_ns((speeds.share_ns - place._share_ns) * self.slots)
        self.times.learn(
            prompt_tokens, answer_tokens, speeds.answer_cost, speeds.read_ns * self.slots, took_ns, share_ns, full_ns, place._took_last
        )
        queue.settle(place.flow, cost - place.cost)

    def _first_token(self, place: Place) -> None:
        now_ns = self._clock_ns()
        speeds = self.speeds
        speeds.pass_time(now_ns, self.running, self.slots)
        place._reads = False
        speeds.leave(place._prompt_tokens)
        part = self.running / self.slots if self.running < self.slots else 1.0
        speeds.first_token(place._prompt_tokens, place._unread, now_ns - place.started_ns, part)
        if self.queue.waiting:
            self._dispatch(now_ns)

    def _outlook_ns(self, place: Place) -> int:
        flow, now_ns = place.flow, self._clock_ns()
        ahead_ns, ahead_cost = self.queue.ahead(flow, place.order)
        # it stands among them itself
        wait_ns, _ = self._forecast_ns(place, (max(0, ahead_ns - place.slot_ns), max(0.0, ahead_cost - place.cost)), self._first(now_ns))
        # Where nobody has left for so long, nobody is expected to leave sooner than in as long again, whatever was forecast.
        stuck_ns = now_ns - self._moved_ns
        return now_ns - place.entered_ns + max(int(wait_ns / self.times.doubt), stuck_ns)

    def _gone(self, place: Place) -> None:
        self.queue.remove(place)
        if self.on_leave is not None:
            self.on_leave()

    def resize(self, slots: int) -> None:
        """The lane has so many slots from now on. Fewer: what runs goes on, and nobody starts until it is below. 0: no bound."""
        self.slots = max(0, slots)
        self._dispatch(self._clock_ns())

    # -- the turn

    def has_room(self) -> bool:
        """Whether one more may begin: a slot is free, and the engines have not too much to read."""
        return self.running < self.slots and self._may_read()

    def _may_read(self) -> bool:
        speeds = self.speeds
        return speeds.unread <= speeds.most_unread or speeds.reading < self.engines

    def _dispatch(self, now_ns: int) -> None:
        queue = self.queue
        while queue.waiting and ((self.running < self.slots and self._may_read()) or not self.slots):
            place = queue.pop()
            assert isinstance(place, Place), "what waits is a place"
            if place.deadline_ns and place.deadline_ns <= now_ns:
                queue.settle(place.flow, -place.cost)
                self._refuse(place, _too_late())
                continue
            self.waited += 1
            if not place.booked:
                late = now_ns - place.entered_ns > self._bound_ns
                self._trust = max(_LEAST_TRUST, self._trust * _LATE) if late else min(1.0, self._trust * _IN_TIME)
            self._start(place, now_ns)
            self.error_ns += (abs(place.waited_ns - place.forecast_ns) - self.error_ns) / min(self.waited, 32)
            if place.on_turn is not None:
                place.on_turn()

    def _start(self, place: Place, now_ns: int) -> None:
        speeds = self.speeds
        speeds.pass_time(now_ns, self.running, self.slots)
        place._state = _RUNS
        place.started_ns = now_ns
        place._share_ns = speeds.share_ns
        if place.tells:
            place._reads = True
            place._unread = speeds.begin(place._prompt_tokens)
        place.flow.running += 1
        self.running += 1
        place._took_last = took_last = self.running >= self.slots or not self._may_read()
        if took_last:
            self._moved_ns = now_ns
        if not place.booked:
            self._newcomers_ns += place.slot_ns
        self.entered += 1
        self._predicted_ns += place.slot_ns
        self._share_ns += place._share_ns

    # -- forecasts

    def forecast_ns(self) -> int:
        """What a newcomer would wait behind all that waits."""
        if not self.slots or self.has_room():
            return 0
        return self._wait_ns(self.queue.waiting_ns, self._first(self._clock_ns()))

    def _forecast_ns(self, place: Place, ahead: tuple[int, float], first: tuple[float, float]) -> tuple[int, int]:
        """The wait of a place behind this slot time and cost of its flow's own; and its wait if all that is booked for soon came before it. A
        newcomer is admitted by the second, so that those who come back as told do not wait for it."""
        flow, queue, slots = place.flow, self.queue, self.slots
        ahead_ns, ahead_cost = ahead
        behind, least = first
        if not queue.soon_ns or place.booked:
            wait = behind + (ahead_ns + queue.rivals_ns(flow, ahead_cost)[0]) / slots
            wait = int(wait if wait > least else least)
            return wait, wait
        claimed = self.bookings.claimed
        before, before_soon = queue.rivals_ns(flow, ahead_cost, claimed)
        wait = behind + (ahead_ns + before) / slots
        if wait < least:
            wait = least
        with_booked = behind + (ahead_ns + claimed * flow.soon_ns + before_soon) / slots
        # Booked places that become due while it waits come before it, as long as its own work has not aged away: a part of the slots is theirs.
        part = claimed * queue.soon_ns / (slots * self._bound_ns)
        if part > 0.99:
            part = 0.99
        stretched, pushed = wait / (1.0 - part), wait + part * place.slot_ns / self._aging
        return int(stretched if stretched < pushed else pushed), int(with_booked if with_booked > least else least)

    def _wait_ns(self, ahead_ns: float, first: tuple[float, float]) -> int:
        """The wait behind so much slot time; `first`: see `_first`."""
        wait, least = first
        wait += ahead_ns / self.slots
        return int(wait if wait > least else least)

    def _first(self, now_ns: int) -> tuple[float, float]:
        """The wait behind nobody, and the least of all. Only where something runs."""
        running, slots, predicted_ns, speeds = self.running, self.slots, self._predicted_ns, self.speeds
        speeds.pass_time(now_ns, running, slots)
        return first_ns(slots, running, predicted_ns / running, left_ns(predicted_ns, (running * speeds.share_ns - self._share_ns) * slots))

    def _left(self, now_ns: int) -> int:
        """Slot time of the running that is left."""
        self.speeds.pass_time(now_ns, self.running, self.slots)
        return left_ns(self._predicted_ns, (self.running * self.speeds.share_ns - self._share_ns) * self.slots)

    # -- refusals

    def _make_room(self, place: Place, now_ns: int) -> bool:
        """The queue is full: the last place of the heaviest flow is given up for one of a lighter flow, or for one that comes before it in its own.
        (Longest queue drop: Suter, Lakshman, Stiliadis and Choudhury, INFOCOM 1998.)"""
        heaviest, own = self.queue.heaviest(), place.flow
        last = _last(heaviest) if heaviest is not None else None
        if heaviest is None or last is None:
            return False
        if heaviest is own:
            better = place.order < last.order
        else:
            better = (own.waiting_cost + place.cost) / own.weight <= heaviest.waiting_cost / heaviest.weight
        if better or place.booked:
            self._give_up(last, now_ns)
        return better or place.booked

    def _give_up_last(self, flow: Flow, now_ns: int) -> None:
        """A flow's last places whose wait has grown over the bound, for shorter ones came before them or the engine became slower, are told so
        now, not later. Who is near its turn stays."""
        if self._left(now_ns) + self.queue.waiting_ns <= _NEAR * self._bound_ns * self.slots:  # even the last of all is near its turn
            return
        first = self._first(now_ns)
        for _ in range(_LOOK_BACK):
            last = _last(flow)
            if last is None:
                return
            wait, _ = self._forecast_ns(last, (flow.waiting_ns - last.slot_ns, flow.waiting_cost - last.cost), first)
            if wait <= max(self.times.doubt * (self._bound_ns - (now_ns - last.entered_ns)), _NEAR * self._bound_ns):
                return
            self._give_up(last, now_ns)

    def _give_up(self, place: Place, now_ns: int) -> None:
        self.queue.remove(place)
        self.given_up += 1
        self._refuse(place, self._busy(place, now_ns))

    def _refuse(self, place: Place, error: TidegateError) -> None:
        place._state = _REFUSED
        place.error = error
        place.started_ns = self._clock_ns()
        if place.on_turn is not None:
            place.on_turn()

    def _busy(self, place: Place, now_ns: int) -> Busy:
        """The refusal, with a place booked behind all that waits and is booked."""
        flow = place.flow
        slots = self._booked_slots(now_ns) / self.times.doubt
        wait = bounded_ns((self._left(now_ns) + self.queue.waiting_ns) / slots)
        booked = self.bookings.book(flow, place.who, place.request, place.cost, place.slot_ns, now_ns, now_ns + wait, slots)
        seconds = ((booked if isinstance(booked, int) else booked.due_ns) - now_ns) / 1e9
        return Busy(
            f"All {self.slots} slots of {self.name!r} are taken, and the wait would be about {place.forecast_ns / 1e9:.1f} s.",
            hint=f"Come back in {seconds:.1f} s; no more places can be booked (admission.bookings)." if isinstance(booked, int) else
            f"Come back in {seconds:.1f} s: a place is booked for this key then.",
            retry_after_s=seconds,
        )

    def _booked_slots(self, now_ns: int) -> float:
        """How many of the slots serve booked places: what newcomers leave of them, at least half."""
        since_ns = now_ns - self._newcomers_since_ns
        if since_ns > _NEWCOMERS_NS:  # the older half counts half
            self._newcomers_ns >>= 1
            self._newcomers_since_ns = now_ns - (since_ns >> 1 if since_ns < 2 * _NEWCOMERS_NS else _NEWCOMERS_NS)
        left = 1.0 - self._newcomers_ns / (max(since_ns, 1_000_000_000) * self.slots)
        return self.slots * min(_BOOKED_MOST, max(_BOOKED_LEAST, left))

    def figures(self) -> dict[str, Any]:
        """For /health."""
        return {
            "slots": self.slots, "running": self.running, "waiting": self.queue.waiting, "booked": self.bookings.count,
            "forecast_s": round(self.forecast_ns() / 1e9, 3), "forecast_bound_s": self._bound_ns / 1e9,
            "forecast_error_s": round(self.error_ns / 1e9, 3), "waited": self.waited, "refused": self.refused, "given_up": self.given_up,
            "unread_tokens": self.speeds.unread, "answer_cost": round(self.speeds.answer_cost, 1),
        }


class Lending:
    """Slots of tenants that are lent to all others while they are idle: moved from lane to lane, so that no slot is ever in two.

    One slot of each tenant stays. What is lent comes back as soon as its tenant wants it and the request that has it ends.
    """

    def __init__(self, common: Lane) -> None:
        self._common = common
        self._whole: dict[Lane, int] = {common: common.slots}  # the slots of each lane were nothing lent
        common.on_leave = self.settle

    def join(self, lane: Lane) -> None:
        """A tenant's lane lends from now on."""
        self._whole[lane] = lane.slots
        lane.on_leave = self.settle

    def resize(self, lane: Lane, slots: int) -> None:
        """The lane has so many slots of its own from now on."""
        self._whole[lane] = slots
        if not slots:
            lane.resize(0)
        self.settle()

    def settle(self, coming: Lane | None = None) -> None:
        """Move slots to where they are wanted. `coming`: where a request is about to enter."""
        common, whole = self._common, self._whole
        own = [lane for lane in whole if lane is not common and whole[lane]]
        if not whole[common]:
            return
        # What a tenant's own requests do not want, here or in another worker, but for one slot.
        idle = {lane: max(0, whole[lane] - lane.claimed - max(1, lane.running + lane.queue.waiting)) for lane in own}
        wanted = common.running + common.queue.waiting + (common is coming)
        _resize(common, whole[common] + min(sum(idle.values()), max(0, wanted - whole[common])))
        lent = max(0, common.running - whole[common])
        for lane in sorted(own, key=lambda lane: lane.running + lane.queue.waiting):
            lane.lent = taken = min(lent, max(0, whole[lane] - max(1, lane.running)))
            lent -= taken
            _resize(lane, whole[lane] - taken)


def _resize(lane: Lane, slots: int) -> None:
    if lane.slots != slots:
        lane.resize(slots)


class Gate:
    """The lanes of a gateway process, by model, and who is in which class."""

    def __init__(
        self, settings: AdmissionSettings, classes: Mapping[str, ClassSettings] | None = None, clock_ns: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        """Raises SettingsError where somebody is in two classes."""
        self._settings = settings
        self._clock_ns = clock_ns
        self.lanes: dict[str, Lane] = {}
        self._own: dict[str, dict[str, Lane]] = {}  # by tenant and model: lanes for nobody else
        self._lending: dict[Lane, Lending] = {}
        self._weights = {STANDARD: 1.0} | {name: one.weight for name, one in (classes or {}).items()}
        self._of_key: dict[str, str] = {}
        self._of_tenant: dict[str, str] = {}
        self._of_capability: dict[str, str] = {}
        for name, one in (classes or {}).items():
            for known, members, what in (
                (self._of_key, one.keys, "keys"), (self._of_tenant, one.tenants, "tenants"), (self._of_capability, one.capabilities, "capabilities"),
            ):  # fmt: skip
                for member in members:
                    if known.setdefault(member, name) != name:
                        raise SettingsError(
                            f"{member!r} is in the classes {known[member]!r} and {name!r}.", hint=f"Leave it in one of the lists classes.NAME.{what}."
                        )

    def open(self, models: Iterable[str], slots: int, tenant: str = "", *, lends: bool = False) -> Lane:
        """One lane for these models. `tenant`: whose it is alone; whoever has any has no other lanes. `lends`: what is idle in it, but for one slot,
        is lent to the lane of all others, which is there already."""
        names = list(models)
        lane = Lane(f"{names[0]}@{tenant}" if tenant else names[0], slots, self._settings, self._clock_ns)
        lanes = self._own.setdefault(tenant, {}) if tenant else self.lanes
        for name in names:
            lanes[name] = lane
        if lends:
            common = self.lanes[names[0]]
            lending = self._lending.get(common) or Lending(common)
            lending.join(lane)
            self._lending |= {common: lending, lane: lending}
        return lane

    def alias(self, name: str, model: str) -> None:
        """The same lanes by another name for the model."""
        for lanes in (self.lanes, *self._own.values()):
            if model in lanes:
                lanes[name] = lanes[model]

    def enter(
        self, model: str, caller: Caller, *, prompt_tokens: int, answer_tokens: int = 0, capability: str = "", request: str = "",
        deadline_ns: int = 0, within_ns: int = 0, tells: bool = False,
    ) -> Place:
        """A place in the model's lane; FREE where nothing bounds it. `request`: the same where the same request comes back, e.g. the digest of its
        body. Raises as Lane.enter does."""
        lane = (self._own.get(caller.tenant, self.lanes) if self._own else self.lanes).get(model)
        if lane is None or not lane.slots:
            return FREE
        name = self._class_of(caller, capability)
        lending = self._lending.get(lane) if self._lending else None
        if lending is not None:
            lending.settle(coming=lane)
        place = lane.enter(
            (name, caller.tenant), self._weights[name], caller.key_id, prompt_tokens, answer_tokens, sort=capability, request=request,
            deadline_ns=deadline_ns, within_ns=within_ns, tells=tells,
        )
        if lending is not None:
            lending.settle()
        return place

    def spare(self, model: str, caller: Caller, *, prompt_tokens: int, answer_tokens: int = 0, capability: str = "") -> Place | None:
        """A slot that is free now and that nobody waits for or has booked; None where there is none: it is never a place in the queue. FREE where
        nothing bounds the model's lane."""
        lane = (self._own.get(caller.tenant, self.lanes) if self._own else self.lanes).get(model)
        if lane is not None and lane.slots and (not lane.has_room() or lane.queue.waiting or lane.bookings.count):
            return None
        return self.enter(model, caller, prompt_tokens=prompt_tokens, answer_tokens=answer_tokens, capability=capability)

    def resize(self, model: str, slots: int, tenant: str = "") -> None:
        """The model's lane has so many slots from now on; see Lane.resize. A model without a lane gets one. `tenant`: in the lane of its own."""
        lane = (self._own.get(tenant, {}) if tenant else self.lanes).get(model)
        if lane is None:
            self.open([model], slots, tenant)
        elif (lending := self._lending.get(lane)) is not None:
            lending.resize(lane, slots)
        elif lane.slots != slots:
            lane.resize(slots)

    def counts(self) -> dict[str, list[int]]:
        """By lane, those that have a bound: slots, running, waiting, booked."""
        return {
            lane.name: [lane.slots, lane.running, lane.queue.waiting, lane.bookings.count]
            for lane in self._all() if lane.slots
        }

    def figures(self) -> dict[str, dict[str, Any]]:
        """By lane, those that have a bound."""
        return {lane.name: lane.figures() for lane in self._all() if lane.slots}

    def _all(self) -> Iterable[Lane]:
        """Each lane once, those of all first."""
        return dict.fromkeys(lane for lanes in (self.lanes, *self._own.values()) for lane in lanes.values())

    def _class_of(self, caller: Caller, capability: str) -> str:
        return (
            self._of_key.get(caller.key_id) or self._of_tenant.get(caller.tenant) or (self._of_capability.get(capability) if capability else None)
            or STANDARD
        )


def _last(flow: Flow) -> Place | None:
    """The flow's last place that may be given up: a booked one holds."""
    for _, _, item in reversed(flow.items[-_LOOK_BACK:]):
        if isinstance(item, Place) and not item.booked:
            return item
    return None


def _too_late() -> DeadlineExceeded:
    return DeadlineExceeded("The request's time was used up before its turn came.", hint="Raise server.deadline_s, or ask when less is going on.")
