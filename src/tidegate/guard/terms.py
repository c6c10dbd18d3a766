"""Terms that must not be said, found in a stream while it runs: an Aho-Corasick automaton over the normal form, with the way back to the text."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ahocorasick

from tidegate.core.errors import SettingsError
from tidegate.guard.normal import (
    BLANK,
    EXTENDS,
    MOST_MARKS,
    MOST_UNSEEN,
    PARTED,
    UNSEEN,
    extends,
    fold_segment,
    look_up,
    word_class,
    word_pattern,
)

#: Characters of a term's normal form. What is held back is never longer, whatever the list holds.
MOST_TERM_CHARS = 200
_NO_START = re.compile(r"(?!)")


class Hit(NamedTuple):
    """A term that was said. `start`, `end`: characters of the text as it was fed, from its beginning; `term`: its number in the list."""

    start: int
    end: int
    term: int


@dataclass(frozen=True, slots=True)
class TermList:
    """Terms as they were written. `whole_words`: a term that begins or ends with a letter or figure counts only where a word begins or ends
    there; where the letter is of a script that does not part words (Chinese, Japanese, Thai ...) or of Korean, it counts anywhere."""

    terms: Sequence[str]
    whole_words: bool = True


def read_terms(file: Path) -> list[str]:
    """The terms of a file: UTF-8, one a line; empty lines and lines that begin with # are passed over.

    Raises SettingsError that names the file and line of what is no term.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise SettingsError(f"The terms file {file} cannot be read: {error.strerror}.", hint="Correct the path in terms_file.") from None
    try:
        decoded = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at = data.count(b"\n", 0, error.start) + 1
        raise SettingsError(f"{file}:{at}: the terms file is not UTF-8.", hint="Save it as UTF-8.") from None
    terms: list[str] = []
    for number, line in enumerate(decoded.split("\n"), 1):
        term = line.strip()
        if not term or term.startswith("#"):
            continue
        if why := _why_not(term):
            raise SettingsError(f"{file}:{number}: {why}", hint="One term a line; a line that begins with # is a comment.")
        terms.append(term)
    if not terms:
        raise SettingsError(f"The terms file {file} holds no term.", hint="One term a line, or leave terms_file out.")
    return terms


def _why_not(term: str) -> str:
    if term.isascii() and term.isprintable() and len(term) <= MOST_TERM_CHARS:  # nearly all: no need to make the normal form twice
        return ""
    folded = normal_form(term).strip()
    if not folded:
        return "nothing is left of this term when what cannot be seen is taken away."
    if len(folded) > MOST_TERM_CHARS:
        return f"this term has more than {MOST_TERM_CHARS} characters."
    return ""


def normal_form(text: str) -> str:
    """The normal form of a whole text, as it is compared."""
    if _is_plain(text):
        return text.lower()
    scan = Scan(_EMPTY)
    scan.keep_all = True
    scan.feed(text)
    return scan.window


def _is_plain(text: str) -> bool:
    # ASCII without control characters, where blanks stand alone: lower case is all there is to do
    return text.isascii() and text.isprintable() and "  " not in text


class Terms:
    """A compiled list of terms, shared by all generations. `exact`: the text is compared as it is, every place counts (trigger texts)."""

    __slots__ = ("count", "exact", "find", "flags", "lengths", "longest", "make_iter", "match", "sha256")

    def __init__(self, lists: Sequence[TermList], *, exact: bool = False) -> None:
        """About 3 us a term."""
        automaton: Any = ahocorasick.Automaton(ahocorasick.STORE_INTS)
        self.exact = exact
        self.lengths, self.flags = array("H"), bytearray()
        digest = hashlib.sha256()
        at_words: set[str] = set()
        anywhere: set[str] = set()
        is_word = word_pattern().match
        for terms in lists:
            for term in terms.terms:
                folded = term if exact else normal_form(term).strip()
                digest.update(f"{folded}\0{terms.whole_words}\n".encode("utf-8", "surrogatepass"))
                flags = 0
                if terms.whole_words and not exact:
                    flags = bool(is_word(folded[0])) | bool(is_word(folded[-1])) << 1
                (at_words if flags & 1 else anywhere).add(folded[0])
                number = len(self.lengths)
                self.lengths.append(len(folded))
                known = automaton.get(folded, None)
                if known is None:
                    automaton.add_word(folded, number)
                else:
                    flags &= self.flags[known]  # the same term in two lists: the stricter of both
                    self.flags[known] = flags
                self.flags.append(flags)
        if self.lengths:
            automaton.make_automaton()
        #: How many terms there are.
        self.count = len(self.lengths)
        #: Characters of the longest normal form.
        self.longest = max(self.lengths, default=0)
        #: Of all normal forms: which list was in force.
        self.sha256 = digest.hexdigest()
        self.match: Callable[[str], bool] = automaton.match
        self.make_iter: Callable[[str, int], Iterable[tuple[int, int]]] = automaton.iter
        #: Finds the next place where a term may begin.
        self.find: Callable[[str, int], re.Match[str] | None] = _starts(at_words - anywhere, anywhere).search


