"""Terms that must not be said, found in a stream while it runs, over the normal form and with the way back to the text."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ahocorasick

from tidegate.guard.glance import Glance
from tidegate.guard.normal import (
    BLANK,
    EXTENDS,
    MOST_MARKS,
    MOST_UNSEEN,
    PARTED,
    UNSEEN,
    extends,
    fold_segment,
    is_plain,
    look_up,
    word_pattern,
)
from tidegate.guard.parted import BETWEEN, EMPHASIS, Reading, is_word, may_spell, readings
from tidegate.guard.road import Road
from tidegate.guard.step import NO_STEP, Step, Tail

#: Characters of a term's normal form. What is held back is never longer, whatever the list holds.
MOST_TERM_CHARS = 200
#: In a piece of ASCII that is longer than this, places inside words are passed over at once; and no step is learned for it.
LONG_PIECE = 24
#: Steps that are remembered, 600 bytes each. A tokenizer has more tokens, but few that are used.
MOST_STEPS = 1 << 14
BLANK_BEFORE, WORD_BEFORE, ELSE = 0, 1, 2
_BEGINNINGS = re.compile(r"(?<![0-9A-Za-z])[0-9A-Za-z]|[^0-9A-Za-z\s]", re.ASCII)


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


def normal_form(text: str) -> str:
    """The normal form of a whole text, as it is compared."""
    if is_plain(text):
        return text.lower()
    scan = Scan(_EMPTY)
    scan.keep_all = True
    scan.feed_exactly(text)
    return scan.window


class Terms:
    """A compiled list of terms, shared by all generations. `exact`: the text is compared as it is, every place counts (trigger texts).

    The terms lie in tries of pyahocorasick, one for each 64 first characters: a node's children are looked through one by one, which takes 5 us
    at a root with the first characters of a Chinese list. The automaton's own search is not used. Its state outlives a piece of text only by
    `set`, which corrupts the heap when a text with characters above U+FFFF follows one without (pyahocorasick issue 221), and it does not tell
    the live prefix; walking from the few places where a term may begin tells both.
    """

    __slots__ = ("count", "exact", "flags", "glance", "longest", "only_words", "parted", "roads", "sha256", "start", "steps")

    def __init__(self, lists: Sequence[TermList], *, exact: bool = False, parted: bool = True) -> None:
        """About 5 us and 500 bytes a term. `parted`: also where the letters are spelled singly or emphasis stands between them."""
        self.exact = exact
        self.parted = parted and not exact
        glance = Glance()
        self.flags = bytearray()
        digest = hashlib.sha256()
        tries: dict[int, Any] = {}
        lengths: dict[str, set[int]] = {}
        anywhere: set[str] = set()
        is_word = word_pattern().match
        longest = 0
        for terms in lists:
            for term in terms.terms:
                folded = term if exact else normal_form(term).strip()
                digest.update(f"{folded}\0{terms.whole_words}\n".encode("utf-8", "surrogatepass"))
                flags = 0
                if terms.whole_words and not exact:
                    flags = bool(is_word(folded[0])) | bool(is_word(folded[-1])) << 1
                first, page = folded[0], ord(folded[0]) >> 6
                trie = tries.get(page)
                if trie is None:
                    trie = tries[page] = ahocorasick.Automaton(ahocorasick.STORE_INTS)
                number = len(self.flags)
                self.flags.append(flags)
                known = trie.get(folded, None)
                if known is None:
                    trie.add_word(folded, number)
                else:
                    self.flags[known] &= flags  # the same term in two lists: the stricter of both
                lengths.setdefault(first, set()).add(len(folded))
                if not flags & 1:
                    anywhere.add(first)
                longest = max(longest, len(folded))
                if not exact:
                    glance.add(folded, flags)
        #: By first character.
        self.roads: dict[str, Road] = {
            first: Road(
                tries[ord(first) >> 6].longest_prefix, tries[ord(first) >> 6].get, tuple(sorted(lengths[first])), first not in anywhere, self.parted
            )
            for first in lengths
        }
        glance.close(self.roads, parted=self.parted)
        #: For whole texts.
        self.glance = glance
        #: Whether no term that begins with a letter or figure of ASCII may begin inside a word.
        self.only_words = not exact and not any(first.isascii() and first.isalnum() for first in anywhere)
        #: What a short piece leads to where nothing is live, learned as pieces come: behind a blank, behind a word, behind anything else.
        self.steps: tuple[dict[str, Step], dict[str, Step], dict[str, Step]] = ({}, {}, {})
        #: Before any text.
        self.start = Step(self.steps[ELSE])
        #: How many terms there are.
        self.count = len(self.flags)
        #: Characters of the longest normal form.
        self.longest = longest
        #: Of all normal forms: which list was in force.
        self.sha256 = digest.hexdigest()


class Scan:
    """Looks through one text while it grows. The verdict does not depend on how the text was cut into pieces.

    After each `feed`, the first `free` characters of all that was fed are part of no term and may become part of none. A hit is the one that ends
    first, and of those the longest; after it the scan is over. Memory: at most the longest term's normal form and what it was made of.
    """

    __slots__ = (
        "_alive", "_base", "_end", "_fed", "_marks", "_open", "_open_len", "_pending", "_shift", "_spans", "_step", "_unseen",
        "free", "keep_all", "terms", "window",
    )  # fmt: skip

    def __init__(self, terms: Terms, at: int = 0) -> None:
        """`at`: the number of the first character that will be fed."""
        self.terms = terms
        self._fed = self.free = at
        #: Where the text stands, if that is a step; else the members below are in force.
        self._step: Step | None = terms.start
        self.keep_all = False

    def feed(self, text: str) -> Hit | None:
        """The next piece of the text. Returns the hit, if that is what it leads to; then `free` ends where the hit begins."""
        now = self._step
        if now is not None:
            then = now.next.get(text)
            if then is None:
                if not text:
                    return None
                then = self._learn(now, text)
            if then.sized > 0 and (not now.tails or then.first in now.ends or now.ends_with(then)):
                self._step = then
                fed = self._fed = self._fed + then.sized
                self.free = fed - then.held
                return None
        return self.feed_exactly(text)

    def feed_exactly(self, text: str) -> Hit | None:
        """As `feed`, by the long way."""
        if not text:
            return None
        if self._step is not None:
            self._restore(self._step)
        return self._feed(text)

    def _learn(self, now: Step, text: str) -> Step:
        """What a piece leads to where nothing is live: found out once by the long way."""
        terms = self.terms
        if len(text) > LONG_PIECE:
            return NO_STEP
        if sum(map(len, terms.steps)) >= MOST_STEPS:
            for steps in terms.steps:
                steps.clear()
        then = NO_STEP
        if not _marks_what_was(text):
            scan = Scan(terms)
            scan._restore(now)
            scan._alive = []
            scan.keep_all = True
            before = scan._end
            if scan._feed(text) is None:
                norm = scan.window[before:]
                if norm and (step := scan._as_step()) is not None:
                    then = step
                    then.norm, then.first, then.sized = norm, norm[0], len(text)
        now.next[text] = then
        return then

    def _restore(self, step: Step) -> None:
        """Go on by the long way from where a step led to."""
        fed = self._fed
        self.window = step.window
        self._base = 0
        self._end = len(step.window)
        self._alive = [*step.alive]  # where the prefixes of terms begin that the text so far ends with, the longest first
        #: Where the normal form and the text run in step: (place in the normal form, place in the text), each until the next.
        self._spans = [(begin, place + fed) for begin, place in step.spans]
        self._shift = self._spans[-1][1] - self._spans[-1][0]  # of the last span: place in the text minus place in the normal form
        self._open = step.open  # the last character, which marks may follow ...
        self._open_len = step.open_len  # ... how long its normal form is ...
        self._marks = 0  # ... and how many marks it has
        self._unseen = 0
        #: Terms at the very end: what comes next says whether they end there; and whether no word may go on there in any case.
        self._pending: list[tuple[Hit, bool]] = []
        self._step = None

    def _as_step(self) -> Step | None:
        """Where the text stands now, if that is all that there is to know."""
        self._trim()
        if self._pending or self._marks or self._unseen:
            return None
        terms, window, base, fed = self.terms, self.window, self._base, self._fed
        step = Step(terms.steps[BLANK_BEFORE if self._open.isspace() else WORD_BEFORE if window and is_word(window[-1]) else ELSE])
        step.held = fed - self.free
        step.window, step.open, step.open_len = window, self._open, self._open_len
        step.spans = tuple([(begin - base, place - fed) for begin, place in self._spans])
        if self._alive:
            step.alive = tuple([at - base for at in self._alive])
            step.tails = tuple([self._as_tail(at) for at in step.alive])
        return step

    def _as_tail(self, at: int) -> Tail:
        window = self.window
        text = window[at:]
        begins = not (at and is_word(window[at - 1]))
        parted = self.terms.parted and (not EMPHASIS.isdisjoint(text) or (begins and may_spell(text)))
        return Tail(text, self.terms.roads[window[at]], begins, parted)

    def _feed(self, text: str) -> Hit | None:
        terms = self.terms
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
        base, tail = self._base, len(window)
        old = tail - len(norm)
        if self._alive or not terms.only_words or not self._is_one_word(norm, old):
            hit = self._walk(old, tail)
            if hit is not None:
                return hit
        live = self._alive[0] - base if self._alive else tail
        self.free = self._fed if live == tail else self._place(base + live)
        if not self.keep_all:
            self._step = self._as_step()
        return None

    def _trim(self) -> None:
        """Forget what is needed no more."""
        keep = min(self._alive[0] if self._alive else self._end, self._end - self._open_len) - 1 - self._base
        if keep > 0:
            self.window = self.window[keep:]
            self._base += keep
            if len(self._spans) > 1:
                self._forget()

    def finish(self) -> Hit | None:
        """The text ends here: a term at its very end is a hit, and all that was held is free."""
        for hit, _ in sorted(self._pending) if self._step is None else ():
            before = hit.start - self._base - 1
            if not (self.terms.flags[hit.term] & 1 and before >= 0 and is_word(self.window[before])):
                return self._hit(hit)
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
        self._alive = [at for at in self._alive if at < self._end]
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

    def _is_one_word(self, norm: str, old: int) -> bool:
        """Whether the piece is letters only, behind a letter: no term begins there, and none has begun."""
        return old > 0 and norm.isascii() and norm.isalnum() and is_word(self.window[old - 1])

    def _walk(self, old: int, tail: int) -> Hit | None:
        """From each place where a term has begun or may begin: does it end here, does it live on?"""
        window, base, roads = self.window, self._base, self.terms.roads
        until = tail
        if self._marks:  # more marks may change those that are there: whatever may follow the letter is live
            until -= max(0, self._open_len - len(look_up(self._open[0])[0]))
        best: Hit | None = None
        alive: list[int] = []
        places = [at - base for at in self._alive]
        if tail - old > LONG_PIECE and self.terms.only_words and window.isascii():
            places.extend(found.start() for found in _BEGINNINGS.finditer(window, old))
        else:
            places.extend(range(old, tail))
        for at in places:
            road = roads.get(window[at])
            if road is None or (at >= old and road.at_words and at and is_word(window[at - 1])):
                continue
            rest = window[at:] if at else window
            far = road.longest_prefix(rest)
            lives = far >= until - at
            if road.parted and not BETWEEN.isdisjoint(rest[: far + 1]):
                begins = not (at and is_word(window[at - 1]))
                others = readings(rest, begins, road)
                for other in others:
                    found = self._first_of(other, road, base + at, old - at)
                    if found is not None and (best is None or (found.end, found.start) < (best.end, best.start)):
                        best = found
                if not lives:
                    now = others if until == tail else readings(rest[: until - at], begins, road)
                    lives = any(other.lives(road) for other in now)
            if lives:
                alive.append(base + at)
            if far >= road.lengths[0]:
                for length in road.lengths:
                    if length > far:
                        break
                    if at + length > old and (number := road.number_of(rest[:length], None)) is not None:
                        found = self._judge(Hit(base + at, base + at + length, number))
                        if found is not None and (best is None or (found.end, found.start) < (best.end, best.start)):
                            best = found
        self._alive = alive
        return None if best is None else self._hit(best)

    def _first_of(self, reading: Reading, road: Road, at: int, old: int) -> Hit | None:
        """The first term of another reading of what follows a place, if it ends in what is new."""
        for end, number in reading.terms(road):
            if end > old and (found := self._judge(Hit(at, at + end, number), reading.strict)) is not None:
                return found
        return None

    def _judge(self, hit: Hit, strict: bool = False) -> Hit | None:
        if self.terms.exact:
            return hit
        if hit.end == self._end:
            self._pending.append((hit, strict))
            return None
        return hit if self._ends(hit, strict) else None

    def _ends(self, hit: Hit, strict: bool) -> bool:
        """Whether a term that ended before what is there now ends as a term does, its beginning judged likewise."""
        end = hit.end - self._base
        last, after = self.window[end - 1], self.window[end]
        flags = self.terms.flags[hit.term]
        if extends(after) or ((flags & 2 or (strict and is_word(last))) and is_word(after)):
            return False
        before = hit.start - self._base - 1
        return not (flags & 1 and before >= 0 and is_word(self.window[before]))

    def _settle(self) -> Hit | None:
        """Terms at the end of what was there: do they end there?"""
        for hit, strict in sorted(self._pending):
            if self._ends(hit, strict):
                return self._hit(hit)
        self._pending.clear()
        return None

    def _hit(self, hit: Hit) -> Hit:
        start = self._place(hit.start)
        self.free = start
        return Hit(start, self._fed if hit.end >= self._end else self._place(hit.end), hit.term)


def _marks_what_was(text: str) -> bool:
    """Whether the text begins with a mark, or may: that belongs to the character before it."""
    for character in text:
        kind = look_up(character)[1]
        if kind != UNSEEN:
            return kind == EXTENDS
    return True


_EMPTY = Terms([])
