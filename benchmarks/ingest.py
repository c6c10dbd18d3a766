"""How fast documents are ingested, and what an ingest costs those who search meanwhile.

    .venv/bin/python benchmarks/ingest.py [documents | pdfs | beside]...      (all of them; each takes one to three minutes)

Real parts: `tidegate up` without an engine, so PostgreSQL and the embedder's process as users have them, and `tidegate ingest` as a process of its
own, into an empty collection each time.

- documents: 300 of the bank's policy documents of tau2 (Markdown of 4 kB), with 1 and 2 workers.
- pdfs: the tables of ICDAR 2013 (10 PDFs), with 1 and 2 workers.
- beside: searches of the example documents, one after the other as fast as they come, for 10 s with nothing beside them, 10 s beside an ingest of the
  policy documents with 1 worker, 10 s beside one with 2 workers (what two cores get without being told); three rounds of that, so that a machine that
  gets slower does not pass for an ingest. A search is what a capability does: embed the question in the embedder's process, search in PostgreSQL by
  words and vectors, choose. The goal is a P95 of at most 1.5 times that of the same round's quiet searches; the median round counts.

Each figure stands with the cores that processes of others used meanwhile. Reads ../shared/data. Adds to benchmarks/results/ingest.json.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from common import commit, machine, record, used_by_others

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
TIDEGATE = [sys.executable, "-m", "tidegate.cli"]
DOCUMENTS, SECONDS, ROUNDS = 300, 10.0, 3


@contextlib.contextmanager
def up() -> Iterator[Path]:
    """A running `tidegate up` without an engine; its data folder."""
    home = Path(tempfile.mkdtemp(prefix="tg-", dir="/tmp"))
    home.chmod(0o711)
    log = home / "up.log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            [*TIDEGATE, "up", "--data", str(home / "data"), "--port", "0", "--set", "local.engine=false"],
            stdout=out, stderr=out, cwd=home, start_new_session=True,
        )  # fmt: skip
    try:
        while "curl" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        yield home / "data"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        subprocess.run(["rm", "-rf", str(home)], check=True)


def policies(folder: Path) -> list[Path]:
    """The bank's documents, one Markdown file each."""
    files = []
    lines = (DATA / "retrieval" / "tau2_banking" / "documents.jsonl").read_text().splitlines()
    for number, line in enumerate(lines[:DOCUMENTS]):
        document = json.loads(line)
        files.append(folder / f"{number:03}.md")
        files[-1].write_text(f"# {document['title']}\n\n{document['content']}\n")
    return files


def command(data: Path, paths: list[Path], collection: str, workers: int) -> list[str]:
    return [*TIDEGATE, "ingest", *map(str, paths), "--collection", collection, "--set", f"local.data={data}", "--workers", str(workers), "--json"]


def children_s() -> float:
    """CPU seconds of all processes that this one started and waited for, theirs included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def speed(data: Path, paths: list[Path], name: str) -> dict[str, Any]:
    """Documents and passages a second, by workers."""
    found = {}
    for workers in (1, 2):
        own = children_s()
        with used_by_others() as others:
            done = subprocess.run(command(data, paths, f"{name}{workers}", workers), capture_output=True, check=False)
        own = children_s() - own  # it has ended, so it is not among the living whose time is known
        report = json.loads(done.stdout)
        stored, passages, seconds = len(report["stored"]), report["passages"], report["seconds"]
        found[f"{workers} workers"] = {
            "documents": stored, "failed": len(report["failed"]), "passages": passages, "seconds": round(seconds, 1),
            "documents_s": round(stored / seconds, 2), "passages_s": round(passages / seconds, 2),
            "cpu_s_of_ingest": round(own, 1), "cores_of_others": round(others.cores - own / seconds, 2),
        }  # fmt: skip
        print(name, workers, found[f"{workers} workers"], flush=True)
    return found


@contextlib.asynccontextmanager
async def searcher(data: Path) -> AsyncIterator[tuple[Any, list[float]]]:
    """A search, and how many milliseconds each question's embedding took."""
    from tidegate.app.collections import embedder_and_passages
    from tidegate.app.parts import reach
    from tidegate.retrieval.search import Search
    from tidegate.settings import load

    settings = reach(load(None, os.environ, {"local.data": str(data)}))
    async with embedder_and_passages(settings) as (embedder, store):
        watched: Any = embedder
        embed, took_ms = embedder.embed, list[float]()

        async def timed(*given: Any) -> Any:
            began_ns = time.perf_counter_ns()
            try:
                return await embed(*given)
            finally:
                took_ms.append((time.perf_counter_ns() - began_ns) / 1e6)

        watched.embed = timed
        yield Search(embedder, store, settings.retrieval), took_ms


