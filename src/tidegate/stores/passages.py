"""Passages in PostgreSQL: which way a search goes, and what a document's change does to them.

A filter that few passages fit is served by comparing all that fit, which an index holds whole and which is always right. Where many fit, the
graph of neighbours (HNSW) is faster and nearly right; where it gives fewer than were asked for, though more may fit, all are compared after it.
Never is the graph asked for what few fit: it would walk past most of the collection and give up early.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import psycopg
from pgvector import HalfVector
from psycopg import sql
from psycopg.rows import TupleRow

from tidegate.core.document import Document, NewPassage, Replaced, Unembedded, passage_ids
from tidegate.core.errors import BadRequest, NotFound, OtherEmbedder
from tidegate.core.plugins import nearest
from tidegate.core.ports import Vectors
from tidegate.core.search import ANY, Filter, Found, IndexProgress, IndexState, Ranking, Way
from tidegate.stores.clean import clean_text, clean_value
from tidegate.stores.files import put_file
from tidegate.stores.prepare import DIMENSIONS, check_vectors, prepare
from tidegate.stores.queries import queries
from tidegate.stores.words import Changed, Terms, Worded, count_words, find_words, passage_of, put_words

T = TypeVar("T")
Link = psycopg.AsyncConnection[TupleRow]
Run = Callable[[Callable[[Link], Awaitable[T]]], Awaitable[T]]

#: So many passages are compared one by one faster than a graph finds its way among those that do not fit: 0.6 us each, 12 ms for these.
EXACT_MOST = 20_000
#: What is known of a collection, and of how many passages fit a filter, is asked for again after this time.
KNOWN_NS = 10_000_000_000
#: Neighbours of a passage in the graph, and candidates that are looked at to find them.
GRAPH_M, GRAPH_EF = 24, 128
#: Memory for a passage while its graph is built: its vector, its neighbours with their distances.
GRAPH_BYTES = 2_000
#: Between two looks at how far an index is built.
_LOOK_S = 0.5
_FACET = re.compile(r"[A-Za-z0-9_-]{1,100}")
#: Filters whose number of fitting passages is remembered.
MOST_FILTERS = 1024


class _State(NamedTuple):
    """A collection as it was when it was looked at."""

    index_version: str
    facets: tuple[str, ...]
    graph: bool
    until_ns: int


class Passages:
    """The tables of passages and documents. `run` does work on a connection of the pool; `alone` gives one outside it, whose statements may take
    as long as they do. Both raise StoreDown."""

    def __init__(
        self, run: Callable[[Callable[[Link], Awaitable[Any]]], Awaitable[Any]], alone: Callable[[], AbstractAsyncContextManager[Link]]
    ) -> None:
        self._run = run
        self._alone = alone
        self._states: dict[str, _State] = {}
        self._fitting: dict[tuple[str, bytes], tuple[int, int]] = {}

    async def search(
        self, collection: str, vector: Vectors | None, k: int, wanted: Filter, *, words: Sequence[str] = (), exact: bool = False
    ) -> Found:
        """The k nearest passages that fit, nearest first, and with `words` the k best by BM25; `exact`: whatever the number, compare all that fit."""
        if vector is None:
            return await self._by_words(collection, k, wanted, words)
        check_vectors(vector)
        wanted = clean_value_of(wanted)
        collection = clean_text(collection)
        parameters = {"collection": collection, "vector": HalfVector(vector.reshape(DIMENSIONS)), "k": k}

        async def find(link: Link) -> Found:
            state = await self._state(link, collection)
            asked = parameters | _conditions(wanted, state.facets)
            by_graph = not exact and await self._graph_serves(link, collection, state, wanted, asked)
            if not words:
                return await self._nearest(link, asked, by_graph, state)
            fit = None if wanted == ANY else await self._fit(link, collection, wanted, asked)
            async with link.transaction():
                await link.execute(queries()["see_one_state"].sql)
                found = await self._nearest(link, asked, by_graph, state)
                passages, ranking = await find_words(link, asked, words, fit)
            near = {passage.id for passage in found.passages}
            only_words = [passage for passage in passages if passage.id not in near]
            return msgspec.structs.replace(found, passages=[*found.passages, *only_words], legs=[*found.legs, ranking])

        found: Found = await self._run(find)
        return found

    async def _by_words(self, collection: str, k: int, wanted: Filter, words: Sequence[str]) -> Found:
        """The word leg alone; the passages' own scores are 0, for there is nothing that they could be near to."""
        wanted, collection = clean_value_of(wanted), clean_text(collection)
        parameters = {"collection": collection, "vector": HalfVector(np.zeros(DIMENSIONS, np.float32)), "k": k}

        async def find(link: Link) -> Found:
            asked = parameters | _conditions(wanted, (await self._state(link, collection)).facets)
            fit = None if wanted == ANY else await self._fit(link, collection, wanted, asked)
            async with link.transaction():
                await link.execute(queries()["see_one_state"].sql)
                state = await fetch(link, "collection_state", asked)
                passages, ranking = await find_words(link, asked, words, fit) if words else ([], Ranking("words", [], [], []))
            return Found(passages, state[0][0] if state else "0", legs=[ranking])

        found: Found = await self._run(find)
        return found

    async def _nearest(self, link: Link, asked: dict[str, Any], by_graph: bool, state: _State) -> Found:
        """The vector leg."""
        if not by_graph:
            return await self._found(link, "find_exact", asked, "exact", state)
        found = await self._found(link, "find_by_graph", asked, "graph", state)
        if len(found.passages) < asked["k"]:  # the graph gave up, or fewer fit
            found = await self._found(link, "find_exact", asked, "graph_then_exact", state)
        return found

    async def explain(self, collection: str, vector: Vectors, k: int, wanted: Filter) -> list[str]:
        """The way that a search takes, and the database's plan for it with what it did and how long. Raises StoreDown, NotFound."""
        check_vectors(vector)
        wanted, collection = clean_value_of(wanted), clean_text(collection)

        async def plan(link: Link) -> list[str]:
            await _known(link, collection)
            state = await self._state(link, collection)
            asked = {"collection": collection, "vector": HalfVector(vector.reshape(DIMENSIONS)), "k": k} | _conditions(wanted, state.facets)
            graph = await self._graph_serves(link, collection, state, wanted, asked)
            fit, _ = self._fitting.get((collection, msgspec.json.encode(wanted)), (0, 0))
            said = ["no graph is there" if not state.graph else f"about {fit:,} passages fit"]
            said.append("by the graph of neighbours" if graph else "all that fit are compared")
            query = queries()["find_by_graph" if graph else "find_exact"].sql
            lines = await (await link.execute(b"explain (analyze, buffers) " + query, asked)).fetchall()
            return [": ".join(said), *(str(line[0]) for line in lines)]

        found: list[str] = await self._run(plan)
        return found

    async def index_version(self, collection: str) -> str:
        rows = await self._rows("collection_state", {"collection": clean_text(collection)})
        return str(rows[0][0]) if rows else "0"

    async def build_indexes(
        self, collection: str, *, facets: Sequence[str] | None = None, graph: bool | None = None,
        progress: Callable[[IndexProgress], None] = lambda _: None,
    ) -> list[IndexState]:
        """Give a collection the indexes that it needs: those of its `facets` (None: as they were), and a graph of neighbours (None: from
        `EXACT_MOST` passages on). Those that are there stay; searches and writers go on meanwhile. Returns those that it has then, by name.
        Raises StoreDown, NotFound for a collection that is not there, BadRequest for a name that cannot be a facet, or that no passage carries."""
        collection = clean_text(collection)
        for name in facets or ():
            if not _FACET.fullmatch(name):
                raise BadRequest(f"{name!r} cannot be a facet.", hint="A facet is a tag's name of letters, digits, _ and -.", param="facets")
        async with self._alone() as link:
            await _known(link, collection)
            if facets:
                carried = {str(name) for (name,) in await fetch(link, "tag_names", {"collection": collection})}
                for name in facets:
                    if name not in carried:
                        raise BadRequest(f"No passage of {collection!r} carries a tag {name!r}.", hint=nearest(name, carried), param="facets")
            ((part,),) = await fetch(link, "make_partition", {"collection": collection})
            if facets is not None:
                await link.execute(queries()["set_facets"].sql, {"collection": collection, "facets": list(facets)})
            for table in (part, "postings", "words"):
                await link.execute(sql.SQL("vacuum (analyze) tidegate.{}").format(sql.Identifier(table)))
            ((known, there, passages),) = await fetch(link, "collection_indexes", {"collection": collection})
            wanted = {_facet_index(part, name): _facet_sql(part, name) for name in known}
            for name in there:
                if name.startswith(f"{part}_facet_") and name not in wanted:
                    await link.execute(sql.SQL("drop index concurrently if exists tidegate.{}").format(sql.Identifier(name)))
            if graph or (graph is None and passages > EXACT_MOST):
                wanted[f"{part}_graph"] = _graph_sql(part)
            missing = {name: statement for name, statement in wanted.items() if name not in there}
            await link.execute(queries()["give_memory"].sql, {"wanted": passages * GRAPH_BYTES})
            for name, statement in missing.items():
                try:
                    await self._build(link, name, statement, progress)
                except psycopg.errors.DiskFull:  # of the memory that workers share: a container has 64 MB of it
                    await link.execute(queries()["build_alone"].sql)
                    await self._build(link, name, statement, progress)
            if missing:  # the planner knows nothing yet of what a facet's index holds
                await link.execute(sql.SQL("analyze tidegate.{}").format(sql.Identifier(part)))
            named = {_facet_index(part, name): f"facet {name}" for name in known} | {f"{part}_graph": "graph of neighbours"}
            states = [
                IndexState(name, named.get(name, "as every collection has"), size, name in missing)
                for name, size in await fetch(link, "index_sizes", {"collection": collection})
            ]
        self._states.pop(collection, None)
        self._fitting.clear()
        return states

    async def _build(self, link: Link, name: str, statement: sql.Composed, progress: Callable[[IndexProgress], None]) -> None:
        """One index, while others read and write; what a killed build left behind goes first."""
        await link.execute(sql.SQL("drop index concurrently if exists tidegate.{}").format(sql.Identifier(name)))
        building = asyncio.ensure_future(link.execute(statement))
        try:
            while not building.done():
                await asyncio.wait((building,), timeout=_LOOK_S)
                rows = await self._rows("build_progress", {"index": name})
                if rows and not building.done():
                    progress(IndexProgress(name, str(rows[0][0]), int(rows[0][1]), int(rows[0][2])))
            await building
        finally:
            building.cancel()
        progress(IndexProgress(name, "done", 1, 1))

    # -- the way of a search

    async def _state(self, link: Link, collection: str) -> _State:
        state, now_ns = self._states.get(collection), time.perf_counter_ns()
        if state is None or now_ns > state.until_ns:
            rows = await fetch(link, "collection_state", {"collection": collection})
            version, facets, graph = rows[0] if rows else ("0", [], False)
            state = self._states[collection] = _State(version, tuple(facets), graph, now_ns + KNOWN_NS)
        return state

    async def _graph_serves(self, link: Link, collection: str, state: _State, wanted: Filter, asked: dict[str, Any]) -> bool:
        """Whether there is a graph, and so many passages fit that it is the better way."""
        return state.graph and await self._fit(link, collection, wanted, asked) > EXACT_MOST

    async def _fit(self, link: Link, collection: str, wanted: Filter, asked: dict[str, Any]) -> int:
        """About how many passages fit."""
        key = (collection, msgspec.json.encode(wanted))
        fit, until_ns = self._fitting.get(key, (0, 0))
        if time.perf_counter_ns() > until_ns:
            ((plan,),) = await fetch(link, "estimate_fitting", asked)
            fit = int(plan[0]["Plan"]["Plan Rows"])
            if len(self._fitting) >= MOST_FILTERS:
                self._fitting.clear()
            self._fitting[key] = (fit, time.perf_counter_ns() + KNOWN_NS)
        return fit

    async def _found(self, link: Link, name: str, asked: dict[str, Any], way: Way, state: _State) -> Found:
        rows = await fetch(link, name, asked)
        version = rows[0][0] or "0"
        if version != state.index_version:  # facets or a graph may have come with the change
            self._states.pop(asked["collection"], None)
        passages = [passage_of(row[2:]) for row in rows if row[2] is not None]
        nearest = Ranking("vector", [passage.id for passage in passages], [passage.score for passage in passages])
        return Found(passages, version, way, [nearest], rows[0][1] or "")

    # -- documents

    async def document_sha(self, collection: str, source: str) -> str | None:
        rows = await self._rows("document_sha", {"collection": clean_text(collection), "source": clean_text(source)})
        return str(rows[0][0]) if rows else None

    async def replace_document(
        self, document: Document, passages: Sequence[NewPassage], vectors: Vectors, *, file: bytes | None = None
    ) -> Replaced:
        document, passages, notes = prepare(document, passages, vectors)
        ids = passage_ids(document, passages)
        terms = Terms(document.collection)
        worded = {id: Worded(passage.words, terms) for id, passage in zip(ids, passages, strict=True)}
        head = {**msgspec.structs.asdict(document), "tags": as_json(document.tags), "supersedes": list(document.supersedes)}
        rows = [
            {
                "id": id, "collection": document.collection, "ordinal": ordinal, "text": passage.text, "page": passage.page,
                "heading": passage.heading, "tokens": passage.tokens, "tags": as_json(document.tags | passage.tags),
                "boxes": msgspec.json.encode(passage.boxes).decode(), "embedding": HalfVector(vector), "confidence": document.confidence,
            }
            for ordinal, (id, passage, vector) in enumerate(zip(ids, passages, np.asarray(vectors, np.float32), strict=True))
        ]  # fmt: skip

        async def replace(link: Link) -> Replaced:
            async with link.transaction():
                await fetch(link, "make_partition", head)
                ((document_id, version, dated_at, superseded),) = await fetch(link, "put_document", head)
                shared = {"document_id": document_id, "collection": document.collection, "dated_at": dated_at, "superseded": superseded}
                before = {row[0]: Before(*row[1:]) for row in await fetch(link, "document_passages", shared)}
                gone = [id for id in before if id not in worded]
                await link.execute(queries()["drop_passages"].sql, {**shared, "ids": gone})
                numbers = await _numbers(link, before, worded)
                async with link.cursor() as cursor:
                    of_words = ({"number": numbers[id], "words": one.length, "words_digest": one.digest} for id, one in worded.items())
                    await cursor.executemany(queries()["put_passage"].sql, [row | shared | words for row, words in zip(rows, of_words, strict=True)])
                await put_file(link, document_id, file)
                await link.execute(queries()["mark_superseded"].sql, head)
                await _change(link, document.collection, await _put_words(link, before, worded, numbers), document.fingerprint)
            new = len(worded.keys() - before.keys())
            return Replaced(added=new, kept=len(ids) - new, removed=len(gone), version=version, notes=notes)

        replaced: Replaced = await self._run(replace)
        return replaced

    async def delete_document(self, collection: str, source: str) -> bool:
        named = {"collection": clean_text(collection), "source": clean_text(source), "supersedes": []}

        async def delete(link: Link) -> bool:
            async with link.transaction():
                gone = await fetch(link, "lock_document", named)
                if gone:
                    rows = await fetch(link, "document_passages", {**named, "document_id": gone[0][0]})
                    changed = await _put_words(link, {row[0]: Before(*row[1:]) for row in rows}, {}, {})
                    await link.execute(queries()["delete_document"].sql, named)
                    await link.execute(queries()["mark_superseded"].sql, named)
                    await _change(link, clean_text(collection), changed)
            return bool(gone)

        gone: bool = await self._run(delete)
        return gone

    async def fingerprint(self, collection: str) -> str:
        rows = await self._rows("collection_fingerprint", {"collection": clean_text(collection)})
        return str(rows[0][0]) if rows else ""

    async def unembedded(self, collection: str, fingerprint: str, limit: int) -> list[Unembedded]:
        collection = clean_text(collection)
        said = {"collection": collection, "fingerprint": fingerprint, "limit": limit, "random": secrets.token_hex(4)}

        async def look(link: Link) -> list[Unembedded]:
            await link.execute(queries()["begin_reembedding"].sql, said)
            rows = await fetch(link, "documents_unembedded", said)
            if not rows:
                await link.execute(queries()["end_reembedding"].sql, said)
            passages = [msgspec.json.decode(row[3], type=list[tuple[str, str, str]]) for row in rows]
            return [Unembedded(collection, row[0], row[1], row[2], found) for row, found in zip(rows, passages, strict=True)]

        found: list[Unembedded] = await self._run(look)
        return found

    async def reembed_document(self, document: Unembedded, fingerprint: str, vectors: Vectors) -> bool:
        check_vectors(vectors)
        said = {"collection": document.collection, "source": document.source, "version": document.version, "fingerprint": fingerprint}
        rows = [
            {"collection": document.collection, "id": id, "embedding": HalfVector(vector)}
            for (id, _, _), vector in zip(document.passages, np.asarray(vectors, np.float32), strict=True)
        ]

        async def replace(link: Link) -> bool:
            async with link.transaction():
                if not await fetch(link, "lock_version", said):
                    return False
                async with link.cursor() as cursor:
                    await cursor.executemany(queries()["put_vector"].sql, rows)
                await _change(link, document.collection, Changed({}), fingerprint)
            return True

        done: bool = await self._run(replace)
        return done

    async def list_documents(self, collection: str | None = None) -> list[Document]:
        rows = await self._rows("list_documents", {"collection": clean_value(collection)})
        return [
            Document(
                collection=row[0], source=row[1], title=row[2], sha256=row[3], size_bytes=row[4],
                tags=msgspec.json.decode(row[5], type=dict[str, str]), version=row[6], dated_unix_s=row[7], confidence=row[8],
                supersedes=tuple(row[9]), superseded_by=row[10], passages=row[11], ingested_unix_s=row[12],
            )
            for row in rows
        ]  # fmt: skip

    async def _rows(self, name: str, parameters: dict[str, Any]) -> list[TupleRow]:
        rows: list[TupleRow] = await self._run(lambda link: fetch(link, name, parameters))
        return rows


