"""Limits of keys, tenants and capabilities: what passes, what waits, what is given back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.admission.limits import Limits
from tidegate.admission.plan import money_is_limited
from tidegate.admission.prices import Prices
from tidegate.admission.settings import Allowance, EachTenant, LimitSettings, PriceSettings
from tidegate.core.ask import Caller
from tidegate.core.chunk import Usage
from tidegate.core.errors import LimitsDown, RateLimited, SettingsError


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
    limits = Limits(LimitSettings(requests_per_minute=3), clock_ns=clock)
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
    limits = Limits(LimitSettings(requests_per_minute=1), clock_ns=Clock())
    own = Caller("vip", "tenant", requests_per_minute=2)
    limits.admit(own, 1)
    limits.admit(own, 1)
    with pytest.raises(RateLimited):
        limits.admit(own, 1)


def test_runs_at_a_time_and_money_may_be_the_keys_own() -> None:
    """They replace those of all keys, and those of the settings for this key replace them."""
    prices = Prices({"m": PriceSettings(input=1.0, output=1.0)})
    limits = Limits(LimitSettings(concurrent=9, keys={"known": Allowance(concurrent=3)}), prices=prices, clock_ns=Clock())
    own = Caller("own", "tenant", concurrent=2, money_per_day=0.01)
    tickets = [limits.admit(own, 1, model="m") for _ in range(2)]
    with pytest.raises(RateLimited, match="2 requests at a time"):
        limits.admit(own, 1, model="m")
    tickets[0].book(Usage(10_000, 0), "m")
    with pytest.raises(RateLimited, match=r"0\.01 USD per day"):
        limits.admit(own, 1, model="m")
    known = Caller("known", "tenant", concurrent=2)
    assert [limits.admit(known, 1) for _ in range(3)]
    with pytest.raises(RateLimited, match="3 requests at a time"):
        limits.admit(known, 1)


def test_where_only_a_key_has_a_limit_the_others_have_none() -> None:
    """Its limit is counted all the same."""
    limits = Limits(clock_ns=Clock())
    own = Caller("own", "tenant", concurrent=1)
    limits.admit(own, 1)
    with pytest.raises(RateLimited):
        limits.admit(own, 1)
    assert limits.admit(KEY, 10**9) is limits.admit(KEY, 1), "nothing is counted for them"


def test_money_of_a_key_without_prices_is_refused() -> None:
    """It would pass for nothing; who has no limit of money passes."""
    limits = Limits(clock_ns=Clock())
    limits.unpriced = "big"
    with pytest.raises(LimitsDown, match="'big' has no price"):
        limits.admit(Caller("own", "tenant", money_per_day=1.0), 1)
    limits.admit(Caller("own", "tenant", concurrent=1), 1)


def test_keys_do_not_share_a_bucket() -> None:
    """One key's use takes nothing from another's."""
    limits = Limits(LimitSettings(requests_per_minute=1), clock_ns=Clock())
    limits.admit(KEY, 1)
    limits.admit(Caller("other", "tenant"), 1)


def test_tokens_are_settled_with_the_true_count() -> None:
    """What was reserved too much is given back, what was used beyond is owed."""
    limits = Limits(LimitSettings(tokens_per_minute=100), clock_ns=Clock())
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
    limits = Limits(LimitSettings(requests_per_minute=1, tokens_per_minute=10), clock_ns=Clock())
    limits.admit(KEY, 10).refund()
    limits.admit(KEY, 10)


def test_settling_twice_counts_once() -> None:
    """Only the first of settle and refund takes effect."""
    limits = Limits(LimitSettings(requests_per_minute=2, tokens_per_minute=10), clock_ns=Clock())
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
    limits = Limits(LimitSettings(tokens_per_minute=100), clock_ns=clock)
    limits.admit(KEY, 250).settle(250)
    with pytest.raises(RateLimited) as refused:
        limits.admit(KEY, 250)
    clock.pass_s((refused.value.retry_after_s or 0.0) + 0.01)
    limits.admit(KEY, 250)


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 40)), max_size=60))
def test_never_more_than_a_minute_and_a_burst(steps: list[tuple[float, int]]) -> None:
    """Whatever the arrivals, what passed never exceeds the burst plus what refilled, and whoever comes back as told passes."""
    clock = Clock()
    limits = Limits(LimitSettings(tokens_per_minute=60), clock_ns=clock)
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
    limits = Limits(LimitSettings(tokens_per_minute=100), clock_ns=Clock())
    ticket = limits.admit(KEY, claim)
    ticket.settle(40)
    limits.admit(KEY, 60)
    with pytest.raises(RateLimited):
        limits.admit(KEY, 1)


def test_a_claim_of_less_than_nothing_is_no_credit_while_it_runs() -> None:
    """A negative estimate does not let others of the same key pass meanwhile."""
    limits = Limits(LimitSettings(tokens_per_minute=100), clock_ns=Clock())
    limits.admit(KEY, -1000)
    limits.admit(KEY, 100)
    with pytest.raises(RateLimited):
        limits.admit(KEY, 1)


def test_a_claim_of_less_than_nothing_is_no_debt_later() -> None:
    """What the key runs meanwhile does not make the settled count of it dearer."""
    limits = Limits(LimitSettings(tokens_per_minute=100), clock_ns=Clock())
    strange, plain = limits.admit(KEY, -1000), limits.admit(KEY, 10)
    strange.settle(0)
    plain.settle(10)
    limits.admit(KEY, 90)
    with pytest.raises(RateLimited):
        limits.admit(KEY, 1)


# -- whose limits


def test_all_keys_of_a_tenant_share_its_limit() -> None:
    """A tenant cannot make itself more by making keys."""
    limits = Limits(LimitSettings(tenants={"tenant": Allowance(requests_per_minute=2)}), clock_ns=Clock())
    limits.admit(Caller("one", "tenant"), 1)
    limits.admit(Caller("two", "tenant"), 1)
    with pytest.raises(RateLimited, match="The limit of tenant tenant is used up: 2 requests per minute"):
        limits.admit(Caller("three", "tenant"), 1)
    limits.admit(Caller("four", "another"), 1)


def test_each_tenant_has_the_limit_for_all_unless_its_own_is_said() -> None:
    """`each_tenant` fills in what a tenant's own section leaves out."""
    settings = LimitSettings(each_tenant=EachTenant(requests_per_minute=1, concurrent=9), tenants={"vip": Allowance(requests_per_minute=2)})
    limits = Limits(settings, clock_ns=Clock())
    limits.admit(Caller("a", "vip"), 1)
    limits.admit(Caller("b", "vip"), 1)
    limits.admit(Caller("c", "small"), 1)
    with pytest.raises(RateLimited):
        limits.admit(Caller("d", "small"), 1)


