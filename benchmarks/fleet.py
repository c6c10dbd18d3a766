"""Four instances of one model under recorded loads: the shipped choice beside round robin and fewest requests, and what the choice costs.
Writes results/fleet.json.

    .venv/bin/python benchmarks/fleet.py [--traces ../shared/data/traces]

The waits are those of an engine model under a virtual clock, driven by the very code of `engines/routing.py`: deterministic, whatever the machine.
The prefix hits are counted in blocks of 512 tokens as the trace names them, of which each instance keeps the newest; `one instance` has the cache of
all four. Microseconds are this machine's.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import itertools
import json
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

from tidegate.core.ask import Ask, Caller, Deadline, EngineCall
from tidegate.core.chunk import Usage
from tidegate.core.flight import Flight
from tidegate.core.memory import Shared
from tidegate.engines import fleet as fleet_module
from tidegate.engines import member as member_module
from tidegate.engines import routing as routing_module
from tidegate.engines.fleet import Fleet
from tidegate.engines.homes import PLACES
from tidegate.engines.ledger import words_for
from tidegate.engines.member import Run
from tidegate.engines.settings import EngineSettings, FleetSettings
from tidegate.sizing.engine_model import Engine, Speed
from tidegate.sizing.job import Job
from tidegate.sizing.traces import Arrival, read

INSTANCES, REQUESTS = 4, 6000
SPEED = Speed()
LOADS = (0.5, 0.7, 0.85)
#: Blocks of 512 tokens in the KV cache of one instance.
BLOCKS = 2000
Choose = Callable[[int, Ask], int]


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def time_ns(self) -> int:
        return self.now_ns


class Sized:
    """A body of so many bytes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


def fleet_of(count: int, workers: int = 1) -> Fleet:
    """As one of so many workers has it."""
    fields = {"url": "http://127.0.0.1:1", "models": ["m"], "conformance": "off"}
    memory, homes = (Shared(words_for(count, workers), workers), Shared(PLACES, workers)) if workers > 1 else (None, None)
    return Fleet({f"e{n}": EngineSettings.model_validate(fields) for n in range(count)}, FleetSettings(), memory=memory, homes=homes)


def ask_of(prompt: int, told: int, first: str = "", second: str = "") -> Ask:
    ask = Ask(Flight("/bench"), Caller("k", "t"), Deadline(1e6))
    messages = [{"role": "system", "content": first}, {"role": "user", "content": second}]
    if first:  # a conversation that goes on
        messages.append({"role": "assistant", "content": ""})
    ask.call = EngineCall("chat", "m", {"messages": messages, "max_tokens": told}, Sized(4 * prompt))  # type: ignore[arg-type]
    return ask


