"""Where rooms meet without knowing each other. Each port is used by two rooms or served by two implementations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tidegate.core.ask import Ask, EngineCall, Said
from tidegate.core.ask import EngineAnswer as EngineAnswer
from tidegate.core.chunk import Chunk, Usage
from tidegate.core.document import Document, NewPassage, Replaced, StoredPassage, Unembedded
from tidegate.core.flight import Flight, FlightRecord
from tidegate.core.search import ANY, Filter, Found, IndexProgress, IndexState

Vectors = npt.NDArray[np.float32]


class Stage(Protocol):
    """One step of a capability. Reads and extends the Ask; raises a TidegateError to stop the walk. Must be cancel-safe."""

    name: str

    async def __call__(self, ask: Ask) -> None: ...


class EngineStream(Protocol):
    """A running generation."""

    @property
    def usage(self) -> Usage:
        """Tokens so far: as the engine said, else an estimate. Good at any time, also after an abort or an error."""
        ...

    async def relay(self, take: Callable[[list[Chunk]], Awaitable[None] | None]) -> None:
        """Give each batch to `take`, in order, and return after a clean end.

        A batch holds all chunks that one read of the socket completed, at least one. It is taken in the turn of the event loop that read
        it, so that no task has to wake up for a token: `take` must be quick, and returns None, or what to await before it can take more
        (the socket is paused meanwhile). Raises EngineCut, EngineEmpty, EngineStalled, EngineError: a cut is never a success; and what
        `take` raises. Cancelling aborts the engine's connection.
        """
        ...

    def abort(self) -> None:
        """Close the engine's connection at once. May be called at any time, also twice, also after the end."""
        ...


class Engine(Protocol):
    """Something that runs a model. Implementations put laps on the flight: `engine.connect`, `engine.send`, `engine.first_byte`."""

    name: str
    models: tuple[str, ...]

    async def start(self, call: EngineCall, flight: Flight) -> EngineStream:
        """Send, wait for the engine's answer head. Raises EngineDown, EngineRefused, ContextTooLong, EngineStalled."""
        ...

    async def whole(self, call: EngineCall, flight: Flight) -> EngineAnswer:
        """The whole answer at once. Cancelling the caller's task aborts the engine's connection. Raises as `start` and its stream do."""
        ...

    async def continue_from(self, call: EngineCall, said: Said, flight: Flight, *, forbid: str = "") -> EngineStream:
        """Go on with the answer to `call` from exactly `said`: the stream gives only what comes after it, as chunks with `raw=None` where the
        engine's own events would not fit behind those of the first run.

        `forbid`: the next token is not one that `forbid` begins with (one position only, the rest is free). The call's `max_tokens` counts
        from the beginning of the answer; the stream's usage is that of its own run: the prompt with `said` in it, and the tokens after it. Raises
        CannotContinue where this engine has no way to do it for this call, and as `start` does.
        """
        ...

    async def figures(self) -> dict[str, Any]:
        """Live figures for /health: reachable, slots, context length, whatever the engine tells. Never raises: `{"up": False, "why": ...}`."""
        ...

    async def close(self) -> None: ...


#: Who counted: the engine's own tokenizer, the vocabulary of its GGUF file, or nobody: it is an estimate.
How = Literal["engine", "vocabulary", "estimate"]


class Counted(msgspec.Struct, frozen=True, gc=False):
    """A number of tokens, and who counted them."""

    tokens: int
    how: How


class TokenCounter(Protocol):
    """Counts tokens as the engine that is asked will. Never raises: where nobody can count, it estimates and says so."""

    async def texts(self, engine: Engine, texts: Sequence[str]) -> tuple[list[int], How]:
        """The tokens of each text, control tokens in it taken as text."""
        ...

    async def prompt(self, engine: Engine, call: EngineCall) -> Counted:
        """The tokens of a call's whole prompt, as the engine's own template makes it."""
        ...

    async def context(self, engine: Engine, model: str) -> int:
        """Tokens that prompt and answer may have together; 0 where the engine does not say. `model`: the engine's own name for it."""
        ...


class Embedder(Protocol):
    """Texts to unit vectors. Rows are L2-normalised float32, shape (len(texts), dimensions)."""

    model: str
    dimensions: int
    #: Of model, weights and how texts are read: vectors may be compared only where it is equal. `embed` gives vectors of no other.
    fingerprint: str

    async def embed(self, texts: Sequence[str], kind: Literal["query", "passage"]) -> Vectors:
        """Raises StoreDown where the embedder's process cannot be reached."""
        ...

    async def count_tokens(self, texts: Sequence[str]) -> list[int]: ...