def test_a_capability_is_limited_for_all_callers_together_and_alone() -> None:
    """Who asks does not matter, and other capabilities are not touched."""
    limits = Limits(LimitSettings(capabilities={"group/dear": Allowance(requests_per_minute=1)}), clock_ns=Clock())
    limits.admit(Caller("one", "a"), 1, capability="group/dear")
    with pytest.raises(RateLimited, match="capability group/dear"):
        limits.admit(Caller("two", "b"), 1, capability="group/dear")
    limits.admit(Caller("two", "b"), 1, capability="group/cheap")
    limits.admit(Caller("two", "b"), 1)


def test_a_key_may_have_limits_of_its_own_in_the_settings() -> None:
    """By its id; before what the key itself carries."""
    limits = Limits(LimitSettings(keys={"key": Allowance(requests_per_minute=1)}), clock_ns=Clock())
    limits.admit(Caller("key", "t", requests_per_minute=50), 1)
    with pytest.raises(RateLimited):
        limits.admit(Caller("key", "t", requests_per_minute=50), 1)


def test_what_one_limit_refuses_costs_the_others_nothing() -> None:
    """All or nothing: a request that its capability refuses takes no request, no token and no place of its key."""
    settings = LimitSettings(
        requests_per_minute=2, tokens_per_minute=100, concurrent=2, capabilities={"g/c": Allowance(tokens_per_minute=5)}
    )
    limits = Limits(settings, clock_ns=Clock())
    limits.admit(KEY, 5, capability="g/c")
    for _ in range(5):
        with pytest.raises(RateLimited):
            limits.admit(KEY, 5, capability="g/c")
    limits.admit(KEY, 95)


