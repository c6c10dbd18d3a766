"""The slots of a lane over all workers of a machine: each holds some of them, and what one does not need another has.

Nothing is handed over: a worker that holds more than its fair part gives up what is idle, and one that holds less takes what nobody holds. Both
happen under the memory's lock, so that all together never hold more than there is. What is fair goes by what each has under way and waiting: max-min,
and what is left over is spread evenly. A worker always holds one, also while it is started again.

    words   for each worker: slots that it holds (0, where it never looked, is 1), slots that it could use
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from tidegate.admission.gate import Lane
from tidegate.core.memory import Own

#: Looks for which one counts that was sent away.
_LOOKS = 10
_HELD, _WANTED, _OF_WORKER = 0, 1, 2


def words_for(lanes: int, workers: int) -> int:
    """Words that so many lanes take."""
    return lanes * workers * _OF_WORKER


def fair(total: int, wanted: Sequence[int]) -> list[int]:
    """Max-min fair parts of `total`, at least 1 each: nobody has more than it wants while somebody has less, and of what is left all have more."""
    parts = [1] * len(wanted)
    left = max(0, total - len(wanted))
    for more in (wanted, [total + 1] * len(wanted)):
        order = sorted(range(len(wanted)), key=lambda worker: (more[worker], worker))
        for done, worker in enumerate(order):
            part = min(max(0, more[worker] - parts[worker]), left // (len(order) - done))
            parts[worker] += part
            left -= part
    return parts


class Pool:
    """The slots of one lane, as this worker sees them. `total`: how many there are; 0: no bound, and each has none."""

    def __init__(self, memory: Own, number: int) -> None:
        """`number`: of the lane in this memory."""
        self._memory = memory
        self._words = memory.words[number * memory.workers * _OF_WORKER :][: memory.workers * _OF_WORKER]
        self._at = memory.worker * _OF_WORKER
        self._refused = self._sent_away = self._looks = 0
        self.total = 0

    @property
    def held(self) -> int:
        """Slots of this worker."""
        return max(1, self._words[self._at + _HELD]) if self.total else 0

    def resize(self, total: int, lane: Lane | None) -> int:
        """So many are there from now on. As `settle`."""
        self.total = total
        return self.settle(lane)

    def settle(self, lane: Lane | None) -> int:
        """Give up what is idle here and wanted elsewhere, take what is free and wanted here; gives the slots of this worker from now on."""
        if not self.total:
            return 0
        running, wanted = (lane.running, self._wanted(lane)) if lane is not None else (0, 1)
        if lane is not None and lane.lent:  # beside what is lent, one slot stays
            running = max(1, running) + lane.lent
        words, at = self._words, self._at
        with suppress(OSError), self._memory:
            words[at + _WANTED] = wanted
            part = fair(self.total, words[_WANTED::_OF_WORKER].tolist())[self._memory.worker]
            all_held = [max(1, held) for held in words[_HELD::_OF_WORKER].tolist()]
            held = all_held[self._memory.worker]
            if held > part:
                held = min(held, max(part, running))
            else:
                held += max(0, min(part - held, self.total - sum(all_held)))
            words[at + _HELD] = held
            if lane is not None:
                lane.claimed = max(0, held - part)
        return self.held

    def _wanted(self, lane: Lane) -> int:
        """What runs, what waits, and what was sent away lately: it would have run."""
        refused, self._refused = lane.refused - self._refused, lane.refused
        if refused:
            self._sent_away, self._looks = refused, _LOOKS
        elif self._looks:
            self._looks -= 1
        else:
            self._sent_away = 0
        return max(1, lane.running + lane.queue.waiting + self._sent_away)


def clear(memory: Own, worker: int) -> None:
    """The worker with this number is dead: it keeps one slot of each lane, for when it is back."""
    with suppress(OSError), memory:
        for at in range(worker * _OF_WORKER, len(memory.words), memory.workers * _OF_WORKER):
            memory.words[at + _HELD] = memory.words[at + _WANTED] = 0
