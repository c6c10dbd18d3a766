"""Whether a second look helps: the reranker `features` against the fused order alone, and what compression keeps of the answers.

    .venv/bin/python benchmarks/rerank.py --data ../shared/data [--cache FOLDER] [--fit] [--save]

The questions of benchmarks/hybrid.py, up to 400 of each set, searched in memory as the product searches: 30 candidates by vectors, 30 by words,
both fused. A passage is right where it is of a document that answers the question and, where the set says them, holds the answer's words.

The half of the questions with an even number in their set is what weights are chosen on (`--fit` prints new ones); the odd half judges them.
Compression's threshold was chosen on paragraphs of XQuAD; the bank's questions and the names, of which none was looked at, judge it. Intervals
are 95 %, by drawing questions anew (paired where two orders are compared).
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hybrid
import numpy as np
import numpy.typing as npt
from common import record

from tidegate.core.document import Document
from tidegate.core.ports import Vectors
from tidegate.core.search import Found
from tidegate.core.words import words
from tidegate.retrieval.compress import compress
from tidegate.retrieval.fuse import fuse
from tidegate.retrieval.quality import Question
from tidegate.retrieval.rerankers.features import NAMES, WEIGHTS, features
from tidegate.stores.systems.memory import Memory

CANDIDATES, MOST, K = 30, 400, 4
Figures = npt.NDArray[np.float64]
#: Of the places of the first right passages, -1 where none is.
MEASURES: dict[str, Callable[[npt.NDArray[np.int64]], Figures]] = {
    "p_at_1": lambda at: (at == 0).astype(float),
    f"recall_at_{K}": lambda at: ((at >= 0) & (at < K)).astype(float),
    "mrr_at_10": lambda at: np.where((at >= 0) & (at < 10), 1 / (np.maximum(at, 0) + 1), 0.0),
}


@dataclass
class Judged:
    """One question: its number in its set, what was found (fused), the features of each passage, which of them are right."""

    number: int
    asked: Question
    found: Found
    rows: Figures
    right: list[bool]

    def place(self, weights: Figures | None) -> int:
        """Of the first right passage; by the fused order without weights."""
        order = np.arange(len(self.right)) if weights is None else np.argsort(-(self.rows @ weights), kind="stable")
        return next((at for at, one in enumerate(order) if self.right[one]), -1)


@dataclass
class Set:
    name: str
    asked: list[Judged] = field(default_factory=list)

    def half(self, odd: bool) -> list[Judged]:
        return [one for one in self.asked if one.number % 2 == odd]


async def filled(found: list[hybrid.Document]) -> Memory:
    store = Memory()
    for one in found:
        await store.replace_document(Document(collection="c", source=one.source, title=one.title, sha256=one.source), one.passages, one.vectors)
    return store


async def searched(store: Memory, number: int, one: Question, vector: Vectors) -> Judged:
    found = fuse(await store.search("c", vector, CANDIDATES, words=words(one.question)))
    found = Found(found.passages[:CANDIDATES], found.index_version, found.way, found.legs)
    right = [one.answered_by(passage.document, passage.text) is not None for passage in found.passages]
    return Judged(number, one, found, np.array(features(one.question, found)), right)


async def all_sets(data: Path, embedding: hybrid.Embedding) -> list[Set]:
    asked = hybrid.asked_of(data)
    stores = {
        corpus: await filled(await hybrid.documents(embedding, hybrid.read(corpus, data)))
        for corpus in sorted({one.corpus for of_set in asked.values() for one in of_set})
    }
    made: list[Set] = []
    for name, of_set in asked.items():
        vectors = await embedding.vectors([one.question for one in of_set], "query")
        step = -(-len(of_set) // MOST) | 1  # odd: both halves are of all documents
        some = range(0, len(of_set), step)
        made.append(Set(name, [await searched(stores[of_set[at].corpus], at, of_set[at], vectors[at]) for at in some]))
    return made


def fit(sets: list[Set]) -> Figures:
    """Weights that make the right passage most probable (softmax over a question's candidates), each set counted alike."""
    asked, shares = [], []
    for one in sets:
        usable = [q for q in one.half(odd=False) if any(q.right)]
        asked += usable
        shares += [1 / len(usable)] * len(usable)
    most = max(len(one.right) for one in asked)
    rows, right, off = np.zeros((len(asked), most, len(NAMES))), np.zeros((len(asked), most)), np.full((len(asked), most), -1e9)
    for at, one in enumerate(asked):
        rows[at, : len(one.right)], right[at, : len(one.right)], off[at, : len(one.right)] = one.rows, one.right, 0
    share = np.array(shares) / sum(shares)
    weights, first, second = np.zeros(len(NAMES)), np.zeros(len(NAMES)), np.zeros(len(NAMES))
    for step in range(1, 801):  # Adam; 10: the scale of weights near 1
        scores = 10 * rows @ weights + off
        chance = np.exp(scores - scores.max(1, keepdims=True))
        chance /= chance.sum(1, keepdims=True)
        mine = chance * right
        mine /= np.maximum(mine.sum(1, keepdims=True), 1e-12)
        slope = -10 * np.einsum("q,qn,qnd->d", share, mine - chance, rows) + 0.02 * weights
        first, second = 0.9 * first + 0.1 * slope, 0.99 * second + 0.01 * slope**2
        weights -= 0.02 * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.99**step)) + 1e-8)
    return np.asarray(weights / np.abs(weights).max())