class Reranker(Protocol):
    """Judges passages beside the question, more slowly and better than the search that found them."""

    name: str

    async def scores(self, question: str, found: Found, ask: Ask | None = None) -> list[float]:
        """One for each of `found.passages`, in their order, higher is better; comparable within one question only. `ask`: in whose name engines are
        asked, where it is a request's. Raises StoreDown where what judges cannot be reached. Cancelling it leaves nothing that runs on for long."""
        ...

    async def close(self) -> None: ...


class VectorStore(Protocol):
    """Passages by nearness, filtered, in one transaction."""

    async def search(
        self, collection: str, vector: Vectors | None, k: int, wanted: Filter = ANY, *, words: Sequence[str] = (), exact: bool = False
    ) -> Found:
        """The k nearest passages that fit, nearest first (none without a vector); with `words` (as `core.words` makes them) also the k best by BM25,
        of the same state of the collection. `exact`: all that fit are compared with the vector, however many. Raises StoreDown."""
        ...

    async def explain(self, collection: str, vector: Vectors, k: int, wanted: Filter = ANY) -> list[str]:
        """Lines for people: the way that such a search takes, and what it did. Raises StoreDown, NotFound."""
        ...

    async def index_version(self, collection: str) -> str:
        """Changes whenever the collection's content does. Raises StoreDown."""
        ...


class DocumentStore(Protocol):
    """Documents and their passages, for ingest. All raise StoreDown."""

    async def document_sha(self, collection: str, source: str) -> str | None:
        """The digest under which the document was stored last; None where it is not there."""
        ...

    async def replace_document(
        self, document: Document, passages: Sequence[NewPassage], vectors: Vectors, *, file: bytes | None = None
    ) -> Replaced:
        """Make the store hold exactly these passages for the document, in one transaction: searches see the old ones until it is done.

        `vectors` has shape (len(passages), dimensions), rows normalised. Passages whose text did not change keep their id. `file`: the
        document's original bytes, kept with it; None: none are kept, also none of before. Raises SettingsError where the dimensions are not
        the store's, OtherEmbedder where the collection's vectors are not of the document's fingerprint.
        """
        ...

    async def fingerprint(self, collection: str) -> str:
        """Of the embedder of all vectors of the collection; "" where it has none, and `>` before it while they change to it."""
        ...

    async def unembedded(self, collection: str, fingerprint: str, limit: int) -> list[Unembedded]:
        """Put the collection on its way to this fingerprint, which stops searches, and give at most `limit` documents whose vectors are of another.
        [] ends the way: all vectors are of it, and may be searched. Raises SettingsError where the store has no such way."""
        ...

    async def reembed_document(self, document: Unembedded, fingerprint: str, vectors: Vectors) -> bool:
        """New vectors for its passages, in one transaction; False where the document has changed since it was given."""
        ...

    async def delete_document(self, collection: str, source: str) -> bool:
        """True where the document was there; its passages go with it."""
        ...

    async def build_indexes(
        self, collection: str, *, facets: Sequence[str] | None = None, graph: bool | None = None,
        progress: Callable[[IndexProgress], None] = lambda _: None,
    ) -> list[IndexState]:
        """Give a collection the indexes that its size needs, while searches and writers go on. Returns those that it has then; [] where the store
        has none of its own.

        `facets`: tags that have an index of their own, the first one first (None: as they were). `graph`: a graph of neighbours (None: where
        the collection is large). Raises NotFound for a collection that is not there, BadRequest for a name that cannot be a facet or that no
        passage carries.
        """
        ...

    async def list_documents(self, collection: str | None = None) -> list[Document]:
        """By collection and source."""
        ...


class FileStore(Protocol):
    """Stored passages, and the files that they were read from, for people who look. All raise StoreDown."""

    async def stored_passages(self, collection: str, ids: Sequence[str]) -> list[StoredPassage]:
        """Those that are there, in the order of `ids`."""
        ...

    async def read_file(self, sha256: str) -> bytes | None:
        """The bytes with this digest; None where no document has them (any more)."""
        ...


class PassageStore(VectorStore, DocumentStore, Protocol):
    """Documents and the passages that are found in them: both or neither, for one is told by the other."""

    async def close(self) -> None: ...

    async def figures(self) -> dict[str, Any]:
        """Live figures for /health: `up`, or `why` not. Never raises."""
        ...


class KeyRecord(msgspec.Struct):
    """An API key as it is stored: never the key itself, only its SHA-256."""

    id: str
    sha256: str
    tenant: str
    role: Literal["data", "admin"]
    name: str
    created_unix_s: float
    revoked_unix_s: float | None = None
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent: int = 0
    money_per_day: float = 0.0


