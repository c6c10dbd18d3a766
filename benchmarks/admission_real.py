"""Is what the simulator says true? The real llama.cpp behind the gateway, under an open-loop load, and the simulator's forecast of the same load.

    .venv/bin/python benchmarks/admission_real.py [--requests 80] [--loads 0.6 0.85]

Starts the embedded llama.cpp with four slots and a gateway before it. First its speeds are measured, with nothing else going on: a stream alone, four
streams, prompts of two lengths; and again after each load, since a shared machine is not equally fast all the time. Then requests come as a Poisson
process, whether or not those before them are answered, with prompts and answers of mixed lengths. The gateway's own flights of that are the trace of
the simulator: the same instants, prompts and answers on an engine model with the measured speeds. Compared are the times to first token, and the
waits for a slot. Writes results/admission_real.json. All on 127.0.0.1; wants a machine on which nothing else runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
from common import database, record
from leaving import start_gateway

from tidegate.admission.settings import AdmissionSettings
from tidegate.sizing.engine_model import Speed
from tidegate.sizing.gated import tidegate
from tidegate.sizing.measures import quantile
from tidegate.sizing.scenario import Scenario
from tidegate.sizing.simulate import policies, simulate
from tidegate.sizing.traces import read

SLOTS = 4
#: Nobody is refused: all that come are compared.
BOUND_S = 3600.0
WORDS = (
    "river", "stone", "lamp", "window", "garden", "letter", "morning", "harbour", "cloud", "paper", "bridge", "winter", "silver", "engine", "table",
    "forest", "market", "signal", "copper", "island",
)  # fmt: skip


class Told:
    """One answer: seconds from the request to each event with text, and the prompt's tokens as the engine counted them."""

    def __init__(self) -> None:
        self.at_s: list[float] = []
        self.prompt_tokens = 0

    @property
    def gap_s(self) -> float:
        """Mean time between two events, without the first third: by then the prompts of those that came together are read."""
        part = self.at_s[len(self.at_s) // 3 :]
        return (part[-1] - part[0]) / (len(part) - 1)


def prompt(chance: random.Random, words: int) -> str:
    """Words in an order that no prompt had before, so that no prefix is in the engine's cache."""
    return f"{chance.random()} " + " ".join(chance.choices(WORDS, k=words)) + ". Tell a long story with these words."


async def ask(client: httpx.AsyncClient, text: str, tokens: int) -> Told:
    began_ns = time.perf_counter_ns()
    body = {
        "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "stream": True, "temperature": 1.0,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    told = Told()
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if any(choice["delta"].get("content") for choice in event["choices"]):
                told.at_s.append((time.perf_counter_ns() - began_ns) / 1e9)
            if event.get("usage"):
                told.prompt_tokens = event["usage"]["prompt_tokens"]
    return told


async def speeds(client: httpx.AsyncClient, chance: random.Random) -> dict[str, float]:
    """`prefill`, `decode` and `half` of the engine model."""
    await ask(client, prompt(chance, 20), 8)
    alone = [await ask(client, prompt(chance, 10), 48) for _ in range(3)]
    together = [told for _ in range(3) for told in await asyncio.gather(*(ask(client, prompt(chance, 10), 48) for _ in range(SLOTS)))]
    short = [await ask(client, prompt(chance, 20), 2) for _ in range(3)]
    long = [await ask(client, prompt(chance, 400), 2) for _ in range(3)]
    one_s, four_s = (statistics.median(told.gap_s for told in some if len(told.at_s) > 6) for some in (alone, together))
    first_s, last_s = (statistics.median(told.at_s[0] for told in some) for some in (short, long))
    tokens = statistics.fmean(told.prompt_tokens for told in long) - statistics.fmean(told.prompt_tokens for told in short)
    return {"prefill": tokens / (last_s - first_s), "decode": 1 / one_s, "half": (SLOTS - 1) / max(four_s / one_s - 1, 0.01)}


async def load(client: httpx.AsyncClient, requests: int, wanted: float, engine: Speed, chance: random.Random) -> tuple[float, list[float]]:
    """An open loop: each request at its instant. Requests per second, and sorted seconds to first token."""
    asked = [(round(chance.lognormvariate(3.5, 0.8)), round(min(chance.lognormvariate(2.9, 0.6), 100)) + 2) for _ in range(requests)]
    # About 1.2 tokens a word, and some 40 for the template, the number and the sentence behind.
    rate = wanted / statistics.fmean(engine.busy_s(40 + 1.2 * words, tokens) for words, tokens in asked)
    running = []
    for words, tokens in asked:
        running.append(asyncio.create_task(ask(client, prompt(chance, words), tokens)))
        await asyncio.sleep(chance.expovariate(rate))
    return rate, sorted(told.at_s[0] for told in await asyncio.gather(*running) if told.at_s)


def flights(client: httpx.Client, folder: Path, count: int) -> tuple[Path, list[dict[str, Any]]]:
    """The newest flights, as `tidegate flights --json` would print them."""
    body = client.get("/api/v1/flights", params={"limit": count}).json()
    file = folder / "flights.json"
    file.write_text(json.dumps({"flights": body["flights"]}, separators=(",", ":")))
    return file, body["flights"]


def lap_s(flight: dict[str, Any], name: str) -> float:
    return sum(spent for part, spent in flight["laps"] if part == name) / 1e9


class Real:
    """The engine and the gateway, for as long as they run."""

    def __init__(self, home: Path, url: str, key: str, seed: int) -> None:
        self._home = home
        self._where = {"base_url": url, "headers": {"authorization": f"Bearer {key}"}}
        self._chance = random.Random(seed)

    async def speeds(self) -> dict[str, float]:
        async with httpx.AsyncClient(**self._where, timeout=600) as client:
            return await speeds(client, self._chance)

    async def run(self, found: dict[str, float], requests: int, wanted: float) -> dict[str, Any]:
        """One load, as it was."""
        async with httpx.AsyncClient(**self._where, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
            rate, real = await load(client, requests, wanted, scenario(found).engine, self._chance)
        with httpx.Client(**self._where) as client:
            file, records = flights(client, self._home, requests)
        self._trace = read(file, 100_000)
        return {
            "load": wanted, "requests": len(real), "rate": round(rate, 3),
            "mean_tokens": {name: round(statistics.fmean(getattr(one, name) for one in self._trace.arrivals), 1) for name in ("prompt", "output")},
            "first_token_s": quantiles(real), "wait_s": quantiles([lap_s(one, "queue") for one in records]),
        }  # fmt: skip

    def compared(self, run: dict[str, Any], found: dict[str, float]) -> dict[str, Any]:
        """What the simulator says of the load that was last, on an engine of these speeds."""
        said = simulate(self._trace, scenario(found), policies(["tidegate"], tidegate(AdmissionSettings(forecast_s=BOUND_S))))["tidegate"]
        return {
            "simulated_first_token_s": rounded(said.ttft_s), "simulated_wait_s": rounded(said.wait_s),
            "p95_off": round(said.ttft_s["p95"] / run["first_token_s"]["p95"] - 1, 3),
        }  # fmt: skip


def mean_speeds(measured: list[dict[str, float]]) -> dict[str, float]:
    """Before and after a load: what else the machine does, it does not do alike all the time."""
    return {name: statistics.fmean(one[name] for one in measured) for name in measured[0]}


def scenario(found: dict[str, float]) -> Scenario:
    return Scenario(slots=SLOTS, prefill=found["prefill"], decode=found["decode"], half=found["half"], chunk=256, slo=30.0)


def quantiles(values: list[float]) -> dict[str, float]:
    return {f"p{percent}": round(quantile(sorted(values), percent / 100), 3) for percent in (50, 95, 99)}


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--requests", type=int, default=80)
    options.add_argument("--loads", type=float, nargs="+", default=[0.6, 0.85])
    options.add_argument("--seed", type=int, default=0)
    asked = options.parse_args()
    from tidegate.local.engine import LocalEngine
    from tidegate.local.folder import DataFolder
    from tidegate.local.settings import LocalSettings

    with database() as (home, dsn, key):
        folder = DataFolder(home / "engine")
        folder.open(min_free_mb=0)
        local = LocalEngine(folder, LocalSettings(data=str(folder.path), engine_slots=SLOTS))
        loop = asyncio.new_event_loop()
        loop.run_until_complete(local.child.start())
        gateway, url = start_gateway(home, dsn, local.address.url, local.address.key, f"slots = {SLOTS}\n[admission]\nforecast_s = {BOUND_S}\n")
        runs: list[dict[str, Any]] = []
        try:
            real = Real(home, url, key, asked.seed)
            measured = [loop.run_until_complete(real.speeds())]
            for wanted in asked.loads:
                runs.append(loop.run_until_complete(real.run(measured[-1], asked.requests, wanted)))
                measured.append(loop.run_until_complete(real.speeds()))
                runs[-1] |= real.compared(runs[-1], mean_speeds(measured[-2:]))
        finally:
            gateway.terminate()
            gateway.wait(60)
            loop.run_until_complete(local.child.stop())
            loop.close()
            local.release()
            folder.close()
    result: dict[str, Any] = {
        "slots": SLOTS, "speeds": [rounded(found) for found in measured], "runs": runs,
        "gates": {"P95 to first token within 20 %": all(abs(run["p95_off"]) <= 0.2 for run in runs)},
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    print("written:", record("admission_real", result))


if __name__ == "__main__":
    main()
