"""PostgreSQL with pgvector. Serves: KeyStore, FlightStore, VectorStore, DocumentStore, EvaluationStore, FileStore.

The pool opens at first use, so a database that is down stops nothing at start, and it heals by itself. While the database is down
one call a second looks for it; all others hear StoreDown at once, so that a request does not wait for what cannot come.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
import psycopg
from pgvector import HalfVector
from pgvector.psycopg.halfvec import HalfVectorBinaryDumper
from psycopg.rows import TupleRow, class_row
from psycopg_pool import AsyncConnectionPool, PoolTimeout, TooManyRequests

from tidegate.core.document import Document, NewPassage, Replaced, StoredPassage, Unembedded
from tidegate.core.errors import StoreDown
from tidegate.core.flight import FlightRecord
from tidegate.core.ports import Evaluation, FlightJson, KeptText, KeyLimits, KeyRecord, Vectors
from tidegate.core.search import ANY, Filter, Found, IndexProgress, IndexState
from tidegate.stores.clean import clean_struct, clean_text, clean_value
from tidegate.stores.down import check_dsn, first_line, translate, where
from tidegate.stores.files import Files
from tidegate.stores.passages import Link, Passages, fetch
from tidegate.stores.queries import queries
from tidegate.stores.settings import StoreSettings

T = TypeVar("T")

#: While the database is down, one call in this time looks whether it is back.
LOOK_AGAIN_NS = 1_000_000_000

#: Two writers may hold what the other wants next: the one that the database ends tries again, so often.
DEADLOCKS = 10

#: /health is asked by watchdogs that wait a second themselves.
HEALTH_WITHIN_S = 0.5

log = logging.getLogger("tidegate.stores")
# The pool says the same thing for every try of every connection; the change from up to down and back is ours to say, once.
logging.getLogger("psycopg.pool").setLevel(logging.ERROR)


class Postgres:
    """One pool per event loop and process. Not to be shared between processes; make it before or after a fork, use it after.

    Raises SettingsError for a DSN that cannot be read."""

    def __init__(self, settings: StoreSettings) -> None:
        check_dsn(settings.dsn)
        self.settings = settings
        self.place = where(settings.dsn)
        self._passages = Passages(self._run, self._alone)
        self._files = Files(self._run)
        self._pool: AsyncConnectionPool[Link] | None = None
        self._down: StoreDown | None = None
        self._look_again_ns = 0
        self._why = ""
        #: Queries whose caller has gone, on their way to an end.
        self._abandoned: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Close the pool; the next call opens a new one."""
        for task in self._abandoned:
            task.cancel()  # for the second time: psycopg waits no longer and closes the connection
        await asyncio.gather(*self._abandoned, return_exceptions=True)
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()

    async def figures(self) -> dict[str, Any]:
        """Live figures for /health: up or why not, round trip, connections. Never raises."""
        began_ns = time.perf_counter_ns()
        try:
            async with asyncio.timeout(HEALTH_WITHIN_S):
                await self._run(lambda link: link.execute("select 1"))
        except StoreDown as down:
            return {"up": False, "why": down.message, "hint": down.hint}
        except TimeoutError:
            why = self._why or f"no answer within {HEALTH_WITHIN_S} s"
            return {"up": False, "why": f"The database {self.place} cannot be reached: {why}.", "hint": "Is PostgreSQL running there?"}
        pool = self._pool
        stats = pool.get_stats() if pool else {}
        return {
            "up": True,
            "round_trip_ms": (time.perf_counter_ns() - began_ns) / 1e6,
            "connections": stats.get("pool_size", 0),
            "idle": stats.get("pool_available", 0),
            "waiting": stats.get("requests_waiting", 0),
        }

    # -- keys

    async def add_key(self, key: KeyRecord) -> None:
        await self._execute("add_key", msgspec.structs.asdict(clean_struct(key)))

    async def list_keys(self) -> list[KeyRecord]:
        return await self._structs("list_keys", KeyRecord, {})

    async def limit_key(self, key_id: str, limits: KeyLimits) -> bool:
        return bool(await self._rows("limit_key", {"id": clean_text(key_id), **msgspec.structs.asdict(limits)}))

    async def revoke_key(self, key_id: str) -> bool:
        return bool(await self._rows("revoke_key", {"id": clean_text(key_id)}))

    # -- flights

    async def write_flights(self, flights: Sequence[FlightJson], kept: Sequence[KeptText]) -> None:
        records = b"[" + b",".join(flights) + b"]"
        texts = {
            "flight_ids": [text.flight_id for text in kept],
            "tenants": [clean_text(text.tenant) for text in kept],
            "expires": [text.expires_unix_s for text in kept],
            "sealed": [text.sealed for text in kept],
        }

        async def write(link: Link) -> None:
            async with link.transaction():
                await link.execute(queries()["write_flights"].sql, {"records": records.decode()})
                await link.execute(queries()["write_kept"].sql, texts)

        if kept:
            await self._run(write)
        else:  # one statement is all or nothing by itself: two round trips less
            await self._execute("write_flights", {"records": records.decode()})

    async def get_flight(self, flight_id: str) -> FlightRecord | None:
        rows = await self._rows("get_flight", {"id": clean_text(flight_id)})
        return msgspec.json.decode(rows[0][0], type=FlightRecord) if rows else None

    async def list_flights(
        self,
        *,
        tenant: str | None = None,
        capability: str | None = None,
        end: str | None = None,
        before_id: str | None = None,
        limit: int = 50,
    ) -> list[FlightRecord]:
        wanted = {"tenant": tenant, "capability": capability, "end": end, "before_id": before_id, "limit": limit}
        rows = await self._rows("list_flights", clean_value(wanted))
        return [msgspec.json.decode(row[0], type=FlightRecord) for row in rows]

    async def get_kept(self, flight_id: str) -> KeptText | None:
        found = await self._structs("get_kept", KeptText, {"id": clean_text(flight_id)})
        return found[0] if found else None

    async def forget_expired(self) -> int:
        return await self._execute("forget_expired", {})

    # -- passages and documents

    async def search(
        self, collection: str, vector: Vectors | None, k: int, wanted: Filter = ANY, *, words: Sequence[str] = (), exact: bool = False
    ) -> Found:
        return await self._passages.search(collection, vector, k, wanted, words=words, exact=exact)

    async def explain(self, collection: str, vector: Vectors, k: int, wanted: Filter = ANY) -> list[str]:
        return await self._passages.explain(collection, vector, k, wanted)

    async def build_indexes(
        self, collection: str, *, facets: Sequence[str] | None = None, graph: bool | None = None,
        progress: Callable[[IndexProgress], None] = lambda _: None,
    ) -> list[IndexState]:
        return await self._passages.build_indexes(collection, facets=facets, graph=graph, progress=progress)

    async def index_version(self, collection: str) -> str:
        return await self._passages.index_version(collection)

    async def document_sha(self, collection: str, source: str) -> str | None:
        return await self._passages.document_sha(collection, source)

    async def replace_document(
        self, document: Document, passages: Sequence[NewPassage], vectors: Vectors, *, file: bytes | None = None
    ) -> Replaced:
        return await self._passages.replace_document(document, passages, vectors, file=file)

    async def fingerprint(self, collection: str) -> str:
        return await self._passages.fingerprint(collection)

    async def unembedded(self, collection: str, fingerprint: str, limit: int) -> list[Unembedded]:
        return await self._passages.unembedded(collection, fingerprint, limit)

    async def reembed_document(self, document: Unembedded, fingerprint: str, vectors: Vectors) -> bool:
        return await self._passages.reembed_document(document, fingerprint, vectors)

    async def delete_document(self, collection: str, source: str) -> bool:
        return await self._passages.delete_document(collection, source)

    async def list_documents(self, collection: str | None = None) -> list[Document]:
        return await self._passages.list_documents(collection)

    async def stored_passages(self, collection: str, ids: Sequence[str]) -> list[StoredPassage]:
        return await self._files.stored_passages(collection, ids)

    async def read_file(self, sha256: str) -> bytes | None:
        return await self._files.read_file(sha256)

    # -- evaluations

    async def add_evaluation(self, evaluation: Evaluation) -> None:
        await self._execute("add_evaluation", clean_value({**msgspec.structs.asdict(evaluation), "report": evaluation.report.decode()}))

    async def list_evaluations(self, collection: str, limit: int = 50) -> list[Evaluation]:
        rows = await self._rows("list_evaluations", {"collection": clean_text(collection), "limit": limit})
        return [Evaluation(row[0], row[1], row[2], row[3], row[4], row[5].encode()) for row in rows]

    # -- the way to the database

    async def _execute(self, name: str, parameters: dict[str, Any]) -> int:
        """Run a named query; returns the number of rows it touched."""
        return (await self._run(lambda link: link.execute(queries()[name].sql, parameters))).rowcount

    async def _rows(self, name: str, parameters: dict[str, Any]) -> list[TupleRow]:
        return await self._run(lambda link: fetch(link, name, parameters))

    async def _structs(self, name: str, kind: type[T], parameters: dict[str, Any]) -> list[T]:
        async def fetch(link: Link) -> list[T]:
            async with link.cursor(row_factory=class_row(kind)) as cursor:
                await cursor.execute(queries()[name].sql, parameters)
                return await cursor.fetchall()

        return await self._run(fetch)

    async def _run(self, work: Callable[[Link], Awaitable[T]], tries: int = 0) -> T:
        """Do the work on a connection. Raises StoreDown. `tries`: in which it lost a deadlock.

        Everything here may be done twice, so a connection that turns out dead (the database was restarted) is worth one more try.
        """
        self._fail_fast()
        try:
            try:
                done = await self._once(work)
            except psycopg.OperationalError as error:
                if self._pool is None or isinstance(error, (PoolTimeout, TooManyRequests, psycopg.errors.QueryCanceled)):
                    raise
                if isinstance(error, psycopg.errors.DeadlockDetected) and tries < DEADLOCKS:
                    return await self._run(work, tries + 1)
                async with asyncio.timeout(self.settings.connect_timeout_s):
                    await self._pool.check()
                done = await self._once(work)
        except (PoolTimeout, TooManyRequests) as error:
            raise self._unreachable() from error
        except TimeoutError as error:
            raise self._note_down(
                StoreDown(f"The database {self.place} does not answer.", hint="Look at the database's load, or whether its machine hangs.")
            ) from error
        except psycopg.Error as error:
            found = translate(error, self.settings.dsn)
            if isinstance(found, StoreDown) and isinstance(error, psycopg.OperationalError) and error.sqlstate is None:
                found = self._note_down(found)  # it never came to a statement: the connection itself failed
            raise found from error
        self._note_up()
        return done

    async def _once(self, work: Callable[[Link], Awaitable[T]]) -> T:
        """A cancelled query is asked to end, which psycopg waits for, with a database that hangs up to ten seconds: that is not the time of a
        caller whose own is over, so the query is left to itself.
        """
        task = asyncio.get_running_loop().create_task(self._on_a_connection(work))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                task.cancel()
                self._abandoned.add(task)
                task.add_done_callback(self._ended)
            raise

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()  # nobody is left to hear it

    async def _on_a_connection(self, work: Callable[[Link], Awaitable[T]]) -> T:
        async with self._connection() as link, asyncio.timeout(self.settings.statement_timeout_s + 2):
            return await work(link)

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[Link]:
        if self._pool is None:
            self._pool = self._make_pool()
            await self._pool.open()
        async with self._pool.connection() as link:
            yield link

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[Link]:
        """A connection of its own, for work that takes minutes: it takes none from those who search."""
        try:
            async with await psycopg.AsyncConnection.connect(
                self.settings.dsn, autocommit=True, connect_timeout=max(2, int(self.settings.connect_timeout_s)),
                application_name="tidegate indexes",
            ) as link:  # fmt: skip
                yield link
        except psycopg.Error as error:
            raise translate(error, self.settings.dsn) from error

    def _make_pool(self) -> AsyncConnectionPool[Link]:
        settings = self.settings
        return AsyncConnectionPool(
            settings.dsn,
            connection_class=_Telling,
            kwargs={
                "autocommit": True,
                "tell": self._note_why,
                "connect_timeout": max(2, int(settings.connect_timeout_s)),
                "application_name": "tidegate",
                # A machine that vanished is noticed within seconds, not within TCP's two hours.
                "keepalives_idle": 10,
                "keepalives_interval": 3,
                "keepalives_count": 3,
                "tcp_user_timeout": 10_000,
            },
            configure=self._configure,
            min_size=min(settings.pool_min, settings.pool_max),
            max_size=settings.pool_max,
            timeout=settings.connect_timeout_s,
            # The pool's own patience doubles its pauses without end; ours is short, because the next call tries again anyway.
            reconnect_timeout=1.0,
            name="tidegate",
            open=False,
        )

    async def _configure(self, link: Link) -> None:
        """New connections: bounded statements; vectors in binary, with a type the server infers, so its oid need not be looked up."""
        link.adapters.register_dumper(HalfVector, HalfVectorBinaryDumper)
        timeout_ms = str(int(self.settings.statement_timeout_s * 1000))
        await link.execute(queries()["set_session"].sql, {"timeout_ms": timeout_ms})

    def _fail_fast(self) -> None:
        if self._down is None:
            return
        now_ns = time.perf_counter_ns()
        if now_ns < self._look_again_ns:
            raise StoreDown(self._down.message, hint=self._down.hint)
        self._look_again_ns = now_ns + LOOK_AGAIN_NS

    def _unreachable(self) -> StoreDown:
        stats = self._pool.get_stats() if self._pool else {}
        if stats.get("pool_size", 0) > 0 and not self._why:
            return StoreDown(
                f"All {self.settings.pool_max} connections to the database {self.place} are busy.",
                hint="Raise store.pool_max, or look at what takes the database so long.",
                retry_after_s=1,
            )
        return self._note_down(
            StoreDown(
                f"The database {self.place} cannot be reached: {self._why or 'no connection in time'}.",
                hint="Is PostgreSQL running there, and is store.dsn right?",
                retry_after_s=1,
            )
        )

    def _note_why(self, error: psycopg.Error | None) -> None:
        self._why = first_line(error) if error else ""

    def _note_down(self, down: StoreDown) -> StoreDown:
        if self._down is None:
            log.warning("%s", down.message)
        self._down = down
        self._look_again_ns = time.perf_counter_ns() + LOOK_AGAIN_NS
        return down

    def _note_up(self) -> None:
        if self._down is not None:
            log.info("The database %s is back.", self.place)
            self._down = None


class _Telling(psycopg.AsyncConnection[TupleRow]):
    """A connection that tells why it could not be made: the pool only says that time ran out."""

    @classmethod
    async def connect(cls, conninfo: str = "", *, tell: Callable[[psycopg.Error | None], None], **kwargs: Any) -> _Telling:  # type: ignore[override]
        try:
            link = await super().connect(conninfo, **kwargs)
        except psycopg.Error as error:
            tell(error)
            raise
        tell(None)
        return link
