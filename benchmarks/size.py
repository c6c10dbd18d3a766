"""How large the gateway is and how long `tidegate up` takes.

    .venv/bin/python benchmarks/size.py

Starts `tidegate up` in a fresh folder (first start: database made, model built, examples read), asks a question, starts it again, then opens
1,000 idle streams on a gateway with the scripted engine. Writes benchmarks/results/size.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from common import database, record, rss_mb, write_config

STREAMS = 1000


def up(data: Path) -> tuple[subprocess.Popen[str], float, str]:
    """Start it and wait for the curl line: the process, seconds, the line."""
    began_ns = time.perf_counter_ns()
    process = subprocess.Popen(
        [sys.executable, "-m", "tidegate.cli", "up", "--data", str(data), "--port", "0"], stdout=subprocess.PIPE, text=True, cwd=data.parent
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("curl"):
            return process, (time.perf_counter_ns() - began_ns) / 1e9, line
    raise RuntimeError("`tidegate up` ended")


def pid_of(data: Path, part: str) -> int:
    pid: int = json.loads((data / "run" / f"{part}.pid").read_bytes())["pid"]
    return pid


def starts() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tg-", dir="/tmp") as home:
        Path(home).chmod(0o711)
        data = Path(home) / "data"
        began_ns = time.perf_counter_ns()
        process, first_s, curl = up(data)
        answer = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=180, check=True).stdout
        answered_s = (time.perf_counter_ns() - began_ns) / 1e9
        assert "event: answer" in answer, answer
        sizes = {f"{part}_rss_mb": round(rss_mb(pid_of(data, part)), 1) for part in ("gateway", "embedder", "engine")}
        process.send_signal(signal.SIGINT)
        process.wait(60)
        process, second_s, _ = up(data)
        idle = round(rss_mb(pid_of(data, "gateway")), 1)
        process.send_signal(signal.SIGINT)
        process.wait(60)
    return {
        "first_start_s": round(first_s, 1), "first_answer_s": round(answered_s, 1), "second_start_s": round(second_s, 1),
        "gateway_idle_rss_mb": idle, **sizes,
    }


async def open_streams(url: str, key: str, count: int) -> list[asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"messages": [{"role": "user", "content": "##n=2,m=stall,k=1##"}], "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    writers = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head + body)
        assert b" 200 " in await reader.readline()
        writers.append(writer)
    return writers


def streams() -> dict[str, Any]:
    """RSS before and with 1,000 streams open that have said one token and are silent."""
    with database() as (home, dsn, key):
        engine = subprocess.Popen([sys.executable, "-m", "tidegate.bench.scripted", "--port", "0"], stdout=subprocess.PIPE, text=True)
        assert engine.stdout is not None
        engine_url = "http://" + engine.stdout.readline().split()[-1]
        config = write_config(home, dsn, engine_url)
        gateway = subprocess.Popen([sys.executable, "-m", "tidegate.cli", "serve", "--config", str(config), "--port", "0"], env={**os.environ})
        note = home / "data" / "run" / "gateway.json"
        for _ in range(300):
            if note.exists():
                break
            time.sleep(0.1)
        url = json.loads(note.read_bytes())["url"]

        async def measure() -> tuple[float, float]:
            for writer in await open_streams(url, key, 10):
                writer.close()
            await asyncio.sleep(1)
            before = rss_mb(gateway.pid)
            writers = await open_streams(url, key, STREAMS)
            await asyncio.sleep(1)
            with_streams = rss_mb(gateway.pid)
            for writer in writers:
                writer.close()
            return before, with_streams

        try:
            httpx.get(url + "/health")
            before, with_streams = asyncio.run(measure())
        finally:
            gateway.terminate()
            gateway.wait(60)
            engine.terminate()
            engine.wait(10)
            engine.stdout.close()
    return {"streams": STREAMS, "streams_more_rss_mb": round(with_streams - before, 1)}


def main() -> None:
    result = starts() | streams()
    result["gates"] = {
        "first answer < 60 s": result["first_answer_s"] < 60,
        "second start < 10 s": result["second_start_s"] < 10,
        "gateway idle < 150 MB": result["gateway_idle_rss_mb"] < 150,
        "embedder < 550 MB": result["embedder_rss_mb"] < 550,
        "1,000 idle streams < 60 MB more": result["streams_more_rss_mb"] < 60,
    }
    print(json.dumps(result, indent=1))
    print("written:", record("size", result))


if __name__ == "__main__":
    main()
