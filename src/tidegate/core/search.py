"""What a search may find, and what it found."""

from __future__ import annotations

from typing import Literal

import msgspec

from tidegate.core.ask import Passage

#: How the nearest passages were looked for: all that fit were compared; or a graph of neighbours was followed (HNSW), which may miss some; or
#: the graph gave fewer than were asked for, and all that fit were compared after it.
Way = Literal["exact", "graph", "graph_then_exact"]


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


class Found(msgspec.Struct, frozen=True):
    """The passages, nearest first, all of one state of the collection, which `index_version` names; `way`: how they were looked for."""

    passages: list[Passage]
    index_version: str = "0"
    way: Way = "exact"
