"""Leaves out sentences that do not bear on the question, by words and how rare they are."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tidegate.core.words import words
from tidegate.retrieval.sentences import split_sentences

#: Stands where sentences were left out, so that nobody takes what stands around it for one sentence after the other.
GAP = "…"
#: Sentences beside one that bears on the question that stay with it: what "it" is, and what follows from it, stand there.
BESIDE = 1
#: A sentence bears on the question from this share of the weight of the question's words on.
ENOUGH = 0.15

#: Lines within which a table's rule stands: its caption may have several.
MOST_LEAD = 8

_RULE = re.compile(r"\|(?:---\|)+")
#: A row of a table that was too wide to repeat its header: `name: cell; name: cell`.
_NAMED = re.compile(r"[^;:]+: [^;]+(?:; [^;:]+: [^;]+)+")


@dataclass(slots=True)
class _Piece:
    """A sentence or a table's row. `before`: what parts it from the last one."""

    text: str
    before: str
    row: bool = False
    #: A table's caption, header and rule: they stay while a row of it does.
    lead: bool = False


def compress(question: str, texts: Sequence[str]) -> list[str]:
    """Each text without the sentences that do not bear on the question, in order, a `GAP` where some were left out.

    Words are weighed by how few of all pieces of these texts hold them. Of a table whole rows go, never its caption and header; a text without a
    word of the question stays as it is: it was found by its meaning. One that has few keeps what has most of them.
    """
    split = [_pieces(text) for text in texts]
    held = [[set(words(piece.text)) for piece in pieces] for pieces in split]
    having = Counter(word for pieces in held for one in pieces for word in one)
    count = sum(map(len, held))
    asked = {word: math.log(1 + count / having[word]) for word in set(words(question)) if having[word]}
    whole = sum(asked.values())
    if not whole:
        return list(texts)
    bearing = [[sum(asked[word] for word in one if word in asked) / whole for one in pieces] for pieces in held]
    return [_kept(text, pieces, shares) for text, pieces, shares in zip(texts, split, bearing, strict=True)]


def _kept(text: str, pieces: list[_Piece], bearing: list[float]) -> str:
    # A table's caption and header stay in any case: they are not what the passage was found by.
    best = max((share for share, piece in zip(bearing, pieces, strict=True) if not piece.lead), default=0.0)
    if not best:
        return text
    stays = [share >= min(ENOUGH, best) for share in bearing]
    stays = [
        piece.lead or stays[at] or (not piece.row and any(stays[max(0, at - BESIDE) : at + BESIDE + 1])) for at, piece in enumerate(pieces)
    ]
    if all(stays):
        return text
    said, gap, joint = "", False, " "
    for piece, stay in zip(pieces, stays, strict=True):
        if not stay:
            gap = gap or not piece.row  # rows are whole in themselves, and a gap among them would be a row of its own
            continue
        if gap:
            said += (joint if said else "") + GAP + (piece.before if "\n" in piece.before else " ")
        elif said:
            said += piece.before
        said, gap, joint = said + piece.text, False, "\n" if piece.row or piece.lead else " "
    return said + joint + GAP if gap else said


def _pieces(text: str) -> list[_Piece]:
    """The text as sentences and rows; joined, with what stands before each, they give it back, spaces at the ends of lines aside."""
    found: list[_Piece] = []
    ends = ""  # of lines since the last piece
    for line, kind in _lines(text):
        if kind == "text":
            sentences = [(before if n else ends, sentence) for n, (before, sentence) in enumerate(split_sentences(line))]
        else:
            sentences = [(ends, line)]
        found += [_Piece(sentence, before, kind == "row", kind == "lead") for before, sentence in sentences]
        ends = "\n" if sentences else ends + "\n"
    return found


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """Each line with what it is, as `chunk.py` writes them: `text`, `row` of a table, or `lead`: its caption, header or rule."""
    lines = text.split("\n")
    rule = next((at for at, line in enumerate(lines[:MOST_LEAD]) if _RULE.fullmatch(line)), -1)
    named = [rule < 0 and _NAMED.fullmatch(line) is not None for line in lines]
    for at, line in enumerate(lines):
        if at <= rule or (at == 0 and not named[0] and named[1:2] == [True]):
            yield line, "lead"
        elif line.startswith("|") or named[at]:
            yield line, "row"
        else:
            yield line, "text"
