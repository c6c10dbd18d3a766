"""Long runs in a text that no person writes: encoded data, and one passage over and over.

A run that is long enough covers some of the places that are looked at, wherever it begins: the blanks at the end of each stretch, a few letters at
each stride. Only what is suspicious there is followed to where its run begins and ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

#: Characters of base64 (both alphabets), of hexadecimal figures, and the line ends at which both are wrapped.
_DATA = re.compile(r"[A-Za-z0-9+/_=\r\n-]*")
_BACK = re.compile(r"[^A-Za-z0-9+/_=\r\n-]")
#: Encoded data uses its whole alphabet: fewer different characters are a ruler, a table's line, a number.
_LEAST_DIFFERENT = 12
#: Characters that one line of wrapped data has at least; words and addresses on lines of their own are shorter.
_LEAST_LINE = 48
_PIECE = 4096
#: Characters that are looked for again first: seldom met twice in prose, and found quickly.
_HEAD = 16


def blob(text: str, least: int) -> tuple[int, int] | None:
    """Where the first run of encoded data of at least `least` characters (base64, hexadecimal; wrapped or not) begins and ends. Data of fewer than
    about 50 different characters in a line is none."""
    if len(text) < least:
        return None
    block = max(8, least // 2)
    at, last = 0, len(text) - 2 * block
    while at <= last:
        # A run that begins at `at` or later and has twice a block covers the block behind this one, or begins behind its last blank.
        blank = text.rfind(" ", at + block, at + 2 * block)
        if blank >= 0:
            at = blank + 1
            continue
        at += block
        if not _DATA.fullmatch(text, at, at + block):
            continue
        begin = _begin(text, at)
        whole = _DATA.match(text, at)
        assert whole is not None
        at = whole.end()
        for first, end in _lines(text, begin, at):
            if end - first >= least and len(set(text[first : first + _PIECE])) >= _LEAST_DIFFERENT:
                return first, end
    return None


def _begin(text: str, at: int) -> int:
    """Where the run of data's characters begins that `at` lies in."""
    while at > 0:
        before = text[max(0, at - _PIECE) : at]
        other = _BACK.search(before[::-1])
        if other is not None:
            return at - other.start()
        at -= len(before)
    return 0


def _lines(text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """The runs of long lines between two places; the last line of a run may be short."""
    run = at = begin
    while at < end:
        line_end = text.find("\n", at, end)
        after = end if line_end < 0 else line_end + 1
        if len(text[at:after].strip("\r\n")) < _LEAST_LINE:
            yield run, after if run < at else at
            run = after
        at = after
    yield run, end


def repetition(text: str, least: int) -> tuple[int, int] | None:
    """Where the first run begins and ends, of at least `least` characters, that is one passage of at most a quarter of that over and over. It finds
    exact repetition alone."""
    if len(text) < least:
        return None
    longest = max(8, least // 4)  # of a passage
    head = max(_HEAD, longest // 2)
    done = 0
    for at in range(0, len(text) - longest - head + 1, max(1, least - longest - head)):  # a run covers a passage and a head from one of these on
        if at < done or text.find(text[at : at + _HEAD], at + 1, at + longest + _HEAD) < 0:
            continue
        period = text.find(text[at : at + head], at + 1, at + longest + head) - at
        if period < 0:
            continue
        begin, end = _grow(text, at, at + period + head, period)
        if end - begin >= least:
            return begin, end
        done = end
    return None


def _grow(text: str, begin: int, end: int, period: int) -> tuple[int, int]:
    """As far as the text goes on with this period on both sides of a run."""
    while end < len(text):
        size = min(_PIECE, len(text) - end)
        same = _common(text[end : end + size], text[end - period : end - period + size])
        end += same
        if same < size:
            break
    while begin > 0:
        size = min(_PIECE, begin)
        same = _common(text[begin - size : begin][::-1], text[begin - size + period : begin + period][::-1])
        begin -= same
        if same < size:
            break
    return begin, end


def _common(one: str, other: str) -> int:
    """Characters that two texts of one length begin with alike."""
    if one == other:
        return len(one)
    low, high = 0, len(one)
    while high - low > 1:
        middle = (low + high) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle
    return low
