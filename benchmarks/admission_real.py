"""Is what the simulator says true? The gateway as users run it under an open-loop load, and the simulator's forecast of the same load.

    .venv/bin/python benchmarks/admission_real.py [--requests 220] [--rates 1.2 1.6] [--seeds 0]
    .venv/bin/python benchmarks/admission_real.py --scripted                    # see admission_scripted.py

The embedded llama.cpp with four slots, behind a gateway that refuses nobody. Requests come as a Poisson process, with prompts and answers of mixed
lengths, none like another. The gateway's own flights are the trace of the simulator: the same instants, prompts and answers. The engine's speeds are
fitted to when it was given each request, to its first and to its last token, never to how long anybody waited in the queue. Two forecasts of the
time to first token:

    later     the speeds are those of the first half of the run, what is compared is the second half: a forecast in the true sense, of the machine too
    known     the engine is as fast in each stretch of STRETCH_S as its own steps say that it was, what is compared is the whole run: whether
              queue, order and engine model are right, whatever the machine does meanwhile

How much of the processors others had is told beside it. Runs are added to results/admission_real.json. All on 127.0.0.1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import admission_scripted
from admission_scripted import TOLERANCE, gateway, off
from common import RESULTS, commit, database, embedded_engine, machine, used_by_others
from open_loop import OpenLoop

from tidegate.admission.settings import AdmissionSettings
from tidegate.sizing.engine_model import Engine, Speed
from tidegate.sizing.fitted import Step, fit, steps
from tidegate.sizing.gated import Gated
from tidegate.sizing.job import Job
from tidegate.sizing.measures import quantile
from tidegate.sizing.simulate import Simulation
from tidegate.sizing.traces import Arrival, read

SLOTS = 4
#: As src/tidegate/local/engine_child.py starts it.
CHUNK = 256
#: Nobody is refused: all that come are compared.
BOUND_S = 3600.0
#: Where the search for speeds begins.
GUESS = Speed(SLOTS, 150.0, 75.0, 2.0, CHUNK)
STRETCH_S = 2.0
WORDS = (
    "river", "stone", "lamp", "window", "garden", "letter", "morning", "harbour", "cloud", "paper", "bridge", "winter", "silver", "engine", "table",
    "forest", "market", "signal", "copper", "island",
)  # fmt: skip


def make_load(requests: int, rate: float, seed: int) -> tuple[list[Job], dict[int, str]]:
    """Jobs at their instants, and the text of each: words in an order that no other has, so that only the chat template is in the engine's cache."""
    chance = random.Random(seed)
    jobs, texts = [], {}
    at_s = 0.0
    for number in range(requests):
        words, tokens = round(min(chance.lognormvariate(3.0, 0.8), 200)), round(min(chance.lognormvariate(2.3, 0.6), 60)) + 2
        texts[number] = f"{chance.random()} {' '.join(chance.choices(WORDS, k=words))}. Tell a long story with these words."
        jobs.append(Job(number, "bench", words, tokens, 0.0, tokens, round(at_s * 1e9), 0))
        at_s += chance.expovariate(rate)
    return jobs, texts


class Drifting(Engine):
    """An engine whose speed is another in each stretch of time."""

    def __init__(self, speeds: list[Speed], window_s: float) -> None:
        self._speeds = speeds
        self._window_ns = window_s * 1e9
        super().__init__(speeds[0])

    def _plan(self, now_ns: int) -> None:
        self.speed = self._speeds[min(int(now_ns / self._window_ns), len(self._speeds) - 1)]
        super()._plan(now_ns)


def forecast(jobs: list[Job], arrivals: list[Arrival], engine: Engine) -> list[float]:
    """Seconds to first token of each, as the simulator has them behind the gateway's own gate."""
    copies = [
        Job(job.number, job.tenant, one.prompt, one.output, 0.0, job.told, job.came_ns, job.came_ns, cached=one.cached, guessed=job.guessed)
        for job, one in zip(jobs, arrivals, strict=True)
    ]
    simulation = Simulation(sorted(copies, key=lambda job: job.came_ns), engine.speed, Gated(SLOTS, AdmissionSettings(forecast_s=BOUND_S), {}))
    simulation.engine = engine
    simulation.run()
    return [job.ttft_s for job in copies]


def slowness(done: list[Step], speed: Speed) -> list[float]:
    """By stretch: how many times as long as it should have its steps took; where next to nothing ran, as in the one before."""
    count = int(done[-1].ended_s / STRETCH_S) + 1
    took_s, due_s = [0.0] * count, [0.0] * count
    for step in done:
        for number in range(int(step.began_s / STRETCH_S), int(step.ended_s / STRETCH_S) + 1):
            inside_s = min(step.ended_s, (number + 1) * STRETCH_S) - max(step.began_s, number * STRETCH_S)
            if inside_s > 0:
                took_s[number] += inside_s
                due_s[number] += step.due_s(speed) * inside_s / (step.ended_s - step.began_s)
    found = [1.0]
    for took, due in zip(took_s, due_s, strict=True):
        found.append(took / due if due and took > STRETCH_S / 10 else found[-1])
    return found[1:]