async def searches(data: Path) -> dict[str, float]:
    """Milliseconds of searches, one after the other."""
    questions = [json.loads(line)["question"] for line in (ROOT / "examples" / "questions.jsonl").read_text("utf-8").splitlines()]
    took_ms: list[float] = []
    async with searcher(data) as (search, embed_ms):
        for question in questions[:10]:
            await search.find(question, collection="harbour-mutual")
        embed_ms.clear()
        with used_by_others() as others:
            end_ns = time.perf_counter_ns() + int(SECONDS * 1e9)
            while time.perf_counter_ns() < end_ns:
                began_ns = time.perf_counter_ns()
                await search.find(questions[len(took_ms) % len(questions)], collection="harbour-mutual")
                took_ms.append((time.perf_counter_ns() - began_ns) / 1e6)
    cuts = statistics.quantiles(took_ms, n=100)
    return {
        "searches": len(took_ms), "p50_ms": round(cuts[49], 1), "p95_ms": round(cuts[94], 1), "p99_ms": round(cuts[98], 1),
        "embedding_p50_ms": round(statistics.median(embed_ms), 1), "embedding_p95_ms": round(statistics.quantiles(embed_ms, n=20)[18], 1),
        "cores_of_others": others.cores,
    }  # fmt: skip


def searches_beside(data: Path, paths: list[Path], workers: int, collection: str) -> dict[str, float]:
    """As `searches`, while an ingest runs."""
    silent = subprocess.DEVNULL
    running = subprocess.Popen(command(data, paths, collection, workers), stdout=silent, stderr=silent, start_new_session=True)
    try:
        time.sleep(3)  # it has found its pace
        found = asyncio.run(searches(data))
        assert running.poll() is None, "the ingest ended before the searches did"
    finally:
        running.send_signal(signal.SIGINT)
        running.wait(60)
    return found


def beside(data: Path, paths: list[Path]) -> dict[str, Any]:
    rounds = []
    for number in range(ROUNDS):
        one: dict[str, Any] = {"quiet": asyncio.run(searches(data))}
        for workers in (1, 2):
            one[f"{workers} workers"] = searches_beside(data, paths, workers, f"beside{number}{workers}")
        rounds.append(one)
        print(one, flush=True)
    ratios = {name: [round(one[name]["p95_ms"] / one["quiet"]["p95_ms"], 2) for one in rounds] for name in ("1 workers", "2 workers")}
    medians = {name: statistics.median(found) for name, found in ratios.items()}
    print(ratios, flush=True)
    return {"rounds": rounds, "p95_ratios": ratios, "p95_ratio": medians, "goal": 1.5, "met": max(medians.values()) <= 1.5}


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # what runs beside is ended, too
    wanted = sys.argv[1:] or ["documents", "pdfs", "beside"]
    results = ROOT / "benchmarks" / "results" / "ingest.json"
    before = json.loads(results.read_text()) if results.exists() else {}
    found = {name: before[name] for name in ("documents", "pdfs", "beside") if name in before}
    now = {"commit": commit(), "load_1m": machine()["load_1m"]}  # the parts may be of different days
    with up() as data, tempfile.TemporaryDirectory() as folder:
        bank = policies(Path(folder))
        if "documents" in wanted:
            found["documents"] = now | speed(data, bank, "documents")
        if "pdfs" in wanted:
            found["pdfs"] = now | speed(data, sorted((DATA / "pdf" / "icdar2013").glob("*.pdf")), "pdfs")
        if "beside" in wanted:
            found["beside"] = now | beside(data, bank)
    record("ingest", found)


if __name__ == "__main__":
    main()