def simulate(arrivals: list[Arrival], choice: str, clock: Clock) -> dict[str, float]:
    """Seconds to first token: P50, P95, P99."""
    fleet = fleet_of(INSTANCES)
    members = list(fleet.members.values())
    engines = [Engine(SPEED) for _ in members]
    waiting: list[deque[Job]] = [deque() for _ in members]
    runs: dict[int, Run] = {}
    running = [0] * INSTANCES
    turn = itertools.count()
    chance = random.Random(0)
    jobs: list[Job] = []
    events: list[tuple[int, int, int, int]] = [(int(one.at_s * 1e9), 0, n, -1) for n, one in enumerate(arrivals)]
    heapq.heapify(events)
    number = itertools.count(len(events))

    def see(which: int) -> None:
        next_ns = engines[which].next_ns
        if next_ns is not None:
            heapq.heappush(events, (max(next_ns, clock.now_ns + 1), 1, next(number), which))

    while events:
        clock.now_ns, kind, which_one, which = heapq.heappop(events)
        if kind == 0:
            one = arrivals[which_one]
            job = Job(which_one, "t", one.prompt, one.output, 0.0, 0, clock.now_ns, clock.now_ns)
            jobs.append(job)
            ask = ask_of(one.prompt, 4096, second=f"{which_one}")
            assert ask.call is not None
            if choice == "fleet":
                member, _ = fleet.find("m", ask)
                which = members.index(member)
                runs[which_one] = Run(member, ask.call)
            elif choice == "fewest requests":
                which = min(range(INSTANCES), key=lambda n: (running[n], chance.random()))
            else:
                which = next(turn) % INSTANCES
            running[which] += 1
            waiting[which].append(job)
        else:
            next_ns = engines[which].next_ns
            if next_ns is None or next_ns > clock.now_ns:
                continue
            for job in engines[which].advance(clock.now_ns):
                running[which] -= 1
                if choice == "fleet":
                    runs.pop(job.number).end(None, Usage(job.prompt, job.output))
        while waiting[which] and engines[which].free:
            engines[which].start(waiting[which].popleft(), clock.now_ns)
        see(which)
    waits = sorted(job.ttft_s for job in jobs)
    return {f"p{p}": round(waits[min(len(waits) - 1, len(waits) * p // 100)], 3) for p in (50, 95, 99)}


def scaled(arrivals: tuple[Arrival, ...], load: float) -> list[Arrival]:
    """The same arrivals, faster or slower, so that all instances together are so busy."""
    work_s = sum(SPEED.busy_s(one.prompt, one.output) for one in arrivals) / INSTANCES
    factor = work_s / load / max(arrivals[-1].at_s, 1e-9)
    return [Arrival(one.at_s * factor, one.prompt, one.output) for one in arrivals]


def hits(file: Path, choice: str, clock: Clock) -> float:
    """Share of prompt blocks that the chosen instance has in its cache."""
    fleet = fleet_of(1 if choice == "one instance" else INSTANCES)
    members = list(fleet.members.values())
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in members]
    running: deque[tuple[int, Run]] = deque()
    found = total = 0
    with gzip.open(file, "rt") as lines:
        for count, line in enumerate(itertools.islice(lines, REQUESTS)):
            record = json.loads(line)
            clock.now_ns = count * 10_000_000
            while running and running[0][0] <= count:
                running.popleft()[1].end(None)
            ids = record["hash_ids"]
            ask = ask_of(record["input_length"], record["output_length"], f"{ids[0]}", f"{ids[1:2]}")
            assert ask.call is not None
            member = members[count % INSTANCES] if choice == "round robin" else fleet.find("m", ask)[0]
            running.append((count + 12, Run(member, ask.call)))
            cache = caches[members.index(member)]
            for block in ids:
                found += block in cache
                total += 1
                cache[block] = None
                cache.move_to_end(block)
            while len(cache) * len(members) > BLOCKS * INSTANCES:
                cache.popitem(last=False)
    return round(found / total, 3)


def costs() -> dict[str, dict[str, float]]:
    """Microseconds for one choice, and for the account of one call."""
    said: dict[str, dict[str, float]] = {}
    ask = Ask(Flight("/bench"), Caller("k", "t"), Deadline(1e6))
    messages = [{"role": "system", "content": "You are a helper. " * 20}, {"role": "user", "content": "hello " * 50}]
    call = ask.call = EngineCall("chat", "m", {"messages": messages, "max_tokens": 100})
    for count, workers in ((1, 1), (2, 1), (4, 1), (16, 1), (1, 2), (2, 2), (4, 2), (16, 2), (4, 8)):
        fleet = fleet_of(count, workers)
        member = fleet.members["e0"]
        said[f"{count}" if workers == 1 else f"{count}, {workers} workers"] = {
            "choose_us": common.least_us(lambda fleet=fleet: fleet.find("m", ask), 200, 400),  # type: ignore[misc]
            "account_us": common.least_us(lambda member=member: Run(member, call).end(None), 200, 400),  # type: ignore[misc]
        }
    return said


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--traces", type=Path, default=common.ROOT.parent / "shared" / "data" / "traces")
    folder = parser.parse_args().traces
    cost = costs()
    clock = Clock()
    for module in (fleet_module, member_module, routing_module):
        module.time = clock  # type: ignore[attr-defined]
    waits: dict[str, Any] = {}
    for name, file in {"azure code": "azure2023_code.csv", "mooncake": "mooncake_synthetic.jsonl.gz"}.items():
        arrivals = read(folder / file, REQUESTS).arrivals
        for load in LOADS:
            timed = scaled(arrivals, load)
            waits[f"{name}, {load:.0%}"] = {choice: simulate(timed, choice, clock) for choice in ("fleet", "fewest requests", "round robin")}
            print(f"{name}, {load:.0%}: {waits[f'{name}, {load:.0%}']}")
    prefix = {name: hits(folder / "mooncake_synthetic.jsonl.gz", name, clock) for name in ("fleet", "round robin", "one instance")}
    print(f"cost: {cost}\nprefix hits: {prefix}")
    common.record("fleet", {"instances": INSTANCES, "requests": REQUESTS, "first_token_s": waits, "prefix_hits": prefix, "cost": cost})


if __name__ == "__main__":
    main()