async def _known(link: Link, collection: str) -> None:
    """Raises NotFound for a collection that nothing was ever ingested into: a misspelt one would only look empty."""
    known = [row[0] for row in await fetch(link, "list_collections", {})]
    if collection not in known:
        raise NotFound(f"There is no collection {collection[:200]!r}.", hint=f"{nearest(collection, known)} `tidegate ingest` makes one.")


async def fetch(link: Link, name: str, parameters: dict[str, Any]) -> list[TupleRow]:
    """All rows of a named query."""
    return await (await link.execute(queries()[name].sql, parameters)).fetchall()


def as_json(tags: dict[str, str]) -> str:
    """Tags as PostgreSQL takes them."""
    return msgspec.json.encode(clean_value(tags)).decode()


def clean_value_of(wanted: Filter) -> Filter:
    """The filter with tags that a database can compare."""
    return msgspec.structs.replace(wanted, tags=clean_value(wanted.tags)) if wanted.tags else wanted


def _conditions(wanted: Filter, facets: Sequence[str]) -> dict[str, Any]:
    """A filter as parameters of the queries. Of its tags, the collection's first facet among them goes by the facet's own index."""
    facet = next((name for name in facets if name in wanted.tags), None)
    others = {name: value for name, value in wanted.tags.items() if name != facet}
    return {
        "facet": facet, "facet_value": wanted.tags[facet] if facet is not None else None, "tags": as_json(others) if others else None,
        "since": wanted.since_unix_s, "until": wanted.until_unix_s, "min_confidence": wanted.min_confidence, "superseded": wanted.superseded,
    }  # fmt: skip