def compared(forecasts: list[float], measured: list[float]) -> dict[str, Any]:
    told = {q: (quantile(sorted(forecasts), share), quantile(sorted(measured), share)) for q, share in (("p50", 0.5), ("p95", 0.95))}
    return {
        "forecast_s": {q: round(one, 3) for q, (one, _) in told.items()}, "measured_s": {q: round(one, 3) for q, (_, one) in told.items()},
        "off": {q: off(*both) for q, both in told.items()},
    }  # fmt: skip


def judge(jobs: list[Job], arrivals: list[Arrival]) -> dict[str, Any]:
    """What came of a run: both forecasts beside what was measured."""
    whole = fit(arrivals, GUESS)
    half = len(arrivals) // 2
    first, second = (fit(part, whole.speed) for part in (arrivals[:half], arrivals[half:]))
    slow = slowness(steps(arrivals, CHUNK), whole.speed)
    speeds = [replace(whole.speed, prefill=whole.speed.prefill / one, decode=whole.speed.decode / one) for one in slow]
    ttfts_s = [job.ttft_s for job in jobs]
    return {
        "requests": len(jobs), "first_token_s": {f"p{share}": round(quantile(sorted(ttfts_s), share / 100), 3) for share in (50, 95, 99)},
        "waited_for_a_slot": sum(job.wait_s > 0.001 for job in jobs), "fit_wrong": round(whole.wrong, 3),
        "speeds": {name: told(one.speed) for name, one in (("whole", whole), ("first half", first), ("second half", second))},
        "slowness": {f"p{share}": round(quantile(sorted(slow), share / 100), 2) for share in (5, 50, 95)},
        "later": compared(forecast(jobs, arrivals, Engine(first.speed))[half:], ttfts_s[half:]),
        "known": compared(forecast(jobs, arrivals, Drifting(speeds, STRETCH_S)), ttfts_s),
    }  # fmt: skip


def told(speed: Speed) -> dict[str, float]:
    return {"prefill": round(speed.prefill, 1), "decode": round(speed.decode, 1), "half": round(speed.half, 2)}


def run(requests: int, rate: float, seed: int, home: Path, door: str, key: str) -> dict[str, Any]:
    jobs, texts = make_load(requests, rate, seed)

    def body(job: Job) -> dict[str, Any]:
        return {
            "model": "model", "messages": [{"role": "user", "content": texts[job.number]}], "max_tokens": job.told, "stream": True,
            "temperature": 1.0, "stream_options": {"include_usage": True},
        }  # fmt: skip

    driver = OpenLoop(door, {"bench": key}, body, 0.0, seed)
    with used_by_others() as others:
        asyncio.run(driver.run(jobs))
    flights, file = driver.read_flights(), home / "flights.json"
    file.write_text(json.dumps({"flights": flights}, separators=(",", ":")))
    jobs = [driver.flights[one["id"]] for one in flights]  # in the order of the trace
    return {"rate": rate, "seed": seed, "cores_used_by_others": others.cores, **judge(jobs, list(read(file, requests).arrivals))}


@contextlib.contextmanager
def llama(home: Path) -> Iterator[str]:
    """The embedded engine, as a section of the settings."""
    with embedded_engine(home, engine_slots=SLOTS) as local:
        at = local.address
        yield f'adapter = "llama_cpp"\nurl = "{at.url}"\napi_key = "{at.key}"\nmodels = ["model"]\nslots = {SLOTS}'


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--requests", type=int, default=220)
    options.add_argument("--rates", type=float, nargs="+", default=[1.2, 1.6], help="requests a second")
    options.add_argument("--seeds", type=int, nargs="+", default=[0])
    options.add_argument("--scripted", action="store_true", help="the scripted engine in place of llama.cpp")
    options.add_argument("--loads", nargs="+", default=[], choices=list(admission_scripted.LOADS), help="with --scripted: these loads alone")
    asked = options.parse_args()
    if asked.scripted:
        admission_scripted.main(asked.loads, asked.seeds)
        return
    file = RESULTS / "admission_real.json"
    result = json.loads(file.read_text()) if file.exists() else {}
    part = result.setdefault("llama_cpp", {"slots": SLOTS, "stretch_s": STRETCH_S, "runs": []})
    with database() as (home, dsn, key), llama(home) as section:
        for rate in asked.rates:
            for seed in asked.seeds:
                with gateway(home, dsn, f"{section}\n[admission]\nforecast_s = {BOUND_S}\n") as door:
                    found = run(asked.requests, rate, seed, home, door, key)
                print(json.dumps(found), flush=True)
                part["runs"].append({"date": time.strftime("%Y-%m-%d"), "commit": commit(), "machine": machine(), **found})
                part["gates"] = gates(part["runs"])
                file.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(part["gates"], indent=1))


def gates(runs: list[dict[str, Any]]) -> dict[str, str]:
    return {
        f"P95 to first token within 20 %, {how}": f"{sum(abs(run[how]['off']['p95']) <= TOLERANCE for run in runs)} of {len(runs)}"
        for how in ("later", "known")
    }


if __name__ == "__main__":
    main()
