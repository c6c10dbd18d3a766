"""How long answers are expected to be: learnt by the length of the prompt, drawn together where little is known."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.admission.answers import ANSWER_TOKENS, Answers, half_octave
from tidegate.admission.forecast import ServiceTimes


def taught(answers: Answers, prompt: int, answer: float, often: int = 100) -> None:
    for _ in range(often):
        answers.learn(prompt, answer)


def test_a_length_learns_how_long_its_answers_are() -> None:
    """After a hundred requests of one length the answer that is expected is what they got."""
    answers = Answers(None)
    taught(answers, 500, 70)
    assert answers.expect(500) == pytest.approx(70, rel=0.05)


def test_lengths_are_learnt_apart() -> None:
    """Long prompts with long answers do not make short ones look dear."""
    answers = Answers(None)
    for _ in range(50):
        taught(answers, 100, 20, 2)
        taught(answers, 30_000, 900, 2)
    assert answers.expect(100) == pytest.approx(20, rel=0.1)
    assert answers.expect(30_000) == pytest.approx(900, rel=0.1)


def test_where_the_prompt_says_nothing_all_are_expected_to_be_alike() -> None:
    """Answers that are drawn from one distribution whatever the prompt is: lengths that have seen few do not pretend to know, and none is expected to
    have much more than another."""
    spread = []
    for seed in range(20):
        answers, chance = Answers(None), random.Random(seed)
        for _ in range(150):
            answers.learn(int(chance.lognormvariate(7.0, 1.5)) + 1, chance.expovariate(1 / 30))
        said = [answers.expect(prompt) for prompt in (50, 200, 1000, 5000, 20_000)]
        spread.append(max(said) / min(said))
    assert sorted(spread)[10] < 1.25


def test_inside_a_half_octave_the_expectation_goes_as_the_answers_do() -> None:
    """Short prompts have long answers: of two prompts of one half octave the longer is expected to have the shorter answer, so that it comes first
    where answers are dear."""
    answers = Answers(None)
    for prompt in range(600, 4000, 40):
        taught(answers, prompt, 4000 - prompt, 4)
    assert half_octave(1600) == half_octave(2000)
    assert answers.expect(1600) > answers.expect(2000) + 200


def test_a_change_is_learnt_within_some_hundred_answers() -> None:
    """Answers that become three times as long are soon expected to be: old ones fade."""
    answers = Answers(None)
    taught(answers, 500, 100, 5000)
    taught(answers, 500, 300, 300)
    assert answers.expect(500) == pytest.approx(300, rel=0.05)


def test_one_absurd_count_is_soon_forgotten() -> None:
    """A count of a million million tokens moves what is expected by no more than some thousand tokens, and a hundred answers later by less than one
    in three."""
    answers = Answers(None)
    taught(answers, 500, 100)
    answers.learn(500, 1e12)
    answers.learn(500, -1e12)
    assert answers.expect(500) < 1000
    taught(answers, 500, 100, 200)
    assert answers.expect(500) == pytest.approx(100, rel=0.3)


def test_a_new_sort_begins_with_what_the_lane_is_answered() -> None:
    """Nothing was asked of this capability yet: its answers are expected to be as those of all."""
    times = ServiceTimes()
    taught(times.answers("", 0), 1000, 900)
    assert times.answers("support/answer", 0).expect(4000) == pytest.approx(900, rel=0.1)


def test_a_new_length_begins_with_what_its_sort_is_answered() -> None:
    """A capability with short answers is expected to have short ones at lengths that it has not had yet."""
    times = ServiceTimes()
    taught(times.answers("", 1000), 1000, 900)
    taught(times.answers("support/answer", 1000), 1000, 30, 600)
    assert times.answers("support/answer", 1000).expect(4000) == pytest.approx(30, rel=0.1)
    assert times.answers("support/answer", 100).expect(4000) == pytest.approx(30, rel=0.3)


def test_of_what_nothing_is_known_a_guess_is_made() -> None:
    """Before anything was answered an answer is thought to have some hundred tokens."""
    assert ServiceTimes().answers("", 2000).expect(500) == ANSWER_TOKENS


def test_sorts_are_bounded() -> None:
    """However many sorts there are, memory is bounded, and predictions still come."""
    times = ServiceTimes()
    for n in range(3000):
        times.answers(f"sort/{n}", 1 << n % 20).learn(100, 7)
    assert len(times._answers) <= 1024
    assert times.answers("another", 3).expect(100) == pytest.approx(7)


@given(st.lists(st.tuples(st.integers(-(2**40), 2**40), st.floats(-1e12, 1e12)), max_size=150), st.integers(-(2**40), 2**40))
def test_whatever_is_learnt_an_expectation_is_a_number_from_nought_on(learnt: list[tuple[int, float]], prompt: int) -> None:
    """Any counts, in any order: what is expected is finite, not negative, and no more than the most that was counted."""
    answers = Answers(None)
    for tokens, answer in learnt:
        answers.learn(tokens, answer)
    most = max([ANSWER_TOKENS, *(answer for _, answer in learnt)])
    assert -1e-6 * most <= answers.expect(prompt) <= 3.0 * most + 1.0


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_half_octaves_follow_the_length(one: int, other: int) -> None:
    """A longer prompt is never in a lower one, and twice the length is two on, up to the last."""
    if one <= other:
        assert half_octave(one) <= half_octave(other)
    if 2 <= one < 1 << 22:
        assert half_octave(2 * one) == half_octave(one) + 2
