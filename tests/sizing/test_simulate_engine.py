"""The engine model: its times are those of its formula, and it never does more than it can."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.sizing.engine_model import Engine, Speed
from tidegate.sizing.job import Job

SPEED = Speed(slots=4, prefill=1000.0, decode=10.0, half=3.0, chunk=100)


def job(number: int, prompt: int, output: int) -> Job:
    return Job(number, "t", prompt, output, float(output), 0, 0, 0)


def run(engine: Engine) -> list[Job]:
    ended: list[Job] = []
    while engine.next_ns is not None:
        ended += engine.advance(engine.next_ns)
    return ended


def test_one_request_alone_takes_its_prompt_and_its_tokens() -> None:
    """500 tokens at 1,000 a second, then 20 more tokens at 10 a second; the first token comes with the end of the prompt."""
    one = job(0, 500, 21)
    engine = Engine(SPEED)
    engine.start(one, 0)
    assert run(engine) == [one]
    assert (one.first_ns, one.done_ns) == (pytest.approx(0.5e9), pytest.approx(2.5e9))
    assert SPEED.alone_s(500, 21) == pytest.approx(2.5)


def test_prompts_are_read_one_after_the_other() -> None:
    """Answers of one token: two prompts of half a second each end at 0.5 and 1 s."""
    first, second = job(0, 500, 1), job(1, 500, 1)
    engine = Engine(SPEED)
    engine.start(first, 0)
    engine.start(second, 0)
    run(engine)
    assert (first.done_ns, second.done_ns) == (pytest.approx(0.5e9), pytest.approx(1e9))


def test_short_prompts_are_read_in_one_step() -> None:
    """Two prompts of 30 tokens have room in one step of 100: both have their first token when 60 are read, behind the step at work."""
    first, *others = job(0, 100, 1), job(1, 30, 1), job(2, 30, 1)
    engine = Engine(SPEED)
    for one in (first, *others):
        engine.start(one, 0)
    run(engine)
    assert [one.first_ns for one in (first, *others)] == [pytest.approx(0.1e9), pytest.approx(0.16e9), pytest.approx(0.16e9)]


def test_streams_slow_each_other_down() -> None:
    """With `half` more streams beside it, a stream has half the speed: 4 streams with half = 3 take 0.2 s a token in place of 0.1 s."""
    first, *others = [job(number, 25, 11) for number in range(4)]
    engine = Engine(SPEED)
    for one in (first, *others):
        engine.start(one, 0)
    run(engine)
    # 25 tokens; 75 tokens and the first stream's second; 9 steps of four streams; one of three.
    read_s = 0.025 + 0.1 + 0.075
    assert first.done_ns == pytest.approx((read_s + 9 * 0.2) * 1e9)
    assert [one.done_ns for one in others] == [pytest.approx((read_s + 9 * 0.2 + (1 + 2 / 3) / 10) * 1e9)] * 3


def test_reading_slows_streams_and_streams_slow_reading() -> None:
    """A step of 100 prompt tokens and a token of a stream takes 0.1 + 0.1 s: 1,000 prompt tokens take 2 s; the stream gets 10 meanwhile."""
    stream, prompt = job(0, 0, 12), job(1, 1000, 1)
    engine = Engine(SPEED)
    engine.start(stream, 0)
    engine.advance(0)
    engine.start(prompt, 0)
    run(engine)
    assert (prompt.done_ns, stream.done_ns) == (pytest.approx(2.1e9), pytest.approx(2.1e9))


def test_who_comes_during_a_step_is_part_of_the_next() -> None:
    """A stream's steps take 0.1 s. A prompt that comes 0.05 s after the third began is read in the fourth, together with the stream's token."""
    stream, prompt = job(0, 100, 21), job(1, 50, 1)
    engine = Engine(SPEED)
    engine.start(stream, 0)
    engine.advance(100_000_000)
    engine.start(prompt, 350_000_000)
    run(engine)
    assert prompt.first_ns == pytest.approx(0.4e9 + 0.15e9)
    assert stream.done_ns == pytest.approx(0.1e9 + 20 * 0.1e9 + 0.05e9)


def test_an_empty_answer_ends_with_its_prompt() -> None:
    """No token, or one: the slot is free when the prompt is read."""
    for output in (0, 1):
        one = job(0, 100, output)
        engine = Engine(SPEED)
        engine.start(one, 0)
        run(engine)
        assert one.first_ns == one.done_ns == pytest.approx(0.1e9)


def test_what_is_cached_is_not_read() -> None:
    """500 tokens of which the engine has 400: 0.1 s."""
    one = job(0, 500, 1)
    one.cached = 400
    engine = Engine(SPEED)
    engine.start(one, 0)
    run(engine)
    assert one.first_ns == pytest.approx(0.1e9)


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 300), st.integers(0, 5_000_000_000)), min_size=1, max_size=40))
def test_nobody_is_faster_than_alone_and_the_whole_is_not_faster_than_the_engine(asked: list[tuple[int, int, int]]) -> None:
    """Every request ends once, none before its time alone; all prompts together take at least their reading; never more than the slots run."""
    waiting = sorted((came_ns, number, job(number, prompt, output)) for number, (prompt, output, came_ns) in enumerate(asked))
    engine = Engine(SPEED)
    ended: list[Job] = []
    now_ns = 0
    while waiting or engine.next_ns is not None:
        while engine.free and waiting and waiting[0][0] <= now_ns:
            engine.start(waiting.pop(0)[2], now_ns)
        times = [engine.next_ns] if engine.next_ns is not None else []
        if waiting and engine.free:
            times.append(waiting[0][0])
        now_ns = max(now_ns, min(times))
        ended += engine.advance(now_ns)
        assert 0 <= engine.free <= SPEED.slots
    assert sorted(one.number for one in ended) == list(range(len(asked)))
    assert engine.free == SPEED.slots
    for one in ended:
        assert one.started_ns <= one.first_ns <= one.done_ns
        assert one.done_ns - one.started_ns >= SPEED.alone_s(one.prompt, one.output) * 1e9 * (1 - 1e-6) - 1000
    begun, read = min(one.started_ns for one in ended), max(one.first_ns for one in ended)
    assert read - begun >= sum(one.prompt for one in ended) / SPEED.prefill * 1e9 * (1 - 1e-6) - 1000
