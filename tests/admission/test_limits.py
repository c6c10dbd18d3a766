"""Token buckets per key: what passes, what waits, what is given back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.admission.limits import Limits
from tidegate.core.ask import Caller
from tidegate.core.errors import RateLimited


class Clock:
    def __init__(self) -> None:
        self.ns = 1

    def __call__(self) -> int:
        return self.ns

    def pass_s(self, seconds: float) -> None:
        self.ns += int(seconds * 1e9)


KEY = Caller("key", "tenant")


def test_a_key_without_limits_always_passes() -> None:
    """No limit set means no limit."""
    limits = Limits()
    for _ in range(1000):
        limits.admit(KEY, 10**9)


def test_the_request_limit_refuses_the_next_and_says_when() -> None:
    """The request after the last allowed one is refused with the exact time after which it passes."""
    clock = Clock()
    limits = Limits(requests_per_minute=3, clock_ns=clock)
    for _ in range(3):
        limits.admit(KEY, 1)
    with pytest.raises(RateLimited) as refused:
        limits.admit(KEY, 1)
    assert refused.value.retry_after_s == pytest.approx(20.0)
    clock.pass_s(19.99)
    with pytest.raises(RateLimited):
        limits.admit(KEY, 1)
    clock.pass_s(0.02)
    limits.admit(KEY, 1)


def test_a_keys_own_limit_wins() -> None:
    """A limit on the key replaces the setting."""
    limits = Limits(requests_per_minute=1, clock_ns=Clock())
    own = Caller("vip", "tenant", requests_per_minute=2)
    limits.admit(own, 1)
    limits.admit(own, 1)
    with pytest.raises(RateLimited):
        limits.admit(own, 1)


def test_keys_do_not_share_a_bucket() -> None:
    """One key's use takes nothing from another's."""
    limits = Limits(requests_per_minute=1, clock_ns=Clock())
    limits.admit(KEY, 1)
    limits.admit(Caller("other", "tenant"), 1)


def test_tokens_are_settled_with_the_true_count() -> None:
    """What was reserved too much is given back, what was used beyond is owed."""
    limits = Limits(tokens_per_minute=100, clock_ns=Clock())
    ticket = limits.admit(KEY, 90)
    with pytest.raises(RateLimited):
        limits.admit(KEY, 90)
    ticket.settle(10)
    second = limits.admit(KEY, 90)
    second.settle(150)
    with pytest.raises(RateLimited) as refused:
        limits.admit(KEY, 40)
    assert refused.value.retry_after_s == pytest.approx((40 + 60) * 60 / 100)


def test_a_refund_gives_back_the_request_and_its_tokens() -> None:
    """A request that never ran costs nothing."""
    limits = Limits(requests_per_minute=1, tokens_per_minute=10, clock_ns=Clock())
    limits.admit(KEY, 10).refund()
    limits.admit(KEY, 10)


def test_settling_twice_counts_once() -> None:
    """Only the first of settle and refund takes effect."""
    limits = Limits(requests_per_minute=2, tokens_per_minute=10, clock_ns=Clock())
    ticket = limits.admit(KEY, 5)
    ticket.settle(5)
    ticket.refund()
    ticket.settle(0)
    limits.admit(KEY, 5)
    with pytest.raises(RateLimited):
        limits.admit(KEY, 1)


def test_a_request_larger_than_the_bucket_passes_when_the_bucket_is_full() -> None:
    """An estimate above the limit waits for a full bucket, not for ever."""
    clock = Clock()
    limits = Limits(tokens_per_minute=100, clock_ns=clock)
    limits.admit(KEY, 250).settle(250)
    with pytest.raises(RateLimited) as refused:
        limits.admit(KEY, 250)
    clock.pass_s(refused.value.retry_after_s + 0.01)
    limits.admit(KEY, 250)


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 40)), max_size=60))
def test_never_more_than_a_minute_and_a_burst(steps: list[tuple[float, int]]) -> None:
    """Whatever the arrivals, what passed never exceeds the burst plus what refilled, and whoever comes back as told passes."""
    clock = Clock()
    limits = Limits(tokens_per_minute=60, clock_ns=clock)
    began_ns, passed = clock.ns, 0
    for pause_s, tokens in steps:
        clock.pass_s(pause_s)
        try:
            limits.admit(KEY, tokens).settle(tokens)
        except RateLimited as refused:
            clock.pass_s((refused.retry_after_s or 0.0) + 1e-6)
            limits.admit(KEY, tokens).settle(tokens)
        passed += tokens
        assert passed <= 60 + (clock.ns - began_ns) / 1e9 + 1e-3


@pytest.mark.parametrize("claim", [-(10**6), -1, 0, 10**18, 10**400])
def test_no_claim_widens_or_ruins_a_bucket(claim: int) -> None:
    """Whatever a caller says it will need, after the true count is booked the bucket holds its minute less what was used."""
    limits = Limits(tokens_per_minute=100, clock_ns=Clock())
    ticket = limits.admit(KEY, claim)
    ticket.settle(40)
    limits.admit(KEY, 60)
    with pytest.raises(RateLimited):
        limits.admit(KEY, 1)


def test_a_claim_of_less_than_nothing_is_no_credit_while_it_runs() -> None:
    """A negative estimate does not let others of the same key pass meanwhile."""
    limits = Limits(tokens_per_minute=100, clock_ns=Clock())
    limits.admit(KEY, -1000)
    limits.admit(KEY, 100)
    with pytest.raises(RateLimited):
        limits.admit(KEY, 1)
