"""Documents and collections, for the command line: what `tidegate ingest`, `index`, `search`, `explain` and `migrate` do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from tidegate.app.parts import open_embedder, open_passages, reach
from tidegate.core.errors import BadRequest, NotFound, SettingsError
from tidegate.core.plugins import nearest
from tidegate.core.ports import Embedder, PassageStore
from tidegate.core.search import Filter, IndexProgress, IndexState
from tidegate.retrieval.ingest import Given, IngestReport, Progress
from tidegate.retrieval.ingest import ingest as ingest_paths
from tidegate.retrieval.reembed import reembed as reembed_all
from tidegate.retrieval.search import Search, Searched
from tidegate.retrieval.structure import Rules
from tidegate.settings import Settings
from tidegate.stores.migrate import migrate

#: Added to the niceness of an ingest and of its readers: a search beside it goes first. A tenth of the time is what niceness 10 would leave a reader
#: beside a busy engine, too little for a long PDF within its `load_seconds`; 5 leaves a quarter.
PATIENCE = 5


@contextlib.asynccontextmanager
async def embedder_and_passages(settings: Settings) -> AsyncIterator[tuple[Embedder, PassageStore]]:
    """Those of the settings, or of the `tidegate up` that runs on this machine. Raises SettingsError where there is no embedder."""
    reached = reach(settings)
    async with open_embedder(reached) as embedder, open_passages(reached) as store:
        if embedder is None:
            raise SettingsError("There is no embedder.", hint='Set embedder.socket, or embedder.mode = "in_process".')
        yield embedder, store


def migrate_store(settings: Settings) -> list[str]:
    """`tidegate migrate`: bring the database's schema up to date; returns what was applied."""
    return migrate(settings.store.dsn)


async def ingest(
    settings: Settings, paths: Sequence[Path], *, collection: str, given: Given, base: Path | None, prune: bool,
    rules: Rules | None, progress: Callable[[Progress], None],
) -> IngestReport:
    """`tidegate ingest`: into the database of the settings, or of the `tidegate up` that runs on this machine. This process stays behind others."""
    os.nice(PATIENCE)  # Linux: of this thread and of what it starts, readers too
    async with embedder_and_passages(settings) as (embedder, store):
        return await ingest_paths(
            paths, collection=collection, given=given, embedder=embedder, store=store, base=base, progress=progress, prune=prune,
            settings=settings.retrieval, rules=rules,
        )


async def reembed(settings: Settings, collection: str, progress: Callable[[Progress], None]) -> int:
    """`tidegate ingest --reembed`: new vectors for a collection whose embedder was changed; tells for how many documents."""
    async with embedder_and_passages(settings) as (embedder, store):
        total = len(await store.list_documents(collection))
        if not total:
            raise await holds_nothing(store, collection)
        return await reembed_all(
            collection, embedder=embedder, store=store, patience_s=settings.retrieval.ingest_patience_s,
            progress=lambda done, source: progress(Progress(done, total, source, "embedding")),
        )


async def build_indexes(
    settings: Settings, collection: str, *, facets: Sequence[str] | None, graph: bool | None, progress: Callable[[IndexProgress], None]
) -> list[IndexState]:
    """`tidegate index`: the indexes of a collection, and what it has then."""
    async with open_passages(reach(settings)) as store:
        return await store.build_indexes(collection, facets=facets, graph=graph, progress=progress)


async def search(settings: Settings, question: str, *, collection: str, k: int, wanted: Filter, rerank: str | None) -> Searched:
    """`tidegate search`: as a request searches, but for rerankers that ask an engine. `rerank`: another one than that of the settings."""
    reached = settings.retrieval if rerank is None else settings.retrieval.model_copy(update={"rerank": rerank})
    async with embedder_and_passages(settings) as (embedder, store):
        road = Search(embedder, store, reached)
        try:
            found = await road.find(question, k=k, wanted=wanted, collection=collection)
        finally:
            await road.close()
        if not found.passages and not await store.list_documents(collection):
            raise await holds_nothing(store, collection)
        return found


async def holds_nothing(store: PassageStore, collection: str) -> NotFound:
    """The error that says so, with the name that was perhaps meant."""
    known = sorted({document.collection for document in await store.list_documents()})
    return NotFound(f"The collection {collection!r} holds no document.", hint=f"{nearest(collection, known)} `tidegate ingest` fills one.")


async def explain_search(settings: Settings, question: str, *, collection: str, k: int, wanted: Filter) -> list[str]:
    """`tidegate explain`: the way of a search and the database's plan for it."""
    if not question.strip():
        raise BadRequest("The question is empty.", hint="Ask something.", param="question")
    async with embedder_and_passages(settings) as (embedder, store):
        (vector,) = await embedder.embed([question], "query")
        return await store.explain(collection, vector, k, wanted)
