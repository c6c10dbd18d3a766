"""The book that workers share: exact whoever counts, and whole whoever dies."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.dying import Dying, in_child

from tidegate.admission.book import HEAD, Book
from tidegate.admission.limits import Limits, Ticket
from tidegate.admission.settings import Allowance, LimitSettings
from tidegate.admission.shared import SharedBook
from tidegate.core.ask import Caller
from tidegate.core.errors import LimitsDown, RateLimited

_forks = multiprocessing.get_context("fork")
LIMITS = LimitSettings(
    requests_per_minute=7, tokens_per_minute=500, concurrent=3, most_subjects=64, tenants={"t": Allowance(requests_per_minute=11, concurrent=5)}
)
KEYS = [Caller(f"k{number}", "t" if number < 3 else "other") for number in range(4)]


class Clock:
    ns = 10**12

    def __call__(self) -> int:
        return self.ns


def records(book: SharedBook) -> list[int]:
    return list(book.words[HEAD : book._regions[0]])


def a_run_that_dies(after: int) -> tuple[int, list[int], list[int]]:
    """A second worker runs one request and is killed before its write number `after`: how it ended, the records before and after all that."""
    clock = Clock()
    book = SharedBook(64, 2)
    book.join(0)
    mine = Limits(LIMITS, book=book, clock_ns=clock)
    mine.admit(KEYS[0], 40).settle(30)
    mine.admit(KEYS[0], 100)  # runs all the time, and must not be lost
    before = records(book)

    def one_run() -> None:
        book.join(1)
        theirs = Limits(LIMITS, book=book, clock_ns=clock)
        theirs._plan(KEYS[0], "")
        book.words = Dying(book.words, after)  # type: ignore[assignment]
        theirs.admit(KEYS[0], 60).settle(90)

    code = in_child(one_run)
    book.reclaim(1)
    return code, before, records(book)


def test_a_death_at_any_write_leaves_everything_as_before_or_as_after() -> None:
    """A worker that is killed anywhere in taking, running or settling: what its run held comes back, or its run is settled; nothing between."""
    code, before, after = a_run_that_dies(10**6)
    assert code == 0
    assert before != after
    seen: list[list[int]] = []
    while True:
        code, before, now = a_run_that_dies(len(seen))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        assert now in (before, after)
        seen.append(now)
    assert len(seen) > 15  # each word, and each note of it
    assert seen[-1] == before
    assert now == after


def test_one_worker_that_died_with_the_lock_stops_nobody() -> None:
    """The next one gets it, also without anybody having reclaimed."""
    book = SharedBook(64, 2)
    book.join(0)

    def die() -> None:
        book._enter()
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(die) == -signal.SIGKILL
    Limits(LIMITS, book=book, clock_ns=Clock()).admit(KEYS[0], 1).settle(1)
    assert in_child(die) == -signal.SIGKILL
    assert book.reclaim(1) == 0


def test_a_lock_that_is_not_given_back_is_an_error_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker was stopped with it: requests are refused as such, and what ended meanwhile is booked with the next that gets the lock."""
    monkeypatch.setattr("tidegate.admission.shared._WAIT_NS", 20_000_000)
    book = SharedBook(64, 2)
    book.join(0)
    limits = Limits(LIMITS, book=book, clock_ns=Clock())
    running = limits.admit(KEYS[0], 10)
    ours, theirs = multiprocessing.Pipe()

    def hold() -> None:
        book._enter()
        theirs.send(b"held")
        theirs.recv()

    gc.freeze()
    holder = _forks.Process(target=hold)
    holder.start()
    ours.recv()
    with pytest.raises(LimitsDown, match="held by a worker that does not run"):
        limits.admit(KEYS[0], 10)
    running.settle(10)
    holder.kill()
    holder.join()
    for _ in range(3):
        limits.admit(KEYS[0], 1).settle(1)
    assert book.words[limits._plans["k0"].seats[0].used] == 0


