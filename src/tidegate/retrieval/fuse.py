"""Two orders of the same passages made one: reciprocal rank fusion (Cormack, Clarke and Buettcher 2009), where words speak as far as they carry.

Each leg gives a passage 1 / (k + its rank), and the sums order the passages. The vote of the words' leg is multiplied by the square of the passage's
coverage: by how much of the weight of the question's words it holds. A question in another language than the documents shares a name or a number with
them at most, its words find whatever else holds these, and a full vote for it would put that before what the vectors know to be right (first passage
right: 0.26 of the questions instead of 0.71, see `benchmarks/hybrid.py`, where the square was chosen on one half of the questions and judged on the
other).
"""

from __future__ import annotations

from collections import defaultdict

import msgspec

from tidegate.core.search import Found

#: As in the paper: how much less a rank counts than the one before it.
K = 60
#: The power of the coverage.
_POWER = 2


def fuse(found: Found, *, k: int = K) -> Found:
    """The same passages and legs, the passages in the order of both; as they came where there is one leg. Of equals, the one that came first."""
    by_id = votes(found, k=k)
    return msgspec.structs.replace(found, passages=sorted(found.passages, key=lambda passage: -by_id.get(passage.id, 0.0)))


def votes(found: Found, *, k: int = K) -> dict[str, float]:
    """What both legs give each passage that one of them found, by its id."""
    by_id: defaultdict[str, float] = defaultdict(float)
    for leg in found.legs:
        weights = [coverage**_POWER for coverage in leg.coverage] if leg.leg == "words" else [1.0] * len(leg.ids)
        for rank, (id, weight) in enumerate(zip(leg.ids, weights, strict=True), 1):
            by_id[id] += weight / (k + rank)
    return dict(by_id)
