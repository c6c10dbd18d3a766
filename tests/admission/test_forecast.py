"""Answers by length class, the pace of a lane, and the wait that follows from them."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.admission.forecast import ANSWER_COST, ANSWER_TOKENS, ServiceTimes, bounded_ns, cost_of, half_octave, left_ns, wait_ns

S = 1_000_000_000


def taught(times: ServiceTimes, prompt: int, most: int, answer: int, *, sort: str = "", often: int = 100, token_ns: float = 1e6) -> None:
    """So many requests that were answered with `answer` tokens, on an engine that needs `token_ns` for a cost of 1, which is never full."""
    for _ in range(often):
        cost = cost_of(prompt, answer)
        times.learn(times.length_class(sort, prompt, most), answer, cost, int(cost * token_ns), 0, False)


def expected(times: ServiceTimes, prompt: int, most: int = 0, *, sort: str = "") -> float:
    return times.length_class(sort, prompt, most).answer


def test_a_class_learns_how_long_its_answers_are() -> None:
    """After a hundred requests of one length the answer that is expected is what they got, however much might have been answered."""
    times = ServiceTimes()
    taught(times, 500, 1000, 70)
    assert expected(times, 500, 1000) == pytest.approx(70, rel=0.05)


def test_lengths_are_learnt_apart() -> None:
    """Long prompts with long answers do not make short ones look dear."""
    times = ServiceTimes()
    for _ in range(50):
        taught(times, 100, 0, 20, often=2)
        taught(times, 30_000, 0, 900, often=2)
    assert expected(times, 100) == pytest.approx(20, rel=0.1)
    assert expected(times, 30_000) == pytest.approx(900, rel=0.1)


def test_a_long_prompt_is_not_one_unit() -> None:
    """30,000 tokens cost many times what 500 do, also before the first long prompt was measured."""
    times = ServiceTimes()
    taught(times, 500, 0, 100)
    assert cost_of(30_000, expected(times, 30_000)) > 10 * cost_of(500, expected(times, 500))


def test_a_new_length_begins_with_what_its_sort_is_answered() -> None:
    """A capability with short answers is expected to have short ones at lengths that it has not had yet."""
    times = ServiceTimes()
    taught(times, 1000, 1000, 900)
    taught(times, 1000, 1000, 30, sort="support/answer", often=600)
    assert expected(times, 4000, 1000, sort="support/answer") == pytest.approx(30, rel=0.1)


def test_of_what_nothing_is_known_a_guess_is_made() -> None:
    """Before anything was answered an answer is thought to have some hundred tokens."""
    assert expected(ServiceTimes(), 500, 2000) == ANSWER_TOKENS


def test_the_pace_is_what_the_engine_needs() -> None:
    """Where the lane is never full the pace is slot time by cost."""
    times = ServiceTimes()
    taught(times, 500, 0, 100, token_ns=40_000)
    assert times.pace_ns == pytest.approx(40_000, rel=0.01)
    assert times.doubt == 1.0


def test_a_change_is_learnt_within_some_hundred_requests() -> None:
    """An engine that becomes three times as slow is soon known as such: old measurements fade."""
    times = ServiceTimes()
    taught(times, 500, 0, 100, often=5000, token_ns=1e6)
    taught(times, 500, 0, 100, often=250, token_ns=3e6)
    assert times.pace_ns == pytest.approx(3e6, rel=0.05)


def test_where_two_measurements_disagree_there_is_doubt() -> None:
    """Throughput says 4 ms and slot times say 1 ms for a cost of 1: the pace is 2 ms, and both are a factor of 2 from it."""
    times = ServiceTimes()
    for _ in range(200):
        cost = cost_of(500, 100)
        times.learn(times.length_class("", 500, 0), 100, cost, int(cost * 1e6), int(cost * 4e6), True)
    assert times.pace_ns == pytest.approx(2e6)
    assert times.doubt == pytest.approx(2.0)


@given(st.integers(-(2**70), 2**70), st.integers(-(2**70), 2**70))
def test_absurd_numbers_are_bounded(prompt: int, answer: int) -> None:
    """Whatever a caller says of its tokens, the cost is above nought and finite, and the slot time within a microsecond and a day."""
    times = ServiceTimes()
    times.length_class("", prompt, answer)
    cost = cost_of(prompt, answer)
    assert 1.0 <= cost <= 2**41 * ANSWER_COST
    assert 1000 <= bounded_ns(cost * times.pace_ns) <= 86_400 * S


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_half_octaves_follow_the_length(one: int, other: int) -> None:
    """A longer prompt is never in a lower class, and twice the length is two classes on."""
    if one <= other:
        assert half_octave(one) <= half_octave(other)
    if one >= 2:
        assert half_octave(2 * one) == half_octave(one) + 2


def test_classes_are_bounded() -> None:
    """However many lengths and sorts there are, memory is bounded, and predictions still come."""
    times = ServiceTimes()
    for n in range(200):
        for prompt in (1, 10, 100, 1000, 10_000, 100_000):
            for answer in (1, 10, 100, 1000, 10_000):
                times.length_class(f"sort/{n}", prompt, answer).learn(7)
    assert len(times._classes) <= 4096
    assert expected(times, 3, 3) == pytest.approx(7)


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


def test_a_free_slot_means_no_wait() -> None:
    """Where fewer run than there are slots the forecast is nought."""
    assert wait_ns(16, 15, 5.0 * S, 15 * S, 0) == 0
