"""Without a model: a linear rule over what the legs said, and over how the question's words, figures and names stand in a passage.

The weights were chosen on one half of the data and judged on the other: benchmarks/rerank.py, docs/search.md.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from tidegate.core.ask import Ask, Passage
from tidegate.core.search import Found
from tidegate.core.words import words
from tidegate.retrieval.rerank import RerankerParts

NAMES = ("fused", "cosine", "bm25", "coverage", "figures", "names", "phrases", "title")
#: In the order of NAMES.
WEIGHTS = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)

#: Reciprocal rank fusion's constant: the first place is worth 1 here.
_K = 60
#: Cosines of the shipped embedder lie in a narrow band: this far below the best is as good as nothing.
_BAND = 0.1
_FIGURE = re.compile(r"\d+(?:[.,:/]\d+)*")
#: What stands right behind a figure and belongs to it.
_UNIT = re.compile(r"\s?(%|‰|°|[^\W\d_]{1,12})")
#: Codes (A-12, XK7), abbreviations, and words with a capital that begin no sentence.
_NAME = re.compile(r"\b(?=\w*\d)(?=\w*[^\W\d_])[\w/-]{2,}\b|\b[A-Z]{2,}\b|(?<=[a-z0-9,;'] )[A-Z][\w'-]+")


def figures(text: str) -> dict[str, set[str]]:
    """Figures without their thousands' commas, each with the units that follow it anywhere."""
    found: dict[str, set[str]] = {}
    for one in _FIGURE.finditer(text):
        unit = _UNIT.match(text, one.end())
        found.setdefault(re.sub(r"(?<=\d),(?=\d{3}\b)", "", one.group()), set()).add(unit.group(1).casefold()[:3] if unit else "")
    return found


def features(question: str, found: Found) -> list[list[float]]:
    """A row for each passage, a figure from 0 to 1 for each of NAMES."""
    texts = [words(passage.text) for passage in found.passages]
    held = [set(one) for one in texts]
    having = Counter(word for one in held for word in one)
    asked = list(dict.fromkeys(words(question)))
    # A word that no candidate holds tells none from another.
    weigh = {word: math.log(1 + (len(held) - having[word] + 0.5) / (having[word] + 0.5)) for word in asked if having[word]}
    whole = sum(weigh.values())
    pairs = [pair for pair in zip(words(question), words(question)[1:], strict=False) if pair[0] in weigh and pair[1] in weigh]
    weighed = sum(weigh[one] + weigh[other] for one, other in pairs)
    by_words = {
        id: (score, share) for leg in found.legs if leg.leg == "words"
        for id, score, share in zip(leg.ids, leg.scores, leg.coverage, strict=True)
    }  # fmt: skip
    best_bm25 = max((score for score, _ in by_words.values()), default=0.0)
    best_cosine = max((passage.score for passage in found.passages), default=0.0)
    wanted_figures, wanted_names = figures(question), {name.casefold() for name in _NAME.findall(question)}
    rows: list[list[float]] = []
    for at, passage in enumerate(found.passages):
        bm25, coverage = by_words.get(passage.id, (0.0, 0.0))
        own = sum(weigh[word] for word in weigh if word in held[at]) / whole if whole else 0.0
        beside = set(zip(texts[at], texts[at][1:], strict=False)) if pairs else set()
        title = set(words(passage.title))
        rows.append([
            (_K + 1) / (_K + 1 + at),
            max(0.0, 1 - (best_cosine - passage.score) / _BAND),
            bm25 / best_bm25 if best_bm25 else 0.0,
            max(coverage, own),
            _agree(wanted_figures, passage),
            sum(name in passage.text.casefold() for name in wanted_names) / len(wanted_names) if wanted_names else 0.0,
            sum(weigh[one] + weigh[other] for one, other in pairs if (one, other) in beside) / weighed if weighed else 0.0,
            sum(weigh[word] for word in weigh if word in title) / whole if whole else 0.0,
        ])
    return rows


def _agree(wanted: dict[str, set[str]], passage: Passage) -> float:
    """The share of the question's figures that the passage has; one with another unit counts half."""
    if not wanted:
        return 0.0
    has = figures(passage.text)
    return sum(0.0 if figure not in has else 1.0 if units & has[figure] else 0.5 for figure, units in wanted.items()) / len(wanted)


class Features:
    """Takes well under a millisecond a passage, and fails never."""

    name = "features"

    def __init__(self, weights: Sequence[float] = WEIGHTS) -> None:
        self._weights = weights

    async def scores(self, question: str, found: Found, ask: Ask | None = None) -> list[float]:
        return [sum(weight * figure for weight, figure in zip(self._weights, row, strict=True)) for row in features(question, found)]

    async def close(self) -> None: ...


def build(parts: RerankerParts) -> Features:
    return Features()