def test_processes_at_the_same_time_pass_exactly_the_limit() -> None:
    """Four hammer one key: of requests exactly as many pass as may, never more than may run do, and in the end everything is given back."""
    book = SharedBook(64, 4)
    rules = LimitSettings(requests_per_minute=600, concurrent=3)
    clock = Clock()
    counts = _forks.Queue()

    def hammer(worker: int) -> None:
        book.join(worker)
        limits = Limits(rules, book=book, clock_ns=clock)
        passed = busy = most = 0
        for _ in range(2000):
            try:
                ticket = limits.admit(KEYS[0], 1)
            except RateLimited as refused:
                busy += "at a time" in refused.message
                continue
            passed += 1
            most = max(most, book.words[limits._plans["k0"].seats[0].used])
            ticket.settle(1)
        counts.put((passed, most))

    gc.freeze()
    workers = [_forks.Process(target=hammer, args=(worker,)) for worker in range(4)]
    for worker in workers:
        worker.start()
    told = [counts.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert sum(passed for passed, _ in told) == 600
    assert max(most for _, most in told) <= 3
    mine = Limits(rules, book=book, clock_ns=clock)
    with pytest.raises(RateLimited, match="600 requests per minute"):
        mine.admit(KEYS[0], 1)
    assert book.words[mine._plans["k0"].seats[0].used] == 0


def test_more_keys_than_are_counted_are_refused_and_idle_ones_make_room() -> None:
    """As in one process; and each is found again in the same place by all."""
    clock = Clock()
    book = SharedBook(64, 1)
    book.join(0)
    limits = Limits(LimitSettings(requests_per_minute=1, most_subjects=64), book=book, clock_ns=clock)
    passed = 0
    for number in range(120):
        with contextlib.suppress(RateLimited):
            limits.admit(Caller(f"k{number}", "t"), 1).settle(1)
            passed += 1
    assert 64 <= passed <= 86  # a table has a little more room than it promises
    other = Limits(LimitSettings(requests_per_minute=1, most_subjects=64), book=book, clock_ns=clock)
    with pytest.raises(RateLimited, match="1 requests per minute"):
        other.admit(Caller("k0", "t"), 1)
    for round_ in range(10):
        clock.ns += 61 * 10**9
        for number in range(64):
            limits.admit(Caller(f"{round_}-{number}", "t"), 1).settle(1)
    assert book.count() <= 86


def test_a_record_that_was_given_to_another_is_looked_for_anew() -> None:
    """One worker's memory of where a key is may be old: it counts for that key, never for the one that is there now."""
    clock = Clock()
    book = SharedBook(16, 1)
    book.join(0)
    rules = LimitSettings(requests_per_minute=1, most_subjects=16)
    one, other = Limits(rules, book=book, clock_ns=clock), Limits(rules, book=book, clock_ns=clock)
    one.admit(Caller("old", "t"), 1).settle(1)
    clock.ns += 61 * 10**9
    with contextlib.suppress(RateLimited):
        for number in range(120):
            other.admit(Caller(f"new{number}", "t"), 1).settle(1)
    with pytest.raises(RateLimited, match="More keys"):
        one.admit(Caller("old", "t"), 1)
    clock.ns += 61 * 10**9
    one.admit(Caller("old", "t"), 1)
    with pytest.raises(RateLimited, match="1 requests per minute"):
        other.admit(Caller("old", "t"), 1)


# -- two processes do as one


class Worker:
    """A forked worker that does as it is told: `(instant, what, argument)` over a pipe."""

    def __init__(self, book: SharedBook, number: int) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        gc.freeze()
        self.process: BaseProcess = _forks.Process(target=self._run, args=(book, number, theirs), daemon=True)
        self.process.start()
        theirs.close()

    @staticmethod
    def _run(book: SharedBook, number: int, pipe: Connection) -> None:
        book.join(number)
        clock = Clock()
        limits = Limits(LIMITS, book=book, clock_ns=clock)
        tickets: dict[int, Ticket] = {}
        with contextlib.suppress(EOFError):
            while True:
                clock.ns, what, argument = pipe.recv()
                pipe.send(act(limits, tickets, what, argument))

    def do(self, ns: int, what: str, argument: Any) -> Any:
        self.pipe.send((ns, what, argument))
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def act(limits: Limits, tickets: dict[int, Ticket], what: str, argument: Any) -> Any:
    """One step, and what a caller sees of it."""
    if what == "admit":
        number, key, tokens = argument
        try:
            tickets[number] = limits.admit(KEYS[key], tokens)
        except RateLimited as refused:
            # How long runs take is each worker's own measure.
            return refused.message, None if "at a time" in refused.message else refused.retry_after_s
        return sorted(tickets[number].headers())
    number, used = argument
    ticket = tickets.pop(number)
    if used is None:
        ticket.refund()
    else:
        ticket.settle(used)
    return "ended"


class TwoWorkers(RuleBasedStateMachine):
    """Whatever two workers do in whatever order, and whichever of them is killed: callers see what one process would have shown them."""

    @initialize()
    def begin(self) -> None:
        self.book = SharedBook(64, 2)
        self.workers = [Worker(self.book, number) for number in range(2)]
        self.clock = Clock()
        self.clock.ns = 10**12
        self.model = Limits(LIMITS, book=Book(64), clock_ns=self.clock)
        self.tickets: dict[int, Ticket] = {}
        self.running: dict[int, int] = {}
        self.number = 0

    @rule(worker=st.integers(0, 1), key=st.integers(0, 3), tokens=st.integers(-5, 700))
    def admit(self, worker: int, key: int, tokens: int) -> None:
        self.number += 1
        step = ("admit", (self.number, key, tokens))
        seen = self.workers[worker].do(self.clock.ns, *step)
        assert seen == act(self.model, self.tickets, *step)
        if isinstance(seen, list):
            self.running[self.number] = worker

    @rule(pick=st.randoms(use_true_random=False), used=st.none() | st.integers(0, 900))
    def end(self, pick: Any, used: int | None) -> None:
        if self.running:
            number = pick.choice(sorted(self.running))
            worker = self.running.pop(number)
            step = ("end", (number, used))
            assert self.workers[worker].do(self.clock.ns, *step) == act(self.model, self.tickets, *step)

    @rule(seconds=st.floats(0, 70))
    def wait(self, seconds: float) -> None:
        self.clock.ns += int(seconds * 1e9)

    @rule(worker=st.integers(0, 1))
    def kill(self, worker: int) -> None:
        self.workers[worker].kill()
        held = [number for number, of in self.running.items() if of == worker]
        assert self.book.reclaim(worker) == len(held)
        for number in held:
            del self.running[number]
            self.tickets.pop(number).refund()
        self.workers[worker] = Worker(self.book, worker)

    @invariant()
    def as_many_run_as_are_counted(self) -> None:
        if hasattr(self, "model"):
            for plan in self.model._plans.values():
                for seat in plan.seats:
                    place = self.book._find(seat.who, self.clock.ns)
                    assert self.book.words[place + 1] == self.model.book.words[seat.used]

    def teardown(self) -> None:
        for worker in getattr(self, "workers", ()):
            worker.kill()


TwoWorkers.TestCase.settings = settings(
    max_examples=12, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
test_two_workers_do_as_one_process = TwoWorkers.TestCase


@pytest.fixture(autouse=True)
def _unfreeze() -> Iterator[None]:
    yield
    gc.unfreeze()
