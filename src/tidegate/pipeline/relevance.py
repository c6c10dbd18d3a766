"""How near texts are to a question, by their words alone: BM25 among themselves."""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.core.words import words
from tidegate.stores.bm25 import bm25


def relevance(question: str, texts: Sequence[str]) -> list[float]:
    """For each text from 0 to 1, where 1 is the nearest of them. All are 0 where none has a word of the question."""
    scored = bm25(words(question), {str(number): words(text) for number, text in enumerate(texts)})
    best = max((one.score for one in scored.values()), default=1.0)
    return [scored[str(number)].score / best if str(number) in scored else 0.0 for number in range(len(texts))]
