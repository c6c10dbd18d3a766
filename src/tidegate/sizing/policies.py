"""Who gets the next free slot: what people have, what papers propose, what cannot be had, and what we ship.

Each policy is asked in the same way: `come` for every request, `take` for as long as a slot is free, `leave` when an answer ended. Only `tidegate`
runs the code of the gateway (`gated.py`); the others are a few lines each, so that they can be checked by eye.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tidegate.sizing.engine_model import Speed
from tidegate.sizing.job import Job

#: Makes a policy for an engine and an SLO in seconds.
Build = Callable[[Speed, float], "Policy"]
#: Orders requests: the smallest goes first. What it may look at makes the policy.
Key = Callable[[Job], float]


@dataclass(frozen=True, slots=True)
class Refused:
    """Not let in. `retry_after_s`: what the client is told; None: nothing, it does not come back."""

    retry_after_s: float | None


class Policy(Protocol):
    """Decides for one engine under the simulator's clock."""

    #: It sees everything that comes at one instant before it decides: nobody outside a simulation does.
    patient: bool
    #: When it wants to be asked again by itself, in ns; None: never.
    next_ns: int | None

    def come(self, job: Job, now_ns: int) -> Refused | None:
        """A request comes. None: it is let in, at once or to wait."""
        ...

    def take(self, now_ns: int) -> Job | None:
        """Who gets the slot that is free now; None: nobody wants it."""
        ...

    def first(self, job: Job, now_ns: int) -> None:
        """The first token of its answer is there: its prompt is read."""
        ...

    def leave(self, job: Job, now_ns: int) -> None:
        """An answer ended; its slot is free."""
        ...

    def dropped(self) -> list[tuple[Job, Refused]]:
        """Who was let in and then refused while it waited, since the last call."""
        ...


class Ordered:
    """One queue, smallest key first, in order of coming among equals. `late`: who is passed over for good when its turn comes."""

    patient: bool = False
    next_ns: int | None = None

    def __init__(self, key: Key, late: Callable[[Job, int], bool] | None = None, patient: bool = False) -> None:
        self.patient = patient
        self._key = key
        self._late = late
        self._waiting: list[tuple[float, int, Job]] = []
        self._came = 0
        self._dropped: list[tuple[Job, Refused]] = []

    def come(self, job: Job, now_ns: int) -> Refused | None:
        self._came += 1
        heapq.heappush(self._waiting, (self._key(job), self._came, job))
        return None

    def take(self, now_ns: int) -> Job | None:
        while self._waiting:
            job = heapq.heappop(self._waiting)[2]
            if self._late is None or not self._late(job, now_ns):
                return job
            self._dropped.append((job, Refused(None)))
        return None

    def first(self, job: Job, now_ns: int) -> None:
        pass

    def leave(self, job: Job, now_ns: int) -> None:
        pass

    def dropped(self) -> list[tuple[Job, Refused]]:
        dropped, self._dropped = self._dropped, []
        return dropped


class FairQueue(Ordered):
    """Start-time fair queueing between tenants (Goyal, Vin and Cheng 1996), first in first out within one; the cost is the predicted work.

    A request's start tag is max(virtual time, finish tag of its tenant's last one), its finish tag that plus its cost; the smallest start tag goes
    first, and the virtual time is the start tag of the last one that went.
    """

    def __init__(self, cost: Key) -> None:
        super().__init__(self._start_tag)
        self._cost = cost
        self._virtual = 0.0
        self._finish: dict[str, float] = {}

    def _start_tag(self, job: Job) -> float:
        start = max(self._virtual, self._finish.get(job.tenant, 0.0))
        self._finish[job.tenant] = start + self._cost(job)
        return start

    def take(self, now_ns: int) -> Job | None:
        if self._waiting:
            self._virtual = self._waiting[0][0]
        return super().take(now_ns)


def fifo(speed: Speed, slo_s: float) -> Policy:
    """A pool of threads with an endless queue in front: what people have."""
    return Ordered(lambda job: 0.0)


def edf(speed: Speed, slo_s: float) -> Policy:
    """Earliest deadline first, with firm deadlines: who is late when its turn comes is refused."""
    return Ordered(lambda job: job.came_ns + slo_s * 1e9, late=lambda job, now_ns: now_ns > job.came_ns + slo_s * 1e9)


def shortest_prompt(speed: Speed, slo_s: float) -> Policy:
    """The shortest prompt first."""
    return Ordered(lambda job: job.prompt)


def shortest_predicted(speed: Speed, slo_s: float) -> Policy:
    """The shortest time in a slot first, as a predictor of answer lengths would guess it."""
    return Ordered(lambda job: speed.alone_s(job.prompt, job.predicted))


def fair(speed: Speed, slo_s: float) -> Policy:
    """Fair queueing between tenants; within one, first in first out."""
    return FairQueue(lambda job: speed.alone_s(job.prompt, job.predicted))


class Clairvoyant(Ordered):
    """Knows every answer's length, sees all who come at one instant before it decides, and starts nobody who would be late.

    Two things are short: slots, and the engine's reading. `slots` is how much the first counts: requests go by slots x (seconds in a slot alone) +
    (1 - slots) x (seconds of reading), the smallest first.
    """

    def __init__(self, speed: Speed, slo_s: float, slots: float) -> None:
        def key(job: Job) -> float:
            return slots * speed.alone_s(job.reads, job.output) + (1 - slots) * job.reads / speed.prefill

        super().__init__(key, late=self._would_be_late, patient=True)
        self._speed = speed
        self._slo_ns = slo_s * 1e9
        self._reading: list[Job] = []

    def take(self, now_ns: int) -> Job | None:
        job = super().take(now_ns)
        if job is not None:
            self._reading.append(job)
        return job

    def _would_be_late(self, job: Job, now_ns: int) -> bool:
        self._reading = [one for one in self._reading if one.first_ns < 0]
        ahead = sum(one.reads for one in self._reading[1:])  # of the first nobody knows how much is read
        return now_ns + (ahead + job.reads) / self._speed.prefill * 1e9 > job.came_ns + self._slo_ns


def clairvoyant(slots: float) -> Build:
    """What is not to be had: all knowledge. No order is proven best where two things are short, so several are tried."""
    return lambda speed, slo_s: Clairvoyant(speed, slo_s, slots)


#: In the order of the table. Where there are several builds, the one counts that did best on the very load: a choice made with hindsight.
BASELINES: dict[str, tuple[Build, ...]] = {
    "fifo": (fifo,), "edf": (edf,), "shortest-prompt": (shortest_prompt,), "shortest-predicted": (shortest_predicted,), "fair": (fair,),
    "clairvoyant": tuple(clairvoyant(slots) for slots in (0.0, 0.1, 0.25, 0.5, 1.0)),
}