class KeyLimits(msgspec.Struct, frozen=True):
    """New limits of a key; None: as it is, 0: no limit of its own."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    money_per_day: float | None = None


class KeyStore(Protocol):
    """API keys. All raise StoreDown where the database cannot be reached."""

    async def add_key(self, key: KeyRecord) -> None: ...

    async def list_keys(self) -> list[KeyRecord]: ...

    async def limit_key(self, key_id: str, limits: KeyLimits) -> bool:
        """Change what the key may use. True where the key exists and is not revoked."""
        ...

    async def revoke_key(self, key_id: str) -> bool:
        """True where the key existed and was not revoked before."""
        ...


class KeptText(msgspec.Struct):
    """Prompt and answer of one flight, encrypted before it leaves the gateway's memory (policy `keep` only)."""

    flight_id: str
    tenant: str
    expires_unix_s: float
    sealed: bytes


#: The JSON of a FlightRecord.
FlightJson = bytes | msgspec.Raw


class FlightStore(Protocol):
    """Finished flights, durable and queryable. All raise StoreDown."""

    async def write_flights(self, flights: Sequence[FlightJson], kept: Sequence[KeptText]) -> None:
        """Each flight is the JSON of a FlightRecord, as the spool holds it. All or nothing; a flight twice is the same as once."""
        ...

    async def get_flight(self, flight_id: str) -> FlightRecord | None: ...

    async def list_flights(
        self, *, tenant: str | None = None, capability: str | None = None, end: str | None = None, before_id: str | None = None, limit: int = 50
    ) -> list[FlightRecord]:
        """Newest first; `before_id` pages on."""
        ...

    async def get_kept(self, flight_id: str) -> KeptText | None: ...

    async def forget_expired(self) -> int:
        """Deletes kept text past its time; returns how many."""
        ...


class Evaluation(msgspec.Struct, frozen=True):
    """What a set of questions said of a collection. `report`: JSON, as whoever judged it writes it."""

    at_unix_s: float
    collection: str
    index_version: str
    set_name: str
    set_sha256: str
    report: bytes


class EvaluationStore(Protocol):
    """Evaluations of collections. All raise StoreDown."""

    async def add_evaluation(self, evaluation: Evaluation) -> None: ...

    async def list_evaluations(self, collection: str, limit: int = 50) -> list[Evaluation]:
        """Newest first."""
        ...


class RateAsk(msgspec.Struct, frozen=True, gc=False):
    """Units of one rate to be leased. `limit` units per `period_s`, 0: no such rate; `need`: fewer are of no use; `waited`: for so many somebody
    waits; `want`: so many are welcome, as long as others find as many; `give`: units that come back, below 0 units that were spent beyond a
    lease."""

    limit: int
    period_s: float
    need: int
    waited: int
    want: int
    give: int


class LeaseAsk(msgspec.Struct, frozen=True, gc=False):
    """What one machine asks for one subject. `rates`: requests, tokens, money; `most` runs at a time (0: no limit), of which this machine has
    `used` and wants to hold `slots`."""

    subject: str
    rates: list[RateAsk]
    most: int
    used: int
    slots: int


class RateAnswer(msgspec.Struct, frozen=True, gc=False):
    """`granted` units are leased; `wait_s` until `need` of them are there where they are not; `left` are in the common bucket."""

    granted: int
    wait_s: float
    left: int


class LeaseAnswer(msgspec.Struct, frozen=True, gc=False):
    """What a machine has now."""

    rates: list[RateAnswer]
    slots: int


class LeaseStore(Protocol):
    """Where machines lease what they share."""

    async def renew(self, machine: str, slots_s: float, asks: Sequence[LeaseAsk]) -> list[LeaseAnswer]:
        """An answer to each, in order; without asks, whether it is there. Slots lapse after `slots_s` unless they are renewed. Raises StoreDown:
        then each ask may have been answered or not."""
        ...

    async def close(self) -> None: ...


class FlightSink(Protocol):
    """Receives each finished flight once, before its last bytes leave. Must neither raise nor block: a store that is down stops no answer."""

    def finished(self, record: FlightRecord, kept: KeptText | None = None) -> None: ...


class LiveFlights(Protocol):
    """The newest finished flights, in memory: for the live page, and for a flight that no database holds yet. Their numbers only grow."""

    @property
    def seq(self) -> int:
        """The number of the newest flight; 0 before the first."""
        ...

    def recent(self, tenant: str | None, limit: int, after_seq: int = 0) -> list[FlightRecord]:
        """Newest first, at most `limit`, only those numbered above `after_seq`; of one tenant, or of all where `tenant` is None."""
        ...

    def find(self, flight_id: str) -> FlightRecord | None: ...

    async def wait_newer(self, seq: int) -> int:
        """Returns the newest number as soon as it is above `seq`. The caller bounds the wait; cancelling it is safe."""
        ...
