"""What the embedder costs beside the very same model in float32, and whether an ingest slows a question.

    .venv/bin/python benchmarks/embedding.py --data ../shared/data [--part speed|agreement|child] [--runtime onnxruntime|openvino]

- speed: 32 questions, 32 texts of 64 tokens, one question, in process, by one thread and by two. int8 and float32 take turns, round by round: read
  the ratio. float32 is the same graph without rounding, run by ONNX Runtime with the same options.
- agreement: cosine of int8 with float32 over some hundred real texts in English and Chinese.
- child: the same three through the socket of the embedder's process, and questions one after the other, alone and while another process
  sends passages without pause.

Each part takes less than three minutes and writes into `results/embedding.json` beside the other parts. The texts are those of the folder `--data`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, ROOT, record, used_by_others

from tidegate.retrieval.e5_graph import build_graph
from tidegate.retrieval.e5_model import E5Model
from tidegate.retrieval.e5_runtimes import Runtime
from tidegate.retrieval.e5_weights import E5Weights, find_package
from tidegate.retrieval.embedder import LocalEmbedder
from tidegate.retrieval.embedder_client import EmbedderClient
from tidegate.retrieval.embedder_texts import TextKind

CACHE = Path.home() / ".cache" / "tidegate" / "bench"
ROUNDS = 9
QUESTIONS = 500
WANTED_MS = {"32 questions": 45, "32 texts of 64 tokens": 200, "one question": 6}
#: Sends passages until it is killed: 32 in a call, as ingest does.
INGEST = """
import asyncio, json, sys
from tidegate.retrieval.embedder_client import EmbedderClient
texts = json.loads(sys.stdin.read())
async def run():
    client, at = EmbedderClient(sys.argv[1]), 0
    while True:
        await client.embed(texts[at : at + 32], "passage")
        if not at: print("runs", flush=True)
        at = (at + 32) % (len(texts) - 32)
