"""Qdrant, for passages beside the database of everything else. Serves: VectorStore, DocumentStore. Needs the package qdrant-client.

A collection here is one there. Its points are passages (a dense vector, and a sparse one of their words), one head for each document and one for the
collection's state. Qdrant has no transactions, so a document's passages carry a generation: those of a new one are written hidden and then shown in
one batch that removes the old ones. While that batch runs the collection's state says so, and a search that met it looks again; should it meet the
two generations even so (a writer was killed in that instant), it takes the newer one alone, and the next ingest of the document mends it.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import httpx
import msgspec
from qdrant_client import AsyncQdrantClient, models
from qdrant_client.common.client_exceptions import QdrantException
from qdrant_client.http.exceptions import ApiException

from tidegate.core.ask import Passage
from tidegate.core.document import Box, Document, NewPassage, Replaced, Unembedded, passage_ids
from tidegate.core.errors import NotFound, OtherEmbedder, SettingsError, StoreDown
from tidegate.core.plugins import nearest
from tidegate.core.ports import Vectors
from tidegate.core.search import ANY, Filter, Found, IndexProgress, IndexState, Ranking, Way
from tidegate.stores.clean import clean_text, clean_value
from tidegate.stores.prepare import DIMENSIONS, check_vectors, prepare
from tidegate.stores.settings import QdrantSettings

T = TypeVar("T")

DENSE, WORDS = "dense", "words"
#: BM25 (Robertson and Zaragoza 2009). Qdrant weighs a word by its rarity itself; the length of a passage is weighed when it is written, against
#: this average, in words: the collection's own would change with each document.
_K1, _B, _AVERAGE_WORDS = 1.2, 0.75, 200.0
#: Points of one request: a passage with its vector as JSON takes some 5 kB.
_BATCH = 128
#: A search that met a change looks again so often, after so long.
_LOOKS, _LOOK_S = 5, 0.02
#: What is filtered by has an index there.
_INDEXED = {
    "kind": "keyword", "live": "bool", "source": "keyword", "generation": "integer", "tags": "keyword", "dated_unix_s": "float",
    "confidence": "float", "superseded": "bool", "supersedes": "keyword", "terms": "integer",
}  # fmt: skip
#: Collections and words whose counts are remembered.
_MOST_COUNTS = 4096


class Qdrant:
    """One client per event loop and process."""

    def __init__(self, settings: QdrantSettings) -> None:
        self._settings = settings
        self._local = settings.url == ":memory:"
        key = settings.api_key.get_secret_value() if settings.api_key is not None else None
        self._client = (
            AsyncQdrantClient(":memory:") if self._local
            else AsyncQdrantClient(url=settings.url, api_key=key, timeout=math.ceil(settings.timeout_s), check_compatibility=False)
        )
        self._known: dict[str, str] = {}
        self._fingerprints: dict[str, str] = {}
        self._writing: weakref.WeakValueDictionary[tuple[str, str], asyncio.Lock] = weakref.WeakValueDictionary()
        self._flipping: dict[str, asyncio.Lock] = {}
        self._counts: dict[tuple[str, str, int], int] = {}

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def figures(self) -> dict[str, Any]:
        """Live figures for /health: up or why not, and the round trip. Never raises."""
        began_ns = time.perf_counter_ns()
        try:
            names = await self._names()
        except StoreDown as down:
            return {"up": False, "why": down.message, "hint": down.hint}
        return {"up": True, "round_trip_ms": (time.perf_counter_ns() - began_ns) / 1e6, "collections": len(names)}

    # -- passages

    async def search(
        self, collection: str, vector: Vectors | None, k: int, wanted: Filter = ANY, *, words: Sequence[str] = (), exact: bool = False
    ) -> Found:
        """The k nearest passages that fit, nearest first, and with `words` the k best by them. Raises StoreDown."""
        if vector is not None:
            check_vectors(vector)
        collection = clean_text(collection)
        name = await self._there(collection)
        if name is None:
            return Found([])
        for look in range(_LOOKS):
            before, flipping = await self._state(name)
            found = await self._find(name, before, vector, k, wanted, words, exact)
            if not flipping and await self._state(name) == (before, ""):
                break
            await asyncio.sleep(_LOOK_S * look)
        return found

    async def _find(
        self, name: str, version: str, vector: Vectors | None, k: int, wanted: Filter, words: Sequence[str], exact: bool
    ) -> Found:
        fits = _fits(wanted)
        asked = Counter(_term(word) for word in words)
        unit = None if vector is None else vector.reshape(-1)
        dense = models.QueryRequest(
            query=[] if unit is None else unit.tolist(), using=DENSE, limit=k, filter=fits, with_payload=True, params=models.SearchParams(exact=exact)
        )
        sparse = models.QueryRequest(
            query=models.SparseVector(indices=list(asked), values=[1.0] * len(asked)), using=WORDS, limit=k, filter=fits, with_payload=True,
            with_vector=[DENSE],
        )
        legs, passages = [], []
        asking = [*((dense,) if unit is not None else ()), *((sparse,) if asked else ())]
        told = [answer.points for answer in await self._do(lambda: self._client.query_batch_points(name, asking))] if asking else []
        way: Way = "exact" if exact or self._local or unit is None else "graph"
        if unit is not None:
            hits = told.pop(0)
            if way == "graph" and len(hits) < k:  # Qdrant's graph gave up, or fewer fit
                all_of_them = dense.model_copy(update={"params": models.SearchParams(exact=True)})
                (response,) = await self._do(lambda: self._client.query_batch_points(name, [all_of_them]))
                hits, way = response.points, "graph_then_exact"
            passages = [_passage(hit.payload or {}, hit.score) for hit in _newest(hits)]
            legs.append(Ranking("vector", [passage.id for passage in passages], [passage.score for passage in passages]))
        if asked:
            worded = _newest(told.pop(0))
            have = {passage.id for passage in passages}
            passages += [
                _passage(hit.payload, float(unit @ hit.vector[DENSE]) if unit is not None else 0.0) for hit in worded if hit.payload["id"] not in have
            ]
            weights = await self._weights(name, version, asked)
            total = sum(weights.values()) or 1.0
            held = [sum(weights[term] for term in asked if term in terms) / total for terms in (set(hit.payload["terms"]) for hit in worded)]
            legs.append(Ranking("words", [hit.payload["id"] for hit in worded], [hit.score for hit in worded], held))
        return Found(passages, version, way, legs, await self._fingerprint(name))

    async def _weights(self, name: str, version: str, terms: Iterable[int]) -> dict[int, float]:
        """The rarity of each term (inverse document frequency, as BM25 has it)."""
        shown = [models.FieldCondition(key="live", match=models.MatchValue(value=True))]

        async def count(term: int) -> int:
            key = (name, version, term)
            if key not in self._counts:
                has = [] if term < 0 else [models.FieldCondition(key="terms", match=models.MatchValue(value=term))]
                answer = await self._do(lambda: self._client.count(name, count_filter=models.Filter(must=[*shown, *has]), exact=True))
                if len(self._counts) >= _MOST_COUNTS:
                    self._counts.clear()
                self._counts[key] = answer.count
            return self._counts[key]

        terms = list(terms)
        every, *having = await asyncio.gather(count(-1), *(count(term) for term in terms))
        return {term: math.log(1 + (every - has + 0.5) / (has + 0.5)) for term, has in zip(terms, having, strict=True)}

    async def explain(self, collection: str, vector: Vectors, k: int, wanted: Filter = ANY) -> list[str]:
        """What Qdrant tells of a collection, and how many passages fit: it plans by itself. Raises StoreDown, NotFound."""
        check_vectors(vector)
        name = await self._must_be_there(collection)
        fits = await self._do(lambda: self._client.count(name, count_filter=_fits(wanted), exact=True))
        info = await self._do(lambda: self._client.get_collection(name))
        found = await self.search(collection, vector, k, wanted)
        return [
            f"Qdrant at {self._settings.url}: {fits.count:,} passages fit; it chooses between its graph and its payload indexes by itself",
            f"status {info.status}, {info.points_count or 0:,} points, {info.indexed_vectors_count or 0:,} vectors in its graph",
            f"payload indexes: {', '.join(sorted(info.payload_schema)) or 'none'}",
            f"{len(found.passages)} found, {found.way}",
        ]

    async def build_indexes(
        self, collection: str, *, facets: Sequence[str] | None = None, graph: bool | None = None,
        progress: Callable[[IndexProgress], None] = lambda _: None,
    ) -> list[IndexState]:
        """Qdrant builds its graph by itself, and each tag has an index from the beginning. Raises StoreDown, NotFound."""
        await self._must_be_there(collection)
        return []

    async def index_version(self, collection: str) -> str:
        name = await self._there(clean_text(collection))
        return "0" if name is None else (await self._state(name))[0]

    # -- documents

    async def document_sha(self, collection: str, source: str) -> str | None:
        name = await self._there(clean_text(collection))
        head = await self._head(name, clean_text(source)) if name is not None else None
        return None if head is None else str(head["sha256"])

    async def replace_document(
        self, document: Document, passages: Sequence[NewPassage], vectors: Vectors, *, file: bytes | None = None
    ) -> Replaced:
        """As the port says, but that no file is kept; whoever searches in the instant of the change looks again. Raises StoreDown, SettingsError."""
        document, passages, notes = prepare(document, passages, vectors)
        name = await self._made(document.collection)
        if document.fingerprint:
            has = await self._fingerprint(name)
            if has not in ("", document.fingerprint):
                raise OtherEmbedder(document.collection, has, document.fingerprint)
            if not has:
                meta = models.Filter(must=[models.HasIdCondition(has_id=[_META])])
                await self._do(lambda: self._client.batch_update_points(name, [_set({"fingerprint": document.fingerprint}, meta)], wait=True))
        lock = self._writing.setdefault((name, document.source), asyncio.Lock())
        async with lock:
            return await self._replace(name, document, passages, vectors, notes)

    async def _replace(self, name: str, document: Document, passages: list[NewPassage], vectors: Vectors, notes: list[str]) -> Replaced:
        before = await self._head(name, document.source)
        ids = passage_ids(document, passages)
        generation = time.time_ns() // 1000  # whole numbers up to 2**53 are exact there
        now_unix_s = time.time_ns() / 1e9
        dated = now_unix_s if document.dated_unix_s is None else document.dated_unix_s
        superseded_by = await self._successor(name, document.source)
        document = msgspec.structs.replace(
            document, version=(before["version"] if before else 0) + 1, ingested_unix_s=now_unix_s, dated_unix_s=dated, superseded_by=superseded_by
        )
        shared = {
            "kind": "passage", "live": False, "generation": generation, "source": document.source, "title": document.title, "dated_unix_s": dated,
            "confidence": document.confidence, "superseded": superseded_by is not None,
        }  # fmt: skip
        points = [
            models.PointStruct(
                id=_uuid(f"{id} {generation}"), vector=_vectors(passage, vector),
                payload=shared | {
                    "id": id, "text": passage.text, "page": passage.page, "tag": document.tags | passage.tags,
                    "tags": _pairs(document.tags | passage.tags), "boxes": [list(box) for box in passage.boxes],
                    "terms": sorted({_term(word) for word in passage.words}),
                },
            )
            for id, passage, vector in zip(ids, passages, vectors, strict=True)
        ]  # fmt: skip
        for start in range(0, len(points), _BATCH):
            batch = points[start : start + _BATCH]
            await self._do(partial(self._client.upsert, name, batch, wait=True))
        head = models.PointStruct(
            id=_uuid(f"head {document.source}"), vector={},
            payload={"kind": "head", **msgspec.to_builtins(document), "passage_ids": sorted(ids)},
        )
        old = {"source": document.source, "kind": "passage"}
        await self._change(name, [
            _upsert([head]),
            _set({"live": True}, _where(old | {"generation": generation})),
            models.DeleteOperation(delete=models.FilterSelector(filter=_where(old, below=generation))),
        ])
        await self._mark_superseded(name, {*document.supersedes, *(before["supersedes"] if before else ())} - {document.source})
        kept = set(before["passage_ids"]) if before else set()
        return Replaced(len(set(ids) - kept), len(set(ids) & kept), len(kept - set(ids)), document.version, notes)

    async def fingerprint(self, collection: str) -> str:
        name = await self._there(clean_text(collection))
        return "" if name is None else await self._fingerprint(name)

    async def unembedded(self, collection: str, fingerprint: str, limit: int) -> list[Unembedded]:
        """Raises SettingsError where there are some: what is embedded anew is not the passages' own points, so it takes another collection."""
        has = await self.fingerprint(collection)
        if has in ("", fingerprint):
            return []
        raise SettingsError(
            f"The collection {collection!r} is in Qdrant and of the embedder {has}: it cannot be embedded anew where it is.",
            hint="Ingest its documents into a new collection, then let capabilities search that one.",
        )

    async def reembed_document(self, document: Unembedded, fingerprint: str, vectors: Vectors) -> bool:
        """Never called: `unembedded` gives none."""
        return False

    async def _fingerprint(self, name: str) -> str:
        """It never changes here, so it is asked for until it is there."""
        if not self._fingerprints.get(name):
            self._fingerprints[name] = str((await self._meta(name)).get("fingerprint", ""))
        return self._fingerprints[name]

    async def delete_document(self, collection: str, source: str) -> bool:
        name = await self._there(clean_text(collection))
        head = await self._head(name, clean_text(source)) if name is not None else None
        if name is None or head is None:
            return False
        await self._change(name, [models.DeleteOperation(delete=models.FilterSelector(filter=_where({"source": clean_text(source)})))])
        await self._mark_superseded(name, head["supersedes"])
        return True

    async def list_documents(self, collection: str | None = None) -> list[Document]:
        wanted = clean_value(collection)
        names = [await self._there(wanted)] if wanted is not None else sorted(await self._names())
        heads = [head for name in names if name is not None for head in await self._all(name, _where({"kind": "head"}))]
        documents = [msgspec.convert({key: value for key, value in head.items() if key in Document.__struct_fields__}, Document) for head in heads]
        return sorted(documents, key=lambda one: (one.collection, one.source))

    # -- who supersedes whom

    async def _successor(self, name: str, source: str) -> str | None:
        heads = await self._all(name, _where({"kind": "head", "supersedes": source}))
        naming = [head["source"] for head in heads if head["source"] != source]
        return min(naming, default=None)

    async def _mark_superseded(self, name: str, sources: Iterable[str]) -> None:
        for source in sources:
            by = await self._successor(name, source)
            await self._change(name, [
                _set({"superseded": by is not None}, _where({"kind": "passage", "source": source})),
                _set({"superseded_by": by}, _where({"kind": "head", "source": source})),
            ])

    # -- the collection there

    def _named(self, collection: str) -> str:
        return f"{self._settings.prefix}{hashlib.sha256(collection.encode()).hexdigest()[:24]}"

    async def _names(self) -> list[str]:
        """Those of ours that are there."""
        answer = await self._do(self._client.get_collections)
        return [one.name for one in answer.collections if one.name.startswith(self._settings.prefix)]

    async def _there(self, collection: str) -> str | None:
        """What the collection is called there; None where it is not there."""
        if collection not in self._known:
            name = self._named(collection)
            if not await self._do(lambda: self._client.collection_exists(name)):
                return None
            self._known[collection] = name
        return self._known[collection]

    async def _must_be_there(self, collection: str) -> str:
        collection = clean_text(collection)
        name = await self._there(collection)
        if name is None:
            known = [(await self._meta(other)).get("collection", "") for other in await self._names()]
            raise NotFound(f"There is no collection {collection[:200]!r}.", hint=f"{nearest(collection, known)} `tidegate ingest` makes one.")
        return name

    async def _made(self, collection: str) -> str:
        """The collection there, made where it is not."""
        name = await self._there(collection)
        if name is not None:
            return name
        name = self._named(collection)
        try:
            await self._do(lambda: self._client.create_collection(
                name, vectors_config={DENSE: models.VectorParams(size=DIMENSIONS, distance=models.Distance.DOT)},
                sparse_vectors_config={WORDS: models.SparseVectorParams(modifier=models.Modifier.IDF)},
            ))
        except (StoreDown, ValueError):  # another writer may have been quicker
            if not await self._do(lambda: self._client.collection_exists(name)):
                raise
        if not self._local:  # the client's own memory has no indexes
            for field, schema in _INDEXED.items():
                await self._do(partial(self._client.create_payload_index, name, field, models.PayloadSchemaType(schema), wait=True))
        state = models.PointStruct(id=_META, vector={}, payload={"kind": "meta", "collection": collection, "version": "0", "flipping": ""})
        if not await self._meta(name):
            await self._do(lambda: self._client.upsert(name, [state], wait=True))
        self._known[collection] = name
        return name

    async def _meta(self, name: str) -> dict[str, Any]:
        found = await self._do(lambda: self._client.retrieve(name, [_META], with_payload=True))
        return found[0].payload or {} if found else {}

    async def _state(self, name: str) -> tuple[str, str]:
        """The index version, and whose change is under way ("" where none is)."""
        meta = await self._meta(name)
        return meta.get("version", "0"), meta.get("flipping", "")

    async def _change(self, name: str, operations: list[Any]) -> None:
        """One batch, told before and after, so that a search can see that it met it."""
        async with self._flipping.setdefault(name, asyncio.Lock()):
            version, _ = await self._state(name)
            new = f"{int(version.partition('-')[0]) + 1}-{secrets.token_hex(4)}"
            meta = models.Filter(must=[models.HasIdCondition(has_id=[_META])])
            batch = [_set({"flipping": new}, meta), *operations, _set({"version": new, "flipping": ""}, meta)]
            await self._do(lambda: self._client.batch_update_points(name, batch, wait=True))

    async def _head(self, name: str, source: str) -> dict[str, Any] | None:
        found = await self._do(lambda: self._client.retrieve(name, [_uuid(f"head {source}")], with_payload=True))
        return found[0].payload if found else None

    async def _all(self, name: str, wanted: Any) -> list[dict[str, Any]]:
        """What all points that fit carry."""
        found: list[dict[str, Any]] = []
        offset = None
        while True:
            points, offset = await self._do(
                partial(self._client.scroll, name, scroll_filter=wanted, limit=_BATCH, offset=offset, with_payload=True)
            )
            found += (point.payload or {} for point in points)
            if offset is None:
                return found

    async def _do(self, call: Callable[[], Awaitable[T]]) -> T:
        """Raises StoreDown for whatever Qdrant or the way there has to say."""
        try:
            return await call()
        except (ApiException, QdrantException, httpx.HTTPError, OSError, AssertionError, RecursionError, TypeError, ValueError) as error:
            status = getattr(error, "status_code", None)
            why, hint = (str(error).splitlines() or [type(error).__name__])[0][:200].rstrip("."), "Is Qdrant running there? See qdrant.url."
            if status:
                why, hint = f"it answered {status}", "Check qdrant.api_key." if status in (401, 403) else hint
            elif isinstance(getattr(error, "source", error), (AssertionError, RecursionError, TypeError, ValueError)):  # the client cannot read it
                why, hint = "its answer is none that Qdrant gives", "Is another server there? See qdrant.url."
            raise StoreDown(f"Qdrant at {self._settings.url} cannot be used: {why}.", hint=hint) from None


