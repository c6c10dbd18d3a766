"""Codes in words, figures as people read them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from tidegate.api.page import words
from tidegate.core.chunk import CLEAN_ENDS, End

ROOT = Path(__file__).parents[2]


def test_every_end_has_a_word_a_meaning_and_a_tone() -> None:
    """Also the ends that are added later: this fails until they have one."""
    assert set(words.ENDS) == set(get_args(End))
    assert {end for end in get_args(End) if words.tone(end) == "good"} == CLEAN_ENDS - {"content_filter"}


def test_every_part_is_explained_as_the_docs_do() -> None:
    """The page says on every part whose time it was, and docs/flights.md has the same parts."""
    rows = [line for line in (ROOT / "docs" / "flights.md").read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    named = {name for line in rows for name in re.findall(r"`([a-z_.]+)`", line.split("|")[1])}
    assert set(words.PARTS) == named - set(words.ENDS)


def test_every_error_code_of_ours_has_a_meaning() -> None:
    """Ours from the errors' own sentences; an engine's own code says whose it is."""
    assert words.meaning("rate_limit_exceeded") == "A limit of the key, tenant or capability is used up."
    assert words.meaning("engine_cut") == "The engine's stream ended before its end."
    assert "engine's own" in words.meaning("cuda_oom")


@pytest.mark.parametrize(("nanoseconds", "said"), [
    (0, "0.000 ms"), (42_000, "0.042 ms"), (7_310_000, "7.31 ms"), (41_500_000, "41.5 ms"), (1_204_000_000, "1,204 ms"),
    (12_340_000_000, "12.3 s"), (None, "–"),
])
def test_durations_carry_their_unit(nanoseconds: float | None, said: str) -> None:
    """Three digits that count, seconds from ten on, a dash for none."""
    assert words.span(nanoseconds) == said


def test_small_shares_are_not_called_nothing() -> None:
    """A hundredth of a percent is there."""
    assert [words.percent(share) for share in (0, 0.0001, 0.251, 1)] == ["0.0 %", "< 0.1 %", "25.1 %", "100.0 %"]


def test_backticks_are_code_and_markup_is_text() -> None:
    """Messages may name commands; nothing in them becomes HTML."""
    assert words.marked("Run `tidegate <up>` & wait.") == "Run <code>tidegate &lt;up&gt;</code> &amp; wait."
    assert words.marked("an odd ` <b>") == "an odd ` &lt;b&gt;"
