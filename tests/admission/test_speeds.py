"""What a token of the answer costs and how much may be unread, learnt from engines whose speeds are known."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tidegate.admission.speeds import ANSWER_COST, ANSWER_COST_LEAST, ANSWER_COST_MOST, HOLD_S, Speeds

S = 1_000_000_000


def run(speeds: Speeds, *, read_s: float, told_s: float, count: int = 300, one_by_one: bool = True, seed: int = 1, now_ns: int = 0) -> int:
    """Pairs of requests on an engine with one slot: `read_s` and `told_s` a token. A fifth of the time in which it reads it tells answers, so those
    take that much less afterwards. `one_by_one`: the two prompts are read one after the other, else at once. Returns the time."""
    chance = random.Random(seed)
    for _ in range(count):
        prompts = [chance.randint(50, 5000), chance.randint(50, 5000)]
        answers = [chance.randint(10, 300), chance.randint(10, 300)]
        before = [speeds.begin(tokens) for tokens in prompts]
        began_ns = now_ns
        for tokens, unread in zip(prompts, before, strict=True):
            if one_by_one:
                now_ns += int(tokens * read_s / 0.8 * S)
            took_ns = now_ns - began_ns if one_by_one else int(tokens * read_s / 0.8 * S)
            speeds.pass_time(began_ns + max(took_ns, now_ns - began_ns), 2, 1)
            speeds.leave(tokens)
            speeds.first_token(tokens, unread, took_ns, 1.0)
        if not one_by_one:
            now_ns += int(max(prompts) * read_s / 0.8 * S)
        left_s = max(0.0, sum(answers) * told_s - sum(prompts) * read_s / 4)
        for tokens in answers:
            now_ns += int(left_s * tokens / sum(answers) * S)
            speeds.pass_time(now_ns, 1, 1)
            speeds.end(tokens)
    return now_ns


@pytest.mark.parametrize(("read_s", "told_s"), [(40e-6, 280e-6), (40e-6, 560e-6), (5e-6, 240e-6)], ids=["7", "14", "48"])
def test_what_a_token_of_the_answer_costs_is_learnt(read_s: float, told_s: float) -> None:
    """On engines where a token of the answer takes as long as 7, 14 and 48 of the prompt, what is learnt is within a third of that."""
    speeds = Speeds(0)
    run(speeds, read_s=read_s, told_s=told_s)
    assert 2 / 3 < speeds.answer_cost / (told_s / read_s) < 3 / 2


def test_it_begins_with_a_guess() -> None:
    """Before anything was measured a token of the answer costs 20, and after one request still about that."""
    speeds = Speeds(0)
    assert speeds.answer_cost == ANSWER_COST
    run(speeds, read_s=1e-6, told_s=1.0, count=1)
    assert speeds.answer_cost == ANSWER_COST


def test_an_engine_that_changes_is_learnt_anew() -> None:
    """An engine that answers five times as slowly is known as such some hundred requests later."""
    speeds = Speeds(0)
    now_ns = run(speeds, read_s=40e-6, told_s=400e-6)
    before = speeds.answer_cost
    run(speeds, read_s=40e-6, told_s=2000e-6, now_ns=now_ns)
    assert speeds.answer_cost > 3 * before


@pytest.mark.parametrize("jump_s", [3600.0, 1e9, -3600.0, -1e9], ids=["hour on", "years on", "hour back", "years back"])
def test_a_clock_that_lies_once_moves_little(jump_s: float) -> None:
    """One jump, however far: the cost stays within a factor of two of what it was."""
    speeds = Speeds(0)
    now_ns = run(speeds, read_s=40e-6, told_s=560e-6)
    before, bound = speeds.answer_cost, speeds.most_unread
    run(speeds, read_s=40e-6, told_s=560e-6, count=4, now_ns=now_ns + int(jump_s * S))
    assert before / 2 < speeds.answer_cost < 2 * before
    assert bound / 4 < speeds.most_unread < 4 * bound


def test_where_prompts_are_read_one_by_one_what_is_unread_is_bounded() -> None:
    """The bound is what the engine reads in a quarter of a second, to within a third."""
    speeds = Speeds(0)
    run(speeds, read_s=40e-6, told_s=560e-6)
    assert 2 / 3 < speeds.most_unread / (HOLD_S / 50e-6) < 3 / 2


def test_where_many_are_read_as_fast_as_one_nothing_is_bounded() -> None:
    """Times to first token that do not grow with what is unread: no bound that anybody meets."""
    speeds = Speeds(0)
    run(speeds, read_s=40e-6, told_s=560e-6, one_by_one=False)
    assert speeds.most_unread > 1e6


def test_before_anything_was_measured_nothing_is_bounded() -> None:
    """An engine of which nothing is known has no bound."""
    assert Speeds(0).most_unread == math.inf


@settings(max_examples=30, deadline=None)
@given(st.floats(1e-9, 1e-2), st.floats(1e-9, 1.0), st.integers(0, 2**32))
def test_whatever_the_engine_the_cost_is_within_its_bounds(read_s: float, told_s: float, seed: int) -> None:
    """Engines of any speed, also where a token of the answer takes a millionth or a million times as long as one of the prompt."""
    speeds = Speeds(0)
    run(speeds, read_s=read_s, told_s=told_s, count=40, seed=seed)
    assert ANSWER_COST_LEAST <= speeds.answer_cost <= ANSWER_COST_MOST
    assert speeds.most_unread > 0


_STEPS = st.one_of(
    st.tuples(st.just("time"), st.integers(-(2**62), 2**62), st.integers(0, 100), st.integers(1, 100)),
    st.tuples(st.just("first"), st.integers(-(2**40), 2**40), st.integers(0, 2**40), st.integers(-(2**62), 2**62)),
    st.tuples(st.just("end"), st.integers(-(2**40), 2**40)),
)


@example([("time", 1, 1, 1), *[("first", -2, 0, 0)] * 20, *[("end", 0)] * 40])
@settings(max_examples=200)
@given(st.lists(_STEPS, max_size=120))
def test_whatever_is_told_the_measurements_are_bounded(steps: list[tuple[Any, ...]]) -> None:
    """Any order of any numbers: the cost of a token is within its bounds, the bound of what is unread above nought."""
    speeds = Speeds(0)
    for what, *numbers in steps:
        if what == "time":
            speeds.pass_time(*numbers)
        elif what == "first":
            speeds.first_token(*numbers, 1.0)
        else:
            speeds.end(*numbers)
    assert ANSWER_COST_LEAST <= speeds.answer_cost <= ANSWER_COST_MOST
    assert speeds.most_unread > 0
    assert speeds.read_ns >= 0
