"""The first look at a whole text: it never passes what the scan would find, and seldom doubts what holds no term."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.guard.test_terms import ANYWHERE, TERMS, WORDS, texts

from tidegate.guard.normal import MOST_UNSEEN, simple_form
from tidegate.guard.terms import Scan, TermList, Terms, normal_form

ODD = Terms([TermList(["a  ͺb", "_x", "x_", "-", "b-c d", "é", "ü b", "炸b"]), TermList(["_x", "bomb"], whole_words=False)])
fillers = st.sampled_from(["\u200b", " ", "\n", "\x00", "\u00a0"])
long_gaps = st.tuples(texts, fillers, st.integers(MOST_UNSEEN - 3, MOST_UNSEEN + 3), fillers, st.sampled_from(TERMS)).map(
    lambda parts: parts[0] + parts[1] * parts[2] + parts[3] + parts[4]
)


def finds(terms: Terms, text: str) -> bool:
    scan = Scan(terms)
    return scan.feed(text) is not None or scan.finish() is not None


@given(text=texts | long_gaps, terms=st.sampled_from([WORDS, ANYWHERE, ODD]))
@example(text="x" + "\u200b" * MOST_UNSEEN + "bomb", terms=WORDS)
@example(text="a  ͺb", terms=ODD)
@example(text="état", terms=WORDS)
@settings(max_examples=1500, deadline=None)
def test_what_it_passes_holds_no_term(text: str, terms: Terms) -> None:
    """Whatever the scan would find, the glance leaves to the scan."""
    if terms.glance.clears(text):
        assert not finds(terms, text)


@given(text=texts)
@settings(max_examples=500, deadline=None)
def test_the_simple_form_is_the_normal_form(text: str) -> None:
    """Where it is given; blanks at the ends aside."""
    simple = simple_form(text)
    if simple is not None:
        assert simple.strip() == normal_form(text).strip()


@pytest.mark.parametrize(
    "text", ["", "bombs", "the foo has bars", "two\n\nparts", "café", "你好 😀", "👩\u200d🚀 ❤\ufe0f", "abc_", "c+", "    return x\r\n"]
)
def test_what_holds_no_term_passes(text: str) -> None:
    """Other words, the first word of a term alone, line ends, signs that are made of several characters."""
    assert WORDS.glance.clears(text)


@pytest.mark.parametrize("text", ["bomb", "a BOMB!", "foo  bar", "做炸弹", "C++", "b\u200bomb", "вomb", "_bomb_", "bomb_s"])
def test_what_holds_a_term_does_not(text: str) -> None:
    """As a reader sees it."""
    assert not WORDS.glance.clears(text)
