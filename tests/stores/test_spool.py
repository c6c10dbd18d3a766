"""The spool takes every finished flight, is bounded, says so, and never raises into the path."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tidegate.core.errors import SettingsError
from tidegate.core.flight import FlightRecord
from tidegate.stores.frames import unpack
from tidegate.stores.segment import Segment
from tidegate.stores.settings import SpoolSettings
from tidegate.stores.spool import Spool

from .flights import a_flight, a_text


def drained(spool: Spool) -> list[FlightRecord]:
    """Everything that waits, in order, taken out."""
    records = []
    spool.look_around()
    while batch := spool.next_batch():
        records += [msgspec.json.decode(unpack(frame.payload).record, type=FlightRecord) for frame in batch.frames]
        spool.done(batch)
    return records


def killed(spool: Spool) -> None:
    """What SIGKILL leaves: the files as they are, their locks free."""
    for segment in spool._segments:
        os.close(segment.fd)
    spool._segments.clear()


def test_flights_come_out_in_the_order_they_went_in(tmp_path: Path) -> None:
    """With their kept text, over several files."""
    spool = Spool(tmp_path, SpoolSettings(segment_bytes=1024))
    flights = [a_flight(number) for number in range(50)]
    for flight in flights:
        spool.finished(flight, a_text(flight.id))
    assert len(list(tmp_path.iterdir())) > 1
    assert drained(spool) == flights


def test_what_is_drained_leaves_no_bytes_behind(tmp_path: Path) -> None:
    """Room is given back at once, and closing leaves an empty folder."""
    spool = Spool(tmp_path, SpoolSettings(segment_bytes=1024))
    for number in range(20):
        spool.finished(a_flight(number))
    drained(spool)
    assert (spool.figures()["bytes"], spool.figures()["records_waiting"]) == (0, 0)
    spool.close()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_processs_flights_are_adopted(tmp_path: Path) -> None:
    """The next process finds them all, a torn last one excepted."""
    spool = Spool(tmp_path, SpoolSettings())
    flights = [a_flight(number) for number in range(3)]
    for flight in flights:
        spool.finished(flight)
    os.ftruncate(spool._active.fd, spool._active.size - 1)
    killed(spool)
    after = Spool(tmp_path, SpoolSettings())
    assert drained(after) == flights[:2]
    after.close()
    assert list(tmp_path.iterdir()) == []


def test_a_closed_spools_flights_wait_for_the_next_process(tmp_path: Path) -> None:
    """Shut down while the database is down: nothing is lost."""
    spool = Spool(tmp_path, SpoolSettings())
    flight = a_flight()
    spool.finished(flight)
    spool.close()
    assert drained(Spool(tmp_path, SpoolSettings())) == [flight]


def test_a_living_processs_file_is_left_alone(tmp_path: Path) -> None:
    """Two spools in one folder: each drains its own, both count the folder's bytes."""
    one, two = Spool(tmp_path, SpoolSettings()), Spool(tmp_path, SpoolSettings())
    first, second = a_flight(1), a_flight(2)
    one.finished(first)
    two.finished(second)
    assert drained(two) == [second]
    assert two.figures()["bytes"] == one.figures()["bytes"] > 0
    assert drained(one) == [first]


def test_sigkill_loses_no_flight_that_was_spooled(tmp_path: Path) -> None:
    """A real process, killed in the middle: every flight it said it had appended is there."""
    code = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from typing import Any
from tidegate.core.flight import Flight
from tidegate.stores.settings import SpoolSettings
from tidegate.stores.spool import Spool
spool = Spool(Path(sys.argv[1]), SpoolSettings(segment_bytes=1024))
while True:
    record = Flight("/x").finish("stop", 200)
    spool.finished(record)
    sys.stdout.write(record.id + "\\n")
    sys.stdout.flush()
