"""What a search may find, and what it found."""

from __future__ import annotations

from typing import Literal

import msgspec

from tidegate.core.ask import Passage

#: How the nearest passages were looked for: all that fit were compared; or a graph of neighbours was followed (HNSW), which may miss some; or
#: the graph gave fewer than were asked for, and all that fit were compared after it.
Way = Literal["exact", "graph", "graph_then_exact"]

#: What a search goes by: nearness of meaning, or the words themselves.
Leg = Literal["vector", "words"]


class Filter(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which passages a search may find; without anything, all of its collection but superseded ones.

    - `tags`: a passage carries all of them.
    - `since_unix_s`, `until_unix_s`: its document is dated in this time, both ends included.
    - `min_confidence`: its document's confidence is at least this, 0 to 1.
    - `superseded`: also documents that another one supersedes.
    """

    tags: dict[str, str] = {}
    since_unix_s: float | None = None
    until_unix_s: float | None = None
    min_confidence: float = 0.0
    superseded: bool = False


#: All that is not superseded.
ANY = Filter()


class IndexProgress(msgspec.Struct, frozen=True):
    """How far an index is built: what is done of the `phase`, in the database's own words and units."""

    name: str
    phase: str
    done: int
    total: int


class IndexState(msgspec.Struct, frozen=True):
    """An index of a collection: what it is for, its bytes on disk, and whether it was built just now."""

    name: str
    what: str
    bytes: int
    built: bool


class Ranking(msgspec.Struct, frozen=True):
    """One leg's order, best first.

    - `ids`: of passages that are in `Found.passages`.
    - `scores`: the leg's own: cosine similarity, 0 to 1; or BM25, from 0 on.
    - `coverage`: how much of the weight (inverse document frequency) of the question's words a passage holds, 0 to 1; [] of the vector leg. Words
      that no passage of the collection holds count among the question's with the weight of the rarest.
    """

    leg: Leg
    ids: list[str]
    scores: list[float]
    coverage: list[float] = []


class Found(msgspec.Struct, frozen=True):
    """The passages, best first, all of one state of the collection, which `index_version` names.

    `way`: how the nearest were looked for. `legs`: where each leg had them. From a store, what the vector leg found comes first, nearest first, then
    what only the words found.
    """

    passages: list[Passage]
    index_version: str = "0"
    way: Way = "exact"
    legs: list[Ranking] = []
    #: Of the embedder of all vectors of the collection; "" where it has none, and `>` before it while they change to it.
    fingerprint: str = ""