_META = str(uuid.uuid5(uuid.NAMESPACE_OID, "tidegate meta"))


def _uuid(name: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_OID, name))


def _term(word: str) -> int:
    """A word's place in a sparse vector: 32 bits, as Qdrant has them."""
    return int.from_bytes(hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=4).digest(), "big")


def _vectors(passage: NewPassage, vector: Vectors) -> dict[str, Any]:
    counted = Counter(_term(word) for word in passage.words)
    norm = _K1 * (1 - _B + _B * len(passage.words) / _AVERAGE_WORDS)
    sparse = models.SparseVector(indices=list(counted), values=[count * (_K1 + 1) / (count + norm) for count in counted.values()])
    return {DENSE: vector.tolist(), **({WORDS: sparse} if counted else {})}


def _pairs(tags: dict[str, str]) -> list[str]:
    """Tags as Qdrant compares them: a name may hold what its paths would take for a step."""
    return [f"{name}\x1f{value}" for name, value in tags.items()]


def _where(values: dict[str, Any], below: int | None = None) -> Any:
    must: list[Any] = [models.FieldCondition(key=key, match=models.MatchValue(value=value)) for key, value in values.items()]
    if below is not None:
        must.append(models.FieldCondition(key="generation", range=models.Range(lt=below)))
    return models.Filter(must=must)


