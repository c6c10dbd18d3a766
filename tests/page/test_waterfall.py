"""The drawing's arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_in import MS, record

from tidegate.api.page import waterfall

NAMES = st.sampled_from(["read", "auth", "retrieve", "stream", "engine.send", "x.y"])
LAPS = st.lists(st.tuples(NAMES, st.integers(0, 10**10)), max_size=40)


@given(LAPS)
def test_the_parts_add_up_to_the_laps_and_stay_inside(laps: list[tuple[str, int]]) -> None:
    """Sums are exact, shares add up to one, and no bar leaves the drawing."""
    flight = record(0, laps=laps, whole_ns=sum(ns for _, ns in laps))
    parts = waterfall.parts(flight)
    assert sum(part.sum_ns for part in parts) == flight.whole_ns
    assert sum(part.times for part in parts) == len(laps)
    if flight.whole_ns:
        assert sum(part.share for part in parts) == pytest.approx(1)
    for bar in [bar for part in parts for bar in part.bars] + waterfall.strip(laps, flight.whole_ns):
        assert -0.001 <= bar.x <= bar.x + bar.width <= waterfall.WIDTH + 0.35


def test_a_bar_lies_where_its_lap_lay() -> None:
    """Three laps of one length: the second begins at a third."""
    [_, second, _] = waterfall.parts(record(0, laps=[("read", MS), ("retrieve", MS), ("close", MS)], whole_ns=3 * MS))
    assert second.bars[0].x == pytest.approx(33.333, abs=0.01)
    assert second.bars[0].width == pytest.approx(33.333, abs=0.01)
    assert second.room == "retrieval"


def test_a_part_that_happens_twice_is_one_row_with_two_bars() -> None:
    """The row's figure is the sum."""
    parts = waterfall.parts(record(0, laps=[("engine.send", MS), ("prompt", MS), ("engine.send", 2 * MS)], whole_ns=4 * MS))
    assert [(part.name, len(part.bars), part.sum_ns, part.times) for part in parts] == [("engine.send", 2, 3 * MS, 2), ("prompt", 1, MS, 1)]


@given(st.integers(0, 10**13))
def test_ticks_are_few_round_and_inside(whole_ns: int) -> None:
    """Between one and eleven, the first at 0, none beyond the end."""
    ticks = waterfall.ticks(whole_ns)
    assert 1 <= len(ticks) <= 11
    assert ticks[0].ms == 0
    assert all(tick.x <= 100 for tick in ticks)


def test_the_rhythm_tells_a_stall_from_a_beat() -> None:
    """Ten gaps of 20 ms and one of 200: one stall, drawn highest, and the rate is tokens over time."""
    stamps = [n * 20 * MS for n in range(11)]
    rhythm = waterfall.rhythm(record(0, token_ns=[*stamps, stamps[-1] + 200 * MS]))
    assert rhythm is not None
    assert (rhythm.p50_ms, rhythm.max_ms, rhythm.stalls) == (20, 200, 1)
    assert [gap.stall for gap in rhythm.gaps] == [False] * 10 + [True]
    assert rhythm.gaps[-1].height == 100
    assert rhythm.per_s == pytest.approx(11 / 0.4)


def test_a_long_answer_draws_a_bounded_number_of_lines() -> None:
    """Ten thousand tokens merge, and the longest gap is still drawn."""
    stamps = [n * MS for n in range(10_000)]
    stamps[5000:] = [at + 900 * MS for at in stamps[5000:]]
    rhythm = waterfall.rhythm(record(0, token_ns=stamps))
    assert rhythm is not None
    assert len(rhythm.gaps) <= 400
    assert max(gap.ms for gap in rhythm.gaps) == 901


def test_one_token_has_no_rhythm() -> None:
    """Nor have none."""
    assert waterfall.rhythm(record(0, token_ns=[5])) is None
    assert waterfall.rhythm(record(0, token_ns=[])) is None
