"""The circuit breaker of one instance: a sliding window of outcomes, and a few probes before it is trusted again.

No clock of its own, no I/O. States and words as in M. Nygard, Release It! (2007), chapter "Circuit Breaker". It counts what its owner judges
to be a failure of the instance; a caller's own mistake (4xx), an instance that is busy (429, 503) and a client that left are no outcome at all.

All workers of a machine have one breaker for an instance: its state stands in a ledger that they share. Each counts outcomes in words of its own;
a failure is judged by those of all. A state changes under the lock, where it is looked at once more, and so is a probe's place taken. A change
that cannot have the lock is left out: the next outcome brings it.

It says what it thinks of the instance. Whether that means anything is the fleet's business: where no other instance can take a request, an open
breaker keeps nobody away (see `routing`).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

from tidegate.engines.ledger import BAD, BUCKETS, CLOSED, ERA, GOOD, NEWEST, OF_ERA, PASSED, STATE, TIMES, UNTIL, Ledger
from tidegate.engines.settings import FleetSettings

State = Literal["closed", "open", "half_open"]

#: An instant that never comes.
NEVER_NS = 1 << 62
#: Seconds after which a probe's place that was claimed and not taken is given back.
CLAIM_S = 1.0
_STATES: tuple[State, State, State] = ("closed", "open", "half_open")
_CLOSED, _OPEN, _HALF_OPEN = range(3)
_ERA_BITS = 20
_MOST_PROBES = (1 << _ERA_BITS) - 1


class Breaker:
    """Opens where at least `breaker_min_calls` outcomes lie in the window and `breaker_share` of them are failures. Open, it waits `breaker_open_s`,
    twice as long each time that it opens again soon, at most `breaker_max_open_s`. Then `breaker_probes` requests may try the instance at once: as
    many good outcomes close it, the first bad one opens it again.

    All instants are of one monotonic clock, in nanoseconds; one that goes back counts as standing still.
    """

    __slots__ = (
        "_at", "_bucket_ns", "_claimed_ns", "_claims", "_ledger", "_max_open_ns", "_min_calls", "_open_ns", "_probes", "_share", "_trying",
        "_trying_in", "_words",
    )  # fmt: skip

    def __init__(self, settings: FleetSettings, ledger: Ledger | None = None) -> None:
        self._bucket_ns = max(1, int(settings.breaker_window_s * 1e9 / BUCKETS))
        self._min_calls = settings.breaker_min_calls
        self._share = settings.breaker_share
        self._open_ns = int(settings.breaker_open_s * 1e9)
        self._max_open_ns = max(self._open_ns, int(settings.breaker_max_open_s * 1e9))
        self._probes = settings.breaker_probes
        self._ledger = ledger if ledger is not None else Ledger()
        self._words, self._at = self._ledger.words, self._ledger.at
        # probes of this worker: of which era, how many, and those of them that were claimed and have not begun
        self._trying_in = self._trying = self._claims = self._claimed_ns = 0

    @property
    def state(self) -> State:
        """As of the last look of any worker."""
        return _STATES[self._words[self._at + STATE]]

    @property
    def era(self) -> int:
        """Grows with each change of state: an outcome counts only in the era in which its request began."""
        return self._words[self._at + ERA]

    @property
    def until_ns(self) -> int:
        """While open: when probes may pass."""
        return self._words[self._at + UNTIL] if self._words[self._at + STATE] == _OPEN else NEVER_NS

    @property
    def failures(self) -> int:
        """Failures in the window, as of the last outcome."""
        return self._sums()[1]

    def look(self, now_ns: int) -> State:
        """The state as of now: an open breaker whose time is over is half open."""
        if self._words[self._at + STATE] == _OPEN and now_ns >= self._words[self._at + UNTIL]:
            with suppress(OSError), self._ledger.memory:
                if self._words[self._at + STATE] == _OPEN and now_ns >= self._words[self._at + UNTIL]:
                    self._turn(_HALF_OPEN)
        return self.state

    @property
    def probing(self) -> bool:
        """Whether a probe may pass just now."""
        return self._words[self._at + STATE] == _HALF_OPEN and self._under_way() < self._probes

    def claim(self, now_ns: int) -> bool:
        """Take a probe's place for the request that begins next. False where all are taken, by whichever worker."""
        with suppress(OSError), self._ledger.memory:
            if self._words[self._at + STATE] == _HALF_OPEN:
                self.give_back(now_ns)
                if self._under_way() < self._probes:
                    self._try(1)
                    self._claims += 1
                    self._claimed_ns = now_ns
                    return True
        return False

    def begin(self, now_ns: int) -> int:
        """A request is sent; gives the era to say at its end. Nobody is kept away here: whoever asks has decided."""
        words, at = self._words, self._at
        era = words[at + ERA]  # read first: it is written before the state
        if words[at + STATE] == _CLOSED:
            return era
        if self.look(now_ns) == "half_open":
            self.give_back(now_ns)
            if self._claims:
                self._claims -= 1
            else:
                self._try(1)
        return words[at + ERA]

    def end(self, era: int, good: bool | None, now_ns: int) -> None:
        """The request that began in `era` ended: well, badly, or (None) in a way that says nothing of the instance. Once for each `begin`."""
        words, at = self._words, self._at
        if era != words[at + ERA]:  # it began before the last change of state: old news
            return
        state = words[at + STATE]
        if state == _CLOSED:
            if good is not None:
                self._count(era, good, now_ns)
        elif state == _HALF_OPEN:
            self._try(-1)
            if good is not None:
                with suppress(OSError), self._ledger.memory:
                    if era == words[at + ERA]:
                        self._judge(good, now_ns)

    def give_back(self, now_ns: int) -> int:
        """Give back what was claimed and not taken; gives when to do so again."""
        if self._claims and (self._trying_in != self.era or now_ns - self._claimed_ns > CLAIM_S * 1e9):
            claims, self._claims = self._claims, 0
            self._try(-claims)
        return self._claimed_ns + int(CLAIM_S * 1e9) if self._claims else NEVER_NS

    # -- probes: each worker has a word for its own, with the era in which they began, so that those of an earlier one are none

    def _under_way(self) -> int:
        first, era = self._ledger.probes, self.era
        return sum(told & _MOST_PROBES for told in self._words[first : first + self._ledger.workers] if told >> _ERA_BITS == era)

    def _try(self, more: int) -> None:
        """So many probes more of this worker."""
        era = self.era
        if self._trying_in != era:
            self._trying_in, self._trying, self._claims = era, 0, 0
        self._trying = min(max(0, self._trying + more), _MOST_PROBES)
        self._words[self._ledger.probes + self._ledger.worker] = era << _ERA_BITS | self._trying

    # -- outcomes

    def _count(self, era: int, good: bool, now_ns: int) -> None:
        words, own = self._words, self._ledger.outcomes
        at = now_ns // self._bucket_ns
        newest = words[own + NEWEST]
        if words[own + OF_ERA] != era:
            self._forget(range(BUCKETS))
            words[own + NEWEST], words[own + OF_ERA] = at, era
        elif at > newest:
            self._forget(range(newest + 1, at + 1) if at - newest < BUCKETS else range(BUCKETS))
            words[own + NEWEST] = at
        else:
            at = newest
        word = own + (GOOD if good else BAD) + at % BUCKETS
        words[word] += 1
        if not good and self._is_ill():
            with suppress(OSError), self._ledger.memory:
                if words[self._at + ERA] == era and words[self._at + STATE] == _CLOSED and self._is_ill():
                    self._open(now_ns)

    def _forget(self, buckets: range) -> None:
        own = self._ledger.outcomes
        for bucket in buckets:
            self._words[own + GOOD + bucket % BUCKETS] = self._words[own + BAD + bucket % BUCKETS] = 0

    def _is_ill(self) -> bool:
        calls, bad = self._sums()
        return calls >= self._min_calls and bad >= self._share * calls

    def _sums(self) -> tuple[int, int]:
        """Outcomes of all workers in the window that ends with the newest of them, and the failures among them."""
        words, era = self._words, self.era
        counted = [first for first in self._ledger.all_outcomes if words[first + OF_ERA] == era]
        newest = max((words[first + NEWEST] for first in counted), default=0)
        calls = bad = 0
        for first in counted:
            last = words[first + NEWEST]
            for bucket in range(max(last, newest) - BUCKETS + 1, last + 1):
                bad += words[first + BAD + bucket % BUCKETS]
                calls += words[first + GOOD + bucket % BUCKETS] + words[first + BAD + bucket % BUCKETS]
        return calls, bad

    # -- states, under the lock

    def _open(self, now_ns: int) -> None:
        words, at = self._words, self._at
        well = words[at + STATE] == _CLOSED and now_ns - words[at + CLOSED] > self._max_open_ns
        times = 1 if well else words[at + TIMES] + 1  # it was well for long: not the same illness
        words[at + UNTIL] = now_ns + min(self._open_ns << min(times - 1, 20), self._max_open_ns)
        words[at + TIMES] = times
        self._turn(_OPEN)

    def _judge(self, good: bool, now_ns: int) -> None:
        """The end of a probe."""
        words, at = self._words, self._at
        if not good:
            self._open(now_ns)
            return
        words[at + PASSED] += 1
        if words[at + PASSED] >= self._probes:
            words[at + CLOSED] = now_ns
            self._turn(_CLOSED)

    def _turn(self, state: int) -> None:
        words, at = self._words, self._at
        words[at + PASSED] = 0
        words[at + ERA] += 1
        words[at + STATE] = state
        self._ledger.changed()