@pytest.mark.parametrize(("key", "tenant", "capability"), [(1, 2, 2), (2, 1, 2), (2, 2, 1)])
def test_what_one_refuses_takes_no_place_of_the_others(key: int, tenant: int, capability: int) -> None:
    """However often it asks meanwhile, one run is counted for each; when that ends, none."""
    settings = LimitSettings(
        concurrent=key, tenants={"tenant": Allowance(concurrent=tenant)}, capabilities={"g/c": Allowance(concurrent=capability)}
    )
    limits = Limits(settings, clock_ns=Clock())
    first = limits.admit(KEY, 1, capability="g/c")
    for _ in range(5):
        with pytest.raises(RateLimited, match="1 requests at a time"):
            limits.admit(KEY, 1, capability="g/c")
    (plan,) = limits._plans.values()
    assert [limits.book.words[seat.used] for seat in plan.seats] == [1, 1, 1]
    first.settle(1)
    assert [limits.book.words[seat.used] for seat in plan.seats] == [0, 0, 0]


def test_a_refusal_names_the_wait_that_is_longest() -> None:
    """Who comes back as told passes every limit."""
    clock = Clock()
    limits = Limits(LimitSettings(requests_per_minute=60, tenants={"tenant": Allowance(requests_per_minute=1)}), clock_ns=clock)
    limits.admit(KEY, 1)
    with pytest.raises(RateLimited) as refused:
        limits.admit(KEY, 1)
    clock.pass_s(refused.value.retry_after_s or 0.0)
    limits.admit(KEY, 1)


@pytest.mark.parametrize(("key", "tenant"), [(200, 100), (100, 200)])
def test_of_two_limits_that_are_used_up_the_longer_wait_is_named(key: int, tenant: int) -> None:
    """Whichever is looked at first: of three hundred tokens two hundred are owed where a hundred a minute are allowed."""
    limits = Limits(LimitSettings(tokens_per_minute=key, tenants={"tenant": Allowance(tokens_per_minute=tenant)}), clock_ns=Clock())
    limits.admit(KEY, 10).settle(300)
    with pytest.raises(RateLimited, match="100 tokens per minute") as refused:
        limits.admit(KEY, 10)
    assert refused.value.retry_after_s == pytest.approx(126.0)


def test_a_limit_that_changes_keeps_what_was_used() -> None:
    """A key whose limit is raised while it is used up does not begin with a full bucket."""
    limits = Limits(LimitSettings(), clock_ns=Clock())
    limits.admit(Caller("k", "t", requests_per_minute=1), 1)
    with pytest.raises(RateLimited):
        limits.admit(Caller("k", "t", requests_per_minute=2), 1)


def test_a_limit_that_changes_counts_from_the_next_request() -> None:
    """A key that was read anew with twice its limit has what is left of a minute twice as fast."""
    clock = Clock()
    limits = Limits(LimitSettings(), clock_ns=clock)
    limits.admit(Caller("k", "t", requests_per_minute=1), 1)
    clock.pass_s(31)
    with pytest.raises(RateLimited):
        limits.admit(Caller("k", "t", requests_per_minute=1), 1)
    limits.admit(Caller("k", "t", requests_per_minute=2), 1)


# -- at a time


def test_runs_at_a_time_are_bounded_and_every_end_frees_a_place() -> None:
    """Settled, booked or refunded, twice or once: a place is free again once."""
    limits = Limits(LimitSettings(concurrent=2), clock_ns=Clock())
    first, second = limits.admit(KEY, 1), limits.admit(KEY, 1)
    with pytest.raises(RateLimited, match="2 requests at a time") as refused:
        limits.admit(KEY, 1)
    assert (refused.value.retry_after_s or 0) >= 1
    first.settle(1)
    first.refund()
    third = limits.admit(KEY, 1)
    with pytest.raises(RateLimited):
        limits.admit(KEY, 1)
    second.refund()
    third.book(Usage(1, 1))
    limits.admit(KEY, 1)
    limits.admit(KEY, 1)
    with pytest.raises(RateLimited):
        limits.admit(KEY, 1)


