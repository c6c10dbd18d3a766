"""Long runs in a text that no person writes: encoded data, and one passage over and over.

Both are looked for in blocks: a run of twice a block's length covers one whole, wherever it begins, so a text is looked at block by block, a slice
each, and only a block that is suspicious is followed to where its run begins and ends.
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


def blob(text: str, least: int) -> tuple[int, int] | None:
    """Where the first run of encoded data of at least `least` characters (base64, hexadecimal; wrapped or not) begins and ends. Data of fewer than
    about 50 different characters in a line is none."""
    if len(text) < least:
        return None
    block = max(8, least // 2)
    done = 0
    for at in range(0, len(text) - block + 1, block):
        piece = text[at : at + block]
        if at < done or " " in piece or not piece.isascii() or not _DATA.fullmatch(piece):
            continue
        whole = _DATA.match(text, at)
        assert whole is not None
        done = whole.end()
        for begin, end in _lines(text, _begin(text, at), done):
            if end - begin >= least and len(set(text[begin : begin + _PIECE])) >= _LEAST_DIFFERENT:
                return begin, end
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
    block = max(8, least // 2)
    done = 0
    for at in range(0, len(text) - block + 1, block):
        if at < done:
            continue
        piece = text[at : at + block]
        period = piece.find(piece[: block // 4], 1, block // 2 + block // 4)
        if period < 0 or piece[period:] != piece[:-period]:
            continue
        begin, end = _grow(text, at, at + block, period)
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
