"""How soon a slot of the real engine is free when a client leaves the gateway.

    .venv/bin/python benchmarks/leaving.py [--times 40]

Starts the embedded llama.cpp and a gateway before it, one client at a time. The client leaves after its third token, or in the middle of a
non-streamed answer; then the engine's own /slots is asked every few milliseconds until no slot is at work. Writes
benchmarks/results/leaving.json. Everything is on 127.0.0.1, bounded in count and time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from typing import Any

import httpx
from common import database, embedded_engine, gateway, record

PROMPT = "Tell me a long story about a lighthouse keeper and the sea."


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
    with database() as (home, dsn, key), embedded_engine(home) as local:
        at = local.address
        section = f'adapter = "llama_cpp"\nurl = "{at.url}"\napi_key = "{at.key}"\nmodels = ["model"]\nconformance = "off"'
        with gateway(home, dsn, section) as url, httpx.Client(base_url=at.url, headers={"authorization": f"Bearer {at.key}"}) as engine:
            leave(url, key, engine, stream=True)
            result: dict[str, Any] = {
                "times": options.times,
                "slot_free_ms_streamed": spread([leave(url, key, engine, stream=True) for _ in range(options.times)]),
                "slot_free_ms_whole": spread([leave(url, key, engine, stream=False) for _ in range(options.times // 4)]),
            }
    result["gates"] = {"slot free <= 100 ms P95": result["slot_free_ms_streamed"]["p95"] <= 100}
    print(json.dumps(result, indent=1))
    print("written:", record("leaving", result))


if __name__ == "__main__":
    main()
