"""The slots of a lane over all workers: never more than there are, and none idle where somebody waits."""

from __future__ import annotations

import copy
import multiprocessing
import os
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tidegate.admission.gate import Lane, Place
from tidegate.admission.pool import Pool, clear, fair, words_for
from tidegate.admission.settings import AdmissionSettings
from tidegate.core.errors import Busy
from tidegate.core.memory import Own, Shared

_forks = multiprocessing.get_context("fork")


def joined(memory: Shared, worker: int) -> Shared:
    mine = copy.copy(memory)
    mine.join(worker)
    return mine


class Worker:
    """A worker's lane, with as many slots as its pool says."""

    def __init__(self, memory: Own, total: int) -> None:
        self.pool = Pool(memory, 0)
        self.lane = Lane("m", self.pool.resize(total, None), AdmissionSettings(forecast_s=600), lambda: 1)
        self.places: list[Place] = []

    def enter(self) -> None:
        self.places.append(self.lane.enter(("standard", "t"), 1.0, "k", 10, 10))

    def look(self) -> None:
        slots = self.pool.settle(self.lane)
        if slots != self.lane.slots:
            self.lane.resize(slots)

    @property
    def wanted(self) -> int:
        return self.lane.running + self.lane.queue.waiting


@given(st.integers(0, 200), st.lists(st.integers(0, 100), min_size=1, max_size=12))
def test_parts_are_max_min_fair(total: int, wanted: list[int]) -> None:
    """All of it is dealt out, one to each at least; nobody has less than another unless it wants no more, but for the rest that cannot be divided."""
    parts = fair(total, wanted)
    assert sum(parts) == max(total, len(wanted))
    assert min(parts) >= 1
    for part, wish in zip(parts, wanted, strict=True):
        if part < wish:
            assert part >= max(parts) - 1


@pytest.mark.parametrize(("slots", "workers"), [(16, 1), (16, 3), (4, 4), (2, 4), (0, 2)])
def test_where_nobody_wants_more_all_have_the_same(slots: int, workers: int) -> None:
    """Together they have exactly the engine's slots, where those are at least as many as the workers; no bound is none for all."""
    memory = Shared(words_for(1, workers), workers)
    pools = [Pool(joined(memory, worker), 0) for worker in range(workers)]
    shares = [pool.resize(slots, None) for pool in pools]
    assert sum(shares) == (max(slots, workers) if slots else 0)
    assert max(shares) - min(shares) <= 1


class Machine(RuleBasedStateMachine):
    """Three workers, and requests that come, end and are looked after in any order; a worker that is killed; slots that change, also to fewer than
    there are workers, each of which keeps one."""

    @initialize(total=st.integers(1, 9))
    def build(self, total: int) -> None:
        self.memory = Shared(words_for(1, 3), 3)
        self.total = total
        self.most = max(3, total)  # what may be held; after a cut what was held before, less what was given up since
        self.workers = [Worker(joined(self.memory, worker), total) for worker in range(3)]

    @rule(which=st.integers(0, 2), count=st.integers(1, 6))
    def come(self, which: int, count: int) -> None:
        for _ in range(count):
            self.workers[which].enter()

    @rule(which=st.integers(0, 2), first=st.booleans())
    def end(self, which: int, first: bool) -> None:
        worker = self.workers[which]
        if worker.places:
            worker.places.pop(0 if first else -1).leave(20)

    @rule(which=st.integers(0, 2))
    def look(self, which: int) -> None:
        self.workers[which].look()

    @rule(which=st.integers(0, 2))
    def kill(self, which: int) -> None:
        clear(self.memory, which)
        self.workers[which] = Worker(joined(self.memory, which), self.total)

    @rule(total=st.integers(1, 9))
    def change(self, total: int) -> None:
        """An instance is drained or comes back: every worker hears of it."""
        self.total = total
        for worker in self.workers:
            worker.lane.resize(worker.pool.resize(total, worker.lane))

    @rule()
    def settles(self) -> None:
        """After a few looks of each, what waits anywhere has every slot that nobody runs on, within what is fair."""
        for _ in range(6):
            for worker in self.workers:
                worker.look()
        for worker in self.workers:
            assert worker.lane.running <= worker.lane.slots
        idle = self.total - sum(worker.lane.running for worker in self.workers)
        if any(worker.lane.queue.waiting for worker in self.workers):
            kept = sum(1 for worker in self.workers if not worker.wanted)  # one stays with each that wants none
            assert idle <= kept
        if not any(worker.wanted for worker in self.workers):
            assert sum(worker.lane.slots for worker in self.workers) == max(self.total, 3)

    @invariant()
    def never_more_than_there_are(self) -> None:
        workers = getattr(self, "workers", [])
        if workers:
            held = sum(worker.lane.slots for worker in workers)
            assert held <= max(self.most, self.total)
            self.most = max(held, self.total, 3)
            assert all(1 <= worker.lane.slots >= worker.lane.running for worker in workers)


