"""JSON in pieces, without its escapes."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.guard.escapes import Unescaped


@given(st.text(max_size=20), st.lists(st.integers(0, 200), max_size=6), st.booleans())
@settings(max_examples=500, deadline=None)
def test_any_chunking_of_a_string_is_its_text(text: str, cuts: list[int], ascii_only: bool) -> None:
    """However it is written and cut: what it means, pairs of surrogates too."""
    said = json.dumps(text.encode("utf-8", "replace").decode(), ensure_ascii=ascii_only)
    meant = json.loads(said)
    unescaped = Unescaped()
    places = sorted({0, len(said), *(cut % (len(said) + 1) for cut in cuts)})
    assert "".join(unescaped.feed(said[a:b]) for a, b in itertools.pairwise(places)) == f'"{meant}"'
    assert not unescaped.open


@pytest.mark.parametrize("said", ["\\", "\\u", "\\u00", "\\ud83d", "\\ud83d\\", "\\ud83d\\u", "\\ud83d\\ude0"])
def test_an_escape_that_is_not_whole_waits(said: str) -> None:
    """Nothing of it is told before its end."""
    unescaped = Unescaped()
    assert unescaped.feed(said) == ""
    assert unescaped.open == said


@pytest.mark.parametrize(("said", "told"), [("\\q", "q"), ("\\uzz12", "uzz12"), ("\\\\u0062", "\\u0062")])
def test_what_is_no_escape_is_looked_at_as_it_is(said: str, told: str) -> None:
    """Broken JSON hides nothing, and an escaped backslash begins no escape."""
    assert Unescaped().feed(said) == told