"""
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), "src"], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    said = [writer.stdout.readline().strip() for _ in range(200)]
    os.kill(writer.pid, signal.SIGKILL)
    said += [line.strip() for line in writer.stdout if line.endswith("\n")]
    writer.wait()
    writer.stdout.close()
    found = [flight.id for flight in drained(Spool(tmp_path, SpoolSettings()))]
    assert set(said) <= set(found)
    assert len(found) == len(set(found))


def test_near_the_bound_token_stamps_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The record says so, the log says it once, the caller's own record stays whole."""
    spool = Spool(tmp_path, SpoolSettings(max_bytes=20_000, near_share=0.5))
    flights = [a_flight(number, token_ns=list(range(100))) for number in range(50)]
    for flight in flights:
        spool.finished(flight)
    assert spool.figures()["near"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    found = drained(spool)
    assert len(found) == 50
    assert not found[0].thinned
    assert found[-1].thinned
    assert found[-1].token_ns == []
    assert len(flights[-1].token_ns) == 100


def test_at_the_bound_new_flights_are_lost_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is written stays, the file does not grow past the bound, the log says it once, and it heals when there is room."""
    spool = Spool(tmp_path, SpoolSettings(max_bytes=5_000))
    flights = [a_flight(number) for number in range(100)]
    for flight in flights:
        spool.finished(flight)
    figures = spool.figures()
    assert figures["lost"] > 0
    assert figures["state"] == "full"
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 5_000
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    caplog.set_level(logging.INFO)
    assert drained(spool) == flights[: 100 - figures["lost"]]
    assert spool.figures()["state"] == "ok"
    spool.finished(flights[-1])
    assert drained(spool) == [flights[-1]]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_refuses_is_counted_and_never_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """One error line for many lost flights; it goes on when the disk does."""
    spool = Spool(tmp_path, SpoolSettings())

    def refuse(fd: int, data: bytes) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as broken:
        broken.setattr(os, "write", refuse)
        for flight_number in range(3):
            spool.finished(a_flight(flight_number))
    assert (spool.figures()["lost"], spool.figures()["state"]) == (3, "failing")
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    flight = a_flight(9)
    spool.finished(flight)
    assert drained(spool) == [flight]


@pytest.mark.parametrize("untidy", [False, True])
def test_a_flight_written_by_half_is_taken_out_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untidy: bool) -> None:
    """The disk fills up in the middle of a record: it counts as lost, and those before and after it are whole, even where it stays."""
    spool = Spool(tmp_path, SpoolSettings())
    before, after = a_flight(1), a_flight(3)
    spool.finished(before)
    write = os.write

    def refuse(fd: int, size: int) -> None:
        raise OSError(errno.EIO, "no")

    with monkeypatch.context() as broken:
        broken.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) // 2]))
        if untidy:
            broken.setattr(os, "ftruncate", refuse)
        spool.finished(a_flight(2))
    spool.finished(after)
    assert spool.lost == 1
    assert drained(spool) == [before, after]


def test_a_real_full_disk_is_survived(tmp_path: Path) -> None:
    """/dev/full answers every write with ENOSPC."""
    spool = Spool(tmp_path, SpoolSettings())
    spool._active.fd, real = os.open("/dev/full", os.O_WRONLY), spool._active.fd
    spool.finished(a_flight())
    assert spool.lost == 1
    os.close(spool._active.fd)
    spool._active.fd = real


def test_a_record_that_cannot_be_encoded_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Never raised, named by its id in the log."""
    spool = Spool(tmp_path, SpoolSettings())

    class Unspeakable:
        def __str__(self) -> str:
            raise ValueError("no words")

    flight = a_flight(decisions=[(1, "x", {"fact": Unspeakable()})])
    spool.finished(flight)
    assert spool.lost == 1
    assert flight.id in caplog.text


def test_a_deleted_folder_is_made_again(tmp_path: Path) -> None:
    """What was written before is drained, what comes after lies in a file that a next process can find."""
    spool = Spool(tmp_path / "spool", SpoolSettings())
    first, second = a_flight(1), a_flight(2)
    spool.finished(first)
    for file in (tmp_path / "spool").iterdir():
        file.unlink()
    (tmp_path / "spool").rmdir()
    spool.look_around()
    spool.finished(second)
    assert len(list((tmp_path / "spool").iterdir())) == 1
    assert drained(spool) == [first, second]


def test_a_folder_that_cannot_be_made_is_a_settings_error(tmp_path: Path) -> None:
    """At start-up, with the way out."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="cannot be written") as caught:
        Spool(tmp_path / "file" / "spool", SpoolSettings())
    assert "spool.folder" in (caught.value.hint or "")


def test_files_and_folder_are_private(tmp_path: Path) -> None:
    """Only their owner may read them."""
    Spool(tmp_path / "spool", SpoolSettings())
    assert (tmp_path / "spool").stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "spool").iterdir()} == {0o600}


def test_a_batch_done_twice_or_late_takes_nothing_else_out(tmp_path: Path) -> None:
    """A batch says which life of the file it was read from."""
    spool = Spool(tmp_path, SpoolSettings())
    spool.finished(a_flight(1))
    batch = spool.next_batch()
    assert batch is not None
    spool.done(batch)
    second = a_flight(2)
    spool.finished(second)
    spool.done(batch)
    assert drained(spool) == [second]


def test_a_segment_is_adopted_once(tmp_path: Path) -> None:
    """The lock decides; a file that is removed meanwhile is nobody's."""
    made = Segment.create(tmp_path)
    assert Segment.adopt(made.path) is None
    made.close()
    adopted = Segment.adopt(made.path)
    assert adopted is not None
    assert Segment.adopt(made.path) is None
    adopted.remove()
    assert Segment.adopt(made.path) is None


def test_a_file_that_fills_up_while_it_is_read_keeps_its_flights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flights that come between the look into the active file and the end of that look, and close it, are not thrown away with it."""
    spool = Spool(tmp_path, SpoolSettings(segment_bytes=1024))
    flights = [a_flight(number) for number in range(40)]
    real, waiting = Segment.frames, list(flights)

    def frames(segment: Segment, *args: Any, **more: Any) -> Any:
        found = real(segment, *args, **more)
        while waiting:
            spool.finished(waiting.pop(0))
        return found

    monkeypatch.setattr(Segment, "frames", frames)
    found = drained(spool) + drained(spool)
    assert [flight.id for flight in found] == [flight.id for flight in flights]


def test_many_threads_may_append_while_one_drains(tmp_path: Path) -> None:
    """No flight is lost or torn."""
    spool = Spool(tmp_path, SpoolSettings(segment_bytes=4096))
    flights = [[a_flight(1000 * thread + number) for number in range(200)] for thread in range(4)]

    def append(mine: list[FlightRecord]) -> None:
        for flight in mine:
            spool.finished(flight)

    threads = [threading.Thread(target=append, args=(mine,)) for mine in flights]
    for thread in threads:
        thread.start()
    found: list[FlightRecord] = []
    while any(thread.is_alive() for thread in threads):
        found += drained(spool)
    found += drained(spool)
    assert sorted(flight.id for flight in found) == sorted(flight.id for mine in flights for flight in mine)
    assert spool.lost == 0


def test_figures_tell_the_age_of_the_oldest(tmp_path: Path) -> None:
    """Zero where nothing waits; the age of the oldest flight's end otherwise."""
    spool = Spool(tmp_path, SpoolSettings())
    assert spool.figures()["oldest_age_s"] == 0.0
    spool.finished(a_flight())  # of 2023
    assert spool.figures()["oldest_age_s"] > 1_000_000
    assert spool.figures()["records_waiting"] == 1