def test_the_wait_for_a_place_is_told_by_how_long_runs_take() -> None:
    """At first a second; where runs take a hundred, about that."""
    clock = Clock()
    limits = Limits(LimitSettings(concurrent=1), clock_ns=clock)
    for _ in range(80):
        ticket = limits.admit(KEY, 1)
        clock.pass_s(100)
        ticket.settle(1)
    limits.admit(KEY, 1)
    with pytest.raises(RateLimited) as refused:
        limits.admit(KEY, 1)
    assert refused.value.retry_after_s == pytest.approx(100.0, rel=0.02)


# -- money

PRICES = {"small": PriceSettings(input=1.0, cached_input=0.1, output=2.0), "large": PriceSettings(input=10.0, output=20.0)}


def test_money_is_reserved_by_the_estimate_and_booked_by_the_count() -> None:
    """A million prompt tokens of `small` cost 1, cached ones a tenth, completion 2; what is not used is given back."""
    limits = Limits(LimitSettings(money_per_day=10.0), prices=Prices(PRICES), clock_ns=Clock())
    ticket = limits.admit(KEY, 1_000_000, 4_000_000, "small")
    with pytest.raises(RateLimited, match="10 USD per day"):
        limits.admit(KEY, 1_000_000, 1_000_000, "small")
    ticket.book(Usage(1_000_000, 500_000, cached_tokens=1_000_000), "small")  # 0.1 + 1
    limits.admit(KEY, 8_900_000, 0, "small").book(Usage(8_900_000, 0), "small")
    with pytest.raises(RateLimited) as refused:
        limits.admit(KEY, 1_000_000, 0, "small")
    assert refused.value.retry_after_s == pytest.approx(86_400 / 10, rel=1e-3)


def test_a_run_on_another_model_than_was_asked_costs_that_ones_price() -> None:
    """A rung may fall to a smaller model: the flight's model is what is paid."""
    limits = Limits(LimitSettings(money_per_day=100.0), prices=Prices(PRICES), clock_ns=Clock())
    limits.admit(KEY, 1_000_000, 0, "large").book(Usage(1_000_000, 0), "small")
    limits.admit(KEY, 9_900_000, 0, "large")
    with pytest.raises(RateLimited):
        limits.admit(KEY, 1, 0, "small")


def test_a_name_without_a_price_costs_the_dearest() -> None:
    """A name of the caller's choice is no way past a limit."""
    prices = Prices(PRICES, free=["own"])
    assert prices.of("made up").of(1_000_000, 1_000_000) == prices.of("large").of(1_000_000, 1_000_000)
    assert prices.of("own").of(1_000_000, 1_000_000) == 0


def test_prices_in_two_currencies_are_refused() -> None:
    """A limit could not add them up."""
    with pytest.raises(SettingsError, match="a in EUR, b in USD"):
        Prices({"a": PriceSettings(currency="EUR"), "b": PriceSettings()})


def test_limited_money_needs_a_price_for_every_model() -> None:
    """Else a model would pass for nothing."""
    assert money_is_limited(LimitSettings(tenants={"t": Allowance(money_per_day=1.0)}))
    Prices(PRICES).need(["small", "large"])
    with pytest.raises(SettingsError, match="no price for medium"):
        Prices(PRICES).need(["small", "medium"])


@pytest.mark.parametrize(("count", "locked_days"), [(-(10**30), 0.0), (-1, 0.0), (10**30, 12.0)])
def test_counts_that_cannot_be_neither_pay_nor_lock_out_for_ever(count: int, locked_days: float) -> None:
    """An engine that tells nonsense gives nobody money, and a key is back after what the longest run that can be would have cost."""
    clock = Clock()
    limits = Limits(LimitSettings(money_per_day=10.0, tokens_per_minute=1000), prices=Prices(PRICES), clock_ns=clock)
    limits.admit(KEY, 10, 10, "small").book(Usage(count, 5), "small")
    if locked_days:
        with pytest.raises(RateLimited):
            limits.admit(KEY, 20, 0, "small")
    clock.pass_s(locked_days * 86_400)
    limits.admit(KEY, 900, 0, "small")
    with pytest.raises(RateLimited):
        limits.admit(KEY, 900, 0, "small")


