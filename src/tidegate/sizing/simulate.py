"""Discrete-event simulation of a load on one engine under a virtual clock, with one policy or another at its door.

Three things move the clock: a request comes (or comes back), the engine model gets on, the policy wants to be asked. Nothing here reads a real
clock or draws from chance that is not seeded, so the same trace, scenario and seed give the same figures on every machine.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable

from tidegate.core.errors import SettingsError
from tidegate.core.plugins import nearest
from tidegate.sizing.engine_model import Engine, Speed
from tidegate.sizing.job import Job
from tidegate.sizing.measures import Measures, measure
from tidegate.sizing.policies import BASELINES, Build, Policy, Refused
from tidegate.sizing.scenario import Scenario, make_jobs
from tidegate.sizing.traces import Trace

#: Comings of one client after which it gives up.
MOST_TRIES = 20
#: Seconds that a client which comes back may be later than it was told: its timer and the way.
LATE_S = 0.1


class Simulation:
    """One load, one engine, one policy."""

    def __init__(self, jobs: list[Job], speed: Speed, policy: Policy, returns: float = 0.0, seed: int = 0) -> None:
        """`jobs` in order of coming. `returns`: share of those refused with a time that come back at it."""
        self.jobs = jobs
        self.engine = Engine(speed)
        self.policy = policy
        self._returns = returns
        self._seed = seed
        self._next = 0
        #: (when, number, job) of clients on their way back
        self._back: list[tuple[int, int, Job]] = []

    def run(self) -> None:
        """Until nothing moves any more. What happened stands in the jobs."""
        engine, policy = self.engine, self.policy
        while (now_ns := self._soonest()) is not None:
            ended = engine.advance(now_ns) if engine.next_ns is not None and engine.next_ns <= now_ns else ()
            first, engine.first = engine.first, []
            for job in first:
                policy.first(job, now_ns)
            for job in ended:
                policy.leave(job, now_ns)
            self._fill(now_ns)
            for job in self._coming(now_ns):
                job.came_ns = now_ns
                job.tries += 1
                job.refused = False
                if (refused := policy.come(job, now_ns)) is not None:
                    self._refuse(job, refused, now_ns)
                elif not policy.patient:
                    self._fill(now_ns)
            self._fill(now_ns)

    def _soonest(self) -> int | None:
        times = [self.jobs[self._next].asked_ns] if self._next < len(self.jobs) else []
        if self._back:
            times.append(self._back[0][0])
        times += [one for one in (self.engine.next_ns, self.policy.next_ns) if one is not None]
        return min(times, default=None)

    def _coming(self, now_ns: int) -> Iterable[Job]:
        """Who comes now: those who come back first."""
        while self._back and self._back[0][0] <= now_ns:
            yield heapq.heappop(self._back)[2]
        while self._next < len(self.jobs) and self.jobs[self._next].asked_ns <= now_ns:
            self._next += 1
            yield self.jobs[self._next - 1]

    def _fill(self, now_ns: int) -> None:
        while self.engine.free and (job := self.policy.take(now_ns)) is not None:
            self.engine.start(job, now_ns)
        for job, refused in self.policy.dropped():
            self._refuse(job, refused, now_ns)

    def _refuse(self, job: Job, refused: Refused, now_ns: int) -> None:
        job.refused = True
        back_s = comes_back_s(job, refused.retry_after_s, self._returns, self._seed)
        if back_s is not None:
            heapq.heappush(self._back, (now_ns + round(back_s * 1e9), job.number, job))


def comes_back_s(job: Job, retry_after_s: float | None, returns: float, seed: int) -> float | None:
    """Seconds after which a client that was refused comes back: when it was told to, and a little later. None: it stays away. `returns`: the share of
    clients that come back."""
    if retry_after_s is None or job.tries >= MOST_TRIES:
        return None
    chance = random.Random(f"{seed}/back/{job.number}/{job.tries}")  # noqa: S311 - a simulation, no secrets
    if chance.random() >= returns:
        return None
    return max(1, math.ceil(retry_after_s)) + chance.uniform(0.0, LATE_S)  # `Retry-After` is a header of whole seconds


def policies(names: Iterable[str], more: dict[str, tuple[Build, ...]] | None = None) -> dict[str, tuple[Build, ...]]:
    """The policies of these names, all where none is named; `more` are known beside the baselines. Raises SettingsError for one that is not known."""
    known = {**BASELINES, **(more or {})}
    chosen = list(names) or list(known)
    for name in chosen:
        if name not in known:
            raise SettingsError(f"There is no policy {name!r}.", hint=nearest(name, known))
    return {name: known[name] for name in known if name in chosen}


def simulate(trace: Trace, scenario: Scenario, chosen: dict[str, tuple[Build, ...]], seed: int = 0) -> dict[str, Measures]:
    """The figures of each policy on the same requests."""
    return {
        name: max((_simulate(trace, scenario, build, seed) for build in builds), key=lambda one: one.good) for name, builds in chosen.items()
    }


def _simulate(trace: Trace, scenario: Scenario, build: Build, seed: int) -> Measures:
    jobs = make_jobs(trace, scenario, seed)
    Simulation(jobs, scenario.engine, build(scenario.engine, scenario.slo), scenario.returns, seed).run()
    return measure([job for job in jobs if job.counted], scenario)
