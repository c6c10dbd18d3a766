"""Recall in production: what a sampled search had of what comparing everything gives, told by the flight of the request."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from tidegate.core.ask import Passage
from tidegate.core.errors import StoreDown
from tidegate.core.flight import Flight
from tidegate.core.ports import Vectors
from tidegate.core.search import ANY, Filter, Found, Ranking
from tidegate.retrieval.recall import Sampler

VECTOR = np.eye(384, dtype=np.float32)[0]


def passages(names: str) -> list[Passage]:
    return [Passage(name, "d", "d", name, 0.5) for name in names]


class Exact:
    """A store whose exact searches wait until they may go on."""

    def __init__(self, names: str, index_version: str = "7") -> None:
        self.names, self.index_version = names, index_version
        self.asked = 0
        self.go = asyncio.Event()

    async def search(self, collection: str, vector: Vectors, k: int, wanted: Filter = ANY, *, words: Any = (), exact: bool = False) -> Found:
        assert exact
        self.asked += 1
        await self.go.wait()
        if not self.names:
            raise StoreDown("down")
        return Found(passages(self.names[:k]), self.index_version)


BY_GRAPH = Found(passages("abxy"), "7", "graph", [Ranking("vector", list("abx"), [0.9, 0.8, 0.7]), Ranking("words", ["y"], [1.0], [1.0])])


async def told(store: Exact, found: Found = BY_GRAPH, share: float = 1.0) -> list[Any]:
    """What a search's flight holds of its sample."""
    flight, sampler = Flight("/x"), Sampler(store, share)  # type: ignore[arg-type]
    sampler.look(flight, "c", VECTOR, 3, ANY, found)
    store.go.set()
    if sampler._running is not None:
        await sampler._running
    return [facts for _, what, facts in flight.decisions if what == "recall"]


async def test_the_share_that_the_graph_had_is_told() -> None:
    """Two of the three nearest; what only the words found does not count."""
    assert await told(Exact("aby")) == [{"collection": "c", "found": 2, "of": 3}]


async def test_what_was_compared_with_everything_needs_no_sample() -> None:
    """Nor is one taken where the share is 0."""
    store = Exact("abc")
    assert await told(store, Found(passages("abc"), "7", "exact")) == []
    assert await told(store, share=0.0) == []
    assert store.asked == 0


async def test_a_collection_that_changed_tells_nothing() -> None:
    """The two looks were at different passages; nor does a store that went down, and nobody hears of it."""
    assert await told(Exact("aby", "8")) == []
    assert await told(Exact("")) == []


async def test_one_sample_at_a_time() -> None:
    """Searches that come meanwhile are not looked at again, and one that comes later is."""
    store, flights = Exact("abx"), [Flight("/x") for _ in range(3)]
    sampler = Sampler(store, 1.0)  # type: ignore[arg-type]
    for flight in flights[:2]:
        sampler.look(flight, "c", VECTOR, 3, ANY, BY_GRAPH)
    store.go.set()
    assert sampler._running is not None
    await sampler._running
    sampler.look(flights[2], "c", VECTOR, 3, ANY, BY_GRAPH)
    await sampler._running
    assert [len(flight.decisions) for flight in flights] == [1, 0, 1]


async def test_a_flight_that_ended_is_left_alone() -> None:
    """Its record is made: the database would not have what the metrics had."""
    store, flight = Exact("abx"), Flight("/x")
    sampler = Sampler(store, 1.0)  # type: ignore[arg-type]
    sampler.look(flight, "c", VECTOR, 3, ANY, BY_GRAPH)
    flight.finish("stop", 200)
    store.go.set()
    assert sampler._running is not None
    await sampler._running
    assert flight.decisions == []


async def test_closing_ends_the_look_that_is_under_way() -> None:
    """A gateway that stops does not wait for it."""
    sampler = Sampler(Exact("abx"), 1.0)  # type: ignore[arg-type]
    sampler.look(Flight("/x"), "c", VECTOR, 3, ANY, BY_GRAPH)
    await asyncio.sleep(0)
    await sampler.close()
    assert sampler._running is not None
    assert sampler._running.cancelled()