# -- bad settings, clocks and callers


@pytest.mark.parametrize("name", ["requests_per_minute", "tokens_per_minute", "concurrent", "money_per_day"])
@pytest.mark.parametrize("value", [-1, 10**18, float("inf"), float("nan"), "many"])
def test_absurd_limits_are_refused_by_name(name: str, value: object) -> None:
    """In every section that has them."""
    for section in (LimitSettings, Allowance, EachTenant):
        with pytest.raises(ValueError, match=name):
            section.model_validate({name: value})


def test_a_clock_that_falls_back_locks_nobody_out() -> None:
    """It goes on from where it was."""
    clock = Clock()
    clock.pass_s(10**6)
    limits = Limits(LimitSettings(requests_per_minute=1), clock_ns=clock)
    limits.admit(KEY, 1)
    clock.pass_s(-(10**5))
    with pytest.raises(RateLimited) as refused:
        limits.admit(KEY, 1)
    assert refused.value.retry_after_s == pytest.approx(60)
    clock.pass_s(60)
    limits.admit(KEY, 1)


def test_a_clock_that_jumps_ahead_brings_one_burst() -> None:
    """Ten years fill a bucket, no more."""
    clock = Clock()
    limits = Limits(LimitSettings(requests_per_minute=3), clock_ns=clock)
    clock.pass_s(10 * 365 * 86_400)
    for _ in range(3):
        limits.admit(KEY, 1)
    with pytest.raises(RateLimited):
        limits.admit(KEY, 1)


def test_many_keys_take_bounded_memory_and_idle_ones_make_room() -> None:
    """A tenant with more keys than are counted is refused for a minute, not for ever, and no key that is in use is forgotten."""
    clock = Clock()
    limits = Limits(LimitSettings(requests_per_minute=1, most_subjects=100), clock_ns=clock)
    for number in range(100):
        limits.admit(Caller(f"k{number}", "t"), 1)
    with pytest.raises(RateLimited, match="More keys are in use"):
        limits.admit(Caller("one more", "t"), 1)
    with pytest.raises(RateLimited, match="1 requests per minute"):
        limits.admit(Caller("k7", "t"), 1)
    size = len(limits.book.words)
    for round_ in range(20):
        clock.pass_s(61)
        for number in range(100):
            limits.admit(Caller(f"k{round_}-{number}", "t"), 1)
    assert len(limits.book.words) == size
    assert limits.book.count() == 100


def test_a_key_whose_run_is_counted_is_not_forgotten_while_it_runs() -> None:
    """However many others come by: its place is taken until it ends."""
    clock = Clock()
    limits = Limits(LimitSettings(concurrent=1, most_subjects=16), clock_ns=clock)
    limits.admit(KEY, 1)
    for number in range(200):
        clock.pass_s(61)
        limits.admit(Caller(f"k{number}", "t"), 1).settle(1)
    with pytest.raises(RateLimited, match="1 requests at a time"):
        limits.admit(KEY, 1)


def test_the_headers_tell_the_nearest_limit() -> None:
    """Of a key and its tenant the one with less left, as OpenAI's headers tell one."""
    settings = LimitSettings(requests_per_minute=10, tokens_per_minute=1000, tenants={"tenant": Allowance(requests_per_minute=3)})
    limits = Limits(settings, clock_ns=Clock())
    ticket = limits.admit(KEY, 100)
    assert dict(ticket.headers()) == {
        b"x-ratelimit-limit-requests": b"3", b"x-ratelimit-remaining-requests": b"2",
        b"x-ratelimit-limit-tokens": b"1000", b"x-ratelimit-remaining-tokens": b"900",
    }
