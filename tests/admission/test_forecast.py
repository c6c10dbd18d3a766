"""The pace of a lane, and the wait that follows from it."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.admission.forecast import ServiceTimes, bounded_ns, cost_of, left_ns, wait_ns
from tidegate.admission.speeds import ANSWER_COST

S = 1_000_000_000


def taught(times: ServiceTimes, prompt: int, answer: int, *, often: int = 100, token_ns: float = 1e6) -> None:
    """So many requests on an engine that needs `token_ns` for a cost of 1, which is never full."""
    for _ in range(often):
        took_ns = int(cost_of(prompt, answer, ANSWER_COST) * token_ns)
        times.learn(prompt, answer, ANSWER_COST, 0.0, took_ns, took_ns, 0, False)


def test_a_long_prompt_is_not_one_unit() -> None:
    """30,000 tokens cost many times what 500 do."""
    assert cost_of(30_000, 100, ANSWER_COST) > 10 * cost_of(500, 100, ANSWER_COST)


def test_the_pace_is_what_the_engine_needs() -> None:
    """Where the lane is never full the pace is slot time by cost."""
    times = ServiceTimes()
    taught(times, 500, 100, token_ns=40_000)
    assert times.pace_ns == pytest.approx(40_000, rel=0.01)
    assert times.doubt == 1.0


def test_a_change_is_learnt_within_some_hundred_requests() -> None:
    """An engine that becomes three times as slow is soon known as such: old measurements fade."""
    times = ServiceTimes()
    taught(times, 500, 100, often=5000, token_ns=1e6)
    taught(times, 500, 100, often=250, token_ns=3e6)
    assert times.pace_ns == pytest.approx(3e6, rel=0.05)


def test_where_measurements_disagree_there_is_doubt() -> None:
    """Throughput says 4 ms, shares say 1 ms and the engines' speeds 2 ms for a cost of 1: the pace is 2 ms, and the slowest is twice that."""
    times = ServiceTimes()
    for _ in range(200):
        cost = cost_of(500, 100, ANSWER_COST)
        times.learn(500, 100, ANSWER_COST, 2e6, 0, int(cost * 1e6), int(cost * 4e6), True)
    assert times.pace_ns == pytest.approx(2e6)
    assert times.doubt == pytest.approx(2.0)


def test_a_lane_that_was_hardly_ever_full_will_be_slower() -> None:
    """Requests that ran beside few say 1 ms for a cost of 1, and the engines' speeds 4 ms where all slots are taken: places are booked by those."""
    times = ServiceTimes()
    for _ in range(200):
        cost = cost_of(500, 100, ANSWER_COST)
        times.learn(500, 100, ANSWER_COST, 4e6, int(cost * 1e6), int(cost * 3e6), 0, False)
    assert times.pace_ns == pytest.approx(2e6)
    assert times.pace_ns * times.doubt == pytest.approx(4e6)


def test_what_an_answer_costs_may_change_without_a_change_of_the_forecast() -> None:
    """Slot times are those that were measured, whatever a token of the answer is said to cost."""
    times = ServiceTimes()
    taught(times, 500, 100)
    before = cost_of(500, 100, ANSWER_COST) * times.pace_ns
    times.learn(500, 100, 50.0, 0.0, int(before), int(before), 0, False)
    taught(times, 0, 0, often=0)
    times._tell_pace(50.0, 0.0)
    assert cost_of(500, 100, 50.0) * times.pace_ns == pytest.approx(before, rel=0.01)


@given(st.integers(-(2**70), 2**70), st.integers(-(2**70), 2**70))
def test_absurd_numbers_are_bounded(prompt: int, answer: int) -> None:
    """Whatever a caller says of its tokens, the cost is above nought and finite, and the slot time within a microsecond and a day."""
    times = ServiceTimes()
    times.answers("", answer).expect(prompt)
    cost = cost_of(prompt, answer, ANSWER_COST)
    assert 1.0 <= cost <= 2**41 * ANSWER_COST
    assert 1000 <= bounded_ns(cost * times.pace_ns) <= 86_400 * S


def test_what_outlives_its_prediction_is_not_forecast_to_end_now() -> None:
    """What runs longer than predicted is expected to run on."""
    assert left_ns(2 * S, S // 2) == 2 * S - S // 2
    assert left_ns(2 * S, 8 * S) == S


@given(st.integers(1, 64), st.lists(st.integers(1, 1000), max_size=200), st.integers(0, 2**32))
def test_the_forecast_is_within_one_service_time_of_list_scheduling(slots: int, ahead: list[int], seed: int) -> None:
    """With true service times the forecast wait differs from what list scheduling on these slots gives by at most the longest of them."""
    chance = random.Random(seed)
    whole = [chance.randint(1, 1000) for _ in range(slots)]
    left = [chance.randint(1, one) for one in whole]
    forecast = wait_ns(slots, slots, sum(whole) / slots, sum(left), sum(ahead))
    free = list(left)
    heapq.heapify(free)
    for work in ahead:
        heapq.heappush(free, heapq.heappop(free) + work)
    assert abs(forecast - free[0]) <= max(whole + ahead)