def _fits(wanted: Filter) -> Any:
    """A filter as Qdrant takes it."""
    must: list[Any] = [models.FieldCondition(key="live", match=models.MatchValue(value=True))]
    must += [models.FieldCondition(key="tags", match=models.MatchValue(value=pair)) for pair in _pairs(clean_value(wanted.tags))]
    if wanted.since_unix_s is not None or wanted.until_unix_s is not None:
        must.append(models.FieldCondition(key="dated_unix_s", range=models.Range(gte=wanted.since_unix_s, lte=wanted.until_unix_s)))
    if wanted.min_confidence > 0:
        must.append(models.FieldCondition(key="confidence", range=models.Range(gte=wanted.min_confidence)))
    if not wanted.superseded:
        must.append(models.FieldCondition(key="superseded", match=models.MatchValue(value=False)))
    return models.Filter(must=must)


def _set(values: dict[str, Any], wanted: Any) -> Any:
    return models.SetPayloadOperation(set_payload=models.SetPayload(payload=values, filter=wanted))


def _upsert(points: list[Any]) -> Any:
    return models.UpsertOperation(upsert=models.PointsList(points=points))


def _newest(hits: Sequence[Any]) -> list[Any]:
    """Of a document that was met in two generations, the newer one."""
    newest: dict[str, int] = {}
    for hit in hits:
        source, generation = hit.payload["source"], hit.payload["generation"]
        newest[source] = max(newest.get(source, 0), generation)
    return [hit for hit in hits if hit.payload["generation"] == newest[hit.payload["source"]]]


def _passage(payload: dict[str, Any], score: float) -> Passage:
    boxes = [Box(int(page), *rest) for page, *rest in payload["boxes"]]
    return Passage(
        payload["id"], payload["source"], payload["title"], payload["text"], min(1.0, max(0.0, score)), payload["page"], payload["tag"], boxes
    )
