"""Is what the simulator says true where the engine's speeds are known? The gateway as users run it before the scripted engine, under an open loop.

    .venv/bin/python benchmarks/admission_real.py --scripted [--seeds 0 1] [--loads code-0.6 ...]

The scripted engine works in steps that all its answers share (`tidegate scripted --speeds`), so its speeds do not change with the machine's. For each
load the requests are sent to a gateway that was just started: key check, gate with its usual settings, spool and PostgreSQL are those of users. The
simulator is given the same requests at the instants at which they were sent, and the engine's speeds, and nothing else of what happened. Runs are
added to results/admission_real.json.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import httpx
from common import RESULTS, ROOT, add_key, commit, database, machine
from open_loop import OpenLoop, guessed

from tidegate.sizing.gated import tidegate
from tidegate.sizing.job import Job
from tidegate.sizing.measures import Measures, measure
from tidegate.sizing.scenario import Scenario, make_jobs, parse
from tidegate.sizing.simulate import Simulation
from tidegate.sizing.traces import Trace, read

TRACES = ROOT.parent / "shared" / "data" / "traces"
#: An engine on which a few hundred requests with the lengths of the trace take less than a minute.
ENGINES = {
    "code": ("azure2023_code.csv", "slots=8,prefill=16000,decode=100,half=20,chunk=2048"),
    "papers": ("vidur_arxiv_lengths.csv", "slots=16,prefill=50000,decode=250,half=16,chunk=2048"),
}
REQUESTS = 240
QUANTILES = ("p50", "p95", "p99")
#: A load is simulated so many times, each time with all arrivals moved by up to so many seconds.
FORECASTS, JITTER_S = 9, 0.001
(GATE,) = tidegate()["tidegate"]
#: How much is tolerated between forecast and measurement.
TOLERANCE = 0.2
#: What is below this many seconds is not compared as a ratio: a timer's and a socket's jitter is part of it.
LEAST_S = 0.02


@dataclass(frozen=True)
class Load:
    """Requests of a trace: `of_capacity` as a Poisson process at that share of what the engine can do, or at the trace's own times, as many times as
    fast as gives that share; 0: all at one instant. `told`: callers say how long answers may be."""

    trace: str
    of_capacity: float = 0.0
    own_times: bool = False
    told: bool = False

    def scenario(self) -> tuple[Trace, Scenario]:
        file, engine = ENGINES[self.trace]
        trace = read(TRACES / file, REQUESTS)
        plain = parse(engine)
        most = 1 / statistics.fmean(plain.engine.busy_s(one.prompt, one.output) for one in trace.arrivals)
        said = f"{engine},requests={REQUESTS},told={int(self.told)}"
        if not self.of_capacity:
            said += f",burst={REQUESTS},warm=48"
        elif self.own_times:
            own = len(trace.arrivals) / trace.arrivals[-1].at_s
            said += f",speed={self.of_capacity * most / own:.3f}"
        else:
            said += f",rate={self.of_capacity * most:.3f}"
        return trace, parse(said)


LOADS = {
    "code-0.6": Load("code", 0.6), "code-0.9": Load("code", 0.9, told=True), "code-1.3": Load("code", 1.3),
    "code-own-times-0.8": Load("code", 0.8, own_times=True), "code-burst": Load("code"),
    "papers-0.7": Load("papers", 0.7), "papers-1.2": Load("papers", 1.2, told=True), "papers-burst": Load("papers"),
}  # fmt: skip


@contextlib.contextmanager
def engine(speeds: str) -> Iterator[str]:
    """The scripted engine, and its address."""
    slots, _, rest = speeds.partition(",")
    argv = [sys.executable, "-m", "tidegate.cli", "scripted", "--speeds", rest, "--slots", slots.removeprefix("slots=")]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield "http://" + process.stdout.readline().removeprefix("listening ").strip()
    finally:
        process.terminate()
        process.wait(30)


def gateway(home: Path, dsn: str, section: str) -> AbstractContextManager[str]:
    """A gateway whose checks of the engine are over: they would be part of the load."""
    return common.gateway(home, dsn, section, is_checked)


def is_checked(url: str) -> bool:
    return "checked_unix_s" in httpx.get(f"{url}/health").json()["engines"]["real"]


def body(job: Job) -> dict[str, Any]:
    """A prompt of as many words as it has tokens, different from all others, which orders its answer's length."""
    orders = f"##n={job.output}##"
    words = [orders, f"n{job.number}", *["abc"] * (job.prompt - 2)]
    said: dict[str, Any] = {
        "model": "scripted", "messages": [{"role": "user", "content": " ".join(words[: max(1, job.prompt)])}], "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    return said | ({"max_tokens": job.told} if job.told else {})


def run(load: Load, seed: int, home: Path, dsn: str, keys: dict[str, str]) -> dict[str, Any]:
    trace, scenario = load.scenario()
    jobs = make_jobs(trace, scenario, seed)
    with contextlib.ExitStack() as parts:
        url = parts.enter_context(engine(ENGINES[load.trace][1]))
        section = f'adapter = "scripted"\nurl = "{url}"\nmodels = ["scripted"]\nslots = {scenario.slots}'
        door = parts.enter_context(gateway(home, dsn, section))
        driver = OpenLoop(door, keys, body, scenario.returns, seed)
        with common.used_by_others() as others:
            asyncio.run(driver.run(jobs))
        driver.read_flights()
    forecasts = forecast(trace, scenario, seed, driver.sent_ns)
    real = measure([job for job in jobs if job.counted], scenario)
    return {
        "scenario": load.trace, "rate": round(scenario.rate, 2), "speed": scenario.speed, "cores_used_by_others": others.cores,
        **compared(forecasts, real),
    }  # fmt: skip


def forecast(trace: Trace, scenario: Scenario, seed: int, sent_ns: dict[int, int]) -> list[Measures]:
    """What the simulator says of the requests at the instants at which they were sent, several times: where many are refused and come back, a
    millisecond on the way changes who is. The first is without jitter. Nothing else of the run is known to it."""
    found = []
    for number in range(FORECASTS):
        jobs, chance = make_jobs(trace, scenario, seed), random.Random(f"{seed}/jitter/{number}")
        for job in jobs:
            job.guessed = guessed(body(job))
            job.asked_ns = job.came_ns = sent_ns[job.number] + round(chance.uniform(0.0, JITTER_S if number else 0.0) * 1e9)
        jobs.sort(key=lambda job: job.asked_ns)
        Simulation(jobs, scenario.engine, GATE(scenario.engine, scenario.slo), scenario.returns, seed).run()
        found.append(measure([job for job in jobs if job.counted], scenario))
    return found


def compared(forecasts: list[Measures], real: Measures) -> dict[str, Any]:
    """The forecast (the median of several) beside the measurement, and how far the forecast is off."""
    times = {
        name: {
            "forecast": {q: round(statistics.median(getattr(one, field)[q] for one in forecasts), 4) for q in QUANTILES},
            "measured": {q: round(getattr(real, field)[q], 4) for q in QUANTILES},
        }
        for name, field in (("first_token_s", "ttft_s"), ("wait_s", "wait_s"))
    }
    counts = {
        name: {"forecast": statistics.median(getattr(one, name) for one in forecasts), "measured": getattr(real, name)}
        for name in ("asked", "good", "returned", "refused")
    }  # fmt: skip
    first, last = times["first_token_s"], sorted(one.ttft_s["p95"] for one in forecasts)
    return {
        **times, **counts, "forecasts_p95_s": [round(last[0], 4), round(last[-1], 4)],
        "off": {q: off(first["forecast"][q], first["measured"][q]) for q in QUANTILES},
        "goodput_off": round((counts["good"]["forecast"] - real.good) / real.asked, 3),
    }  # fmt: skip


def off(forecast: float, measured: float) -> float:
    """By how much the forecast is too large (+) or too small (-), as a share of what was measured."""
    return round((forecast - measured) / max(measured, LEAST_S), 3)


def main(names: list[str], seeds: list[int]) -> None:
    file = RESULTS / "admission_real.json"
    result = json.loads(file.read_text()) if file.exists() else {}
    part = result.setdefault("scripted", {"requests": REQUESTS, "engines": {name: said for name, (_, said) in ENGINES.items()}, "runs": {}})
    with database() as (home, dsn, _):
        keys = {f"tenant-{number}": add_key(dsn, f"tenant-{number}") for number in range(1, 5)}
        for name in names or LOADS:
            for seed in seeds:
                found = run(LOADS[name], seed, home, dsn, keys)
                print(name, seed, json.dumps(found), flush=True)
                part["runs"][f"{name} seed {seed}"] = {"date": time.strftime("%Y-%m-%d"), "commit": commit(), "machine": machine(), **found}
                part["gates"] = gates(part["runs"])
                file.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(part["gates"], indent=1))


def gates(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What is wanted, in how many of the runs it was so, and where not."""
    wanted = {
        "P95 to first token within 20 %": lambda run: abs(run["off"]["p95"]) <= TOLERANCE,
        "P50 to first token within 20 %": lambda run: abs(run["off"]["p50"]) <= TOLERANCE,
        "goodput within 5 points": lambda run: abs(run["goodput_off"]) <= 0.05,
    }
    return {
        what: {"held": f"{sum(map(holds, runs.values()))} of {len(runs)}", "missed": [name for name, run in runs.items() if not holds(run)]}
        for what, holds in wanted.items()
    }
