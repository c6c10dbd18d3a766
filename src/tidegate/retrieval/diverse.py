"""Passages that say what another one says already do not take a place: maximal marginal relevance (Carbonell and Goldstein, SIGIR 1998)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tidegate.core.ask import Passage
from tidegate.core.words import FIGURE, words

#: How much relevance weighs; the rest is novelty. At a half, a passage that repeats another comes behind every one that does not.
WEIGHT = 0.5
#: Words of a shingle: three in a row are seldom equal by chance.
SHINGLE = 3
#: Below this share of common shingles two passages are of one subject, not of one text: chunks of a table share their header.
KIN = 0.5
#: From this share on, what is left of a passage is not worth its place.
SAME = 0.9


class Chosen(NamedTuple):
    """`kept`: places of the passages that stay, best first. `repeated`: of those that only repeat one of them. `differing`: pairs of passages, first
    the better one, of two documents that say the same with other figures: both may be kept."""

    kept: list[int]
    repeated: list[int]
    differing: list[tuple[int, int]]


class _Said(NamedTuple):
    shingles: frozenset[tuple[str, ...]]
    numbers: frozenset[str]


def _said(text: str) -> _Said:
    # Figures stand in no shingle: whether they agree is a question of its own.
    found = words(FIGURE.sub(" ", text))
    if len(found) < SHINGLE:
        return _Said(frozenset([tuple(found)]), frozenset(FIGURE.findall(text)))
    return _Said(frozenset(zip(*(found[at:] for at in range(SHINGLE)), strict=False)), frozenset(FIGURE.findall(text)))


def choose(passages: Sequence[Passage], k: int, weight: float = WEIGHT) -> Chosen:
    """Up to `k` of the passages (best first), each the one with the most `weight` x relevance - (1 - `weight`) x what is said already.

    Relevance falls with the place, from 1 to 0. What is said already: the share of a passage's shingles that one chosen before it holds, counted from
    `KIN` on; 0 where the passage has a figure that the other has not: it says something else, however alike the words. From `SAME` on, and without a
    figure of its own, it is left out altogether.
    """
    known: dict[int, _Said] = {}

    def said(at: int) -> _Said:
        if at not in known:
            known[at] = _said(passages[at].text)
        return known[at]

    kept: list[int] = []
    repeated: list[int] = []
    left = list(range(len(passages)))
    while left and len(kept) < k:
        best, best_worth, gone = -1, float("-inf"), set[int]()
        for at in left:
            relevance = weight * (1 - at / len(passages))
            if relevance <= best_worth:
                break  # all behind it are worth less, however new
            again = max((_again(said(at), said(other)) for other in kept), default=0.0)
            if again >= SAME:
                gone.add(at)
                continue
            worth = relevance - (1 - weight) * max(0.0, again - KIN) / (1 - KIN)
            if worth > best_worth:
                best, best_worth = at, worth
        repeated += gone
        if best >= 0:
            kept.append(best)
        left = [at for at in left if at != best and at not in gone]
    pairs = [(one, other) for n, one in enumerate(kept) for other in kept[n + 1 :]]
    differing = [pair for pair in pairs if passages[pair[0]].document != passages[pair[1]].document and _differ(said(pair[0]), said(pair[1]))]
    return Chosen(kept, sorted(repeated), differing)


def _again(one: _Said, before: _Said) -> float:
    """The share of `one` that `before` says."""
    if not one.numbers <= before.numbers:
        return 0.0
    return len(one.shingles & before.shingles) / len(one.shingles)


def _differ(one: _Said, other: _Said) -> bool:
    common = len(one.shingles & other.shingles)
    return one.numbers != other.numbers and common >= SAME * max(len(one.shingles), len(other.shingles))