TestMachine = Machine.TestCase
TestMachine.settings = hypothesis_settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_an_idle_workers_slots_are_anothers_and_come_back() -> None:
    """One worker has all requests: all slots but one are its own after a look of each. The other wants its part again: it has it as answers end."""
    memory = Shared(words_for(1, 2), 2)
    one, other = Worker(joined(memory, 0), 8), Worker(joined(memory, 1), 8)
    one.look()
    other.look()
    assert (one.lane.slots, other.lane.slots) == (4, 4)
    for _ in range(10):
        one.enter()
    for worker in (one, other, one):
        worker.look()
    assert (one.lane.slots, one.lane.running, other.lane.slots) == (7, 7, 1)
    for _ in range(4):
        other.enter()
    for _ in range(6):
        one.places.pop(0).leave(20)
        other.look()
        one.look()
    other.look()
    assert other.lane.running == 4
    assert one.lane.slots + other.lane.slots == 8


def test_who_was_sent_away_wanted_a_slot_too() -> None:
    """Requests that are refused because the wait would be too long make their worker take more slots, though nobody waits."""
    memory = Shared(words_for(1, 2), 2)
    one, other = Worker(joined(memory, 0), 8), Worker(joined(memory, 1), 8)
    one.lane = Lane("m", one.pool.settle(None), AdmissionSettings(forecast_s=0.000_001), lambda: 1)
    for _ in range(4):
        one.enter()
    for _ in range(2):
        with pytest.raises(Busy):
            one.enter()
    one.look()
    other.look()
    one.look()
    assert one.lane.slots >= 6


class Slow(Pool):
    """Lets others run between what it sees and what it does."""

    def __init__(self, memory: Own, number: int) -> None:
        super().__init__(memory, number)
        self._words = _Yielding(self._words)  # type: ignore[assignment]


class _Yielding:
    def __init__(self, words: memoryview) -> None:
        self.words = words

    def __getitem__(self, at: int | slice) -> int | memoryview:
        if isinstance(at, slice) and at.start == 0:
            found = memoryview(self.words[at].tobytes()).cast("q")
            os.sched_yield()
            return found
        return self.words[at]

    def __setitem__(self, at: int, value: int) -> None:
        self.words[at] = value


def test_workers_that_race_hold_no_more_than_there_are() -> None:
    """Four processes give and take as fast as they can: at no look is more held than there is."""
    memory, seen = Shared(words_for(1, 4), 4), _forks.Queue()

    def race(worker: int) -> None:
        pool, lane = Slow(joined(memory, worker), 0), Lane("m", 1, AdmissionSettings(), lambda: 1)
        most = 0
        for number in range(3000):
            lane.running = (number * (worker + 3)) % 13
            lane.resize(pool.resize(12, lane))
            lane.running = 0
            pool.settle(lane)
            with suppress(TimeoutError), memory:  # where the lock is not to be had in time, there is no look
                most = max(most, sum(max(1, held) for held in memory.words[0::2].tolist()))
        seen.put(most)

    processes = [_forks.Process(target=race, args=(worker,)) for worker in range(4)]
    for process in processes:
        process.start()
    told = [seen.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert max(told) <= 12


def test_one_process_has_all() -> None:
    """Where there are no other workers."""
    pool = Pool(Own(words_for(1, 1)), 0)
    call: Callable[[int], int] = lambda total: pool.resize(total, None)  # noqa: E731
    assert [call(total) for total in (0, 1, 7, 0, 3)] == [0, 1, 7, 0, 3]
