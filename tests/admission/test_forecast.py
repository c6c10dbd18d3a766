"""Service times by length class, and the wait that follows from them."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.admission.forecast import ServiceTimes, bounded_ns, guess_ns, half_octave, left_ns, wait_ns

S = 1_000_000_000


def taught(times: ServiceTimes, prompt: int, answer: int, took_ns: int, *, sort: str = "", often: int = 100) -> None:
    for _ in range(often):
        times.length_class(sort, prompt, answer).learn(took_ns / guess_ns(prompt, answer))


def predicted(times: ServiceTimes, prompt: int, answer: int, *, sort: str = "") -> float:
    return times.length_class(sort, prompt, answer).factor * guess_ns(prompt, answer)


def test_a_class_learns_what_its_requests_take() -> None:
    """After a hundred requests of one length the prediction is what they took."""
    times = ServiceTimes()
    taught(times, 500, 100, 7 * S)
    assert predicted(times, 500, 100) == pytest.approx(7 * S, rel=0.02)


def test_lengths_are_learnt_apart() -> None:
    """Long prompts that take longer than their tokens say do not make short ones look slow."""
    times = ServiceTimes()
    for _ in range(50):
        taught(times, 100, 50, 1 * S, often=2)
        taught(times, 30_000, 50, 60 * S, often=2)
    assert predicted(times, 100, 50) == pytest.approx(1 * S, rel=0.1)
    assert predicted(times, 30_000, 50) == pytest.approx(60 * S, rel=0.1)


def test_a_long_prompt_is_not_one_unit() -> None:
    """Also before the first long prompt was measured, it is predicted to take many times as long."""
    times = ServiceTimes()
    taught(times, 500, 100, 2 * S)
    assert predicted(times, 30_000, 100) > 10 * predicted(times, 500, 100)


def test_a_new_length_begins_with_what_its_sort_takes() -> None:
    """A capability that takes a tenth of the plain guess is predicted so at lengths that it has not had yet."""
    times = ServiceTimes()
    taught(times, 1000, 1000, 10 * guess_ns(1000, 1000))
    taught(times, 1000, 1000, guess_ns(1000, 1000) // 10, sort="support/answer", often=300)
    assert predicted(times, 4000, 1000, sort="support/answer") == pytest.approx(guess_ns(4000, 1000) / 10, rel=0.1)


def test_a_change_is_learnt_within_some_hundred_requests() -> None:
    """An engine that becomes three times as slow is soon predicted so: old measurements fade."""
    times = ServiceTimes()
    taught(times, 500, 100, 1 * S, often=10_000)
    taught(times, 500, 100, 3 * S, often=200)
    assert predicted(times, 500, 100) == pytest.approx(3 * S, rel=0.05)


@given(st.integers(-(2**70), 2**70), st.integers(-(2**70), 2**70))
def test_absurd_numbers_are_bounded(prompt: int, answer: int) -> None:
    """Whatever a caller says of its tokens, the prediction lies between a microsecond and a day."""
    times = ServiceTimes()
    assert 1000 <= bounded_ns(times.length_class("", prompt, answer).factor * guess_ns(prompt, answer)) <= 86_400 * S


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
                times.length_class(f"sort/{n}", prompt, answer).learn(1.0)
    assert len(times._classes) <= 4096
    assert predicted(times, 3, 3) > 0


def test_a_request_that_outlives_its_prediction_is_not_forecast_to_end_now() -> None:
    """What has run for long is expected to run on for a part of its age."""
    assert left_ns(2 * S, 1 * S) == 1 * S
    assert left_ns(2 * S, 8 * S) == 2 * S


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
