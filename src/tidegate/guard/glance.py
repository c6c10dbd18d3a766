"""The first look at a whole text: nearly always it is certain at once that no term is in it, and nobody has to walk through it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tidegate.guard.normal import extends, simple_form
from tidegate.guard.parted import may_be_parted
from tidegate.guard.road import Road

_WORD = re.compile(r"[0-9a-z]+")


class Glance:
    """Knows how terms begin. It may doubt a text that holds none, for the scan to decide; it never passes one that holds a term."""

    __slots__ = ("_heads", "_parted", "_places", "_roads", "_words")

    def __init__(self) -> None:
        #: First words, up to where a character follows that is no letter or figure of ASCII, of terms that begin where a word begins.
        self._words: set[str] = set()
        #: Of all other terms the first two characters.
        self._heads: set[str] = set()
        self._places: re.Pattern[str] | None = None
        self._roads: Mapping[str, Road] = {}
        self._parted = False

    def add(self, folded: str, flags: int) -> None:
        """The next term's normal form; `flags`: 1 where it counts only at a word's begin, 2 only at a word's end."""
        word = _WORD.match(folded)
        if flags & 1 and word is not None and (flags & 2 or word.end() < len(folded)):
            self._words.add(word.group())  # where the term stands in a text, the text's own word is just this one
        else:
            self._heads.add(folded[:2])

    def close(self, roads: Mapping[str, Road], *, parted: bool = False) -> None:
        """All terms were added; `roads` are theirs, by first character; `parted`: they are looked for also where their letters are parted."""
        self._parted = parted and bool(roads)
        self._roads = roads
        if self._heads:
            self._places = re.compile(f"[{''.join(re.escape(first) for first in sorted({head[0] for head in self._heads}))}]")

    def clears(self, text: str) -> bool:
        """Whether it is certain that the whole text holds no term."""
        norm = simple_form(text)
        if norm is None or (self._parted and may_be_parted(norm)):
            return False
        words, heads = self._words, self._heads
        if words and not words.isdisjoint(_WORD.findall(norm)):
            for found in _WORD.finditer(norm):
                if found.group() in words and self._has_term(norm, found.start(), found.end() - found.start()):
                    return False
        if self._places is not None:
            for found in self._places.finditer(norm):
                at = found.start()
                if (norm[at : at + 2] in heads or norm[at] in heads) and self._has_term(norm, at, 1):
                    return False
        return True

    def _has_term(self, norm: str, at: int, least: int) -> bool:
        """Whether a term of at least so many characters stands there, wherever words begin and end."""
        road = self._roads[norm[at]]
        rest = norm[at : at + road.lengths[-1]]
        far = road.longest_prefix(rest)
        if far < road.lengths[0] or far < least:
            return False
        for length in road.lengths:
            if least <= length <= far and road.number_of(rest[:length], None) is not None:
                after = norm[at + length : at + length + 1]
                if not (after and extends(after)):  # else it ends inside a character
                    return True
        return False
