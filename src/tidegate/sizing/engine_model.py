"""A model of an engine for simulations: slots, one queue of prompts to read, and streams that slow each other down.

An engine works in steps. A step gives every running stream one token and takes

    (1 + (b - 1) / half) / decode   seconds for b streams (weights are read once for all, each stream's KV cache for itself);

where prompts wait, it also reads up to `chunk` tokens of the oldest one (chunked prefill, Agrawal et al. 2023), which takes `chunk / prefill` more.
Between two events (a prompt is read, an answer ends, a slot is taken) these speeds are constant, so the model jumps from event to event. All streams
advance alike: one counter of tokens stands for them all, and a stream ends when the counter reaches its number.

Left out: memory (a slot always has room for its KV cache), prefix caches, speculation, tokenising, the network.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from tidegate.sizing.job import Job

#: Tokens: what is left of one below it is rounding.
_NOTHING = 1e-6


@dataclass(frozen=True, slots=True)
class Speed:
    """`slots` answers at the same time; `prefill` prompt tokens/s of the whole engine; `decode` tokens/s of a stream alone; with `half` more streams
    each has half of it; `chunk` prompt tokens are read in one step beside running streams. The defaults are of the order of an 8B model in 16 bits on
    one H100 (3.35 TB/s, 990 TFLOP/s)."""

    slots: int = 16
    prefill: float = 25_000.0
    decode: float = 140.0
    half: float = 60.0
    chunk: int = 2048

    def step_s(self, streams: int) -> float:
        """Seconds of a step that reads no prompt."""
        return (1 + (streams - 1) / self.half) / self.decode

    def busy_s(self, prompt: float, output: float) -> float:
        """Seconds of the whole engine that a request takes where all slots are taken."""
        return prompt / self.prefill + max(output - 1, 0) * self.step_s(self.slots) / self.slots

    def alone_s(self, prompt: float, output: float) -> float:
        """Seconds in its slot of a request that has the engine for itself: no load makes it shorter."""
        return prompt / self.prefill + max(output - 1, 0) / self.decode


class Engine:
    """The engine at work. `next_ns` is when something happens next by itself, None where nothing does."""

    def __init__(self, speed: Speed) -> None:
        self.speed = speed
        self.free = speed.slots
        self.next_ns: int | None = None
        self._at_ns = 0
        self._reading: deque[Job] = deque()
        self._left = 0.0
        #: (value of the counter at which it ends, number, job)
        self._streams: list[tuple[float, int, Job]] = []
        self._counter = 0.0
        self._rates = (0.0, 0.0)

    def start(self, job: Job, now_ns: int) -> None:
        """Give it a slot. There must be a free one."""
        assert self.free > 0
        self._progress(now_ns)
        self.free -= 1
        job.started_ns = now_ns
        self._reading.append(job)
        if len(self._reading) == 1:
            self._left = float(job.prompt)
        self._plan()

    def advance(self, now_ns: int) -> list[Job]:
        """Let the time come: the requests whose answers ended by now, in order. First tokens are stamped into their jobs."""
        self._progress(now_ns)
        ended = []
        while self._reading and self._left <= _NOTHING:
            job = self._reading.popleft()
            job.first_ns = now_ns
            if job.output > 1:
                heapq.heappush(self._streams, (self._counter + job.output - 1, job.number, job))
            else:
                ended.append(job)
            self._left = float(self._reading[0].prompt) if self._reading else 0.0
        while self._streams and self._streams[0][0] <= self._counter + _NOTHING:
            ended.append(heapq.heappop(self._streams)[2])
        if not self._streams:
            self._counter = 0.0
        for job in ended:
            job.done_ns = now_ns
        self.free += len(ended)
        self._plan()
        return ended

    def _progress(self, now_ns: int) -> None:
        spent_s = (now_ns - self._at_ns) / 1e9
        self._at_ns = now_ns
        self._left -= self._rates[0] * spent_s
        self._counter += self._rates[1] * spent_s

    def _plan(self) -> None:
        """The speeds until the next event, and when that is."""
        speed, streams = self.speed, len(self._streams)
        step_s = speed.step_s(streams) if streams else 0.0
        read_s = speed.chunk / speed.prefill if self._reading else 0.0
        whole_s = step_s + read_s
        self._rates = (speed.chunk / whole_s if self._reading else 0.0, 1 / whole_s if streams else 0.0)
        left_s = []
        if self._reading:
            left_s.append(max(self._left, 0.0) / self._rates[0])
        if streams:
            left_s.append(max(self._streams[0][0] - self._counter, 0.0) / self._rates[1])
        self.next_ns = self._at_ns + math.ceil(min(left_s) * 1e9) if left_s else None
