"""Text as a reader sees it: one normal form for what looks the same, made character by character so that a stream can be compared.

The normal form of a text is made of its segments, a character with the marks that follow it. Characters that cannot be seen are dropped, runs
of white space become one blank, a segment becomes NFKC, case-folded, without the diacritics that no composed character has, and is then taken
apart (NFD), so that the form of a character is the beginning of its form with a mark; letters of Cyrillic, Greek and a few others that look
like Latin ones become those. Terms and text go the same way, so what is folded together is folded on both sides.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from functools import cache

import numpy as np
import numpy.typing as npt

from tidegate.guard.characters import Points, code_points

#: Kinds of character, as `look_up` tells them.
SEEN, UNSEEN, EXTENDS, BLANK = 0, 1, 2, 3
#: After this many unseen characters or blanks in a row the text is taken as parted, so that what is held back stays bounded.
MOST_UNSEEN = 64
#: Marks of one character that count (Unicode's stream-safe format, UAX 15, has the same bound, 30); those after them are unseen.
MOST_MARKS = 30
#: What stands in the normal form where the text is taken as parted. No term holds it: control characters are unseen.
PARTED = "\x00"

#: Shown as nothing, though their general category is not Cf: fillers, variation selectors, the combining grapheme joiner.
_UNSEEN = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
#: Blocks of diacritics that are laid over letters of any script.
_DIACRITIC = re.compile("[\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff]")
#: Characters of combining class 0 that compose with the one before them (NFC_QC=Maybe in Unicode's DerivedNormalizationProps).
_MAYBE = re.compile(
    "[\u1161-\u1175\u11a8-\u11c2\u09be\u09d7\u0b3e\u0b56\u0b57\u0bbe\u0bd7\u0cc2\u0cd5\u0cd6\u0d3e\u0d57\u0dcf\u0ddf\u102e\u1b35"
    "\U000110ba\U00011127\U0001133e\U00011357\U000114b0\U000114ba\U000114bd\U000115af\U00011930]"
)
#: Scripts that are written without blanks between words, or whose words take endings: there a term counts wherever it stands.
_UNSPACED = (
    "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u19e0-\u19ff\u2e80-\u2fff\u3005-\u3007\u3021-\u3029\u3040-\u30ff"
    "\u3130-\u318f\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\U0001b000-\U0001b16f\U00020000-\U0003ffff"
)

#: Look-alikes of Latin letters after case folding. By the small letter's shape, else by the capital's: either is what a reader takes it for.
_LOOKS_LIKE = str.maketrans(
    "авеѕіјкмнорстухһԁԛԝһ" "αβεζηικμνορτυχϲϳ" "ıɑɡɩʟոսօցһℓⅼ",
    "abesijkmhopctyxhdqwh" "abezhikmvoptuxcj" "iagilnuoghll",
)  # fmt: skip


def _fold(segment: str) -> str:
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", segment).casefold())
    folded = _DIACRITIC.sub("", folded)  # those that are left after composition belong to no letter
    return unicodedata.normalize("NFD", folded).translate(_LOOKS_LIKE)


def fold_segment(segment: str) -> str:
    """The normal form of one character and its marks; "" for a diacritic that stands alone."""
    folded = _fold(segment)
    return " " if folded.isspace() else folded


_known: dict[str, tuple[str, int]] = {}
_MOST_KNOWN = 1 << 16


def look_up(character: str) -> tuple[str, int]:
    """The normal form of a character that stands alone, and its kind."""
    found = _known.get(character)
    if found is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        found = _known[character] = _learn(character)
    return found


def _learn(character: str) -> tuple[str, int]:
    category = unicodedata.category(character)
    if character.isspace():
        return " ", BLANK
    if category in ("Cc", "Cf", "Cs") or _UNSEEN.match(character):
        return "", UNSEEN
    first = unicodedata.normalize("NFKD", character)[0]
    if unicodedata.combining(first) or _MAYBE.match(first):
        return fold_segment(character), EXTENDS
    folded = fold_segment(character)
    return folded, BLANK if folded == " " else SEEN if folded else UNSEEN


def is_plain(text: str) -> bool:
    """ASCII without control characters, where blanks stand alone: the normal form is the text in lower case."""
    return text.isascii() and text.isprintable() and "  " not in text


#: What stands for a character in the table below that is unseen, and for one whose form hangs on those beside it. No normal form holds them.
_GONE, _HANGS = "\x01", "\x02"


class _Folds(dict[int, str]):
    """Normal forms of single characters, for `str.translate`."""

    def __missing__(self, point: int) -> str:
        folded, kind = look_up(chr(point))
        if kind == EXTENDS or (kind == SEEN and any(map(str.isspace, folded))):
            folded = _HANGS
        elif kind == UNSEEN:
            folded = _GONE
        if len(self) >= _MOST_KNOWN:
            self.clear()
        self[point] = folded
        return folded


_folds = _Folds()
_NOT_ASCII = re.compile("[\u0080-\U0010ffff]+")
#: What may be a Latin letter or hide one, or is unseen: ligatures, letters of a raised, wide, ringed or mathematical form, other alphabets that look
#: alike, diacritics, format characters.
_MAY_BE_LATIN = re.compile(
    "[\u00a0\u00aa\u00ad\u00ba\u0250-\u02af\u0300-\u052f\u0530-\u058f\u061c\u115f\u1160\u1680\u180b-\u180f\u1d00-\u1dbf\u2000-\u200f\u2028-\u202f\u205f-\u2071"
    "\u207f\u2090-\u209c\u2100-\u214f\u2170-\u217f\u249c-\u24e9\u3000\u3164\ufb00-\ufb06\ufe00-\ufe0f\ufeff\uff10-\uff19\uff21-\uff3a\uff41-\uff5a\uffa0"
    "\U0001d400-\U0001d7ff\U0001f110-\U0001f189\U000e0000-\U000e0fff]+"
)
_WIDE_LATIN = ((0x1D400, 0x1D7FF), (0x1F110, 0x1F189), (0xE0000, 0xE0FFF))
#: For bytes of ASCII: small letters, and blanks of one kind.
_LOWER = bytes.maketrans(b"\n\t\r", b"   ").lower()
#: Texts of fewer characters are folded without vectors, which cost some microseconds to begin with: of ASCII, and others.
_LONG_ASCII, _LONG = 4096, 256
_PIECE = 1 << 15
#: What a rough form leaves out.
_ROUGH = re.compile(f"[{_GONE}{_HANGS}\u0300-\u036f]")


def simple_form(text: str) -> str | None:
    """The normal form of a whole text, made at once; blanks at its ends may lack. None where it wants to be made character by character: where marks
    follow their letters, or so much is unseen that the text may be taken as parted there.
    """
    if is_plain(text):
        return text.lower()
    folded = text.translate(_folds)
    if _HANGS in folded:
        return None
    if gone := folded.count(_GONE):
        if gone >= MOST_UNSEEN:
            return None
        folded = folded.replace(_GONE, "")
    return " ".join(folded.split()) if "  " in folded else folded


def rough_form(text: str) -> str:
    """About the normal form of a whole text, for a search of words in Latin letters: case, look-alikes, diacritics that stand alone and what is
    unseen make no difference, and blanks of any kind stand alone. Quick: only characters in which a Latin letter may hide are looked up.
    """
    if len(text) <= _PIECE:
        return _rough_piece(text)
    out: list[str] = []
    for at in range(0, len(text), _PIECE):  # a piece is as narrow as its own characters are
        piece = _rough_piece(text[at : at + _PIECE])
        if out and piece[:1] == out[-1][-1] == " ":
            piece = piece[1:]
        if piece:
            out.append(piece)
    return "".join(out)


def _rough_piece(text: str) -> str:
    if len(text) >= (_LONG_ASCII if text.isascii() else _LONG) and (folded := _rough_at_once(text)) is not None:
        return folded
    folded = text.lower()
    if not text.isascii():
        folded = _NOT_ASCII.sub(_unhide, folded)
    for blank in "\n\t\r":
        if blank in folded:
            folded = folded.replace(blank, " ")
    while "  " in folded:  # each time half of them go
        folded = folded.replace("  ", " ")
    return folded


@cache
def rough_table() -> npt.NDArray[np.uint16]:
    """What becomes of each character up to U+FFFF in a rough form, where that hangs on it alone and is one character; else one of the two below.
    Takes 30 ms to make."""
    table = np.arange(0x10000, dtype=np.uint16)
    table[:0x80] = np.frombuffer(_LOWER, np.uint8)[:0x80]
    table[0xD800:0xE000] = 0xFFFD
    for point in (*range(0x80, 0xD800), *range(0xE000, 0x10000)):
        character = chr(point)
        if point == ord("Σ") or character.lower() != character or _MAY_BE_LATIN.match(character):  # a capital sigma hangs on where it stands
            folded = _NOT_ASCII.sub(_unhide, character.lower())
            table[point] = _MANY if len(folded) > 1 or point == ord("Σ") else ord(folded) if folded else _NONE
    return table


#: Halves of surrogate pairs, which stand for nothing else in the table.
_NONE, _MANY = 0xD800, 0xD801


def _rough_at_once(text: str) -> str | None:
    """The rough form of a long text in vector passes; None where a character in it becomes several."""
    folded: Points
    if text.isascii():
        folded = np.frombuffer(text.encode().translate(_LOWER), np.uint8)
    else:
        points, table = code_points(text), rough_table()
        if points.dtype == np.uint16:
            folded = table.take(points)
        else:
            wide = points[points > 0xFFFF]
            if any(((wide >= first) & (wide <= last)).any() for first, last in _WIDE_LATIN):
                return None
            folded = np.where(points > 0xFFFF, points, table.take(np.minimum(points, 0xFFFF)))
        if (folded == _MANY).any():
            return None
        if (folded == _NONE).any():
            folded = folded[folded != _NONE]
    blank = folded == 0x20
    doubled = blank[1:] & blank[:-1]
    if doubled.any():
        folded = np.concatenate([folded[:1], folded[1:][~doubled]])
    return folded.tobytes().decode(_ENCODINGS[folded.itemsize])


_ENCODINGS = {1: "ascii", 2: "utf-16-le", 4: "utf-32-le"}


def _unhide(found: re.Match[str]) -> str:
    return _MAY_BE_LATIN.sub(_show, found[0])


def _show(found: re.Match[str]) -> str:
    return _ROUGH.sub("", found[0].translate(_folds))


def extends(character: str) -> bool:
    """Whether a character of a normal form belongs to the one before it: a match must neither begin nor end in front of it."""
    return character >= "\u0300" and (unicodedata.combining(character) != 0 or _MAYBE.match(character) is not None)


@cache
def word_pattern() -> re.Pattern[str]:
    """Matches one character that is part of a word in a script that parts words: a letter, a figure or a mark.

    The underscore is none: it sets words off (`_so_`), and must not hide them.
    """
    marks: list[str] = []
    begin = last = -2
    for point in range(0x300, sys.maxunicode // 8):
        if unicodedata.category(chr(point))[0] != "M":
            continue
        if point != last + 1:
            if begin >= 0:
                marks.append(f"{chr(begin)}-{chr(last)}")
            begin = point
        last = point
    marks.append(f"{chr(begin)}-{chr(last)}")
    return re.compile(f"(?![_{_UNSPACED}])[\\w{''.join(marks)}]")
