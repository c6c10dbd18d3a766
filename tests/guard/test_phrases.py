"""Phrases in a text: the same places by the automaton and by the quick way, however they lie."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.guard.injection import _PHRASES
from tidegate.guard.phrases import _LONG, Phrases

LISTED = ("abcde", "bcdefg", "abcdefgh", "a b c", "the the", "字典", "字x", "[🔒", "aaaaa", "'sixth", "zzzzzzz")
PHRASES = Phrases(LISTED)
SHIPPED = Phrases(_PHRASES)


def places(listed: tuple[str, ...], text: str) -> list[tuple[int, int]]:
    """By the plainest way there is."""
    return sorted((at + len(phrase), number) for number, phrase in enumerate(listed) for at in range(len(text)) if text.startswith(phrase, at))


@given(
    st.lists(st.sampled_from([*LISTED, *"abcdefghz 字典🔒x'["]) | st.text(alphabet="abcdefgh é字", max_size=4), max_size=20),
    st.integers(0, 9),
    st.booleans(),
)
@settings(max_examples=1000, deadline=None)
def test_all_are_found_wherever_they_are(parts: list[str], before: int, long: bool) -> None:
    """In short and long texts, of narrow and wide characters, at odd and even places, overlapping, at both ends."""
    text = "".join(parts)
    text = f"{text}{'-' * (_LONG if long else before)}{'.' * before}{text}"
    assert sorted(PHRASES.find(text)) == places(LISTED, text)


@pytest.mark.parametrize("before", range(4))
def test_every_shipped_phrase_is_found_at_every_place(before: int) -> None:
    """None of them lies so that the quick way misses it."""
    for number, phrase in enumerate(_PHRASES):
        text = "-" * (_LONG + before) + phrase
        assert (len(text), number) in SHIPPED.find(text)
        assert (len(phrase), number) in SHIPPED.find(phrase + "-" * (_LONG + before))


@pytest.mark.parametrize("listed", [("abcd",), ("字",), ("",), ("abcde", "abcde")])
def test_what_cannot_be_looked_for_is_refused(listed: tuple[str, ...]) -> None:
    """A phrase that is too short, or that is there twice."""
    with pytest.raises(ValueError, match="too short, or twice"):
        Phrases(listed)


def test_no_phrases_find_nothing() -> None:
    """An empty list is a list."""
    assert Phrases(()).find("a" * 5000) == Phrases(()).find("a") == []
