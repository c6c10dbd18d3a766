"""How near texts are to a question, by their words alone: BM25 (Robertson and Zaragoza 2009), k1 = 1.2, b = 0.75.

Words of scripts that part them; of Chinese, Japanese and Thai, which do not, pairs of characters.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

_K1, _B = 1.2, 0.75
_WORDS = re.compile(r"[\u0e00-\u0e7f\u2e80-\u30ff\u3400-\u9fff\uf900-\ufaff]+|[^\W_]+")
_UNSPACED = re.compile(r"[\u0e00-\u0e7f\u2e80-\u30ff\u3400-\u9fff\uf900-\ufaff]")


def terms(text: str) -> list[str]:
    """The words of a text as they are compared."""
    found: list[str] = []
    for run in _WORDS.findall(text.casefold()):
        if len(run) > 1 and _UNSPACED.match(run):
            found += [run[at : at + 2] for at in range(len(run) - 1)]
        else:
            found.append(run)
    return found


def relevance(question: str, texts: Sequence[str]) -> list[float]:
    """For each text from 0 to 1, where 1 is the nearest of them. All are 0 where none has a word of the question."""
    asked = set(terms(question))
    counted = [Counter(terms(text)) for text in texts]
    lengths = [sum(one.values()) for one in counted]
    average = sum(lengths) / max(1, len(lengths)) or 1.0
    scores = [0.0] * len(texts)
    for term in asked:
        having = sum(term in one for one in counted)
        weight = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
        for number, one in enumerate(counted):
            if count := one.get(term):
                scores[number] += weight * count * (_K1 + 1) / (count + _K1 * (1 - _B + _B * lengths[number] / average))
    best = max(scores, default=0.0)
    return [score / best for score in scores] if best > 0 else scores
