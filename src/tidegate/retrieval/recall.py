"""Recall in production: some searches by the graph of neighbours are done again by comparing everything, beside the answer that is being made."""

from __future__ import annotations

import asyncio
import contextlib
import random

from tidegate.core.errors import StoreDown
from tidegate.core.flight import Flight
from tidegate.core.ports import Vectors, VectorStore
from tidegate.core.search import Filter, Found


class Sampler:
    """Samples a `share` of the searches (0 to 1), one at a time: comparing everything takes a database's core for as long as it does."""

    def __init__(self, store: VectorStore, share: float) -> None:
        self._store = store
        self._share = share
        self._chance = random.Random()  # noqa: S311 - which search is looked at again is no secret
        self._running: asyncio.Task[None] | None = None

    def look(self, flight: Flight, collection: str, vector: Vectors, k: int, wanted: Filter, found: Found) -> None:
        """Perhaps look again; what comes of it is noted in the flight (`recall`), unless that ends before, or the collection changes meanwhile."""
        if found.way != "graph" or (self._running and not self._running.done()) or self._chance.random() >= self._share:
            return
        near = next((leg.ids for leg in found.legs if leg.leg == "vector"), [passage.id for passage in found.passages])[:k]
        self._running = asyncio.get_running_loop().create_task(self._again(flight, collection, vector, k, wanted, near, found.index_version))

    async def _again(
        self, flight: Flight, collection: str, vector: Vectors, k: int, wanted: Filter, near: list[str], index_version: str
    ) -> None:
        with contextlib.suppress(StoreDown):  # the search itself went well, and nobody waits for this
            exact = await self._store.search(collection, vector, k, wanted, exact=True)
            if exact.passages and exact.index_version == index_version and not flight.ended:
                found = len({passage.id for passage in exact.passages}.intersection(near))
                flight.decide("recall", collection=collection, found=found, of=len(exact.passages))

    async def close(self) -> None:
        """End the look that is under way."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
