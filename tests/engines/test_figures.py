"""What is told of an engine: its figures, or why there are none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tidegate.core.errors import EngineDown
from tidegate.engines import figures
from tidegate.engines.figures import all_told, in_metrics, up_or_why


async def _told(**found: Any) -> dict[str, Any]:
    return found


async def _fails(error: Exception) -> dict[str, Any]:
    raise error


def test_counts_are_added_up_and_of_shares_the_largest_counts() -> None:
    """Over the processes of one engine; labels may hold blanks and braces, a time may follow, and a longer name is another metric."""
    said = b'# TYPE m:n gauge\nm:n{a="x y"} 2.0\nm:n{a="}"} 1 1700000000\nm:n_total 9\nm:s 0.25\nm:s{} 0.5\nother 7\n\n'
    assert in_metrics(said, {b"m:n": "running"}, {b"m:s": "used"}) == {"running": 3.0, "used": 0.5}


def test_a_value_that_is_no_number_is_refused() -> None:
    """Nothing is guessed."""
    with pytest.raises(ValueError, match="float"):
        in_metrics(b"m:n\n", {b"m:n": "running"})


async def test_a_question_that_fails_takes_nothing_from_the_others() -> None:
    """What is switched off is left out."""
    assert await all_told(_told(a=1), _fails(EngineDown("It is down.")), _fails(ValueError("x")), _told(b=2)) == {"a": 1, "b": 2}


async def test_figures_or_why_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is down, silent or speaks gibberish is told as such: nothing is raised."""
    assert await up_or_why("The engine 'x'", _told(slots=4)) == {"up": True, "slots": 4}
    assert await up_or_why("The engine 'x'", _fails(EngineDown("It is down."))) == {"up": False, "why": "It is down."}
    assert (await up_or_why("The engine 'x'", _fails(KeyError("n"))))["why"] == "The engine 'x' answers what cannot be read: KeyError('n')"
    monkeypatch.setattr(figures, "FIGURES_S", 0.01)
    assert (await up_or_why("The engine 'x'", asyncio.sleep(60, {})))["why"] == "The engine 'x' did not answer within 0.01 s."