asyncio.run(run())
"""


def real_texts(data: Path) -> tuple[list[str], list[str]]:
    """Questions, and paragraphs and lines, English and Chinese, in an order that is always the same."""
    questions: list[str] = []
    passages: list[str] = []
    for language in ("en", "zh"):
        for article in json.loads((data / "retrieval" / f"xquad.{language}.json").read_text("utf-8"))["data"]:
            for paragraph in article["paragraphs"]:
                passages.append(paragraph["context"])
                questions += [one["question"] for one in paragraph["qas"]]
    for file in sorted([*data.glob("retrieval/tau2_banking/**/*"), *data.glob("retrieval/laws_zh/**/*")]):
        if file.is_file():
            passages += [line for line in re.split(r"\n+", file.read_text("utf-8", errors="ignore")) if len(line) > 40]
    draw = random.Random(7)
    draw.shuffle(questions)
    draw.shuffle(passages)
    return questions, passages


async def of_64_tokens(embedder: LocalEmbedder, passages: list[str]) -> list[str]:
    """32 texts cut to 64 tokens, prefix and markers included."""
    cut: list[str] = []
    for text in passages:
        low, high = 1, len(text)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if (await embedder.count_tokens([text[:middle]]))[0] <= 64 else (low, middle - 1)
        if (await embedder.count_tokens([text[:low]]))[0] == 64:
            cut.append(text[:low])
        if len(cut) == 32:
            break
    return cut


def shipped(runtime: Runtime, threads: int) -> LocalEmbedder:
    return LocalEmbedder(CACHE, threads=threads, runtime=runtime)


def exact(threads: int) -> LocalEmbedder:
    """The same in float32."""
    weights = E5Weights(find_package()[0])
    return LocalEmbedder(CACHE, threads=threads, load=lambda _, threads: E5Model(weights, build_graph(weights, "float32"), threads))


async def cases(data: Path) -> dict[str, tuple[list[str], TextKind]]:
    questions, passages = real_texts(data)
    counting = shipped("onnxruntime", 1)
    texts = await of_64_tokens(counting, passages)
    median = sorted(questions[:101], key=len)[50]
    await counting.close()
    return {"32 questions": (questions[:32], "query"), "32 texts of 64 tokens": (texts, "passage"), "one question": ([median], "query")}


async def times(call: Callable[[], Awaitable[Any]], count: int) -> list[float]:
    """Milliseconds of each call."""
    took = []
    for _ in range(count):
        began_ns = time.perf_counter_ns()
        await call()
        took.append((time.perf_counter_ns() - began_ns) / 1e6)
    return took


def spread(took: list[float]) -> dict[str, float]:
    low, median, high = np.percentile(took, [10, 50, 90]).round(2).tolist()
    return {"p10_ms": low, "p50_ms": median, "p90_ms": high}


async def speed(data: Path, runtime: Runtime) -> dict[str, Any]:
    found: dict[str, Any] = {}
    chosen = await cases(data)
    for threads in (1, 2):
        both = {"int8": shipped(runtime, threads), "float32": exact(threads)}
        for name, (texts, kind) in chosen.items():
            calls = 10 if len(texts) == 1 else 1
            took: dict[str, list[float]] = {which: [] for which in both}
            for embedder in both.values():
                await embedder.embed(texts, kind)
            for _ in range(ROUNDS):
                for which, embedder in both.items():
                    took[which] += await times(partial(embedder.embed, texts, kind), calls)
            ratio = statistics.median(took["int8"]) / statistics.median(took["float32"])
            found[f"{name}, {threads} threads" if threads > 1 else f"{name}, one thread"] = {
                **{which: spread(ms) for which, ms in took.items()}, "ratio": round(ratio, 3), "wanted_ms_two_cores": WANTED_MS[name],
            }
        for embedder in both.values():
            await embedder.close()
    return found


async def agreement(data: Path, runtime: Runtime) -> dict[str, Any]:
    questions, passages = real_texts(data)
    chosen: list[tuple[list[str], TextKind]] = [(questions[:200], "query"), (passages[:200], "passage")]
    one, other = shipped(runtime, 2), exact(2)
    cosines = np.concatenate([
        np.sum(await one.embed(texts, kind) * await other.embed(texts, kind), axis=1) for texts, kind in chosen
    ])
    found = {"texts": len(cosines), "least": float(cosines.min()), "p1": float(np.percentile(cosines, 1)), "mean": float(cosines.mean())}
    await one.close()
    await other.close()
    return {key: round(value, 5) for key, value in found.items()}


@contextlib.contextmanager
def child(runtime: Runtime, threads: int) -> Iterator[Path]:
    """The embedder's process, as `tidegate up` starts it."""
    with tempfile.TemporaryDirectory(prefix="tg-", dir="/tmp") as folder:
        path = Path(folder) / "e.sock"
        argv = [sys.executable, "-m", "tidegate.local.embedder_child", "--socket", str(path), "--cache", str(CACHE)]
        process = subprocess.Popen([*argv, "--threads", str(threads), "--runtime", runtime], stdout=subprocess.PIPE)
        assert process.stdout is not None
        try:
            process.stdout.readline()
            yield path
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def ingest(path: Path, passages: list[str]) -> Iterator[None]:
    """Another process that embeds passages without pause."""
    process = subprocess.Popen([sys.executable, "-c", INGEST, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(passages).encode())
        process.stdin.close()
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.wait()


def latencies(took: list[float]) -> dict[str, float]:
    p50, p95, p99 = np.percentile(took, [50, 95, 99]).round(2).tolist()
    return {"p50_ms": p50, "p95_ms": p95, "p99_ms": p99}


async def through_child(data: Path, runtime: Runtime) -> dict[str, Any]:
    questions, passages = real_texts(data)
    found: dict[str, Any] = {}
    chosen = await cases(data)
    for threads in (1, 2):
        with child(runtime, threads) as path:
            client = EmbedderClient(path)
            for name, (texts, kind) in chosen.items():
                await client.embed(texts, kind)
                took = await times(partial(client.embed, texts, kind), ROUNDS * (10 if len(texts) == 1 else 1))
                found[f"{name}, {threads} threads" if threads > 1 else f"{name}, one thread"] = spread(took)
            if threads == 1:
                found["questions"] = await beside_an_ingest(client, path, questions, passages)
            await client.close()
    return found


async def beside_an_ingest(client: EmbedderClient, path: Path, questions: list[str], passages: list[str]) -> dict[str, Any]:
    """Quiet and busy take turns, so that what else the machine does meets both."""

    async def ask(asked: Iterator[str]) -> None:
        await client.embed([next(asked)], "query")

    took: dict[str, list[float]] = {"alone": [], "beside an ingest": []}
    rounds, embedded, busy_s = 4, 0, 0.0
    for number in range(rounds):
        start = number * QUESTIONS // rounds
        took["alone"] += await times(partial(ask, iter(questions[start:])), QUESTIONS // rounds)
        with ingest(path, passages[:2000]):
            before, began_s = (await client.figures())["passages"], time.perf_counter()
            took["beside an ingest"] += await times(partial(ask, iter(questions[start:])), QUESTIONS // rounds)
            embedded += (await client.figures())["passages"] - before
            busy_s += time.perf_counter() - began_s
    ratio = np.percentile(took["beside an ingest"], 95) / np.percentile(took["alone"], 95)
    return {
        **{name: latencies(ms) for name, ms in took.items()}, "p95_ratio": round(float(ratio), 2), "wanted_p95_ratio": 1.5,
        "passages_per_s": round(embedded / busy_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--part", choices=["speed", "agreement", "child"])
    parser.add_argument("--runtime", choices=["onnxruntime", "openvino"], default="onnxruntime")
    given = parser.parse_args()
    parts: dict[str, Callable[[Path, Runtime], Awaitable[dict[str, Any]]]] = {
        "speed": speed, "agreement": agreement, "child": through_child,
    }  # fmt: skip
    file = RESULTS / "embedding.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    results: dict[str, Any] = {runtime: before[runtime] for runtime in ("onnxruntime", "openvino") if runtime in before}
    mine = results.setdefault(given.runtime, {})
    for name in [given.part] if given.part else parts:
        with used_by_others() as others:
            mine[name] = asyncio.run(parts[name](given.data, given.runtime))  # type: ignore[arg-type]
        mine[name]["version"] = metadata.version(given.runtime)
        if name != "child":  # its processes have ended: their work would count as that of others
            mine[name]["cores_used_by_others"] = others.cores
        print(json.dumps({name: mine[name]}, indent=1), flush=True)
    record("embedding", results)


if __name__ == "__main__":
    main()
