"""A model of an engine for simulations: it works in steps, reads prompts beside the streams that run, and streams slow each other down.

A step gives every running stream one token and takes

    (1 + (b - 1) / half) / decode   seconds for b streams (weights are read once for all, each stream's KV cache for itself);

where prompts wait, it also reads up to `chunk` of their tokens, those of the oldest first (chunked prefill, Agrawal et al. 2023), which takes
1 / prefill more for each. At the end of the step that reads a prompt's last token comes the first token of its answer. Who comes while a step is
at work is part of the next one. Steps that are alike are one event here, so the model jumps from change to change.

Left out: memory (a slot always has room for its KV cache), prefix caches (but for what a trace tells of them), speculation, tokenising, the network.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections import deque
from dataclasses import dataclass

from tidegate.sizing.job import Job


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


@dataclass(slots=True)
class _Prompt:
    """One that is read, and its tokens that are left."""

    job: Job
    left: int


class Engine:
    """The engine at work. `next_ns` is when something happens next by itself, None where nothing does."""

    def __init__(self, speed: Speed) -> None:
        self.speed = speed
        self.free = speed.slots
        self.next_ns: int | None = None
        #: Those whose first token has come, until somebody looks.
        self.first: list[Job] = []
        self._reading: deque[_Prompt] = deque()
        #: (value of the counter at which it ends, number, job)
        self._streams: list[tuple[int, int, Job]] = []
        #: Tokens that each stream had that runs since it was 0: all advance alike.
        self._counter = 0
        #: The steps at work, all alike: since when, how long each takes, how many, and how many prompt tokens each reads.
        self._since_ns, self._step_ns, self._steps, self._reads = 0, 0.0, 0, 0

    def start(self, job: Job, now_ns: int) -> None:
        """Give it a slot. There must be a free one."""
        assert self.free > 0
        self.free -= 1
        job.started_ns = now_ns
        self._reading.append(_Prompt(job, job.reads))
        if self.next_ns is None:
            self._plan(now_ns)
        else:  # it is part of the step after the one at work
            done = int((now_ns - self._since_ns) / self._step_ns) if self._step_ns else 0
            self._run(min(self._steps, done + 1))

    def advance(self, now_ns: int) -> list[Job]:
        """Let the time come: the requests whose answers ended by now, in order. First tokens are stamped into their jobs, and these
        listed in `first`."""
        ended: list[Job] = []
        while self.next_ns is not None and self.next_ns <= now_ns:
            at_ns = self.next_ns
            self._end_steps(at_ns, ended)
            self._plan(at_ns)
        return ended

    def _end_steps(self, at_ns: int, ended: list[Job]) -> None:
        if self._streams:
            self._counter += self._steps
        reads = self._steps * self._reads
        done: list[Job] = []
        while self._reading and self._reading[0].left <= reads:
            prompt = self._reading.popleft()
            reads -= prompt.left
            job = prompt.job
            job.first_ns = at_ns
            self.first.append(job)
            if job.output > 1:
                heapq.heappush(self._streams, (self._counter + job.output - 1, job.number, job))
            else:
                done.append(job)
        if self._reading:
            self._reading[0].left -= reads
        while self._streams and self._streams[0][0] <= self._counter:
            done.append(heapq.heappop(self._streams)[2])
        if not self._streams:
            self._counter = 0
        for job in done:
            job.done_ns = at_ns
        self.free += len(done)
        ended += done

    def _plan(self, now_ns: int) -> None:
        """The steps until the next change."""
        speed, streams = self.speed, len(self._streams)
        if not streams and not self._reading:
            self.next_ns = None
            return
        # As many as are alike: until a prompt is read to its end, and until the first stream ends.
        steps = self._streams[0][0] - self._counter if streams else sys.maxsize
        self._reads = 0
        if self._reading:
            first = self._reading[0].left
            self._reads = speed.chunk if first >= speed.chunk else min(sum(prompt.left for prompt in self._reading), speed.chunk)
            steps = min(steps, max(1, first // speed.chunk))
        self._since_ns = now_ns
        self._step_ns = ((speed.step_s(streams) if streams else 0.0) + self._reads / speed.prefill) * 1e9
        self._run(steps)

    def _run(self, steps: int) -> None:
        self._steps = steps
        self.next_ns = self._since_ns + math.ceil(steps * self._step_ns)
