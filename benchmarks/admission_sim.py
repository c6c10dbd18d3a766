"""Admission against what people have and what cannot be had, in virtual time: `python benchmarks/admission_sim.py [--traces FOLDER] [--seeds N]`.

Real traces of ../shared/data/traces on three engine models with 16 slots. Every figure is deterministic by seed, so the machine does not matter: only
the time that it takes does. Writes results/admission_sim.json and, for the page, results/admission_sim.svg.

Engines: `8b` is of the order of an 8B model on one H100, `1b` of a model of about an eighth of its size, `quick` answers 2,000 requests in about ten
seconds, as a fleet would. Traces: `code` is bursty code completion with long prompts and short answers, `chat` and `arxiv` have long answers, `long`
has prompts of up to 190,000 tokens. The constants of the gate were chosen on these four. `held_out` is judged by the same measure and was not
looked at when they were chosen: five other clients of the service that `chat` is of, three alone and all together, each a tenant then.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import common

from tidegate.sizing.gated import tidegate
from tidegate.sizing.measures import Measures, jain
from tidegate.sizing.plots import write
from tidegate.sizing.scenario import Scenario, parse
from tidegate.sizing.simulate import policies, simulate
from tidegate.sizing.traces import Trace, read

TRACES = {
    "code": "azure2023_code.csv", "chat": "servegen/reason__deepseek-r1__chunk-3-trace.csv", "arxiv": "vidur_arxiv_lengths.csv",
    "long": "mooncake_synthetic.jsonl.gz",
}  # fmt: skip
ENGINES = {"8b": "", "1b": ",prefill=200000,decode=300,half=100", "quick": ",prefill=600000,decode=1000,half=1000"}
BURST = "burst=2000"
#: Loads that go on: beyond what the engine can do for minutes (code at three times its speed, arxiv) or all the time (chat).
LONG_LOADS = {"code": "speed=3", "arxiv": "rate=4", "chat": "speed=1"}
#: No constant of the gate may be chosen on these.
HELD_OUT = {f"client {name}": f"servegen/reason__deepseek-r1__chunk-{name}-trace.csv" for name in ("0", "1", "10")}
#: All but the one that is `chat`.
CLIENTS = ("0", "1", "10", "2", "21")
#: About one and a half times what the engine can do.
HELD_OUT_LOADS = {"client 0": "speed=8", "client 1": "speed=24", "client 10": "speed=4", "clients": "speed=16"}
#: The tenant that floods.
FLOOD = "tenant-1"
#: Who knows no more than the gate does where callers tell nothing.
PROMPTS_ALONE = ("fifo", "edf", "shortest-prompt", "fair")
BASELINES = (*PROMPTS_ALONE, "shortest-predicted")


class Bench:
    """Runs scenarios over several seeds."""

    def __init__(self, folder: Path, seeds: int) -> None:
        self._folder = folder
        self._seeds = range(seeds)
        self._read: dict[tuple[str, int, int], Trace] = {}
        self._held_out: tempfile.TemporaryDirectory[str] | None = None

    def trace(self, name: str, scenario: Scenario, seed: int) -> Trace:
        key = (name, scenario.requests, seed)
        if key not in self._read:
            path = self._clients() if name == "clients" else self._folder / (TRACES | HELD_OUT)[name]
            self._read[key] = read(path, scenario.requests, seed)
        return self._read[key]

    def _clients(self) -> Path:
        """A folder with those that are held out, and no other."""
        if self._held_out is None:
            self._held_out = tempfile.TemporaryDirectory()
            for file in (self._folder / "servegen").iterdir():
                if file.name.rsplit("-", 2)[-2] in CLIENTS:
                    (Path(self._held_out.name) / file.name).symlink_to(file)
        return Path(self._held_out.name)

    def run(self, name: str, said: str, names: Iterable[str]) -> list[dict[str, Measures]]:
        """By seed: the figures of these policies."""
        scenario = parse(said)
        chosen = policies(names, tidegate())
        return [simulate(self.trace(name, scenario, seed), scenario, chosen, seed) for seed in self._seeds]

    def burst(self, name: str, engine: str, more: str = "") -> dict[str, Any]:
        """A burst of which nobody comes back: the gate beside all others."""
        runs = self.run(name, f"{BURST},returns=0{ENGINES[engine]}{more}", [])
        equals = BASELINES if "told=1" in more else PROMPTS_ALONE
        return compared(runs, equals)

    def returning(self, name: str, engine: str, share: float) -> dict[str, Any]:
        """A burst of which a share of the refused comes back when it was told to."""
        runs = [run["tidegate"] for run in self.run(name, f"{BURST},returns={share}{ENGINES[engine]}", ["tidegate"])]
        return {
            "returned": sum(one.returned for one in runs),
            "passed": ratio(sum(one.passed for one in runs), sum(one.returned for one in runs)),
            "in_time_then": ratio(sum(one.good_later for one in runs), sum(one.returned for one in runs)),
            "wait_p95_s": mean(one.wait_s["p95"] for one in runs),
            "took_s": mean(one.took_s for one in runs),
        }


def judged(bench: Bench, traces: Iterable[str], loads: dict[str, str]) -> dict[str, Any]:
    """All that is measured on some traces, the verdicts first. `loads`: those that go on."""
    rows = [(trace, engine) for trace in traces for engine in ENGINES]
    found = {
        "burst": {f"{trace} {engine}": bench.burst(trace, engine) for trace, engine in rows},
        "burst_told": {f"{trace} {engine}": bench.burst(trace, engine, ",told=1") for trace, engine in rows},
        "flood": {f"{trace} {engine}": bench.burst(trace, engine, ",flood=10") for trace, engine in rows if engine == "quick" and trace != "clients"},
        "returning": {f"{trace} {engine} {share:g}": bench.returning(trace, engine, share) for trace, engine in rows for share in (1.0, 0.5, 0.1)},
        "long": {trace: compared(bench.run(trace, f"{load},returns=0", []), PROMPTS_ALONE) for trace, load in loads.items()},
        "long_flood": {  # those of `clients` are tenants themselves
            trace: compared(bench.run(trace, f"{load},returns=0,flood=10", []), PROMPTS_ALONE) for trace, load in loads.items() if trace != "clients"
        },
    }
    return {"wanted": verdicts(found), **found}


def compared(runs: list[dict[str, Measures]], equals: Iterable[str]) -> dict[str, Any]:
    """Sums over the seeds; the baselines that count are `equals`."""
    good = {name: sum(run[name].good for run in runs) for name in runs[0]}
    best = max(equals, key=lambda name: good[name])
    return {
        "good": {name: round(count / len(runs), 1) for name, count in good.items()},
        "best_baseline": best,
        "of_best": ratio(good["tidegate"], good[best]),
        "of_clairvoyant": ratio(good["tidegate"], good["clairvoyant"]),
        "fifo_of_clairvoyant": ratio(good["fifo"], good["clairvoyant"]),
        "first_token_p95_s": {name: mean(run[name].ttft_s["p95"] for run in runs) for name in ("tidegate", "fifo")},
        "p95_of_fifo": mean(run["tidegate"].ttft_s["p95"] / run["fifo"].ttft_s["p95"] for run in runs),
        "refused": round(statistics.fmean(run["tidegate"].refused for run in runs), 1),
        "jain": {name: mean(run[name].jain for run in runs) for name in ("tidegate", "fifo", "fair")},
        "jain_of_equals": mean(jain(share for tenant, share in run["tidegate"].shares.items() if tenant != FLOOD) for run in runs),
        "longest_wait_s": mean(run["tidegate"].longest_wait_s for run in runs),
    }


def mean(values: Iterable[float]) -> float:
    return round(statistics.fmean(values), 3)


def ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 3) if whole else None


def verdicts(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures that are wanted, over all bursts: how many hold, and the worst."""
    bursts, told, returning = found["burst"], found["burst_told"], found["returning"]
    flood = found["flood"] | {f"{name}, going on": row for name, row in found["long_flood"].items()}

    def one(what: str, where: dict[str, Any], value: Callable[[dict[str, Any]], float | None], least: float, *, most: bool = False) -> dict[str, Any]:
        values = {name: value(row) for name, row in where.items()}
        held = [name for name, got in values.items() if got is not None and (got <= least if most else got >= least)]
        return {"wanted": what, "bound": least, "held": f"{len(held)} of {len(values)}", "values": values}

    return [
        one("P95 time to first token of the admitted / that of the FIFO pool", bursts, lambda row: row["p95_of_fifo"], 0.25, most=True),
        one("in time / in time with the FIFO pool", bursts, lambda row: ratio(row["good"]["tidegate"], row["good"]["fifo"]), 1.0),
        one("in time / the best that knows prompts alone", bursts, lambda row: row["of_best"], 0.95),
        one("in time / the best, where callers tell how long answers may be", told, lambda row: row["of_best"], 0.95),
        one("in time / clairvoyant, knowing prompts alone", bursts, lambda row: row["of_clairvoyant"], 0.6),
        one("in time / clairvoyant, where callers tell how long answers may be", told, lambda row: row["of_clairvoyant"], 0.6),
        one("passed of those who come back when told", returning, lambda row: row["passed"], 0.95),
        one("in time of those who come back when told", returning, lambda row: row["in_time_then"], 0.95),
        one("Jain's index of three equal tenants beside one with ten times as much", flood, lambda row: row["jain_of_equals"], 0.98),
        one("the same of all four", flood, lambda row: row["jain"]["tidegate"], 0.98),
        one("in time / the best, where the load goes on", found["long"], lambda row: row["of_best"], 0.95),
    ]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--traces", type=Path, default=common.ROOT.parent / "shared" / "data" / "traces")
    options.add_argument("--seeds", type=int, default=5)
    asked = options.parse_args()
    began_ns = time.perf_counter_ns()
    bench = Bench(asked.traces, asked.seeds)
    found = judged(bench, TRACES, LONG_LOADS) | {"held_out": judged(bench, HELD_OUT_LOADS, HELD_OUT_LOADS)}
    found = {"seeds": asked.seeds, **found, "seconds": round((time.perf_counter_ns() - began_ns) / 1e9)}
    for title, rows in (("", found), ("held out", found["held_out"])):
        print(title)
        for one in rows["wanted"]:
            print(f"{one['held']:>9} {'<=' if 'FIFO pool' in one['wanted'] and one['bound'] < 1 else '>='} {one['bound']:<5} {one['wanted']}")
            print("          " + ", ".join(f"{name} {value}" for name, value in one["values"].items()))
    file = common.record("admission_sim", found)
    shown = [("code", "quick"), ("chat", "quick")]
    write(file.with_suffix(".svg"), [
        (f"2,000 requests at once on 16 slots: {trace}, engine {engine}", 3.0, bench.run(trace, f"{BURST},returns=0{ENGINES[engine]}", [])[0])
        for trace, engine in shown
    ])  # fmt: skip
    print(file)


if __name__ == "__main__":
    main()
