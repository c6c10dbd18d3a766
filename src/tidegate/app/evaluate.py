"""What `tidegate eval retrieval` does: a set of questions is searched for in a collection, and the report is kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from tidegate.app.collections import embedder_and_passages, holds_nothing
from tidegate.app.parts import open_store, reach
from tidegate.core.ask import Passage
from tidegate.core.ports import Evaluation
from tidegate.core.search import Found
from tidegate.core.words import words
from tidegate.retrieval import quality
from tidegate.retrieval.fuse import fuse
from tidegate.retrieval.quality import DEPTH, FINAL, FUSED, Quality
from tidegate.retrieval.search import Search
from tidegate.settings import Settings
from tidegate.stores.clean import json_text


async def evaluate_retrieval(
    settings: Settings, path: Path, *, collection: str, save: bool, progress: Callable[[int, int], None]
) -> Quality:
    """Judge a collection by the questions of a file; `save`: keep the report beside the index version. Raises BadRequest, NotFound, StoreDown."""
    wanted = quality.read_set(path)
    async with embedder_and_passages(settings) as (embedder, store):
        sources = [document.source for document in await store.list_documents(collection)]
        if not sources:
            raise await holds_nothing(store, collection)
        search = Search(embedder, store, settings.retrieval)
        most = max(DEPTH, settings.retrieval.candidates)

        async def look(question: str) -> tuple[Mapping[str, Sequence[Passage]], Found]:
            (vector,) = await embedder.embed([question], "query")
            found = await store.search(collection, vector, most, words=words(question))
            by_id = {passage.id: passage for passage in found.passages}
            orders: dict[str, Sequence[Passage]] = {leg.leg: [by_id[id] for id in leg.ids] for leg in found.legs}
            orders[FUSED] = fuse(found).passages
            final = await search.find(question, k=DEPTH, collection=collection)
            return {**orders, FINAL: final.passages}, final

        try:
            judged = await quality.judge(wanted, look, collection=collection, sources=sources, progress=progress)
        finally:
            await search.close()
    if save:
        async with open_store(reach(settings)) as database:
            await database.add_evaluation(Evaluation(
                time.time_ns() / 1e9, collection, judged.index_version, judged.set_name, judged.set_sha256, json_text(judged)
            ))
    return judged


async def list_evaluations(settings: Settings, collection: str, limit: int) -> list[tuple[float, Quality]]:
    """What earlier runs said of a collection, newest first: when (Unix seconds), and what."""
    async with open_store(reach(settings)) as database:
        kept = await database.list_evaluations(collection, limit)
    return [(one.at_unix_s, msgspec.json.decode(one.report, type=Quality)) for one in kept]
