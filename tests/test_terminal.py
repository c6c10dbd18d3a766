"""What is drawn in the terminal is to scale, and safe to print."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tidegate.core.flight import FlightRecord
from tidegate.terminal import fill, ms, render_flights, render_waterfall, spans_by_part, thin


def record(**changes: Any) -> FlightRecord:
    facts: dict[str, Any] = {
        "id": "f" * 32, "began_unix_ns": 1_700_000_000_000_000_000, "whole_ns": 100, "laps": [("a", 50), ("b", 25), ("a", 25)],
        "route": "/v1/completions", "end": "stop", "http_status": 200,
    }
    return FlightRecord(**(facts | changes))


def drawn(what: Any, width: int = 80, encoding: str = "utf-8") -> str:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")  # as the command line sets stdout
    Console(file=out, width=width, force_terminal=False).print(what)
    out.flush()
    return out.buffer.getvalue().decode(encoding)


def test_bars_are_to_scale() -> None:
    """A part that owned the first half fills the first half of the cells, and no other."""
    assert fill([(0.0, 0.5, 1.0)], 8) == pytest.approx([1, 1, 1, 1, 0, 0, 0, 0], abs=1e-6)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=20), st.integers(1, 120))
def test_every_moment_is_drawn_once(laps: list[int], width: int) -> None:
    """The cells of all parts together are full: the picture adds up as the record does."""
    whole = sum(laps)
    if not whole:
        return
    spans = [span for spans in spans_by_part([(f"p{n}", spent) for n, spent in enumerate(laps)]).values() for span in spans]
    cells = fill([(begin / whole, end / whole, 1.0) for begin, end in spans], width)
    assert sum(cells) == pytest.approx(width, abs=1e-4)


def test_a_part_that_comes_twice_has_one_row() -> None:
    """Its times are added, and both places are drawn."""
    assert spans_by_part([("a", 50), ("b", 25), ("a", 25)]) == {"a": [(0, 50), (75, 100)], "b": [(50, 75)]}
    assert drawn(render_waterfall(record())).count("\na ") == 1


def test_a_record_that_does_not_add_up_is_said() -> None:
    """The picture never hides a broken record."""
    assert "not to be trusted" in drawn(render_waterfall(record(whole_ns=101)), 200)
    assert "not to be trusted" not in drawn(render_waterfall(record()))


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=500), st.integers(1, 100))
def test_no_stall_is_hidden(gaps: list[int], width: int) -> None:
    """However many gaps share a cell, the longest is seen."""
    shown = thin(gaps, width)
    assert len(shown) <= width
    assert max(shown) == max(gaps)


@pytest.mark.parametrize("width", [20, 40, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_any_terminal_will_do(width: int, encoding: str) -> None:
    """Narrow, wide, and without Unicode; with no time, no tokens, or one."""
    streams = (record(token_ns=stamps, first_token_ns=5) for stamps in ([5], [5, 5, 5], [5, 9]))
    for one in (record(), record(whole_ns=0, laps=[]), *streams):
        assert drawn(render_waterfall(one), width, encoding)
        assert drawn(render_flights([one]), width, encoding)


@pytest.mark.parametrize("width", [80, 100, 400])
def test_a_list_keeps_ids_and_figures_whole(width: int) -> None:
    """In a terminal of 80 columns names give way, never an id or a figure; each flight has one line; with room all is whole."""
    long = record(capability="underwriting/assess", error_code="deadline_exceeded", whole_ns=120_007_000_000, first_token_ns=384_300_000)
    lines = drawn(render_flights([record(capability="support/answer"), long]), width).splitlines()
    assert len(lines) == 3
    assert {"f" * 32, "120007", "384.3"} <= set(lines[2].split())
    assert ({"underwriting/assess", "deadline_exceeded"} <= set(lines[2].split())) == (width > 80)


def test_a_name_from_outside_cannot_steer_the_terminal() -> None:
    """A model's name is what a caller wrote: control characters and markup are shown, not obeyed."""
    one = record(model="\x1b[2J[red]evil\x07", decisions=[(0, "\x1bX", {"a": "\x1b]0;title\x07"})], error_code="\x1b[0m")
    for picture in (drawn(render_waterfall(one)), drawn(render_flights([one]))):
        assert "\x1b" not in picture
        assert "\x07" not in picture
    assert "[red]evil" in drawn(render_waterfall(one))


@pytest.mark.parametrize(
    ("ns", "said"), [(0, "0.000"), (12_345, "0.012"), (1_234_567, "1.23"), (45_678_901, "45.7"), (1_234_567_890, "1235")]
)
def test_times_are_read_at_a_glance(ns: int, said: str) -> None:
    """As many places as are read."""
    assert ms(ns) == said
