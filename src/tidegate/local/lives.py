"""Signs of life: what workers tell their parent through memory that all share, and who of them has given none for too long.

A worker's event loop counts a word up some times a second; one that is stopped, or stuck in a call or a loop, does not. The parent measures silence
by its own looks: the time between two of them counts for no more than they are meant to be apart. So a parent that was itself stopped, a machine
that slept, and a group that was stopped and continued as a whole leave nobody accused.

    words   workers replaced, by cause | for each worker: signs given, how far it is
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal, get_args

from tidegate.core.memory import Shared

#: Seconds between two signs of a worker.
BEAT_S = 0.1
#: Seconds that a worker may be silent while it starts, which reads files and loads models, or ends, which waits for threads.
SLOW_S = 60.0
#: How many looks of the parent lie in the time of one silence, and the most seconds between two.
_LOOKS, _LOOK_S = 10, 1.0
#: Why a worker was replaced: it ended by itself, somebody killed it, or it hung and its parent killed it.
Cause = Literal["ended", "killed", "hung"]
_CAUSES: tuple[Cause, ...] = get_args(Cause)
_SIGNS, _STAGE, _OF_WORKER = 0, 1, 2
_STARTS, _SERVES, _ENDS = 0, 1, 2


class Lives:
    """To be made before the fork; each worker then says `join`."""

    def __init__(self, workers: int) -> None:
        """Raises SettingsError where this system has no memory that processes share."""
        self._words = Shared(len(_CAUSES) + workers * _OF_WORKER, workers).words
        self.workers = workers
        self._at = len(_CAUSES)

    # -- a worker

    def join(self, worker: int) -> None:
        """This process is the worker with this number, from now on."""
        self._at = self._place(worker)

    async def tell(self) -> None:
        """Give signs, as long as the event loop runs. Until cancelled."""
        while True:
            self._words[self._at + _SIGNS] += 1
            await asyncio.sleep(BEAT_S)

    def serves(self) -> None:
        """This worker takes requests from now on."""
        self._words[self._at + _STAGE] = _SERVES

    def ends(self) -> None:
        """It takes none any more, and what it still does may take time."""
        self._words[self._at + _STAGE] = _ENDS

    # -- their parent

    def begin(self, worker: int) -> None:
        """A new process gets this number."""
        self._words[self._place(worker) + _STAGE] = _STARTS

    def served(self, worker: int) -> bool:
        """Whether this process of that number ever took requests."""
        return self._words[self._place(worker) + _STAGE] != _STARTS

    def steady(self, worker: int) -> bool:
        """Whether it is past its start and not at its end."""
        return self._words[self._place(worker) + _STAGE] == _SERVES

    def signs(self, worker: int) -> int:
        """How many signs that number has given."""
        return self._words[self._place(worker) + _SIGNS]

    def replace(self, cause: Cause) -> None:
        """Count a worker that is replaced."""
        self._words[_CAUSES.index(cause)] += 1

    def replaced(self) -> dict[str, float]:
        """Workers that were replaced since the start, by cause."""
        return dict(zip(_CAUSES, map(float, self._words), strict=False))

    def figures(self) -> dict[str, Any]:
        """For /health."""
        return {"count": self.workers, "replaced": {cause: int(count) for cause, count in self.replaced().items()}}

    def _place(self, worker: int) -> int:
        return len(_CAUSES) + worker * _OF_WORKER


class Watch:
    """The parent's view of who is silent. `look` from time to time, `every_s` apart."""

    def __init__(self, lives: Lives, hung_s: float) -> None:
        """`hung_s`: seconds that a worker which serves may be silent; 0: as long as it likes, and nobody is ever found."""
        self._lives = lives
        self._hung_ns = int(hung_s * 1e9)
        self._slow_ns = int(max(hung_s, SLOW_S) * 1e9)
        self.every_s = min(_LOOK_S, hung_s / _LOOKS) if hung_s else _LOOK_S
        self._every_ns = int(self.every_s * 1e9)
        self._looked_ns: int | None = None
        self._silent: dict[int, tuple[int, int]] = {}  # by number: signs when last looked, and for how long there were no more

    def begin(self, worker: int) -> None:
        """A new process gets this number."""
        self._lives.begin(worker)
        self._silent.pop(worker, None)

    def look(self, now_ns: int) -> list[int]:
        """Those that are silent for too long. `now_ns`: of a clock that does not jump, such as time.perf_counter_ns."""
        past_ns = min(self._every_ns, now_ns - self._looked_ns) if self._looked_ns is not None else 0
        self._looked_ns = now_ns
        hung = []
        for worker in range(self._lives.workers) if self._hung_ns else ():
            signs = self._lives.signs(worker)
            before, silent_ns = self._silent.get(worker, (-1, 0))
            silent_ns = silent_ns + past_ns if signs == before else 0
            self._silent[worker] = signs, silent_ns
            if silent_ns > (self._hung_ns if self._lives.steady(worker) else self._slow_ns):
                hung.append(worker)
        return hung
