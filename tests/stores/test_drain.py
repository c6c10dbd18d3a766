"""The drain brings every flight to the store once, whoever is killed and whatever is down meanwhile."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from blockbuster import blockbuster_ctx
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.waiting import until

from tidegate.core.errors import StoreDown
from tidegate.core.ports import FlightJson, FlightStore, KeptText
from tidegate.stores.drain import Drain
from tidegate.stores.segment import REJECTED, SUFFIX, listed
from tidegate.stores.settings import SpoolSettings
from tidegate.stores.spool import Spool
from tidegate.stores.systems.memory import Memory

from .flights import a_flight, a_text, as_json

QUICK = SpoolSettings(batch_wait_s=0.01, backoff_max_s=0.02, batch_flights=3)


class Moody(Memory):
    """A store with moods: `fine`; `down`; `deaf`: writes, then seems to have failed; and it refuses flights whose model is `poison`."""

    def __init__(self) -> None:
        super().__init__()
        self.mood = "fine"
        self.writes = 0

    async def write_flights(self, flights: Sequence[FlightJson], kept: Sequence[KeptText]) -> None:
        self.writes += 1
        if self.mood == "down":
            raise StoreDown("It is down.")
        if any(b'"poison"' in bytes(flight) for flight in flights):
            raise ValueError("refused")
        await super().write_flights(flights, kept)
        if self.mood == "deaf":
            raise StoreDown("The answer was lost.")


@asynccontextmanager
async def running(drain: Drain) -> AsyncIterator[None]:
    task = asyncio.create_task(drain.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path, QUICK)


async def test_flights_and_kept_texts_reach_the_store(spool: Spool, store: FlightStore) -> None:
    """More than one batch, over every system that keeps flights."""
    flights = [a_flight(number) for number in range(10)]
    for flight in flights:
        spool.finished(flight, a_text(flight.id))
    assert await Drain(spool, store).drain_now(10)
    assert await store.list_flights() == flights[::-1]
    assert await store.get_kept(flights[0].id) is not None


async def test_it_runs_by_itself(spool: Spool) -> None:
    """What is appended while it runs arrives without a call."""
    store = Moody()
    async with running(Drain(spool, store)):
        for number in range(5):
            spool.finished(a_flight(number))
        await until(lambda: len(store._flights) == 5)
        spool.finished(a_flight(6))
        await until(lambda: len(store._flights) == 6)


async def test_it_goes_on_by_itself_when_the_store_is_back(spool: Spool, caplog: pytest.LogCaptureFixture) -> None:
    """While the store is down the figures say why and the log says it once; then everything arrives."""
    store = Moody()
    store.mood = "down"
    flight = a_flight()
    spool.finished(flight)
    async with running(Drain(spool, store)):
        await until(lambda: store.writes > 3)
        assert spool.figures()["last_drain_error"] == "It is down."
        assert spool.figures()["records_waiting"] == 1
        assert len(caplog.records) == 1
        store.mood = "fine"
        await until(lambda: spool.figures()["records_waiting"] == 0)
        await until(lambda: spool.figures()["last_drain_error"] is None)
    assert await store.list_flights() == [flight]


async def test_a_lost_answer_writes_nothing_twice(spool: Spool) -> None:
    """The store took the batch but seemed to fail: the next try finds it there."""
    store = Moody()
    store.mood = "deaf"
    spool.finished(a_flight())
    drain = Drain(spool, store)
    assert not await drain.drain_now(10)
    store.mood = "fine"
    assert await drain.drain_now(10)
    assert len(await store.list_flights()) == 1


async def test_a_refused_flight_is_set_aside(spool: Spool, tmp_path: Path) -> None:
    """Those around it arrive; it lies in a file of its own and can be tried again under another name."""
    store = Moody()
    flights = [a_flight(number, model="poison" if number == 1 else "m") for number in range(4)]
    for flight in flights:
        spool.finished(flight)
    assert await Drain(spool, store).drain_now(10)
    assert await store.list_flights() == [flights[3], flights[2], flights[0]]
    assert spool.figures()["rejected"] == 1
    (rejected,) = (path for path, _ in listed(tmp_path) if path.suffix == REJECTED)
    os.rename(rejected, rejected.with_suffix(SUFFIX))
    patient = Memory()
    assert await Drain(Spool(tmp_path, QUICK), patient).drain_now(10)
    assert await patient.list_flights() == [flights[1]]


async def test_a_shutdown_is_bounded_in_time(spool: Spool) -> None:
    """A store that hangs holds `drain_now` no longer than it was given; the flight waits on disk."""

    class Hanging(Memory):
        async def write_flights(self, flights: Sequence[FlightJson], kept: Sequence[KeptText]) -> None:
            await asyncio.Event().wait()

    spool.finished(a_flight())
    assert not await Drain(spool, Hanging()).drain_now(0.05)
    assert spool.figures()["records_waiting"] == 1


async def test_a_cancelled_drain_leaves_nothing_half_done(spool: Spool) -> None:
    """Cancelled at any of its steps, the next one brings everything."""
    store = Moody()
    flights = [a_flight(number) for number in range(20)]
    for flight in flights:
        spool.finished(flight)
    drain = Drain(spool, store)
    for steps in range(20):
        task = asyncio.create_task(drain.run())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert await drain.drain_now(10)
    assert await store.list_flights() == flights[::-1]


async def test_the_event_loop_is_never_blocked(spool: Spool) -> None:
    """Appends are one short write; all other file work of spool and drain is done beside the loop."""
    store = Moody()
    with blockbuster_ctx():
        drain = Drain(spool, store)
        for number in range(10):
            spool.finished(a_flight(number))
        spool.figures()
        assert await drain.drain_now(10)
        store.mood = "down"
        spool.finished(a_flight(11))
        assert not await drain.drain_now(10)
    assert spool.lost == 0
    assert len(store._flights) == 10


async def test_expired_texts_are_forgotten(spool: Spool) -> None:
    """The drain sees to it, the first time at once."""
    store = Moody()
    flight = a_flight()
    await store.write_flights(as_json(flight), [a_text(flight.id, left_s=0.02)])
    async with running(Drain(spool, store)):
        await until(lambda: spool.drain_error is None and store.writes == 1)
        await asyncio.sleep(0.03)
    drain = Drain(spool, store)
    async with running(drain):
        await until(lambda: not store._kept)


class Crashes(RuleBasedStateMachine):
    """Any order of appends, kills (with a torn last write), drains and outages."""

    @initialize()
    def begin(self) -> None:
        self.home = tempfile.TemporaryDirectory()
        self.loop = asyncio.new_event_loop()
        self.store = Moody()
        self.written: list[str] = []
        self.asked: list[str] = []
        self.start()

    def start(self) -> None:
        self.spool = Spool(Path(self.home.name), SpoolSettings(segment_bytes=1024, batch_flights=3))
        self.drain = Drain(self.spool, self.store)

    @rule(many=st.integers(1, 8))
    def append(self, many: int) -> None:
        for _ in range(many):
            flight = a_flight(len(self.asked))
            self.asked.append(flight.id)
            self.spool.finished(flight)
            self.written.append(flight.id)

    @rule(torn=st.integers(0, 300))
    def kill(self, torn: int) -> None:
        """SIGKILL, at worst in the middle of an append: `torn` bytes of a record that nobody was answered for."""
        extra = a_flight(len(self.asked))
        self.asked.append(extra.id)
        before = self.spool._active.size
        self.spool.finished(extra)
        if before + torn < self.spool._active.size:
            os.ftruncate(self.spool._active.fd, before + torn)
        for segment in self.spool._segments:
            os.close(segment.fd)
        self.start()

    @rule()
    def restart(self) -> None:
        self.spool.close()
        self.start()

    @rule(mood=st.sampled_from(["fine", "fine", "down", "deaf"]))
    def change_mood(self, mood: str) -> None:
        self.store.mood = mood

    @rule()
    def drain_some(self) -> None:
        self.drain._look_at_ns = 0
        self.loop.run_until_complete(self.drain.drain_now(30))

    @rule()
    def drain_one_batch_without_saying_so(self) -> None:
        """Killed between the store's commit and the note of it."""
        if self.store.mood == "fine" and (read := self.drain._read()):
            self.loop.run_until_complete(self.drain._write(read[1]))

    @invariant()
    def nothing_is_invented(self) -> None:
        if hasattr(self, "store"):
            assert set(self.store._flights) <= set(self.asked)

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.mood = "fine"
        self.drain._look_at_ns = 0
        drained = self.loop.run_until_complete(self.drain.drain_now(30))
        try:
            assert drained
            assert set(self.written) <= set(self.store._flights)
            assert self.spool.figures()["records_waiting"] == 0
            assert self.spool.lost == 0
            self.spool.close()
            assert os.listdir(self.home.name) == []
        finally:
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()
            self.home.cleanup()


Crashes.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TestCrashes = Crashes.TestCase
