"""A text as the words it is found by: one way for what is indexed, what is asked and what is compared.

English words lose their endings (Snowball's English stemmer), other words stay as they are. Scripts that do not part their words (Chinese, Japanese,
Korean, Thai and their neighbours) become pairs of characters, one character where it stands alone. Codes and numbers are words as a whole and in
their parts, so that `ERR-204` is found by "err204", "ERR 204" and "204". No word is left out for being frequent: how rare a word is decides what it
counts.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

import Stemmer  # type: ignore[import-not-found, unused-ignore]  # ships no types

#: Names this way of reading words: what is stored under another one has to be read again.
VERSION = f"1, snowball {Stemmer.version()}"
#: A longer run of letters is cut, and a longer compound is not a word of its own: nobody asks for it.
WORD_CHARS = 64
#: A figure as people write it: a number, a date, a time, with what parts its digits.
FIGURE = re.compile(r"\d+(?:[.,:/]\d+)*")

# Thai, Lao, Burmese, Khmer; Hangul; kana, Chinese characters with their supplements.
_UNPARTED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u1100-\u11ff\uac00-\ud7ff"
    "\u2e80-\u2fdf\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
# Vowel signs and points that belong to the letter before them: Hebrew, Arabic, the scripts of India.
_MARKS = "\u0591-\u05c7\u064b-\u065f\u0670\u0900-\u0903\u093a-\u094f\u0955-\u0963\u0980-\u0983\u09bc-\u0dff"
# A letter or digit of a script that parts its words.
_SIGN = rf"(?:(?![{_UNPARTED}])[\w{_MARKS}])"
_FOUND = re.compile(
    rf"(?P<unparted>[{_UNPARTED}]+)"
    rf"|(?P<compound>[§#]?{_SIGN}+(?:[-./:,'’@&]{_SIGN}+)*(?:\(\w{{1,4}}\))*(?:%|‰|\+\+|#)?)"
)
_PLAIN = re.compile(r"[^\W\d_]+")
_PARTS = re.compile(rf"\d+(?:\.\d+)*|(?:[^\W\d_]|[{_MARKS}])+")
_POSSESSIVE = re.compile(r"['’]s\b")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")
# What parts a compound and says nothing, unless digits stand on both sides: err-204, user_id; but 2.3.1, 10-12.
_JOINT = re.compile(r"(?<=[^\W\d])[-./:,'’@_]+(?=\w)|(?<=\w)[-./:,'’@_]+(?=[^\W\d])")
_ACCENTS = re.compile("[\u0300-\u036f]+")
_INVISIBLE = re.compile("[\u00ad\u200b-\u200d\u2060\ufeff]+")

_stem = lru_cache(maxsize=1 << 16)(Stemmer.Stemmer("english", 0).stemWord)


def words(text: str) -> list[str]:
    """The words of a text in its order, each as often as it occurs. Takes time in proportion to the text; never raises."""
    if not text.isascii():
        text = _INVISIBLE.sub("", text)
        text = unicodedata.normalize("NFKC", _ACCENTS.sub("", unicodedata.normalize("NFKD", text)))
    found: list[str] = []
    for match in _FOUND.finditer(text):
        run = match[0]
        if match.lastgroup == "unparted":
            found += [run[at : at + 2] for at in range(len(run) - 1)] or [run.casefold()]
        elif _PLAIN.fullmatch(run) and not _HUMP.search(run):
            found.append(_plain(run))
        else:
            found += _compound(run)
    return found


def _plain(word: str) -> str:
    word = word.casefold()[:WORD_CHARS]
    return _stem(word) if word.isascii() else word


def _compound(run: str) -> list[str]:
    """The parts of a code, a number or a compound, and the whole of it where it is more than one part."""
    run = _THOUSANDS.sub("", _POSSESSIVE.sub("", run))
    parts = [_plain(part) for hump in _HUMP.split(run) for part in _PARTS.findall(hump)]
    if not parts or len(run) > WORD_CHARS:
        return parts
    whole = _JOINT.sub("", run).casefold().strip("_")
    whole = _plain(whole) if _PLAIN.fullmatch(whole) else whole
    if parts == [whole]:
        return parts
    return [whole] if "'" in run or "’" in run else [whole, *parts]
