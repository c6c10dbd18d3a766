"""How fast and how completely passages are found: filtered and not, alone and by 16 clients, in PostgreSQL as the product uses it.

    .venv/bin/python benchmarks/search.py --data ../shared/data [--rows 200000] [--base FILE] [--keep FOLDER] [--only PART ...]

`--keep`: the database and what is computed of the rows stay in that folder, and the next run goes on with them. `--only`: these parts, into the
record beside what is there: `load` alone, `tidegate`, `crowd`, `facet` (products as a second one), `faiss`, `qdrant`.

The vectors are real: short texts of the folder `--data` in two languages, embedded by the model that is shipped (kept in `--base`, a NumPy file,
since that takes minutes), and made more by moving each a part of the way between two of its neighbours, so that they lie as real ones do. Each row
belongs to one of 50 departments (a facet, with an index of its own), to one of 400 products (no facet; the share of the n-th falls as 1/n), to a day
of a thousand, and has a confidence. The truth is computed from the vectors as they were loaded, before anything is measured: done in between, it
would put everything else out of the processor's caches.

Beside it, on the same rows, where they are installed: ids from SQL and then a search in a vector library that filters on ids (faiss-cpu, HNSW), and
Qdrant's local mode.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import re
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import numpy.typing as npt
import psycopg
import uvloop
from common import RESULTS, ROOT, cpu_s, record, used_by_others
from pgvector import HalfVector
from pgvector.psycopg import register_vector

from tidegate.core.search import Filter
from tidegate.local.folder import DataFolder
from tidegate.local.postgres import Postgres as Server
from tidegate.local.settings import LocalSettings
from tidegate.retrieval.embedder import LocalEmbedder
from tidegate.stores.migrate import migrate
from tidegate.stores.settings import StoreSettings
from tidegate.stores.systems.postgres import Postgres

Vectors = npt.NDArray[np.float32]
COLLECTION = "bench"
DAY_S = 86_400
FIRST_DAY = 19_700
DEPARTMENTS, PRODUCTS, DAYS = 50, 400, 1000
K = 5
QUERIES = 200
FILTERED, NO_FACET = "time + department + confidence", "time + product + confidence (no facet)"
A_FACET = "time + product + confidence (a second facet)"


def texts(data: Path) -> list[str]:
    """Sentences and lines of 15 to 400 characters, each once."""
    found: list[str] = []
    for language in ("en", "zh"):
        for article in json.loads((data / "retrieval" / f"xquad.{language}.json").read_text("utf-8"))["data"]:
            for paragraph in article["paragraphs"]:
                found += re.split(r"(?<=[.。!?！？])\s*", paragraph["context"])
                found += [one["question"] for one in paragraph["qas"]]
    for file in sorted([*data.glob("retrieval/tau2_banking/**/*"), *data.glob("retrieval/laws_zh/**/*"), *data.glob("service/**/*.csv")]):
        if file.is_file():
            found += [re.sub(r'[\t,"{}\[\]]+', " ", line) for line in file.read_text("utf-8", errors="ignore").splitlines()]
    return list(dict.fromkeys(text for text in (one.strip() for one in found) if 15 <= len(text) <= 400))


def base_vectors(data: Path, cache: Path | None) -> Vectors:
    if cache and cache.exists():
        return np.asarray(np.load(cache), np.float32)
    words = texts(data)
    print(f"embedding {len(words):,} texts ...", flush=True)
    embedder = LocalEmbedder(Path.home() / ".cache" / "tidegate" / "bench", batch_tokens=2048)
    made = asyncio.run(_embed(embedder, words))
    if cache:
        np.save(cache, made)
    return made


async def _embed(embedder: LocalEmbedder, words: list[str]) -> Vectors:
    return np.concatenate([await embedder.embed(words[start : start + 512], "passage") for start in range(0, len(words), 512)])


def more(base: Vectors, count: int, rng: np.random.Generator) -> Vectors:
    """The base, and beyond it each row moved part of the way from one of its neighbours to another; in half precision, as they are stored."""
    made = [base[:count].astype(np.float16)]
    missing = count - len(base)
    while missing > 0:
        size = min(missing, 20_000)
        chosen = rng.integers(0, len(base), size)
        sample = base[rng.integers(0, len(base), 4000)]
        nearest = np.argpartition(base[chosen] @ sample.T, -8, axis=1)[:, -8:]
        one, other = (sample[nearest[np.arange(size), rng.integers(0, 8, size)]] for _ in range(2))
        moved = base[chosen] + rng.uniform(0.2, 0.6, (size, 1)).astype(np.float32) * (one - other)
        moved += rng.standard_normal(moved.shape).astype(np.float32) * 0.004
        made.append((moved / np.linalg.norm(moved, axis=1, keepdims=True)).astype(np.float16))
        missing -= size
    return np.concatenate(made)


class Rows:
    """What is stored, as arrays. `kept`: a folder where what takes long to compute lies between runs."""

    def __init__(self, base: Vectors, count: int, kept: Path, rounds: int) -> None:
        self.rounds = rounds
        self.kept, file = kept, kept / "vectors.npy"
        if not file.exists():
            np.save(file, more(base, count, np.random.default_rng(7)))
        rng = np.random.default_rng(8)
        self.vectors = np.load(file, mmap_mode="r")
        shares = 1 / np.arange(1, PRODUCTS + 1)
        self.department = rng.integers(0, DEPARTMENTS, count)
        self.product = rng.choice(PRODUCTS, count, p=shares / shares.sum())
        self.day = rng.integers(0, DAYS, count)
        self.confidence = rng.random(count).astype(np.float32)
        own = rng.integers(0, count, QUERIES)
        noisy = self.vectors[own].astype(np.float32)
        noisy += 0.3 * (base[rng.integers(0, len(base), QUERIES)] - base[rng.integers(0, len(base), QUERIES)])
        self.queries = (noisy / np.linalg.norm(noisy, axis=1, keepdims=True)).astype(np.float16).astype(np.float32)  # as they are sent

    def fitting(self, wanted: Filter) -> npt.NDArray[np.bool_]:
        """Which rows a filter lets pass."""
        mask = self.confidence >= np.float32(wanted.min_confidence)
        if "department" in wanted.tags:
            mask &= self.department == int(wanted.tags["department"])
        if "product" in wanted.tags:
            mask &= self.product == int(wanted.tags["product"])
        if wanted.since_unix_s is not None:
            mask &= self.day >= wanted.since_unix_s / DAY_S - FIRST_DAY
        return mask

    def truths(self, cases: Sequence[Case]) -> dict[str, list[set[int]]]:
        """By case and query: the rows that fit and are nearest, -1 where fewer fit."""
        file = self.kept / "truths.npz"
        if not file.exists():
            best = {case.name: (np.full((QUERIES, K), -np.inf, np.float32), np.full((QUERIES, K), -1)) for case in cases}
            fitting = {case.name: [self.fitting(one) for one in case.filters] for case in cases}
            for start in range(0, len(self.vectors), 50_000):
                part = self.vectors[start : start + 50_000].astype(np.float32)
                scores = self.queries @ part.T
                for name, (top, ids) in best.items():
                    for at in range(QUERIES):
                        here = np.flatnonzero(fitting[name][at][start : start + len(part)])
                        all_scores = np.concatenate([top[at], scores[at, here]])
                        all_ids = np.concatenate([ids[at], here + start])
                        order = np.argpartition(-all_scores, K - 1)[:K]
                        top[at], ids[at] = all_scores[order], all_ids[order]
            np.savez(file, **{name: ids for name, (_, ids) in best.items()})
        return {name: [set(row[row >= 0].tolist()) for row in ids] for name, ids in np.load(file).items()}


def load(dsn: str, rows: Rows) -> None:
    """Twenty passages a document, by COPY into a table that becomes the collection's partition, which gets its indexes then: how passages are
    ingested is measured elsewhere."""
    count = len(rows.vectors)
    with psycopg.connect(dsn, autocommit=True) as link:
        register_vector(link)
        part = f"tidegate.passages_{hashlib.md5(COLLECTION.encode()).hexdigest()[:16]}"
        link.execute(f"create table {part} (like tidegate.passages including all excluding indexes)".encode())
        link.execute("insert into tidegate.collections (name, changes, index_version) values (%s, 1, '1-bench')", (COLLECTION,))
        with link.cursor() as cursor:
            cursor.execute(
                "insert into tidegate.documents (collection, source, title, sha256, size_bytes)"
                " select %s, 'd' || n, 'D', '', 0 from generate_series(0, %s) as n returning id", (COLLECTION, count // 20),
            )  # fmt: skip
            documents = [row[0] for row in cursor.fetchall()]
            columns = "id, document_id, collection, ordinal, text, tags, embedding, dated_at, confidence"
            with cursor.copy(f"copy {part} ({columns}) from stdin with (format binary)".encode()) as copy:
                copy.set_types(["text", "int8", "text", "int4", "text", "jsonb", "halfvec", "timestamptz", "float4"])
                for at in range(count):
                    tags = {"department": str(rows.department[at]), "product": str(rows.product[at]), "lang": "en"}
                    dated = np.datetime64(int((FIRST_DAY + rows.day[at]) * DAY_S), "s").astype(object)
                    copy.write_row((
                        f"{at:024x}", documents[at // 20], COLLECTION, at % 20, "A passage of a few hundred characters. " * 12,
                        psycopg.types.json.Jsonb(tags), HalfVector(rows.vectors[at]), dated.replace(tzinfo=UTC), float(rows.confidence[at]),
                    ))  # fmt: skip
        link.execute("set maintenance_work_mem = '1GB'")
        link.execute(f"alter table {part} add foreign key (document_id) references tidegate.documents on delete cascade".encode())
        link.execute(f"alter table tidegate.passages attach partition {part} for values in ('{COLLECTION}')".encode())


class Case:
    """One kind of search: its filters, and what came out."""

    def __init__(self, name: str, filters: list[Filter]) -> None:
        self.name, self.filters = name, filters


def cases(rng: np.random.Generator) -> list[Case]:
    since = (FIRST_DAY + 300) * float(DAY_S)
    departments = [str(one) for one in rng.integers(0, DEPARTMENTS, QUERIES)]
    products = [str(one) for one in rng.integers(2, 40, QUERIES)]
    return [
        Case("pure", [Filter()] * QUERIES),
        Case(FILTERED, [Filter({"department": one}, since, None, 0.3) for one in departments]),
        Case("department", [Filter({"department": one}) for one in departments]),
        Case(NO_FACET, [Filter({"product": one}, since, None, 0.3) for one in products]),
        Case("department + product", [Filter({"department": one, "product": two}) for one, two in zip(departments, products, strict=True)]),
        Case("time alone, 2 % of all", [Filter(since_unix_s=(FIRST_DAY + DAYS - 20) * float(DAY_S))] * QUERIES),
        Case("confidence >= 0.5: half of all", [Filter(min_confidence=0.5)] * QUERIES),
    ]


Search = Callable[[Vectors, Filter], Awaitable[list[int]]]


async def measure(rows: Rows, case: Case, truths: list[set[int]], search: Search) -> dict[str, Any]:
    """Recall against the truth, and whether any search gave fewer rows than fit, which is also the warm-up; then the times of the quietest of some
    rounds over the queries."""
    hits, wanted_hits, fewer = 0, 0, 0
    for query, wanted, truth in zip(rows.queries, case.filters, truths, strict=True):
        found = await search(query, wanted)
        hits += len(truth & set(found))
        wanted_hits += len(truth)
        fewer += len(found) < len(truth)
    rounds = []
    for _ in range(rows.rounds):
        took_ms = []
        for query, wanted in zip(rows.queries, case.filters, strict=True):
            began_ns = time.perf_counter_ns()
            await search(query, wanted)
            took_ms.append((time.perf_counter_ns() - began_ns) / 1e6)
        rounds.append(sorted(took_ms))
    took_ms = min(rounds, key=p95)
    return {
        "p50_ms": round(took_ms[len(took_ms) // 2], 2), "p95_ms": round(p95(took_ms), 2), "p95_ms_of_rounds": [round(p95(one), 1) for one in rounds],
        "recall_at_5": round(hits / max(wanted_hits, 1), 4), "searches_with_fewer_rows_than_fit": fewer,
    }  # fmt: skip


def p95(times: Sequence[float]) -> float:
    """Of sorted ones."""
    return times[int(len(times) * 0.95)]


async def crowd(dsn: str, rows: Rows, case: Case, search: Search, clients: int = 16, seconds: float = 3.0) -> dict[str, Any]:
    """So many clients, each with one search after the other, and whose the processor's time was; the quietest of some rounds."""
    for query, wanted in zip(rows.queries, case.filters, strict=True):
        await search(query, wanted)
    with psycopg.connect(dsn) as link:
        pids = [row[0] for row in link.execute("select pid from pg_stat_activity where application_name = 'tidegate'")]
    rounds = [await _crowd(pids, rows, case, search, clients, seconds) for _ in range(rows.rounds)]
    return max(rounds, key=lambda one: one["per_s"]) | {"per_s_of_rounds": [one["per_s"] for one in rounds]}


