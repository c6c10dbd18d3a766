"""Memory, for tests and demos. Serves: KeyStore, FlightStore, VectorStore, DocumentStore, EvaluationStore, FileStore. Gone when the process is."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Collection, Sequence

import msgspec
import numpy as np

from tidegate.core.ask import Passage
from tidegate.core.document import Document, NewPassage, Replaced, StoredPassage, Unembedded, passage_ids
from tidegate.core.errors import NotFound, OtherEmbedder
from tidegate.core.flight import FlightRecord
from tidegate.core.plugins import nearest
from tidegate.core.ports import Evaluation, FlightJson, KeptText, KeyLimits, KeyRecord, Vectors
from tidegate.core.search import ANY, Filter, Found, IndexProgress, IndexState, Ranking
from tidegate.stores.bm25 import bm25
from tidegate.stores.clean import clean_text, clean_value
from tidegate.stores.prepare import DIMENSIONS, check_vectors, prepare


class _Stored(msgspec.Struct, frozen=True):
    document: Document
    passages: dict[str, NewPassage]
    vectors: Vectors
    file: bytes | None = None


class Memory:
    """All in dicts. Flights are kept as JSON, so that nobody shares an object with the store."""

    def __init__(self) -> None:
        self._keys: dict[str, KeyRecord] = {}
        self._flights: dict[str, bytes] = {}
        self._kept: dict[str, KeptText] = {}
        self._documents: dict[tuple[str, str], _Stored] = {}
        self._index_versions: dict[str, str] = {}
        self._fingerprints: dict[str, str] = {}
        self._evaluations: list[Evaluation] = []

    async def close(self) -> None:
        """Nothing to close."""

    # -- keys

    async def add_key(self, key: KeyRecord) -> None:
        self._keys.setdefault(key.id, msgspec.structs.replace(key))

    async def list_keys(self) -> list[KeyRecord]:
        return [msgspec.structs.replace(key) for key in sorted(self._keys.values(), key=lambda key: (key.created_unix_s, key.id))]

    async def limit_key(self, key_id: str, limits: KeyLimits) -> bool:
        key = self._keys.get(key_id)
        if key is None or key.revoked_unix_s is not None:
            return False
        changed = {name: value for name, value in msgspec.structs.asdict(limits).items() if value is not None}
        self._keys[key_id] = msgspec.structs.replace(key, **changed)
        return True

    async def revoke_key(self, key_id: str) -> bool:
        key = self._keys.get(key_id)
        if key is None or key.revoked_unix_s is not None:
            return False
        key.revoked_unix_s = _now_unix_s()
        return True

    # -- flights

    async def write_flights(self, flights: Sequence[FlightJson], kept: Sequence[KeptText]) -> None:
        for flight in flights:
            record = msgspec.json.decode(flight, type=FlightRecord)
            self._flights.setdefault(record.id, bytes(flight))
        for text in kept:
            if text.expires_unix_s > _now_unix_s():
                self._kept.setdefault(text.flight_id, msgspec.structs.replace(text))

    async def get_flight(self, flight_id: str) -> FlightRecord | None:
        found = self._flights.get(flight_id)
        return msgspec.json.decode(found, type=FlightRecord) if found else None

    async def list_flights(
        self,
        *,
        tenant: str | None = None,
        capability: str | None = None,
        end: str | None = None,
        before_id: str | None = None,
        limit: int = 50,
    ) -> list[FlightRecord]:
        found: list[FlightRecord] = []
        for flight_id in sorted(self._flights, reverse=True):
            flight = msgspec.json.decode(self._flights[flight_id], type=FlightRecord)
            if (
                len(found) < limit
                and (before_id is None or flight.id < before_id)
                and tenant in (None, flight.tenant)
                and capability in (None, flight.capability)
                and end in (None, flight.end)
            ):
                found.append(flight)
        return found

    async def get_kept(self, flight_id: str) -> KeptText | None:
        kept = self._kept.get(flight_id)
        return msgspec.structs.replace(kept) if kept and kept.expires_unix_s > _now_unix_s() else None

    async def forget_expired(self) -> int:
        gone = [flight_id for flight_id, kept in self._kept.items() if kept.expires_unix_s <= _now_unix_s()]
        for flight_id in gone:
            del self._kept[flight_id]
        return len(gone)

    # -- passages

    async def search(
        self, collection: str, vector: Vectors | None, k: int, wanted: Filter = ANY, *, words: Sequence[str] = (), exact: bool = False
    ) -> Found:
        alone, vector = vector is None, np.zeros(DIMENSIONS, np.float32) if vector is None else vector
        check_vectors(vector)
        collection, tags = clean_text(collection), clean_value(wanted.tags)
        found = {
            id: Passage(
                id, stored.document.source, stored.document.title, passage.text, min(1.0, max(0.0, score)), passage.page, of_passage, passage.boxes
            )
            for (name, _), stored in self._documents.items()
            if name == collection and self._fits(stored.document, wanted)
            for (id, passage), score in zip(stored.passages.items(), (stored.vectors @ vector.reshape(-1)).tolist(), strict=True)
            if (of_passage := stored.document.tags | passage.tags).items() >= tags.items()
        }
        best = [] if alone else sorted(found.values(), key=lambda passage: (-passage.score, passage.id))[:k]
        legs = [] if alone else [Ranking("vector", [passage.id for passage in best], [passage.score for passage in best])]
        if words:
            legs.append(self._by_words(collection, words, k, found))
        near = {passage.id for passage in best}
        only_words = [found[id] for leg in legs for id in leg.ids if id not in near]
        return Found([*best, *only_words], self._index_versions.get(collection, "0"), legs=legs, fingerprint=self._fingerprints.get(collection, ""))

    def _by_words(self, collection: str, words: Sequence[str], k: int, fitting: Collection[str]) -> Ranking:
        everywhere = {
            id: passage.words for (name, _), stored in self._documents.items() if name == collection for id, passage in stored.passages.items()
        }
        scored = {id: one for id, one in bm25(words, everywhere).items() if id in fitting}
        ids = sorted(scored, key=lambda id: (-scored[id].score, id))[:k]
        return Ranking("words", ids, [scored[id].score for id in ids], [scored[id].coverage for id in ids])

    async def explain(self, collection: str, vector: Vectors, k: int, wanted: Filter = ANY) -> list[str]:
        self._known(collection)
        found = await self.search(collection, vector, k, wanted)
        return [f"in memory: all passages are compared, {len(found.passages)} found"]

    async def build_indexes(
        self, collection: str, *, facets: Sequence[str] | None = None, graph: bool | None = None,
        progress: Callable[[IndexProgress], None] = lambda _: None,
    ) -> list[IndexState]:
        """Nothing to build."""
        self._known(collection)
        return []

    def _known(self, collection: str) -> None:
        if clean_text(collection) not in self._index_versions:
            raise NotFound(f"There is no collection {collection!r}.", hint=nearest(collection, self._index_versions))

    def _fits(self, document: Document, wanted: Filter) -> bool:
        dated = document.dated_unix_s or 0.0
        return (
            (wanted.since_unix_s is None or dated >= wanted.since_unix_s)
            and (wanted.until_unix_s is None or dated <= wanted.until_unix_s)
            and document.confidence >= wanted.min_confidence
            and (wanted.superseded or self._successor(document) is None)
        )

    def _successor(self, document: Document) -> str | None:
        naming = (
            other.document.source for (name, source), other in self._documents.items()
            if name == document.collection and source != document.source and document.source in other.document.supersedes
        )
        return min(naming, default=None)

    async def index_version(self, collection: str) -> str:
        return self._index_versions.get(clean_text(collection), "0")

    # -- documents

    async def document_sha(self, collection: str, source: str) -> str | None:
        stored = self._documents.get((clean_text(collection), clean_text(source)))
        return stored.document.sha256 if stored else None

    async def replace_document(
        self, document: Document, passages: Sequence[NewPassage], vectors: Vectors, *, file: bytes | None = None
    ) -> Replaced:
        document, passages, notes = prepare(document, passages, vectors)
        ids = passage_ids(document, passages)
        key = (document.collection, document.source)
        before = self._documents.get(key)
        has = self._fingerprints.get(document.collection) or document.fingerprint
        if document.fingerprint and has not in (document.fingerprint, f">{document.fingerprint}"):
            raise OtherEmbedder(document.collection, has, document.fingerprint)
        self._fingerprints[document.collection] = has
        version = before.document.version + 1 if before else 1
        now_unix_s = _now_unix_s()
        dated = now_unix_s if document.dated_unix_s is None else document.dated_unix_s
        document = msgspec.structs.replace(document, version=version, ingested_unix_s=now_unix_s, dated_unix_s=dated)
        own_vectors = np.array(vectors, np.float32).reshape(len(ids), DIMENSIONS)
        self._documents[key] = _Stored(document, dict(zip(ids, passages, strict=True)), own_vectors, file)
        self._change(document.collection)
        old = set(before.passages) if before else set()
        return Replaced(len(set(ids) - old), len(set(ids) & old), len(old - set(ids)), version, notes)

    async def fingerprint(self, collection: str) -> str:
        return self._fingerprints.get(clean_text(collection), "")

    async def unembedded(self, collection: str, fingerprint: str, limit: int) -> list[Unembedded]:
        collection = clean_text(collection)
        found = [
            Unembedded(
                collection, source, stored.document.title, stored.document.version,
                [(id, passage.heading, passage.text) for id, passage in stored.passages.items()],
            )
            for (name, source), stored in self._documents.items() if name == collection and stored.document.fingerprint != fingerprint
        ]  # fmt: skip
        now = f">{fingerprint}" if found else fingerprint
        if self._fingerprints.get(collection, now) != now:
            self._fingerprints[collection] = now
            self._change(collection)
        return found[:limit]

    async def reembed_document(self, document: Unembedded, fingerprint: str, vectors: Vectors) -> bool:
        check_vectors(vectors)
        key = (document.collection, document.source)
        stored = self._documents.get(key)
        if stored is None or stored.document.version != document.version:
            return False
        head = msgspec.structs.replace(stored.document, fingerprint=fingerprint)
        self._documents[key] = _Stored(head, stored.passages, np.array(vectors, np.float32))
        self._change(document.collection)
        return True

    async def delete_document(self, collection: str, source: str) -> bool:
        gone = self._documents.pop((clean_text(collection), clean_text(source)), None)
        if gone:
            self._change(gone.document.collection)
        return gone is not None

    async def list_documents(self, collection: str | None = None) -> list[Document]:
        wanted = clean_value(collection)
        return [
            msgspec.structs.replace(stored.document, superseded_by=self._successor(stored.document))
            for key, stored in sorted(self._documents.items())
            if wanted in (None, key[0])
        ]

    # -- files

    async def stored_passages(self, collection: str, ids: Sequence[str]) -> list[StoredPassage]:
        found = {
            id: StoredPassage(
                id, stored.document.source, stored.document.title, passage.text, passage.page, passage.heading, passage.boxes, _sha256(stored.file)
            )
            for (name, _), stored in self._documents.items()
            if name == clean_text(collection)
            for id, passage in stored.passages.items()
        }
        return [found[id] for id in ids if id in found]

    async def read_file(self, sha256: str) -> bytes | None:
        return next((stored.file for stored in self._documents.values() if _sha256(stored.file) == sha256), None)

    # -- evaluations

    async def add_evaluation(self, evaluation: Evaluation) -> None:
        self._evaluations.append(evaluation)

    async def list_evaluations(self, collection: str, limit: int = 50) -> list[Evaluation]:
        return [one for one in reversed(self._evaluations) if one.collection == collection][:limit]

    def _change(self, collection: str) -> None:
        changes = int(self._index_versions.get(collection, "0").partition("-")[0]) + 1
        self._index_versions[collection] = f"{changes}-{secrets.token_hex(4)}"


def _sha256(file: bytes | None) -> str | None:
    return None if file is None else hashlib.sha256(file).hexdigest()


def _now_unix_s() -> float:
    return time.time_ns() / 1e9
