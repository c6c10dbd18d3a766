"""How soon a slot of the real engine is free when a client leaves the gateway.

    .venv/bin/python benchmarks/leaving.py [--times 40]

Starts the embedded llama.cpp and a gateway before it, one client at a time. The client leaves after its third token, or in the middle of a
non-streamed answer; then the engine's own /slots is asked every few milliseconds until no slot is at work. Writes
benchmarks/results/leaving.json. Everything is on 127.0.0.1, bounded in count and time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from common import database, record

PROMPT = "Tell me a long story about a lighthouse keeper and the sea."


def start_gateway(home: Path, dsn: str, url: str, engine_key: str, more: str = "") -> tuple[subprocess.Popen[bytes], str]:
    config = home / "leaving.toml"
    config.write_text(
        f'[store]\ndsn = "{dsn}"\n[server]\nport = 0\n[local]\ndata = "{home / "data"}"\nembedder = false\n[log]\nflights = "errors"\n'
        f'[engines.real]\nadapter = "llama_cpp"\nurl = "{url}"\napi_key = "{engine_key}"\nmodels = ["model"]\nconformance = "off"\n{more}'
    )
    process = subprocess.Popen([sys.executable, "-m", "tidegate.cli", "serve", "--config", str(config)])
    note = home / "data" / "run" / "gateway.json"
    for _ in range(300):
        if note.exists() and note.read_bytes():
            return process, json.loads(note.read_bytes())["url"]
        time.sleep(0.1)
    raise RuntimeError("the gateway did not start")


def busy(engine: httpx.Client) -> int:
    return sum(bool(slot["is_processing"]) for slot in engine.get("/slots").json())


def freed_ms(engine: httpx.Client, since_ns: int) -> float:
    """Milliseconds from `since_ns` until the engine says that no slot is at work."""
    while busy(engine):
        if time.perf_counter_ns() - since_ns > 30e9:
            raise RuntimeError("the slot was never freed")
        time.sleep(0.002)
    return (time.perf_counter_ns() - since_ns) / 1e6


def leave(url: str, key: str, engine: httpx.Client, *, stream: bool) -> float:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 400, "stream": stream}
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=30) as client:
        if stream:
            with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                lines = (line for line in answer.iter_lines() if line.startswith("data: "))
                for _ in range(4):
                    next(lines)
                since_ns = time.perf_counter_ns()
            return freed_ms(engine, since_ns)
        with contextlib.suppress(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json=body, timeout=1.0)
        since_ns = time.perf_counter_ns()
    return freed_ms(engine, since_ns)


def spread(found: list[float]) -> dict[str, float]:
    found = sorted(found)
    return {f"p{q}": round(found[min(len(found) - 1, len(found) * q // 100)], 1) for q in (50, 95, 100)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=40)
    options = parser.parse_args()
    from tidegate.local.engine import LocalEngine
    from tidegate.local.folder import DataFolder
    from tidegate.local.settings import LocalSettings

    with database() as (home, dsn, key):
        folder = DataFolder(home / "engine")
        folder.open(min_free_mb=0)
        local = LocalEngine(folder, LocalSettings(data=str(folder.path)))
        loop = asyncio.new_event_loop()
        loop.run_until_complete(local.child.start())
        gateway, url = start_gateway(home, dsn, local.address.url, local.address.key)
        try:
            with httpx.Client(base_url=local.address.url, headers={"authorization": f"Bearer {local.address.key}"}) as engine:
                leave(url, key, engine, stream=True)
                result: dict[str, Any] = {
                    "times": options.times,
                    "slot_free_ms_streamed": spread([leave(url, key, engine, stream=True) for _ in range(options.times)]),
                    "slot_free_ms_whole": spread([leave(url, key, engine, stream=False) for _ in range(options.times // 4)]),
                }
        finally:
            gateway.terminate()
            gateway.wait(60)
            loop.run_until_complete(local.child.stop())
            loop.close()
            local.release()
            folder.close()
    result["gates"] = {"slot free <= 100 ms P95": result["slot_free_ms_streamed"]["p95"] <= 100}
    print(json.dumps(result, indent=1))
    print("written:", record("leaving", result))


if __name__ == "__main__":
    main()
