"""The circuit breaker of one instance: a sliding window of outcomes, and a few probes before it is trusted again.

Pure: no clock of its own, no I/O. States and words as in M. Nygard, Release It! (2007), chapter "Circuit Breaker". It counts what its owner judges
to be a failure of the instance; a caller's own mistake (4xx), an instance that is busy (429, 503) and a client that left are no outcome at all.

It says what it thinks of the instance. Whether that means anything is the fleet's business: where no other instance can take a request, an open
breaker keeps nobody away (see `routing`).
"""

from __future__ import annotations

from typing import Literal

from tidegate.engines.settings import FleetSettings

State = Literal["closed", "open", "half_open"]

#: The window is this many buckets; an outcome is forgotten with its bucket.
BUCKETS = 10
#: An instant that never comes.
NEVER_NS = 1 << 62


class Breaker:
    """Opens where at least `breaker_min_calls` outcomes lie in the window and `breaker_share` of them are failures. Open, it waits `breaker_open_s`,
    twice as long each time that it opens again soon, at most `breaker_max_open_s`. Then `breaker_probes` requests may try the instance at once: as
    many good outcomes close it, the first bad one opens it again.

    All instants are of one monotonic clock, in nanoseconds; one that goes back counts as standing still.
    """

    __slots__ = (
        "_at", "_bad", "_bucket_ns", "_closed_ns", "_good", "_max_open_ns", "_min_calls", "_open_ns", "_passed", "_probes", "_share", "_sum_bad",
        "_sum_good", "_times", "_trying", "era", "state", "until_ns",
    )  # fmt: skip

    def __init__(self, settings: FleetSettings) -> None:
        self._bucket_ns = max(1, int(settings.breaker_window_s * 1e9 / BUCKETS))
        self._min_calls = settings.breaker_min_calls
        self._share = settings.breaker_share
        self._open_ns = int(settings.breaker_open_s * 1e9)
        self._max_open_ns = max(self._open_ns, int(settings.breaker_max_open_s * 1e9))
        self._probes = settings.breaker_probes
        self.state: State = "closed"
        #: Grows with each change of state: an outcome counts only in the era in which its request began.
        self.era = 0
        #: While open: when probes may pass.
        self.until_ns = NEVER_NS
        self._closed_ns = 0
        self._times = 0  # openings in a row
        self._trying = self._passed = 0
        self._at = 0
        self._good, self._bad = [0] * BUCKETS, [0] * BUCKETS
        self._sum_good = self._sum_bad = 0

    @property
    def failures(self) -> int:
        """Failures in the window, as of the last outcome."""
        return self._sum_bad

    def look(self, now_ns: int) -> State:
        """The state as of now: an open breaker whose time is over is half open."""
        if self.state == "open" and now_ns >= self.until_ns:
            self._turn("half_open")
            self._trying = self._passed = 0
        return self.state

    @property
    def probing(self) -> bool:
        """Whether a probe may pass just now."""
        return self.state == "half_open" and self._trying < self._probes

    def begin(self, now_ns: int) -> int:
        """A request is sent; gives the era to say at its end. Nobody is kept away here: whoever asks has decided."""
        if self.look(now_ns) == "half_open":
            self._trying += 1
        return self.era

    def end(self, era: int, good: bool | None, now_ns: int) -> None:
        """The request that began in `era` ended: well, badly, or (None) in a way that says nothing of the instance. Once for each `begin`."""
        if era != self.era:  # it began before the last change of state: old news
            return
        if self.state == "half_open":
            self._trying -= 1
            if good:
                self._passed += 1
                if self._passed >= self._probes:
                    self._close(now_ns)
            elif good is False:
                self._open(now_ns)
        elif self.state == "closed" and good is not None:
            self._count(good, now_ns)

    # --

    def _count(self, good: bool, now_ns: int) -> None:
        at = now_ns // self._bucket_ns
        if at > self._at:
            if at - self._at >= BUCKETS:
                self._forget(at)
            else:
                for old in range(self._at + 1, at + 1):
                    slot = old % BUCKETS
                    self._sum_good -= self._good[slot]
                    self._sum_bad -= self._bad[slot]
                    self._good[slot] = self._bad[slot] = 0
                self._at = at
        slot = self._at % BUCKETS
        if good:
            self._good[slot] += 1
            self._sum_good += 1
            return
        self._bad[slot] += 1
        self._sum_bad += 1
        calls = self._sum_good + self._sum_bad
        if calls >= self._min_calls and self._sum_bad >= self._share * calls:
            self._open(now_ns)

    def _open(self, now_ns: int) -> None:
        if self.state == "closed" and now_ns - self._closed_ns > self._max_open_ns:
            self._times = 0  # it was well for long: not the same illness
        self._times += 1
        wait_ns = min(self._open_ns << min(self._times - 1, 20), self._max_open_ns)
        self._turn("open")
        self.until_ns = now_ns + wait_ns

    def _close(self, now_ns: int) -> None:
        self._turn("closed")
        self._closed_ns = now_ns
        self._forget(now_ns // self._bucket_ns)

    def _turn(self, state: State) -> None:
        self.state = state
        self.era += 1
        self.until_ns = NEVER_NS

    def _forget(self, at: int) -> None:
        self._at = at
        self._good, self._bad = [0] * BUCKETS, [0] * BUCKETS
        self._sum_good = self._sum_bad = 0
