"""Characters that are no plain writing are the same ones whether a text is short or long, and where the rules say."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tidegate.guard.characters import _LONG, _LONG_ASCII, Odd, odd_ones

#: Of every kind, beside what is plain: marks, blanks, an emoji, a flag, both ends of the ranges.
ALPHABET = (
    "abXZ  \n\t\r.0字é€"
    "\u200b\u200c\u200f\u2060\u2064\u2065\u202a\u202e\u2066\u206f\x00\x08\x0b\x1b\x1f\x7f\x80\x9f\u00a0\u00ad\u061c\u180e\ufeff\ufffd\ufffe"
    "\ud800\udfff\ufdd0\ufdef\ufff8\ufff9\ufffb\U0001f3f4\U000e0067\U000e0062\U000e007f\U000e0080\U0001f600\U000e0100\U000e0fff\U000e1000\U0001fffe\U0010ffff"
)
texts = st.text(alphabet=ALPHABET, max_size=12)
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
SPOILT = re.compile("[\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff\U0001fffe\U0001ffff\U0010fffe\U0010ffff]")
HIDES = re.compile("[\u202a-\u202e\u2066-\u206f\ufff9-\ufffb\U000e0000-\U000e007f\U000e0100-\U000e0fff]")
UNSEEN = re.compile("[\u00ad\u061c\u180e\u200b-\u200f\u2060-\u2064\ufeff]{3}|(?<=[A-Za-z])[\u200b\u2060-\u2064](?=[A-Za-z])")
SEEN = re.compile(
    "\U0001f3f4[\U000e0030-\U000e007a]{1,8}\U000e007f|[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003fffd][\U000e0100-\U000e01ef]"
)


def first(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return None if found is None else found.start()


def hidden(text: str) -> int | None:
    """As `Odd.hidden`, with flags and chosen forms of ideographs blotted out first."""
    text = SEEN.sub(lambda seen: "." * len(seen[0]), text)
    return min((at for at in (first(HIDES, text), first(UNSEEN, text)) if at is not None), default=None)


@given(texts, st.sampled_from(["", "plain words\n " * 200, "字と " * 100, "\U0001f600 " * 100]))
@example("\U0001f3f4\U000e0067\U000e0062\U000e007f", "")
@example("\u845b\U000e0100\u57ce\U00020bb7\U000e0101", "")
@example("\u845b\U000e0100\U000e0100", "")
@example("\u845b\U000e0041", "")
@settings(max_examples=1500, deadline=None)
def test_each_kind_is_where_the_rules_say(text: str, before: str) -> None:
    """In a short text and behind a long one, of narrow or wide characters, against patterns that say the rules."""
    text = before + text
    odd = odd_ones(text)
    told = (None, None, (0, None), None) if odd is None else (odd.control(), odd.spoilt(), odd.replaced(), odd.hidden())
    replaced = (text.count("\ufffd"), text.index("\ufffd") if "\ufffd" in text else None)
    assert told == (first(CONTROL, text), first(SPOILT, text), replaced, hidden(text))


@pytest.mark.parametrize("size", [8, _LONG - 1, _LONG, _LONG_ASCII - 1, _LONG_ASCII, 9000])
@pytest.mark.parametrize("character", ["\x07", "\u0085", "\u202e", "\ufffd", "\U000e0041"])
def test_one_is_seen_wherever_it_is(character: str, size: int) -> None:
    """At the beginning, in the middle and at the end of a text of any length; without it there is nothing."""
    for filler in ("a", "é", "字", "\U0001f600"):
        assert odd_ones(filler * size) is None
        for at in (0, size // 2, size - 1):
            odd = odd_ones(filler * at + character + filler * (size - at - 1))
            assert isinstance(odd, Odd)
            assert at in (odd.control(), odd.spoilt(), odd.replaced()[1], odd.hidden())
