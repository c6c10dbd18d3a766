"""Terms whose letters are parted: spelled singly (`b a n n e d`), or with marks of emphasis inside a word (`ban**ned**`).

Only what a reader takes for one word: between spelled letters each stands alone, so words that are whole never run together; a mark of emphasis
stands between two letters. Of what follows a place there are two readings, and each is compared as if nothing parted it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from tidegate.guard.normal import extends, word_pattern
from tidegate.guard.road import Road

#: What makes letters bold, slanted, struck out or code in Markdown.
EMPHASIS = frozenset("*_~`")
#: What stands between letters that are spelled singly.
BETWEEN = EMPHASIS | frozenset(" .-/|+·")
#: As many of them stand between two letters.
MOST_BETWEEN = 3
#: Letters that spelling takes: two that stand singly are seldom meant as a word.
LEAST_SPELLED = 3
#: Characters of a reading after which it is first asked whether it leads anywhere; a power of two.
_FIRST_LOOK = 4

_LETTER = r"[^\W_]"
_EMPHASISED = re.compile(rf"(?<=[0-9a-z\u0080-\U0010ffff])[*_~`]{{1,{MOST_BETWEEN}}}(?={_LETTER})")
_GAP = rf"[ .\-/|+·*_~`]{{1,{MOST_BETWEEN}}}"
_CELL = rf"{_LETTER}[^\x00-\u02ff\w]*"  # with its marks
_SPELLED = re.compile(rf"(?<![0-9a-z]){_CELL}{_GAP}{_CELL}{_GAP}{_LETTER}(?![0-9a-z])")


def may_be_parted(norm: str) -> bool:
    """Whether a normal form may hold a word whose letters are parted. It may doubt one that holds none."""
    return _EMPHASISED.search(norm) is not None or _SPELLED.search(norm) is not None


class Reading(NamedTuple):
    """What follows a place, read without what parts its letters. `ends`: for each character of `text`, where it ends; `open`: the reading reaches to
    the end, so that more may follow; `strict`: its letters are spelled, so behind the last of them no word
    goes on."""

    text: str
    ends: list[int]
    open: bool
    strict: bool

    def lives(self, road: Road) -> bool:
        """Whether it may become a term."""
        return self.open and road.longest_prefix(self.text) == len(self.text)

    def terms(self, road: Road) -> Iterator[tuple[int, int]]:
        """Terms that it begins with and that something parts: where each ends, and its number."""
        far = road.longest_prefix(self.text)
        for length in road.lengths:
            if length > far:
                return
            end = self.ends[length - 1]
            if end > length and (not self.strict or length >= LEAST_SPELLED) and (number := road.number_of(self.text[:length], None)) is not None:
                yield end, number


def readings(rest: str, begins: bool, road: Road) -> list[Reading]:
    """The other readings of what stands behind a place, a normal form. `begins`: no word goes on to that place. As it stands it goes along a term up
    to where something parts it, so what lies behind that is only looked at where there is something."""
    found = []
    if not EMPHASIS.isdisjoint(rest[: road.longest_prefix(rest) + 1]) and (emphasised := _emphasised(rest, road)):
        found.append(emphasised)
    if begins and may_spell(rest) and (spelled := _spelled(rest, road)):
        found.append(spelled)
    return found


def _is_lost(text: list[str], road: Road) -> bool:
    """Whether it leads to no term any more; asked when it has doubled its length."""
    size = len(text)
    return size > road.lengths[-1] or (size >= _FIRST_LOOK and size & (size - 1) == 0 and road.longest_prefix("".join(text)) < size)


def may_spell(rest: str) -> bool:
    """Whether the first letter stands alone, or may."""
    size = _cell(rest, 0)
    return size > 0 and (size == len(rest) or rest[size] in BETWEEN)


def _cell(text: str, at: int) -> int:
    """How long a letter or figure is with the marks that belong to it; 0: it is none."""
    if not text[at].isalnum():
        return 0
    end = at + 1
    while end < len(text) and extends(text[end]):
        end += 1
    return end - at


def _emphasised(rest: str, road: Road) -> Reading | None:
    text: list[str] = []
    ends: list[int] = []
    at = 0
    parted = False
    while at < len(rest):
        character = rest[at]
        if character in EMPHASIS and text and (text[-1].isalnum() or extends(text[-1])):
            behind = _behind(rest, at, EMPHASIS)
            if behind == len(rest) and behind - at <= MOST_BETWEEN:
                parted = True
                break
            if behind - at <= MOST_BETWEEN and rest[behind].isalnum():
                at, parted = behind, True
                continue
        text.append(character)
        at += 1
        ends.append(at)
        if _is_lost(text, road):
            return Reading("".join(text), ends, False, False) if parted else None
    return Reading("".join(text), ends, True, False) if parted else None


def _spelled(rest: str, road: Road) -> Reading | None:
    text: list[str] = []
    ends: list[int] = []
    at = 0
    while not _is_lost(text, road):
        size = _cell(rest, at)
        behind = at + size
        if size == 0:
            return Reading("".join(text), ends, False, True)
        if behind < len(rest) and is_word(rest[behind]) and is_word(rest[at]):  # a word begins there
            return Reading("".join(text), ends, False, True)
        text += rest[at:behind]
        ends += range(at + 1, behind + 1)
        if behind < len(rest) and rest[behind] not in BETWEEN:
            return Reading("".join(text), ends, False, True)
        at = _behind(rest, behind, BETWEEN)
        if at - behind > MOST_BETWEEN:
            return Reading("".join(text), ends, False, True)
        if at == len(rest):
            return Reading("".join(text), ends, True, True)
    return Reading("".join(text), ends, False, True)


def _behind(text: str, at: int, characters: frozenset[str]) -> int:
    """Where a run of characters ends; no further than one more than may be."""
    most = at + MOST_BETWEEN + 1
    while at < len(text) and at < most and text[at] in characters:
        at += 1
    return at


def is_word(character: str) -> bool:
    """Whether a character is part of a word in a script that parts words."""
    return character.isalnum() if character.isascii() else word_pattern().match(character) is not None
