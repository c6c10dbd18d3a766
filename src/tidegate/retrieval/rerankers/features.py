"""Without a model: a linear rule over what the legs said, and over how the question's words and figures stand in a passage.

The weights were chosen on one half of the data and judged on the other: benchmarks/rerank.py, docs/search.md.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

from tidegate.core.ask import Ask, Passage
from tidegate.core.search import Found, Ranking
from tidegate.core.words import FIGURE, words
from tidegate.retrieval.fuse import votes
from tidegate.retrieval.rerank import RerankerParts

NAMES = ("fused", "cosine", "bm25", "coverage", "figures", "phrases")
#: In the order of NAMES.
WEIGHTS = (0.27, 1.0, 0.13, 0.17, 0.26, 0.17)

#: Cosines of the shipped embedder lie in a narrow band: this far below the best is as good as nothing.
_BAND = 0.1
#: What stands right behind a figure and belongs to it.
_UNIT = re.compile(r"\s?(%|‰|°|[^\W\d_]{1,12})")


def figures(text: str) -> dict[str, set[str]]:
    """Figures without their thousands' commas, each with the units that follow it anywhere."""
    found: dict[str, set[str]] = {}
    for one in FIGURE.finditer(text):
        unit = _UNIT.match(text, one.end())
        found.setdefault(re.sub(r"(?<=\d),(?=\d{3}\b)", "", one.group()), set()).add(unit.group(1).casefold()[:3] if unit else "")
    return found


def features(question: str, found: Found) -> list[list[float]]:
    """A row for each passage, a figure from 0 to 1 for each of NAMES.

    - fused: the votes of both legs, beside the most that a passage has;
    - cosine: how near to the best it is;
    - bm25: beside the best, as much as the best covers of the question: words without evidence say nothing;
    - coverage: the share of the question's words that the passage and its title hold, by how few candidates hold them;
    - figures: the share of the question's figures that it has, with their units;
    - phrases: the share of pairs of the question's words that stand together in it, by the same weights.
    """
    texts = [_words(passage.title, passage.text) for passage in found.passages]
    held = [set(one) for one in texts]
    having = Counter(word for one in held for word in one)
    asked = words(question)
    # A word that no candidate holds tells none from another.
    weigh = {word: math.log(1 + (len(held) - having[word] + 0.5) / (having[word] + 0.5)) for word in asked if having[word]}
    pairs = [pair for pair in pairwise(asked) if pair[0] in weigh and pair[1] in weigh]
    by_votes = votes(found)
    most_votes = max(by_votes.values(), default=0.0)
    by_words = next((leg for leg in found.legs if leg.leg == "words"), Ranking("words", [], []))
    bm25 = dict(zip(by_words.ids, by_words.scores, strict=True))
    best_bm25, best_coverage = max(by_words.scores, default=0.0), max(by_words.coverage, default=0.0)
    best_cosine = max((passage.score for passage in found.passages), default=0.0)
    wanted = figures(question)
    rows: list[list[float]] = []
    for at, passage in enumerate(found.passages):
        beside = set(pairwise(texts[at])) if pairs else set()
        rows.append([
            _share(by_votes.get(passage.id, 0.0), most_votes),
            max(0.0, 1 - (best_cosine - passage.score) / _BAND),
            _share(bm25.get(passage.id, 0.0), best_bm25) * best_coverage,
            _share(sum(weigh[word] for word in weigh if word in held[at]), sum(weigh.values())),
            _agree(wanted, passage),
            _share(_weight(weigh, (pair for pair in pairs if pair in beside)), _weight(weigh, pairs)),
        ])
    return rows


@lru_cache(maxsize=1024)
def _words(title: str, text: str) -> tuple[str, ...]:
    """Kept for the passages that were found lately: some are found by many questions."""
    return tuple(words(f"{title}\n{text}"))


def _share(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole else 0.0


def _weight(weigh: dict[str, float], pairs: Iterable[tuple[str, str]]) -> float:
    return sum(weigh[one] + weigh[other] for one, other in pairs)


def _agree(wanted: dict[str, set[str]], passage: Passage) -> float:
    """The share of the question's figures that the passage has; one with another unit counts half."""
    if not wanted:
        return 0.0
    has = figures(passage.text)
    return sum(0.0 if figure not in has else 1.0 if units & has[figure] else 0.5 for figure, units in wanted.items()) / len(wanted)


class Features:
    """Takes about half a millisecond a passage that it did not see lately, in a thread: streams of others go on meanwhile. Fails never."""

    name = "features"

    def __init__(self, weights: Sequence[float] = WEIGHTS) -> None:
        self._weights = weights

    async def scores(self, question: str, found: Found, ask: Ask | None = None) -> list[float]:
        rows = await asyncio.to_thread(features, question, found)
        return [sum(weight * figure for weight, figure in zip(self._weights, row, strict=True)) for row in rows]

    async def close(self) -> None: ...


def build(parts: RerankerParts) -> Features:
    return Features()
