"""The circuit breaker against a plain account of the same outcomes, under any interleaving; and its rules one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from pydantic import ValidationError
from tests.engines.clock import S

from tidegate.engines.breaker import BUCKETS, NEVER_NS, Breaker
from tidegate.engines.settings import FleetSettings


def fleet_settings(**fields: Any) -> FleetSettings:
    return FleetSettings.model_validate({
        "breaker_window_s": 10, "breaker_min_calls": 4, "breaker_share": 0.5, "breaker_open_s": 5, "breaker_max_open_s": 30, "breaker_probes": 2,
        **fields,
    })


def end_all(breaker: Breaker, outcomes: list[bool | None], now_ns: int) -> None:
    for good in outcomes:
        breaker.end(breaker.begin(now_ns), good, now_ns)


def opened(**fields: Any) -> Breaker:
    breaker = Breaker(fleet_settings(**fields))
    end_all(breaker, [False] * 4, 0)
    assert str(breaker.state) == "open"
    return breaker


def test_it_opens_at_the_share_of_failures_and_not_before() -> None:
    """Three failures are too few to judge by; half of four outcomes is enough."""
    breaker = Breaker(fleet_settings())
    end_all(breaker, [False] * 3, 0)
    assert str(breaker.state) == "closed"
    end_all(breaker, [True] * 4, 0)  # 3 of 7
    assert str(breaker.state) == "closed"
    end_all(breaker, [False], 0)  # 4 of 8
    assert str(breaker.state) == "open"


def test_what_says_nothing_of_the_instance_never_counts() -> None:
    """4xx, 429 and clients that left: a thousand of them leave the breaker as it was, closed or half open."""
    breaker = Breaker(fleet_settings())
    end_all(breaker, [None] * 1000, 0)
    assert (breaker.state, breaker.failures) == ("closed", 0)
    breaker = opened()
    end_all(breaker, [None] * 1000, 5 * S)
    assert str(breaker.state) == "half_open"
    assert breaker.probing, "none of them keeps a probe's place"


def test_failures_are_forgotten_with_the_window() -> None:
    """What lies a window back is nothing to judge by."""
    breaker = Breaker(fleet_settings())
    end_all(breaker, [False] * 3, 0)
    end_all(breaker, [False], 10 * S)
    assert (breaker.state, breaker.failures) == ("closed", 1)


def test_probes_are_few_and_must_all_end_well() -> None:
    """Two may try at once; one that fails opens it again, twice as long; two good ones close it."""
    breaker = opened()
    assert str(breaker.look(5 * S - 1)) == "open"
    assert str(breaker.look(5 * S)) == "half_open"
    first = breaker.begin(5 * S)
    assert breaker.probing
    second = breaker.begin(5 * S)
    assert not breaker.probing
    breaker.end(first, True, 5 * S)
    assert (str(breaker.state), breaker.probing) == ("half_open", True)
    breaker.end(second, False, 6 * S)
    assert (str(breaker.state), breaker.until_ns) == ("open", 16 * S)
    end_all(breaker, [True, True], 16 * S)
    assert str(breaker.state) == "closed"


def test_a_probe_that_passed_in_an_earlier_trial_counts_no_more() -> None:
    """One of two ended well, then one badly: when it is tried again, two must end well anew."""
    breaker = opened()
    end_all(breaker, [True, False], 5 * S)
    assert str(breaker.state) == "open"
    end_all(breaker, [True], 15 * S)
    assert str(breaker.state) == "half_open"
    end_all(breaker, [True], 15 * S)
    assert str(breaker.state) == "closed"


def test_the_time_that_it_is_open_grows_to_a_bound_and_is_forgotten() -> None:
    """An instance that flaps is asked ever more rarely; one that was well for long begins anew."""
    breaker = opened()
    now_ns, waits = 0, []
    for _ in range(6):
        waits.append((breaker.until_ns - now_ns) // S)
        now_ns = breaker.until_ns
        breaker.end(breaker.begin(now_ns), False, now_ns)
    assert waits == [5, 10, 20, 30, 30, 30]
    now_ns = breaker.until_ns
    end_all(breaker, [True, True], now_ns)
    now_ns += 31 * S
    end_all(breaker, [False] * 4, now_ns)
    assert breaker.until_ns - now_ns == 5 * S


def test_old_news_change_nothing() -> None:
    """A request that began before the breaker opened and ends while it probes is no probe, whatever its end."""
    breaker = Breaker(fleet_settings())
    eras = [breaker.begin(0) for _ in range(3)]
    end_all(breaker, [False] * 4, 0)
    breaker.look(5 * S)
    for era in eras:
        breaker.end(era, True, 5 * S)
    assert str(breaker.state) == "half_open"
    breaker.begin(5 * S)
    breaker.begin(5 * S)
    assert not breaker.probing


@pytest.mark.parametrize(
    "fields",
    [
        {"breaker_window_s": 0}, {"breaker_window_s": float("inf")}, {"breaker_share": 0}, {"breaker_share": 1.1}, {"breaker_share": float("nan")},
        {"breaker_min_calls": 0}, {"breaker_open_s": -1}, {"breaker_max_open_s": 1e9}, {"breaker_probes": 0}, {"slow_start_s": -1},
        {"max_retry_after_s": float("inf")}, {"long_tokens": 0}, {"metrics_s": float("nan")}, {"affinity_tokens": -1}, {"brake": 1},
    ],
)  # fmt: skip
def test_settings_that_are_refused(fields: dict[str, Any]) -> None:
    """Negative, zero, infinite and absurd ones, and an unknown name."""
    with pytest.raises(ValidationError):
        fleet_settings(**fields)


class Account(RuleBasedStateMachine):
    """The same outcomes in a plain list, judged by the words of the settings."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = fleet_settings()
        self.breaker = Breaker(self.settings)
        self.now_ns = 0
        self.running: list[int] = []
        self.outcomes: list[tuple[int, bool]] = []  # of the closed state: bucket and outcome
        self.state = "closed"
        self.until_ns = NEVER_NS
        self.passed = 0
        self.probes = 0

    def _see_time(self) -> None:
        if self.state == "open" and self.now_ns >= self.until_ns:
            self.state, self.passed, self.probes, self.running = "half_open", 0, 0, []

    def _opens(self) -> None:
        self.state, self.running = "open", []
        wait_ns = self.breaker.until_ns - self.now_ns
        assert 5 * S <= wait_ns <= 30 * S
        self.until_ns = self.breaker.until_ns

    @rule(by_ms=st.one_of(st.integers(-5000, 12_000), st.sampled_from([-(10**12), 10**12])))
    def wait(self, by_ms: int) -> None:
        """Also a clock that jumps: monotonic ones do not go back, and nothing breaks where one does."""
        self.now_ns = max(0, self.now_ns + by_ms * 1_000_000)
        self.breaker.look(self.now_ns)
        self._see_time()

    @rule()
    def begin(self) -> None:
        era = self.breaker.begin(self.now_ns)
        self._see_time()
        self.probes += self.state == "half_open"
        self.running.append(era)

    @rule(which=st.integers(0, 100), good=st.sampled_from([True, False, False, None]))
    def end(self, which: int, good: bool | None) -> None:
        if not self.running:
            return
        era = self.running.pop(which % len(self.running))
        self.breaker.end(era, good, self.now_ns)
        if self.state == "half_open":
            self.probes -= 1
            if good:
                self.passed += 1
                if self.passed == 2:
                    self.state, self.outcomes, self.running = "closed", [], []
                    self.at = self.now_ns // S
            elif good is False:
                self._opens()
        elif self.state == "closed" and good is not None:
            at = max([self.now_ns // S, *(bucket for bucket, _ in self.outcomes)])
            self.outcomes = [one for one in self.outcomes if one[0] > at - BUCKETS] + [(at, good)]
            bad = sum(not one for _, one in self.outcomes)
            if not good and len(self.outcomes) >= 4 and bad >= 0.5 * len(self.outcomes):
                self._opens()
                self.outcomes = []

    @rule()
    def old_news(self) -> None:
        """An outcome of an earlier era."""
        self.breaker.end(self.breaker.era - 1, True, self.now_ns)
        self.breaker.end(self.breaker.era - 1, False, self.now_ns)

    @invariant()
    def agrees(self) -> None:
        assert self.breaker.state == self.state
        assert self.breaker.probing == (self.state == "half_open" and self.probes < 2)
        if self.state == "closed":
            assert self.breaker.failures == sum(not good for _, good in self.outcomes)


TestAccount = Account.TestCase
TestAccount.settings = hypothesis_settings(max_examples=150, stateful_step_count=60, deadline=None)