def interval(values: Figures) -> list[float]:
    """Mean, and its interval."""
    draws = np.random.default_rng(7).integers(0, len(values), (2000, len(values)))
    low, high = np.percentile(values[draws].mean(axis=1), (2.5, 97.5))
    return [round(float(figure), 4) for figure in (values.mean(), low, high)]


def judged(one: Set, weights: Figures) -> dict[str, Any]:
    """The odd half, by the fused order and by the weights: P@1, recall@4 and MRR@10, and the differences."""
    asked = one.half(odd=True)
    said: dict[str, Any] = {"questions": len(asked)}
    places = {name: np.array([q.place(by) for q in asked]) for name, by in (("fused", None), ("features", weights))}
    for measure, of in MEASURES.items():
        fused, featured = of(places["fused"]), of(places["features"])
        said[measure] = {"fused": interval(fused), "features": interval(featured), "gain": interval(featured - fused)}
    return said


def compressed(one: Set, weights: Figures) -> dict[str, Any]:
    """Of the odd half's questions whose answer is in the first passages: the share whose answer still is, and the share of characters saved."""
    kept, before, after = [], 0, 0
    for q in one.half(odd=True):
        best = [q.found.passages[at] for at in np.argsort(-(q.rows @ weights), kind="stable")[:K]]
        if not any(q.asked.said_in(passage.text) for passage in best):
            continue
        shown = compress(q.asked.question, [passage.text for passage in best])
        kept.append(any(map(q.asked.said_in, shown)))
        before += sum(len(passage.text) for passage in best)
        after += sum(map(len, shown))
    return {"questions": len(kept), "answers_kept": interval(np.array(kept, float)), "characters_saved": round(1 - after / before, 3)}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds retrieval/")
    parser.add_argument("--cache", type=Path, help="a folder that keeps the vectors")
    parser.add_argument("--fit", action="store_true", help="choose weights anew on the even half, print them and judge them")
    parser.add_argument("--save", action="store_true", help="write results/rerank.json")
    options = parser.parse_args()
    embedding = hybrid.Embedding(options.cache)
    sets = await all_sets(options.data, embedding)
    await embedding.model.close()
    weights = np.array(WEIGHTS)
    if options.fit:
        weights = fit(sets).round(2)
    print({name: float(weight) for name, weight in zip(NAMES, weights, strict=True)})
    results = {one.name: judged(one, weights) for one in [*sets, Set("all together", [q for one in sets for q in one.asked])]}
    for name, figures in results.items():
        print(f"{name}: {figures['questions']} questions")
        for measure in MEASURES:
            two = figures[measure]
            gain, low, high = two["gain"]
            print(f"  {measure:12} fused {two['fused'][0]:.3f}, features {two['features'][0]:.3f}: {gain:+.3f} ({low:+.3f} to {high:+.3f})")
    compression = {one.name: compressed(one, weights) for one in sets if one.asked[0].asked.answer}
    for name, figures in compression.items():
        print(f"compression, {name}: {figures}")
    if options.save:
        weighed = dict(zip(NAMES, weights.tolist(), strict=True))
        print(record("rerank", {"candidates": CANDIDATES, "weights": weighed, "sets": results, "compression": compression}))


if __name__ == "__main__":
    asyncio.run(main())
