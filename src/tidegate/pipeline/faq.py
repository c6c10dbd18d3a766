"""Answers to frequent questions, found by keywords: written by people, so certain, and they need no engine and no database.

    [defaults]                                        fields that every output has
    [[entry]]
    keywords = ["report*|notif*", "car|vehicle"]      each must be in the question; `|` parts alternatives, `*` stands for any ending
    unless = ["abroad"]                               none may be in it
    output = { answer = "..." }                       the business fields, as the output contract has them
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from tidegate.core.errors import SettingsError
from tidegate.core.settings import Section, parse

#: Scripts that put no blanks between words: there a keyword counts wherever it stands.
_NO_BLANKS = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]")
_LETTER = re.compile(r"\w")


class FaqEntry(Section):
    """One answer and the words that ask for it."""

    keywords: list[str] = Field(min_length=1, max_length=16)
    unless: list[str] = Field(default_factory=list, max_length=16)
    output: dict[str, Any]


class FaqFile(Section):
    """The file."""

    defaults: dict[str, Any] = Field(default_factory=dict)
    entry: list[FaqEntry] = Field(min_length=1, max_length=1000)


class Entry(NamedTuple):
    """An answer as it leaves, and a pattern for each of its keywords, and for those that forbid it."""

    patterns: tuple[re.Pattern[str], ...]
    unless: tuple[re.Pattern[str], ...]
    output: dict[str, Any]

    def fits(self, text: str) -> bool:
        """`text` is in its normal form."""
        return all(pattern.search(text) for pattern in self.patterns) and not any(pattern.search(text) for pattern in self.unless)


class Faq:
    """The entries of one file."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = tuple(entries)

    def find(self, question: str) -> int | None:
        """The number (from 0) of the entry whose keywords are all in the question: the one with the most of them, of equals the first. None where
        none fits: an answer to another question is worse than none.
        """
        text, best, most = _normal(question), None, 0
        for number, entry in enumerate(self.entries):
            if len(entry.patterns) > most and entry.fits(text):
                best, most = number, len(entry.patterns)
        return best


def read_faq(file: Path) -> Faq:
    """Raises SettingsError that names the file and the entry that is wrong."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file} cannot be read: {error}.", hint="faq.file names a file in the capability's folder, as UTF-8 text.") from None
    said = parse(text, str(file), FaqFile, "docs/ladder.md shows such a file.")
    return Faq([
        Entry(_patterns(file, number, one.keywords), _patterns(file, number, one.unless), {**said.defaults, **one.output})
        for number, one in enumerate(said.entry, 1)
    ])


def _patterns(file: Path, number: int, keywords: Sequence[str]) -> tuple[re.Pattern[str], ...]:
    return tuple(_pattern(file, number, keyword) for keyword in keywords)


def _pattern(file: Path, number: int, keyword: str) -> re.Pattern[str]:
    pieces = [_normal(one.strip()) for one in keyword.split("|")]
    for piece in pieces:
        if not piece.rstrip("*") or "*" in piece[:-1]:
            raise SettingsError(
                f"{file}: entry {number}: {keyword!r} is no keyword.", hint="Words, parted by |; a * may stand at a word's end: report*|loss."
            )
    return re.compile("|".join(_one(piece) for piece in pieces))


def _one(piece: str) -> str:
    word = piece.removesuffix("*")
    begin = r"(?<!\w)" if _bounded(word[0]) else ""
    end = r"(?!\w)" if word == piece and _bounded(word[-1]) else ""
    return begin + re.escape(word).replace(r"\ ", r"\s+") + end


def _bounded(letter: str) -> bool:
    """Whether a word's border can be seen beside this letter."""
    return bool(_LETTER.match(letter)) and not _NO_BLANKS.match(letter)


def _normal(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()
