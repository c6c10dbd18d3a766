"""What admission costs a request, in CPU time of this process: `python benchmarks/admission.py`; writes results/admission.json.

A gate under a virtual clock, with loads below and beyond what its slots can do. Counted is everything that the gate does for a request: entering,
waiting, being refused, having its turn, its first token, leaving. The clock of the CPU is read once for thousands of requests: the events of a run
are recorded first, and then replayed on a fresh gate with nothing else between.
"""

from __future__ import annotations

import gc
import heapq
import math
import random
import time
from collections.abc import Callable

import common

from tidegate.admission.gate import Gate, Place
from tidegate.admission.settings import AdmissionSettings
from tidegate.core.ask import Caller
from tidegate.core.errors import Busy

REQUESTS = 10_000
ROUNDS = 7
SECOND = 1_000_000_000
#: The part of a request's time in its slot after which its first token is there.
FIRST = 0.1
#: Slots, tenants, and the load as a share of what the slots can do.
LOADS = ((16, 1, 0.3), (16, 20, 0.3), (16, 1, 0.95), (16, 20, 0.95), (16, 1, 1.5), (16, 20, 1.5), (16, 200, 1.5), (256, 20, 1.5))


class Load:
    """Requests with long-tailed lengths that come by chance; of those that are refused, all come back when they were told to."""

    def __init__(self, load: float, tenants: int, slots: int) -> None:
        chance = random.Random(1)
        self.slots = slots
        self.callers = [Caller(f"k{n}", f"t{n}") for n in range(tenants)]
        self.jobs = [(int(chance.lognormvariate(7, 1)) + 1, chance.expovariate(1)) for _ in range(REQUESTS)]
        self.begins: list[int] = []
        at_s = 0.0
        for _ in range(REQUESTS):
            at_s += chance.expovariate(load * slots)
            self.begins.append(int(at_s * SECOND))
        #: (instant, job, 1 where it comes, 2 where its first token is there, 0 where it leaves), as it happened.
        self.events: list[tuple[int, int, int]] = []
        self.refused = self.waited = self.came = 0
        self._record()

    def _record(self) -> None:
        now = [1]
        gate = Gate(AdmissionSettings(), clock_ns=lambda: now[0])
        gate.open(["m"], self.slots)
        ahead = [(at_ns, n, 1) for n, at_ns in enumerate(self.begins)]
        heapq.heapify(ahead)
        places: dict[int, Place] = {}

        def back(n: int, busy: Busy) -> None:
            self.refused += 1
            assert busy.retry_after_s is not None
            heapq.heappush(ahead, (now[0] + math.ceil(busy.retry_after_s) * SECOND, n, 1))

        def turn(n: int) -> None:
            error = places[n].error
            if isinstance(error, Busy):
                back(n, error)
            else:
                heapq.heappush(ahead, (now[0] + int(self.jobs[n][1] * FIRST * SECOND), n, 2))
                heapq.heappush(ahead, (now[0] + int(self.jobs[n][1] * SECOND), n, 0))

        while ahead:
            event = heapq.heappop(ahead)
            now[0], n, comes = event
            self.events.append(event)
            if comes == 2:
                places[n].first_token()
                continue
            if not comes:
                places.pop(n).leave(self.jobs[n][0] + 100, 100)
                continue
            self.came += 1
            try:
                places[n] = self._enter(gate, n)
            except Busy as busy:
                back(n, busy)
                continue
            if places[n].waits:
                self.waited += 1
                places[n].on_turn = lambda n=n: turn(n)  # type: ignore[misc]
            else:
                turn(n)

    def _enter(self, gate: Gate, n: int) -> Place:
        return gate.enter("m", self.callers[n % len(self.callers)], prompt_tokens=self.jobs[n][0], request=str(n), deadline_ns=1 << 62, tells=True)

    def us(self) -> float:
        """CPU microseconds of the gate for each that comes, the best of some rounds: other work on the same cores only ever adds."""
        return round(min(self._replay(Gate) - self._replay(None) for _ in range(ROUNDS)) / 1000 / self.came, 2)

    def _replay(self, make: Callable[..., Gate] | None) -> int:
        now = [1]
        gate = Gate(AdmissionSettings(), clock_ns=lambda: now[0])
        gate.open(["m"], self.slots)
        places: list[Place | None] = [None] * REQUESTS
        jobs, callers, count = self.jobs, self.callers, len(self.callers)
        begin_ns = time.process_time_ns()
        for now[0], n, comes in self.events:
            if make is None:  # what the replay itself costs
                _nothing(callers[n % count], prompt_tokens=jobs[n][0], request=str(n), deadline_ns=1 << 62)
                continue
            if comes == 1:
                try:
                    places[n] = gate.enter("m", callers[n % count], prompt_tokens=jobs[n][0], request=str(n), deadline_ns=1 << 62, tells=True)
                except Busy:
                    places[n] = None
            elif (place := places[n]) is not None:
                if comes:
                    place.first_token()
                else:
                    place.leave(jobs[n][0] + 100, 100)
        return time.process_time_ns() - begin_ns


def _nothing(caller: Caller, *, prompt_tokens: int, request: str, deadline_ns: int) -> None:
    """As many arguments."""


def unbounded() -> float:
    """Where no engine has slots."""
    gate, caller = Gate(AdmissionSettings()), Caller("k", "t")
    gate.open(["m"], 0)
    took = []
    for _ in range(ROUNDS):
        begin_ns = time.process_time_ns()
        for _ in range(REQUESTS):
            gate.enter("m", caller, prompt_tokens=500, request="digest", deadline_ns=1 << 62)
        took.append(time.process_time_ns() - begin_ns)
    return round(min(took) / 1000 / REQUESTS, 2)


def main() -> None:
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # as the gateway has it
    rows = [{"load": 0.0, "slots": 0, "tenants": 1, "us": unbounded(), "waited": 0.0, "refused": 0.0}]
    for slots, tenants, load in LOADS:
        one = Load(load, tenants, slots)
        rows.append({
            "load": load, "slots": slots, "tenants": tenants, "us": one.us(), "waited": round(one.waited / one.came, 3),
            "refused": round(one.refused / one.came, 3),
        })  # fmt: skip
        print(rows[-1], flush=True)
    common.record("admission", {"rows": rows})


if __name__ == "__main__":
    main()
