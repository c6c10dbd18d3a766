"""What several workers counted is one sum, whoever is asked and whoever died when."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tidegate.core.errors import StoreDown
from tidegate.core.flight import FlightRecord, new_flight_id
from tidegate.telemetry import journal as journal_module
from tidegate.telemetry import workers as workers_module
from tidegate.telemetry.journal import Journal, since
from tidegate.telemetry.metrics import Metrics
from tidegate.telemetry.workers import Counts, Shared, clear

BEGAN_NS = 1_700_000_000_000_000_000


def record(number: int = 0, **changes: Any) -> FlightRecord:
    facts: dict[str, Any] = {
        "id": new_flight_id(BEGAN_NS + number), "began_unix_ns": BEGAN_NS, "whole_ns": 1_000_000, "laps": [("parse", 1_000_000)],
        "route": "/v1/chat/completions", "end": "stop", "http_status": 200, "token_ns": [1, 2], "first_token_ns": 1, "decisions": [],
    }
    return FlightRecord(**(facts | changes))


class Worker:
    """A process that counts, by a number of its own."""

    def __init__(self, folder: Path, pid: int) -> None:
        self.metrics = Metrics()
        with mock.patch.object(os, "getpid", return_value=pid):
            self.shared = Shared(folder, self.metrics, lambda: Counts(0, 0, 0))

    def finish(self, count: int) -> None:
        for number in range(count):
            for sink in (self.metrics, self.shared):
                sink.finished(record(number))

    def sum(self) -> int:
        total = self.shared.sum()
        assert sum(total.parts["parse"].counts) == sum(series.count for series in total.series.values()) if total.series else True
        return sum(series.count for series in total.series.values())


@hypothesis_settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["finish", "tell", "write late", "kill"]), st.integers(0, 1), st.integers(0, 40)), max_size=30))
def test_every_flight_is_counted_once(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]) -> None:
    """Flights, tellings whose file is written at once or only after more flights, and deaths at any of these moments: every worker's sum is what
    all have finished."""
    folder = tmp_path_factory.mktemp("workers")
    clear(folder)
    alive, pids, finished = set(), iter(range(1_000_000_000, 1_000_001_000)), 0
    with mock.patch.object(workers_module, "_lives", lambda pid: pid in alive):

        def start() -> Worker:
            pid = next(pids)
            alive.add(pid)
            worker = Worker(folder, pid)
            worker.shared.tell()
            return worker

        workers = [start(), start()]
        for step, which, count in steps:
            worker = workers[which]
            if step == "finish":
                worker.finish(count)
                finished += count
            elif step == "tell":
                worker.shared.tell()
            elif step == "write late":
                told = worker.shared._told()
                worker.finish(count)
                finished += count
                assert [one.sum() for one in workers] == [finished] * 2, "between a telling and its file"
                worker.shared._write(told)
            else:
                alive.discard(int(worker.shared._own.stem))
                workers[which] = start()
            assert [one.sum() for one in workers] == [finished] * 2


def test_the_dead_leave_their_room(tmp_path: Path) -> None:
    """The next worker puts a dead one's journal into its last telling; what was counted stays, and nobody's journal but the living's."""
    clear(tmp_path)
    with mock.patch.object(workers_module, "_lives", return_value=False):
        for pid in range(1_000_000_000, 1_000_000_005):
            worker = Worker(tmp_path, pid)
            worker.shared.tell()
            worker.finish(3)
    assert [file.name for file in tmp_path.glob("*.journal")] == ["1000000004.journal"]
    assert worker.sum() == 15
    assert {file.stat().st_mode & 0o777 for file in tmp_path.glob("*.journal")} == {0o600}


def test_a_journal_that_is_closed_meanwhile_is_counted_once(tmp_path: Path) -> None:
    """Between the reading of a dead worker's file and of its journal another worker closes that."""
    clear(tmp_path)
    one, dead = Worker(tmp_path, 1_000_000_000), Worker(tmp_path, 1_000_000_001)
    dead.shared.tell()
    dead.finish(5)
    told = list(one.shared._others())
    with mock.patch.object(workers_module, "_lives", return_value=False):
        one.shared._close_dead()
    with mock.patch.object(one.shared, "_others", return_value=iter(told)):
        assert one.sum() == 5


def test_a_full_journal_holds_what_it_has(tmp_path: Path) -> None:
    """What has no room is counted by its own worker all the same, and by the others with the next telling."""
    with mock.patch.object(journal_module, "HALF_BYTES", 4096):
        clear(tmp_path)
        one, other = Worker(tmp_path, 1_000_000_000), Worker(tmp_path, 1_000_000_001)
        one.shared.tell()
        one.finish(100)
        assert one.sum() == 100
        assert 0 < other.sum() < 100
        one.shared.tell()
        assert other.sum() == 100


def test_a_journal_reads_as_it_was_written(tmp_path: Path) -> None:
    """Whole records, in order, those after the telling that is asked for."""
    journal = Journal(tmp_path / "1.journal")
    first, second, third = (record(number, token_ns=list(range(number * 100))) for number in range(3))
    journal.add(first)
    number = journal.turn()
    journal.add(second)
    journal.add(third)
    assert list(since(tmp_path / "1.journal", number)) == [second, third]
    assert list(since(tmp_path / "1.journal", 0)) == [first, second, third]
    journal.turn()
    assert list(since(tmp_path / "1.journal", number)) == [second, third]
    journal.turn()
    assert list(since(tmp_path / "1.journal", number + 2)) == []


def test_a_worker_without_descriptors_tells_no_smaller_sum(tmp_path: Path) -> None:
    """Where the others' counts cannot be read it says so: a counter that fell would be read as a restart. With descriptors again the sum is there."""
    clear(tmp_path)
    one, other = Worker(tmp_path, os.getpid()), Worker(tmp_path, os.getppid())
    other.finish(3)
    other.shared.tell()
    limits, held = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[0], 512), limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(StoreDown, match="What the other workers counted cannot be read"):
            one.shared.sum()
        assert one.shared.counts() == Counts(0, 0, 0)  # /health goes on
    finally:
        for held_one in held:
            os.close(held_one)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert one.sum() == 3
