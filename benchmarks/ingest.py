"""How fast documents are ingested, and what an ingest costs those who search meanwhile.

    .venv/bin/python benchmarks/ingest.py [documents | pdfs | beside]...      (all of them; each takes one to three minutes)

Real parts: `tidegate up` without an engine, so PostgreSQL and the embedder's process as users have them, and `tidegate ingest` as a process of its
own, into an empty collection each time.

- documents: 300 of the bank's policy documents of tau2 (Markdown of 4 kB), with 1 and 2 workers.
- pdfs: the tables of ICDAR 2013 (10 PDFs), with 1 and 2 workers.
- beside: searches of the example documents, one after the other as fast as they come, for 15 s; then again while an ingest of the policy documents
  runs. A search is what a capability does: embed the question in the embedder's process, search in PostgreSQL by words and vectors, choose. The goal
  is a P95 of at most 1.5 times the quiet one.

Reads ../shared/data. Adds to benchmarks/results/ingest.json.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from common import record

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
TIDEGATE = [sys.executable, "-m", "tidegate.cli"]
DOCUMENTS, SECONDS = 300, 15.0


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


def speed(data: Path, paths: list[Path], name: str) -> dict[str, Any]:
    """Documents and passages a second, by workers."""
    found = {}
    for workers in (1, 2):
        done = subprocess.run(command(data, paths, f"{name}{workers}", workers), capture_output=True, check=False)
        report = json.loads(done.stdout)
        stored, passages, seconds = len(report["stored"]), report["passages"], report["seconds"]
        found[f"{workers} workers"] = {
            "documents": stored, "failed": len(report["failed"]), "passages": passages, "seconds": round(seconds, 1),
            "documents_s": round(stored / seconds, 2), "passages_s": round(passages / seconds, 2),
        }  # fmt: skip
        print(name, workers, found[f"{workers} workers"], flush=True)
    return found


@contextlib.asynccontextmanager
async def searcher(data: Path) -> AsyncIterator[Any]:
    from tidegate.app.collections import embedder_and_passages
    from tidegate.app.parts import reach
    from tidegate.retrieval.search import Search
    from tidegate.settings import load

    settings = reach(load(None, os.environ, {"local.data": str(data)}))
    async with embedder_and_passages(settings) as (embedder, store):
        yield Search(embedder, store, settings.retrieval)


async def searches(data: Path) -> dict[str, float]:
    """Milliseconds of searches, one after the other."""
    questions = [json.loads(line)["question"] for line in (ROOT / "examples" / "questions.jsonl").read_text("utf-8").splitlines()]
    took_ms = []
    async with searcher(data) as search:
        for question in questions[:10]:
            await search.find(question, collection="harbour-mutual")
        end_ns = time.perf_counter_ns() + int(SECONDS * 1e9)
        while time.perf_counter_ns() < end_ns:
            began_ns = time.perf_counter_ns()
            await search.find(questions[len(took_ms) % len(questions)], collection="harbour-mutual")
            took_ms.append((time.perf_counter_ns() - began_ns) / 1e6)
    cuts = statistics.quantiles(took_ms, n=100)
    return {"searches": len(took_ms), "p50_ms": round(cuts[49], 1), "p95_ms": round(cuts[94], 1), "p99_ms": round(cuts[98], 1)}


def beside(data: Path, paths: list[Path]) -> dict[str, Any]:
    quiet = asyncio.run(searches(data))
    running = subprocess.Popen(command(data, paths, "beside", 1), stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        time.sleep(3)  # it has found its pace
        busy = asyncio.run(searches(data))
        went_on = running.poll() is None
    finally:
        running.send_signal(signal.SIGINT)
        running.wait(60)
    ratio = round(busy["p95_ms"] / quiet["p95_ms"], 2)
    found = {"quiet": quiet, "beside an ingest": busy, "p95_ratio": ratio, "goal": 1.5, "met": ratio <= 1.5, "ingest_ran_to_the_end_of_it": went_on}
    print(found, flush=True)
    return found


def main() -> None:
    wanted = sys.argv[1:] or ["documents", "pdfs", "beside"]
    results = ROOT / "benchmarks" / "results" / "ingest.json"
    found = json.loads(results.read_text()) if results.exists() else {}
    with up() as data, tempfile.TemporaryDirectory() as folder:
        bank = policies(Path(folder))
        if "documents" in wanted:
            found["documents"] = speed(data, bank, "documents")
        if "pdfs" in wanted:
            found["pdfs"] = speed(data, sorted((DATA / "pdf" / "icdar2013").glob("*.pdf")), "pdfs")
        if "beside" in wanted:
            found["beside"] = beside(data, bank)
    record("ingest", found)


if __name__ == "__main__":
    main()
