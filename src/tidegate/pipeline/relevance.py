"""How near texts are to a question, by their words alone: BM25 (Robertson and Zaragoza 2009), k1 = 1.2, b = 0.75."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from tidegate.core.words import words

_K1, _B = 1.2, 0.75


def relevance(question: str, texts: Sequence[str]) -> list[float]:
    """For each text from 0 to 1, where 1 is the nearest of them. All are 0 where none has a word of the question."""
    asked = set(words(question))
    counted = [Counter(words(text)) for text in texts]
    lengths = [sum(one.values()) for one in counted]
    average = sum(lengths) / max(1, len(lengths)) or 1.0
    scores = [0.0] * len(texts)
    for word in asked:
        having = sum(word in one for one in counted)
        weight = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
        for number, one in enumerate(counted):
            if count := one.get(word):
                scores[number] += weight * count * (_K1 + 1) / (count + _K1 * (1 - _B + _B * lengths[number] / average))
    best = max(scores, default=0.0)
    return [score / best for score in scores] if best > 0 else scores
