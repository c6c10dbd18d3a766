"""A text as words: what is asked finds what is written, in two scripts and in codes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.words import WORD_CHARS, words


@pytest.mark.parametrize(
    ("asked", "written"),
    [
        ("reporting", "It was reported"), ("policy", "all policies"), ("CAFE", "the café’s"), ("file", "a ﬁle"), ("cooperate", "coop\u00aderates"),
        ("don't", "DON’T"), ("the bank's", "of the bank"), ("email", "E-mails"), ("123%", "１２３％"), ("3000", "about 3,000 cases"),
        ("1,234,567.89", "$1234567.89"), ("ERR-204", "err_204"), ("ERR 204", "ERR-204 was raised"), ("err204", "ERR-204"),
        ("transferToAgent", "transfer_to_agent"), ("agent", "transfer_to_agent"), ("AB12345", "no. ab12345."), ("12345", "AB12345"),
        ("v2.3.1", "since V2.3.1"), ("10.5%", "(10.5%)"), ("§12(3)", "see §12(3)."), ("C++", "in C++, of course"), ("赔偿", "水灾的赔偿上限"),
        ("한국", "한국어"), ("हिन्दी", "हिन्दी में"),
    ],
)  # fmt: skip
def test_what_is_asked_finds_what_is_written(asked: str, written: str) -> None:
    """Every word of the question stands in the text."""
    assert set(words(asked)) <= set(words(written))


@pytest.mark.parametrize(
    ("one", "other"),
    [("ERR-204", "ERR-205"), ("10.5%", "10.5"), ("v2.3.1", "v23.1"), ("10-12", "1012"), ("C++", "C"), ("3,000", "3"), ("税", "说")],
)
def test_what_differs_stays_apart(one: str, other: str) -> None:
    """The first says something that the second does not."""
    assert set(words(one)) - set(words(other))


def test_words_come_in_the_order_of_the_text_as_often_as_they_occur() -> None:
    """Their number is the text's length, and their frequency counts."""
    assert words("Fees, fees and 费用费!") == ["fee", "fee", "and", "费用", "用费"]


def test_a_code_is_a_word_as_a_whole_and_in_its_parts() -> None:
    """The whole first."""
    assert words("ERR-204") == ["err204", "err", "204"]
    assert words("§12(3)") == ["§12(3)", "12", "3"]
    assert words("1,2,3") == ["1,2,3", "1", "2", "3"]


@given(st.text(st.characters(codec=None), max_size=200))
def test_any_text_has_words(text: str) -> None:
    """Whatever the characters: no error, no word is empty or longer than the bound (a few letters become more when case is folded), and reading
    them again in the same way gives the same."""
    found = words(text)
    assert found == words(text)
    assert all(0 < len(word) <= 3 * WORD_CHARS for word in found)


@given(st.text(max_size=40), st.text(max_size=40))
def test_texts_on_two_lines_have_the_words_of_both(one: str, other: str) -> None:
    """What stands in the next line changes no word."""
    assert words(f"{one}\n{other}") == words(one) + words(other)


@pytest.mark.parametrize("piece", ["a", "a-", "a'", "1(a)", "1,", "1,000", "_", "aA", "a.", "§", "中", "a\u0301", "\ud800"])
def test_a_long_text_of_one_kind_is_read(piece: str) -> None:
    """A megabyte without a blank: nothing is read over and over (a time that grew with the square would be hours)."""
    text = piece * (1_000_000 // len(piece))
    assert len(words(text)) <= len(text)