def _facet_index(part: str, name: str) -> str:
    """Names of indexes have 63 bytes at most: the facet's own name is told in a digest."""
    return f"{part}_facet_{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def _facet_sql(part: str, name: str) -> sql.Composed:
    return sql.SQL(
        "create index concurrently {index} on tidegate.{part} ((tags ->> {name}), dated_at)"
        " include (collection, tags, confidence, superseded, id, embedding)"
    ).format(index=sql.Identifier(_facet_index(part, name)), part=sql.Identifier(part), name=sql.Literal(name))


def _graph_sql(part: str) -> sql.Composed:
    return sql.SQL(
        "create index concurrently {index} on tidegate.{part} using hnsw (embedding halfvec_ip_ops) with (m = {m}, ef_construction = {ef})"
    ).format(index=sql.Identifier(f"{part}_graph"), part=sql.Identifier(part), m=sql.Literal(GRAPH_M), ef=sql.Literal(GRAPH_EF))


class Before(NamedTuple):
    """What is stored of a passage's words."""

    number: int | None
    length: int
    digest: int


async def _numbers(link: Link, before: Mapping[str, Before], worded: Mapping[str, Worded]) -> dict[str, int | None]:
    """What each passage is called in postings: those that are there keep their number, those without words need none."""
    numbers = {id: before[id].number if id in before else None for id in worded}
    without = [id for id, number in numbers.items() if number is None and worded[id].length]
    if without:
        taken = await fetch(link, "take_numbers", {"count": len(without)})
        numbers.update(zip(without, (number for (number,) in taken), strict=True))
    return numbers


async def _put_words(
    link: Link, before: Mapping[str, Before], worded: Mapping[str, Worded], numbers: Mapping[str, int | None]
) -> Changed:
    """Words of passages that came, changed or went; those that stayed as they were are not touched."""
    going = {
        one.number: one.length
        for id, one in before.items()
        if one.number is not None and one.length and (id not in worded or worded[id].digest != one.digest)
    }
    coming = {
        number: worded[id]
        for id, number in numbers.items()
        if number is not None and (id not in before or worded[id].digest != before[id].digest)
    }
    return await put_words(link, coming, going)


async def _change(link: Link, collection: str, changed: Changed, fingerprint: str = "") -> None:
    """Last in its transaction: it locks the collection's row, and writers of other documents should not wait for our work."""
    said = {"collection": collection, "random": secrets.token_hex(4), "worded": changed.worded, "words_total": changed.words_total}
    ((has,),) = await fetch(link, "change_collection", {**said, "fingerprint": fingerprint})
    if fingerprint and has not in (fingerprint, f">{fingerprint}"):
        raise OtherEmbedder(collection, has, fingerprint)
    await count_words(link, changed)