def _starts(at_words: set[str], anywhere: set[str]) -> re.Pattern[str]:
    ways = []
    if at_words:
        ways.append(f"[{_class(at_words)}](?<!{word_class()}.)")
    if anywhere:
        ways.append(f"[{_class(anywhere)}]")
    return re.compile("|".join(ways), re.DOTALL) if ways else _NO_START


def _class(characters: set[str]) -> str:
    return "".join(re.escape(c) for c in sorted(characters))


class Scan:
    """Looks through one text while it grows. The verdict does not depend on how the text was cut into pieces.

    After each `feed`, the first `free` characters of all that was fed are part of no term and may become part of none. A hit is the one that ends
    first, and of those the longest; after it the scan is over. Memory: at most the longest term's normal form and what it was made of.
    """

    __slots__ = (
        "_base", "_end", "_fed", "_live", "_marks", "_open", "_open_len", "_pending", "_shift", "_spans", "_terms", "_unseen",
        "free", "keep_all", "window",
    )  # fmt: skip

    def __init__(self, terms: Terms, at: int = 0) -> None:
        """`at`: the number of the first character that will be fed."""
        self._terms = terms
        self.window = ""  # the normal form from `_base` on
        self._base = 0
        self._end = 0
        self._live = 0  # where the longest prefix of a term begins that the text so far ends with; `_end` where there is none
        self._fed = self.free = at
        #: Where the normal form and the text run in step: (place in the normal form, place in the text), each until the next.
        self._spans: list[tuple[int, int]] = [(0, at)]
        self._shift = at  # of the last span: place in the text minus place in the normal form
        self._open = ""  # the last character, which marks may follow ...
        self._open_len = 0  # ... how long its normal form is ...
        self._marks = 0  # ... and how many marks it has
        self._unseen = 0
        self._pending: list[Hit] = []  # terms at the very end: what comes next says whether they end there
        self.keep_all = False

    def feed(self, text: str) -> Hit | None:
        """The next piece of the text. Returns the hit, if that is what it leads to; then `free` ends where the hit begins."""
        if not text:
            return None
        terms = self._terms
        end, fed = self._end, self._fed
        if terms.exact:
            norm = text
        elif text.isascii() and text.isprintable() and "  " not in text and not (text[0] == " " and self._open.isspace()):
            norm = text.lower()
            if fed - end != self._shift:
                self._shift = fed - end
                self._spans.append((end, fed))
            self._open, self._open_len, self._marks, self._unseen = text[-1], 1, 0, 0
        else:
            norm = self._slowly(text)
            end = self._end  # a mark may have taken the last character back
        self._fed = fed + len(text)
        self._end = end + len(norm)
        window = self.window = self.window + norm
        if self._pending and norm and (hit := self._settle()):
            return hit
        # A hit, and the longest live prefix, begin where the last live prefix began or after it.
        base, live = self._base, len(window)
        start = terms.find(window, self._live - base)
        if start is not None:
            # A new iterator over what is live, which is short, not `set` on an old one: that corrupts the heap where a text with characters
            # above U+FFFF follows one without (pyahocorasick issue 221).
            for last, number in terms.make_iter(window, start.start()):
                if (at := base + last + 1) > end and (hit := self._judge(at, number)) is not None:
                    return hit
            until = live
            if self._marks:  # more marks may change those that are there: whatever may follow the letter is live
                until -= max(0, self._open_len - len(look_up(self._open[0])[0]))
            while start is not None:
                at = start.start()
                if terms.match(window[at:until]):
                    live = at
                    break
                start = terms.find(window, at + 1)
        tail = len(window)
        self._live = base + live
        if live == tail:
            self.free = self._fed
        else:
            self.free = self._place(base + live)
        keep = min(live, tail - self._open_len) - 1
        if keep > 0 and not self.keep_all:
            self.window = window[keep:]
            self._base = base + keep
            if len(self._spans) > 1:
                self._forget()
        return None

    def finish(self) -> Hit | None:
        """The text ends here: a term at its very end is a hit, and all that was held is free."""
        if self._pending:
            return self._hit(self._pending[0])
        self.free = self._fed
        return None

    # -- the normal form

    def _slowly(self, text: str) -> str:
        """The normal form of a piece that is not plain ASCII; the last character is taken back where the piece begins with its marks."""
        out: list[str] = []
        end, place, unseen, is_open, marks = self._end, self._fed - 1, self._unseen, self._open, self._marks
        spans, shift = self._spans, self._shift
        for character in text:
            place += 1
            folded, kind = look_up(character)
            if kind == EXTENDS and is_open:
                if marks < MOST_MARKS and not is_open.isspace():
                    marks += 1
                    is_open += character
                    again = fold_segment(is_open)
                    if out:
                        end -= len(out.pop())
                    else:
                        self._take_back()
                        end = self._end
                    first = self._place(end)
                    while len(spans) > 1 and spans[-1][0] >= end:
                        spans.pop()
                    shift = spans[-1][1] - spans[-1][0]
                    for _ in again:
                        if first - end != shift:
                            shift = first - end
                            spans.append((end, first))
                        end += 1
                    out.append(again)
                    self._open_len = len(again)
                    continue
                kind = UNSEEN
            if kind == UNSEEN or (kind == BLANK and is_open.isspace()) or not folded:
                unseen += 1
                if unseen != MOST_UNSEEN:
                    continue
                folded, kind = PARTED, UNSEEN
            else:
                unseen = 0
            for _ in folded:  # all that one character became comes from its place
                if place - end != shift:
                    shift = place - end
                    spans.append((end, place))
                end += 1
            out.append(folded)
            is_open, marks = "" if kind == UNSEEN else " " if kind == BLANK else character, 0
            self._open_len = len(folded)
        self._unseen, self._open, self._marks, self._shift = unseen, is_open, marks, shift
        return "".join(out)

    def _take_back(self) -> None:
        """Forget the last character's normal form: a mark that follows makes it another."""
        back = self._open_len
        self.window = self.window[: len(self.window) - back]
        self._end -= back
        self._live = min(self._live, self._end)
        self._pending.clear()

    def _place(self, at: int) -> int:
        """Which character of the text a place in the normal form comes from."""
        for begin, place in reversed(self._spans):
            if begin <= at:
                return place + at - begin
        return self._spans[0][1]

    def _forget(self) -> None:
        spans, base = self._spans, self._base
        gone = 0
        while gone + 1 < len(spans) and spans[gone + 1][0] <= base:
            gone += 1
        if gone:
            del spans[:gone]

    # -- judging

    def _judge(self, end: int, number: int) -> Hit | None:
        start = end - self._terms.lengths[number]
        if start < self._live:  # what was let go or parted a word there is no beginning
            return None
        if self._terms.exact:
            return self._hit(Hit(start, end, number))
        before = start - self._base - 1
        if before >= 0:
            window = self.window
            if self._terms.flags[number] & 1 and word_pattern().match(window[before]):
                return None
        if end == self._end:
            self._pending.append(Hit(start, end, number))
            return None
        return self._ends(Hit(start, end, number))

    def _ends(self, hit: Hit) -> Hit | None:
        after = self.window[hit.end - self._base]
        if extends(after) or (self._terms.flags[hit.term] & 2 and word_pattern().match(after)):
            return None
        return self._hit(hit)

    def _settle(self) -> Hit | None:
        for hit in self._pending:
            if (found := self._ends(hit)) is not None:
                return found
        self._pending.clear()
        return None

    def _hit(self, hit: Hit) -> Hit:
        start = self._place(hit.start)
        self.free = start
        return Hit(start, self._fed if hit.end >= self._end else self._place(hit.end), hit.term)


_EMPTY = Terms([])
