"""Where a text may be cut, and how much of it a number of tokens is: counted with the tokenizer of the engine, never inside a character.

Nobody is asked for token offsets, which few engines tell: a text is cut into a few pieces, the pieces are counted, and the piece in which the wanted
place lies is cut again. Each step counts about a twentieth of the one before it, so the whole costs little more than one count of the text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Awaitable, Callable, Sequence

#: Tokens of each text.
Count = Callable[[Sequence[str]], Awaitable[list[int]]]

#: Pieces of one step, and characters of a piece that is not cut further.
_PIECES, _SMALL = 24, 12
#: How far from an even cut a better place is looked for, as a part of a piece.
_NEAR = 3
#: Longest name of what may be a control token (`<|im_end|>`, `[INST]`), with its brackets.
_CONTROL_CHARS = 82
#: Characters that are walked over in search of a place; more of them in a row belong to no character that anybody reads.
_FAR = 256
_CONTROL = re.compile(r"<[^<>]{1,80}>|\[[^\[\]]{1,80}\]")
#: Where a text is cut rather than elsewhere, the best first, and how many characters of it stay before the cut. A blank goes with the word behind it:
#: so most vocabularies have their words.
_ENDS = (("\n\n", 2), ("\n", 1), ("。", 1), (". ", 1), (" ", 0))
_JOINERS = "\u200d\ufe0e\ufe0f"


def may_cut(text: str, at: int) -> bool:
    """Whether a text may be cut before character `at`: not inside what a reader takes for one character, nor inside what may be a control token."""
    if at <= 0 or at >= len(text):
        return True
    before, after = text[at - 1], text[at]
    if unicodedata.combining(after) or after in _JOINERS or before == "\u200d" or "\U0001f3fb" <= after <= "\U0001f3ff":
        return False
    if before == "\r" and after == "\n":
        return False
    if "\U0001f1e6" <= after <= "\U0001f1ff" and "\U0001f1e6" <= before <= "\U0001f1ff":  # the two letters of a flag
        start = at
        while start > 0 and "\U0001f1e6" <= text[start - 1] <= "\U0001f1ff":
            start -= 1
        if (at - start) % 2:
            return False
    start = max(0, at - _CONTROL_CHARS)
    return not any(found.start() < at - start < found.end() for found in _CONTROL.finditer(text[start : at + _CONTROL_CHARS]))


def cut_before(text: str, at: int) -> int:
    """The last place up to `at` where the text may be cut."""
    for place in range(at, max(0, at - _FAR), -1):
        if may_cut(text, place):
            return place
    return 0 if at <= _FAR else at


def cut_after(text: str, at: int) -> int:
    """The first place from `at` on where the text may be cut."""
    for place in range(at, min(len(text), at + _FAR)):
        if may_cut(text, place):
            return place
    return len(text) if len(text) - at <= _FAR else at


def pieces(text: str, count: int) -> list[str]:
    """The text in about so many pieces of about one length, cut where a paragraph, line, sentence or word ends nearby. Joined they are the text."""
    size = max(1, -(-len(text) // count))
    found: list[str] = []
    at = 0
    while len(text) - at > size + size // _NEAR:
        end = _good_place(text, at + size, size // _NEAR)
        if end <= at:
            end = cut_after(text, at + size)
        found.append(text[at:end])
        at = end
    found.append(text[at:])
    return [piece for piece in found if piece]


def _good_place(text: str, at: int, near: int) -> int:
    for end, skip in _ENDS:
        place = text.rfind(end, max(0, at - near), at + near)
        if place > 0 and may_cut(text, place + skip):
            return place + skip
    return cut_before(text, at)


async def head(text: str, tokens: int, count: Count) -> int:
    """How many characters from the beginning are at most so many tokens, as near as a count of pieces tells."""
    return await _seek(text, tokens, count, from_end=False) if tokens > 0 else 0


async def tail(text: str, tokens: int, count: Count) -> int:
    """Where the last characters begin that are at most so many tokens."""
    return len(text) - await _seek(text, tokens, count, from_end=True) if tokens > 0 else len(text)


async def _seek(text: str, tokens: int, count: Count, *, from_end: bool) -> int:
    taken = 0
    span = text
    while span:
        parts = pieces(span, _PIECES)
        if len(parts) == 1 and len(span) > _SMALL:
            parts = _halves(span)
        if from_end:
            parts.reverse()
        span = ""
        for part, size in zip(parts, await count(parts), strict=True):
            if size <= tokens:
                tokens -= size
                taken += len(part)
                continue
            if len(part) > _SMALL and len(parts) > 1:
                span = part
            break
    return len(text) - cut_after(text, len(text) - taken) if from_end else cut_before(text, taken)


def _halves(text: str) -> list[str]:
    middle = cut_before(text, len(text) // 2)
    return [part for part in (text[:middle], text[middle:]) if part]


async def shards(text: str, tokens: int, count: Count) -> list[str]:
    """The text in pieces of at most about so many tokens each, cut as `pieces` does. Joined they are the text."""
    (size,) = await count([text])
    if size <= tokens:
        return [text] if text else []
    # Small pieces first, in one count, and then as many of them together as fit.
    small = pieces(text, -(-size * 8 // tokens))
    if len(small) == 1:
        return small
    found: list[str] = []
    room = 0
    for piece, size in zip(small, await count(small), strict=True):
        if found and size <= room:
            found[-1] += piece
            room -= size
        elif size <= tokens or len(piece) <= _SMALL:
            found.append(piece)
            room = tokens - size
        else:  # a piece with many more tokens than the rest
            found += await shards(piece, tokens, count)
            room = 0
    return found