async def _crowd(pids: Sequence[int], rows: Rows, case: Case, search: Search, clients: int, seconds: float) -> dict[str, Any]:
    took_ms: list[float] = []
    before_s, own_s = sum(map(cpu_s, pids)), time.process_time()
    end_ns = time.perf_counter_ns() + int(seconds * 1e9)

    async def client(number: int) -> None:
        at = number * 7
        while (began_ns := time.perf_counter_ns()) < end_ns:
            await search(rows.queries[at % QUERIES], case.filters[at % QUERIES])
            took_ms.append((time.perf_counter_ns() - began_ns) / 1e6)
            at += 1

    with used_by_others() as others:
        await asyncio.gather(*(client(number) for number in range(clients)))
    own_s, server_s = time.process_time() - own_s, sum(map(cpu_s, pids)) - before_s
    took_ms.sort()
    return {
        "clients": clients, "per_s": round(len(took_ms) / seconds), "p95_ms": round(p95(took_ms), 2),
        "cpu_us_of_a_search": {"client": round(own_s / len(took_ms) * 1e6), "database": round(server_s / len(took_ms) * 1e6)},
        "cores_used_by_others": others.cores,
    }  # fmt: skip


async def ours(dsn: str, rows: Rows, parts: Sequence[str], found: dict[str, Any]) -> None:
    """What is found goes into `found`."""
    settings = StoreSettings(dsn=dsn)
    store = Postgres(settings.model_copy(update={"pool_min": settings.pool_max}))
    began_s = time.perf_counter()
    states = await store.build_indexes(COLLECTION, facets=("department",), graph=True, progress=lambda now: None)
    if any(state.built for state in states):
        found["seconds_to_build_indexes"] = round(time.perf_counter() - began_s)
    found["mb_of_indexes"] = {what: sum(state.bytes for state in states if state.what == what) // 2**20 for what in {state.what for state in states}}
    with psycopg.connect(dsn, autocommit=True) as link:
        link.execute("create extension if not exists pg_prewarm")
        link.execute(
            "select pg_prewarm(c.oid) from pg_class as c join pg_namespace as n on n.oid = c.relnamespace"
            " where n.nspname = 'tidegate' and relkind in ('r', 'i')"
        )

    async def search(query: Vectors, wanted: Filter) -> list[int]:
        return [int(passage.id, 16) for passage in (await store.search(COLLECTION, query, K, wanted)).passages]

    all_cases = cases(np.random.default_rng(3))
    truths = rows.truths(all_cases)
    for case in all_cases:
        if "tidegate" in parts:
            way = (await store.search(COLLECTION, rows.queries[0], K, case.filters[0])).way
            fitting = int(mean(int(rows.fitting(one).sum()) for one in case.filters[:20]))
            with used_by_others() as others:
                measured = await measure(rows, case, truths[case.name], search)
            found[case.name] = {"way": way, "fitting": fitting, **measured, "cores_used_by_others": others.cores}
            print(case.name, found[case.name], flush=True)
        if "crowd" in parts and case.name in ("pure", FILTERED, NO_FACET):
            found["16 clients, " + case.name] = await crowd(dsn, rows, case, search)
            print("16 clients,", case.name, found["16 clients, " + case.name], flush=True)
    if "facet" in parts:
        await store.build_indexes(COLLECTION, facets=("department", "product"), graph=True)
        for case in all_cases:
            if case.name == NO_FACET:
                with used_by_others() as others:
                    measured = await measure(rows, case, truths[case.name], search)
                found[A_FACET] = {"way": "exact", **measured, "cores_used_by_others": others.cores}
                print(A_FACET, found[A_FACET], flush=True)
                found["16 clients, " + A_FACET] = await crowd(dsn, rows, case, search)
                print("16 clients,", A_FACET, found["16 clients, " + A_FACET], flush=True)
        await store.build_indexes(COLLECTION, facets=("department",), graph=True)
    await store.close()


async def two_steps(dsn: str, rows: Rows) -> dict[str, Any]:
    """Ids from SQL, then faiss's HNSW with a selector of these ids."""
    try:
        import faiss
    except ImportError:
        return {"left_out": "faiss-cpu is not installed"}
    file = rows.kept / "faiss.index"
    if file.exists():
        index = faiss.read_index(str(file))
    else:
        index = faiss.IndexHNSWFlat(384, 16, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = 64
        index.add(rows.vectors[:].astype(np.float32))
        faiss.write_index(index, str(file))
    link = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
    sql = "select id from tidegate.passages where collection = %s and tags @> %s and dated_at >= to_timestamp(%s) and confidence >= %s"

    async def search(query: Vectors, wanted: Filter) -> list[int]:
        tags = psycopg.types.json.Jsonb(wanted.tags)
        cursor = await link.execute(sql, (COLLECTION, tags, wanted.since_unix_s or 0.0, wanted.min_confidence), binary=True)
        ids = np.array([int(row[0], 16) for row in await cursor.fetchall()], np.int64)
        if not len(ids):
            return []
        parameters = faiss.SearchParametersHNSW(sel=faiss.IDSelectorBatch(ids), efSearch=100)
        _, found = index.search(query[None], K, params=parameters)
        return [int(one) for one in found[0] if one >= 0]

    all_cases = cases(np.random.default_rng(3))
    truths = rows.truths(all_cases)
    result = {case.name: await measure(rows, case, truths[case.name], search) for case in all_cases if case.name in (FILTERED, NO_FACET)}
    await link.close()
    return result


async def qdrant(rows: Rows) -> dict[str, Any]:
    """Qdrant's client in local mode, which compares everything in this process."""
    try:
        from qdrant_client import QdrantClient, models
    except ImportError:
        return {"left_out": "qdrant-client is not installed"}
    client = QdrantClient(":memory:")
    client.create_collection("c", vectors_config=models.VectorParams(size=384, distance=models.Distance.DOT))
    for start in range(0, len(rows.vectors), 5000):
        part = range(start, min(start + 5000, len(rows.vectors)))
        payload = [
            {
                "department": str(rows.department[at]), "product": str(rows.product[at]), "day": int(rows.day[at]),
                "confidence": float(rows.confidence[at]),
            }
            for at in part
        ]
        client.upload_collection("c", rows.vectors[start : part.stop].astype(np.float32), payload, list(part))

    async def search(query: Vectors, wanted: Filter) -> list[int]:
        must: list[Any] = [models.FieldCondition(key=key, match=models.MatchValue(value=value)) for key, value in wanted.tags.items()]
        if wanted.since_unix_s is not None:
            must.append(models.FieldCondition(key="day", range=models.Range(gte=wanted.since_unix_s / DAY_S - FIRST_DAY)))
        must.append(models.FieldCondition(key="confidence", range=models.Range(gte=wanted.min_confidence)))
        return [int(one.id) for one in client.query_points("c", query=query.tolist(), query_filter=models.Filter(must=must), limit=K).points]

    all_cases = cases(np.random.default_rng(3))
    truths = rows.truths(all_cases)
    few = {case.name: Case(case.name, case.filters[:20]) for case in all_cases}  # a search takes half a second
    rows.queries = rows.queries[:20]
    return {name: await measure(rows, few[name], truths[name][:20], search) for name in (FILTERED, NO_FACET)}


@contextlib.contextmanager
def cluster(home: Path, rows: int) -> Iterator[str]:
    """The connection string of an embedded PostgreSQL in a folder, with memory for the rows and their indexes."""
    home.mkdir(parents=True, exist_ok=True)
    home.chmod(0o711)
    folder = DataFolder(home / "db")
    folder.open(min_free_mb=0)
    server = Server(folder, LocalSettings(data=str(folder.path), postgres_shared_buffers_mb=max(1024, rows * 6 // 1000)), fsync=False)
    with asyncio.Runner() as runner:
        try:
            runner.run(server.start())
            migrate(server.dsn)
            yield server.dsn
        finally:
            runner.run(server.stop())
            folder.close()


PARTS = ("load", "tidegate", "crowd", "facet", "faiss", "qdrant")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--base", type=Path)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--rounds", type=int, default=5, help="of which the quietest counts")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    given = parser.parse_args()
    name = f"search_{given.rows // 1000}k"
    file = RESULTS / f"{name}.json"
    before = json.loads(file.read_bytes()) if file.exists() and set(given.only) != set(PARTS) else {}
    found, others = before.get("tidegate", {}), before.get("others", {})
    with tempfile.TemporaryDirectory(prefix="tg-", dir="/tmp") as passing, cluster(given.keep or Path(passing), given.rows) as dsn:
        home = given.keep or Path(passing)
        rows = Rows(base_vectors(given.data, given.base), given.rows, home, given.rounds)
        loaded = home / "loaded"
        if not loaded.exists():
            load(dsn, rows)
            loaded.touch()
            print("loaded", flush=True)
        if {"load", "tidegate", "crowd", "facet"} & set(given.only):
            uvloop.run(ours(dsn, rows, given.only, found))
        if "faiss" in given.only:
            others["ids from SQL, then faiss"] = uvloop.run(two_steps(dsn, rows))
        if "qdrant" in given.only:
            others["qdrant, local mode"] = uvloop.run(qdrant(rows))
    record(name, {"rows": given.rows, "tidegate": found, "others": others})


if __name__ == "__main__":
    main()
