"""Characters of a text that are no plain writing: control characters, what cannot be seen or reorders, what is no character. Found in a few passes of
vector code over a long text, so that nobody waits for them."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Points = npt.NDArray[Any]

#: Texts of fewer characters are looked at without vectors, which cost some microseconds to begin with: of ASCII, and others.
_LONG_ASCII, _LONG = 2048, 192
#: Control characters of C0, but for the tab and line ends that texts have, and DEL.
_C0 = bytes({*range(0x20), 0x7F} - set(b"\t\n\r"))
#: Kinds of character, as the table below has them.
PLAIN, CONTROL, SPOILT, HIDES, UNSEEN, REPLACED = range(6)
_KINDS = (
    (CONTROL, "\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"),
    # No characters: halves of surrogate pairs, code points that Unicode keeps free for ever.
    (SPOILT, "\ud800-\udfff\ufdd0-\ufdef" + "".join(f"{chr(end - 1)}-{chr(end)}" for end in range(0xFFFF, 0x110000, 0x10000))),
    # They reorder a text (UAX 9: embeddings, overrides, isolates) or write another one that nobody sees: tag characters, selectors beyond those of a
    # pictograph's form, annotations.
    (HIDES, "\u202a-\u202e\u2066-\u206f\ufff9-\ufffb\U000e0000-\U000e007f\U000e0100-\U000e0fff"),
    # Joiners and single direction marks are part of many scripts, so it takes a row of them, or one inside a Latin word.
    (UNSEEN, "\u00ad\u061c\u180e\u200b-\u200f\u2060-\u2064\ufeff"),
    (REPLACED, "\ufffd"),
)  # fmt: skip
_NOT_PLAIN = re.compile(f"[{''.join(characters for _, characters in _KINDS)}]")
#: Of those unseen, what has no business inside a Latin word.
_PARTS_WORDS = np.array([0x200B, *range(0x2060, 0x2065)])
#: What is seen all the same: flags of regions are tag characters behind a black flag, and one selector behind an ideograph chooses its form (names).
_SEEN = re.compile(
    "\U0001f3f4[\U000e0030-\U000e007a]{1,8}\U000e007f|[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003fffd][\U000e0100-\U000e01ef]"
)
_ROW = 3


@cache
def _table() -> npt.NDArray[np.uint8]:
    """The kind of each code point."""
    table = np.zeros(0x110000, np.uint8)
    for kind, characters in _KINDS:
        for first, dash, last in re.findall(r"(?s)(.)(?:(-)(.))?", characters):
            table[ord(first) : ord(last if dash else first) + 1] = kind
    return table


def code_points(text: str) -> Points:
    """A text as a vector of its code points, in bytes, words or double words as it needs."""
    if text.isascii():
        return np.frombuffer(text.encode(), np.uint8)
    narrow = text.encode("utf-16-le", "surrogatepass")
    if len(narrow) == 2 * len(text):
        return np.frombuffer(narrow, np.uint16)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def odd_ones(text: str) -> Odd | None:
    """The characters of a text that are not plain, if there are any."""
    if text.isascii():
        if len(text) < _LONG_ASCII and len(text.encode().translate(None, _C0)) == len(text):
            return None
    elif len(text) < _LONG and _NOT_PLAIN.search(text) is None:
        return None
    odd = Odd(text)
    return odd if odd.any else None


def _places(points: Points) -> npt.NDArray[np.intp]:
    """Where characters stand that are not plain."""
    odd = np.flatnonzero(points - points.dtype.type(0x20) > 0x7E - 0x20)  # what is no letter or sign of ASCII; unsigned, so it wraps
    if not len(odd):
        return odd
    if len(odd) > len(points) // 4:  # another script: picking them out first would cost more than it saves
        return np.flatnonzero(_table().take(points) != PLAIN)
    found: npt.NDArray[np.intp] = odd[_table().take(points[odd]) != PLAIN]
    return found


class Odd:
    """The characters of a text that are not plain: where the first of each kind is, if that counts."""

    __slots__ = ("_kinds", "_places", "_points", "_text", "any")

    def __init__(self, text: str) -> None:
        self._text = text
        self._points = code_points(text)
        self._places = _places(self._points)
        self.any = len(self._places) > 0
        self._kinds = _table().take(self._points[self._places])

    def control(self) -> int | None:
        """Where a control character is."""
        return self._first(CONTROL)

    def spoilt(self) -> int | None:
        """Where something is that is no character."""
        return self._first(SPOILT)

    def replaced(self) -> tuple[int, int | None]:
        """How many replacement characters there are, and where the first is."""
        return int(np.count_nonzero(self._kinds == REPLACED)), self._first(REPLACED)

    def hidden(self) -> int | None:
        """Where something is written that nobody sees, or the text is reordered."""
        found = [at for at in (self._hides(), self._row(), self._inside_word()) if at is not None]
        return min(found, default=None)

    def _first(self, kind: int) -> int | None:
        found = self._places[self._kinds == kind]
        return int(found[0]) if len(found) else None

    def _hides(self) -> int | None:
        behind = 0  # where what was passed over ends
        for at in map(int, self._places[self._kinds == HIDES]):
            if at >= behind:
                seen = _SEEN.match(self._text, max(0, at - 1))
                if seen is None:
                    return at
                behind = seen.end()
        return None

    def _row(self) -> int | None:
        unseen = self._places[self._kinds == UNSEEN]
        rows = np.flatnonzero(unseen[_ROW - 1 :] - unseen[: 1 - _ROW] == _ROW - 1)
        return int(unseen[rows[0]]) if len(rows) else None

    def _inside_word(self) -> int | None:
        points = self._points
        unseen = self._places[self._kinds == UNSEEN]
        unseen = unseen[(unseen > 0) & (unseen < len(points) - 1)]
        unseen = unseen[np.isin(points[unseen], _PARTS_WORDS)]
        inside = unseen[_is_latin(points[unseen - 1]) & _is_latin(points[unseen + 1])]
        return int(inside[0]) if len(inside) else None


def _is_latin(points: Points) -> npt.NDArray[np.bool_]:
    small = points | points.dtype.type(0x20)
    latin: npt.NDArray[np.bool_] = (small >= ord("a")) & (small <= ord("z"))
    return latin
