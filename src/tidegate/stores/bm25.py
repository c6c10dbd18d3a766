"""BM25 (Robertson and Zaragoza 2009), k1 = 1.2, b = 0.75: how much of what is asked a passage says, by its words.

A word that stands in n of N passages weighs ln(1 + (N - n + 0.5) / (n + 0.5)). Both are counted over all passages of a collection that have words,
whatever a search is limited to. The same stands in `sql/passages.sql`; tests compare the two.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

K1, B = 1.2, 0.75
#: Words of a question at most, each once: the others are left out.
ASKED_MOST = 256
#: As PostgreSQL's schema has room for: of a passage's words all together, and of one of them.
LENGTH_MOST, OFTEN_MOST = 65_535, 255


class Scored(NamedTuple):
    """`coverage`: the share of the weight of what was asked, 0 to 1."""

    score: float
    coverage: float


def count(words: Sequence[str]) -> dict[str, int]:
    """How often each word stands there."""
    return {word: min(often, OFTEN_MOST) for word, often in Counter(words).items()}


def asked_once(words: Iterable[str]) -> list[str]:
    """The words of a question."""
    return list(dict.fromkeys(words))[:ASKED_MOST]


def bm25(words: Sequence[str], passages: Mapping[str, Sequence[str]]) -> dict[str, Scored]:
    """Of those of the passages, by id, that hold a word of the question; a word that none of them holds weighs as if one did."""
    counted = {id: count(of_passage) for id, of_passage in passages.items() if of_passage}
    lengths = {id: min(len(passages[id]), LENGTH_MOST) for id in counted}
    average = sum(lengths.values()) / max(1, len(lengths))
    asked = asked_once(words)
    weights = {word: _weight(len(counted), sum(word in one for one in counted.values())) for word in asked}
    whole = sum(weights.values())
    scored = {}
    for id, one in counted.items():
        held = [word for word in asked if word in one]
        if held:
            norm = K1 * (1 - B + B * lengths[id] / average)
            score = sum(weights[word] * one[word] * (K1 + 1) / (one[word] + norm) for word in held)
            scored[id] = Scored(score, min(1.0, sum(weights[word] for word in held) / whole))
    return scored


def _weight(passages: int, having: int) -> float:
    having = max(1, having)
    return math.log(1 + (max(1, passages) - having + 0.5) / (having + 0.5))
