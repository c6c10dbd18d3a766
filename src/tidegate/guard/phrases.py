"""Finds where phrases stand in a text, whatever its length: a short text in one pass of an automaton, a long one by looking at every second place.

The automaton (Aho and Corasick 1975) takes 10 to 20 ns a character. Of a long text the groups of four characters that begin at even places are looked
up in a table, all at once. Of each phrase the five characters in a row are known that are the seldomest; however they lie, their first four or their
last are such a group. Only where a group is found with the fifth before or behind it is the text compared. So five characters are the least that a
phrase has; of one that is not all ASCII, two. What is found is the same either way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import ahocorasick
import numpy as np
import numpy.typing as npt

from tidegate.guard.characters import code_points

#: (where it ends, its number)
Place = tuple[int, int]

#: Texts of fewer characters are walked through; a vector pass takes 20 us to begin with.
_LONG = 1024
_FOUR, _FIVE, _SHORTEST_WIDE = 4, 5, 2
#: Knuth's multiplicative hash: 2^32 / the golden ratio, and another odd number for the fifth.
_MULTIPLIER, _FIFTH = np.uint32(2654435769), np.uint32(40503)
_BITS = 17
_SHIFT = np.uint32(32 - _BITS)
_PAIR = 1 << 16
#: Pairs of letters and blanks in English, the frequent ones first: a group of seldom ones is met seldom.
_FREQUENT = (
    "e  t as thinreheert d ann  conntattir enes ite o soroustitedaral pcoy  f wndng rtomeac biois m dsecao ralel nedeliasunf urhaverirous eg ofce"
    "sichnslataeccticomditstreaprpefoa mah  heessnc netil ym  lelnafewiccemhordgellbeyopohiutimieotloaiirmoidly unoolmivisuosrswaplrtpaifwhamowba"
    "finicucligivsodoty gociackapcisaepulayabcrbldabuopmpadavuew efdsbotuquk shumevppagovfrrr vweldrmsprnexewryuau lseibivamu"
)
_SELDOM = {_FREQUENT[at : at + 2]: at for at in range(len(_FREQUENT) - 2, -1, -2)}

#: What another phrase that has the same five takes from their seldomness.
_SHARED = 40


class Phrases:
    """A compiled list of phrases. They and the texts are in lower case, and blanks stand alone."""

    __slots__ = ("_before", "_behind", "_fives", "_four", "_pairs", "_places", "_two")

    def __init__(self, phrases: Sequence[str]) -> None:
        """The order gives the numbers; raises ValueError for one that is too short, or twice there."""
        automaton = ahocorasick.Automaton()
        #: By their seldomest five characters: phrases, each with the place that the five have in it.
        self._fives: dict[str, list[tuple[str, int, int]]] = {}
        #: By their first two characters: those that are not all ASCII.
        self._pairs: dict[str, list[tuple[str, int]]] = {}
        shared = Counter(five for phrase in phrases for five in set(_fives_of(phrase)))
        for number, phrase in enumerate(phrases):
            if len(phrase) < (_FIVE if phrase.isascii() else _SHORTEST_WIDE) or phrase in automaton:
                raise ValueError(f"the phrase {phrase!r} is too short, or twice there")
            automaton.add_word(phrase, (number, len(phrase)))
            if phrase.isascii():
                five = max((_rarity(five) - _SHARED * shared[five], five) for five in _fives_of(phrase))[1]
                self._fives.setdefault(five, []).append((phrase, phrase.index(five), number))
            else:
                self._pairs.setdefault(phrase[:2], []).append((phrase, number))
        automaton.make_automaton()
        self._places = automaton.iter if phrases else None
        fives = np.array([[ord(character) for character in five] for five in self._fives], np.uint32).reshape(-1, _FIVE)
        weights = np.array([1 << shift for shift in range(0, 8 * _FOUR, 8)], np.uint32)  # as a little-endian number
        first, last = fives[:, :_FOUR] @ weights, fives[:, 1:] @ weights
        #: Groups; groups with what comes behind; groups with what comes before.
        self._four, self._behind, self._before = (np.zeros(1 << _BITS, np.bool_) for _ in range(3))
        self._four[_hash(np.concatenate([first, last]))] = True
        self._behind[_hash(first + fives[:, _FOUR] * _FIFTH)] = True
        self._before[_hash(last + fives[:, 0] * _FIFTH)] = True
        self._two = np.zeros(_PAIR, np.bool_)
        self._two[[_pair(phrase) for phrase in self._pairs]] = True

    def find(self, text: str) -> list[Place]:
        """Where phrases end (behind their last character), and their numbers, sorted."""
        if self._places is None:
            return []
        if len(text) < _LONG:
            return [(end + 1, number) for end, (number, _) in self._places(text)]
        found: list[Place] = []
        points = code_points(text)
        if points.dtype != np.uint8:
            self._find_wide(text, points, found)
            points = np.minimum(points, 0x80).astype(np.uint8)
        data = b"\0" + points.tobytes() + b"\0" * _FIVE  # there is something before and behind each
        points = np.frombuffer(data, np.uint8)
        for offset in (1, 3):
            fours = np.frombuffer(data, "<u4", (len(data) - offset) // _FOUR, offset)
            hits = np.flatnonzero(self._four.take(_hash(fours)))
            groups, hits = fours[hits], hits * _FOUR + (offset - 1)
            behind = self._behind.take(_hash(groups + points.take(hits + _FIVE, mode="clip") * _FIFTH))
            before = self._before.take(_hash(groups + points[hits] * _FIFTH))
            self._compare(text, hits[behind], found)
            self._compare(text, hits[before] - 1, found)
        found.sort()
        return found

    def _compare(self, text: str, hits: npt.NDArray[np.intp], found: list[Place]) -> None:
        for at in hits.tolist():
            for phrase, inside, number in self._fives.get(text[at : at + _FIVE], ()):
                if text.startswith(phrase, at - inside) and at >= inside:
                    found.append((at - inside + len(phrase), number))

    def _find_wide(self, text: str, points: npt.NDArray[np.uint16 | np.uint32], found: list[Place]) -> None:
        wide = np.flatnonzero(points > 0x7F)
        last = len(points) - 1
        sparse = len(wide) < len(points) // 4
        starts = np.unique(np.concatenate([wide[wide < last], wide[wide > 0] - 1])) if sparse else np.arange(last)
        narrow = points.astype(np.uint16, copy=False)
        pairs = narrow[starts] * np.uint16(31) + narrow[starts + 1]
        for at in starts[self._two.take(pairs)].tolist():
            for phrase, number in self._pairs.get(text[at : at + 2], ()):
                if text.startswith(phrase, at):
                    found.append((at + len(phrase), number))


def _hash(groups: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    return (groups * _MULTIPLIER) >> _SHIFT


def _pair(phrase: str) -> int:
    return (ord(phrase[0]) * 31 + ord(phrase[1])) % _PAIR


def _fives_of(phrase: str) -> list[str]:
    return [phrase[at : at + _FIVE] for at in range(len(phrase) - _FOUR)]


def _rarity(five: str) -> int:
    return sum(_SELDOM.get(five[at : at + 2], len(_FREQUENT)) for at in range(_FOUR))
