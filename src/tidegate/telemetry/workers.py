"""The sum over all workers: each writes what it counted to a file, once a second; whoever is asked adds the others' files to its own.

What ended since stands in a journal beside it (`journal.py`). Both are named by their process, and stay when that dies, however it does: what it had
counted still counts, so counters never fall. What is still running (gauges) counts only for processes that live.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tidegate.core.errors import StoreDown
from tidegate.core.flight import FlightRecord
from tidegate.core.ports import KeptText
from tidegate.telemetry.journal import Journal, since
from tidegate.telemetry.metrics import Counted, Metrics

#: Seconds between two writings.
EVERY_S = 1.0
_SUFFIX, _JOURNAL = ".msgpack", ".journal"
_CLOSED = -1


class Counts(msgspec.Struct, array_like=True):
    """Figures of the rooms that add up over workers."""

    in_flight: int
    spool_lost: int
    log_dropped: int
    #: By model: slots, running, waiting, booked.
    lanes: dict[str, list[int]] = {}


class _File(msgspec.Struct, array_like=True):
    counted: Counted
    counts: Counts
    #: Of this telling; see `Journal.turn`. _CLOSED: it is the last one, and there is no journal.
    number: int = _CLOSED


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_File).decode


def clear(folder: Path) -> None:
    """Forget what earlier runs counted; called before the first worker starts."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for suffix in (_SUFFIX, _JOURNAL):
        for file in folder.glob(f"*{suffix}"):
            file.unlink(missing_ok=True)


class Shared:
    """One worker's view of all, and a FlightSink. `counts_now` reads this worker's own rooms."""

    def __init__(self, folder: Path, metrics: Metrics, counts_now: Callable[[], Counts]) -> None:
        self._folder = folder
        self._metrics = metrics
        self._counts_now = counts_now
        self._own = folder / f"{os.getpid()}{_SUFFIX}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._close_dead()
        self._journal = Journal(self._own.with_suffix(_JOURNAL))

    def finished(self, record: FlightRecord, kept: KeptText | None = None) -> None:
        """Keeps a flight for the others, until it is in a telling."""
        self._journal.add(record)

    async def keep_telling(self) -> None:
        """Write the file again and again, until cancelled. A disk that is full or gone takes only the others' view of this worker."""
        while True:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self._write, self._told())
            await asyncio.sleep(EVERY_S)

    def tell(self) -> None:
        """Write it now, for the last time. Raises OSError."""
        self._write(self._told())

    def _told(self) -> bytes:
        return _encode(_File(self._metrics.counted(), self._counts_now(), self._journal.turn()))

    def _write(self, told: bytes) -> None:
        self._replace(self._own, told)

    def _replace(self, path: Path, told: bytes) -> None:
        new = path.with_name(f"{path.stem}.{os.getpid()}.new")
        new.write_bytes(told)
        new.replace(path)  # a reader sees the old file or the new one, never half

    def sum(self) -> Metrics:
        """What all workers counted, those that died included. Raises StoreDown where that cannot be read: with some left out, counters would fall."""
        try:
            return self._sum()
        except OSError as error:
            raise _unreadable(error) from None

    def _sum(self) -> Metrics:
        total = self._metrics.alike()
        total.add(self._metrics.counted())
        for pid, told in self._others():
            if not self._add(total, told, pid):  # its journal was closed since its file was read
                with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
                    total.add(_decode((self._folder / f"{pid}{_SUFFIX}").read_bytes()).counted)
        return total

    def _add(self, total: Metrics, told: _File, pid: int) -> bool:
        """False, and nothing is added, where there should be a journal and is none."""
        records: list[FlightRecord] = []
        if told.number != _CLOSED:
            try:
                records.extend(since(self._folder / f"{pid}{_JOURNAL}", told.number))
            except (FileNotFoundError, msgspec.DecodeError):
                return False
        total.add(told.counted)
        for record in records:
            total.finished(record)
        return True

    def _close_dead(self) -> None:
        """Put what stands in the journals of processes that died into their last telling, so that their room is free."""
        for pid, told in self._others():
            total = self._metrics.alike()
            if told.number != _CLOSED and not _lives(pid) and self._add(total, told, pid):
                self._replace(self._folder / f"{pid}{_SUFFIX}", _encode(_File(total.counted(), told.counts, _CLOSED)))
                (self._folder / f"{pid}{_JOURNAL}").unlink(missing_ok=True)

    def counts(self) -> Counts:
        """The rooms' figures, summed; this worker's alone where those of others cannot be read: whether it serves does not hang on that."""
        total = self._counts_now()
        try:
            others = list(self._others())
        except OSError:
            others = []
        for pid, told in others:
            total.spool_lost += told.counts.spool_lost
            total.log_dropped += told.counts.log_dropped
            if _lives(pid):
                total.in_flight += told.counts.in_flight
                for model, figures in told.counts.lanes.items():
                    own = total.lanes.get(model, [0] * len(figures))
                    total.lanes[model] = [mine + theirs for mine, theirs in zip(own, figures, strict=True)]
        return total

    def _others(self) -> Iterator[tuple[int, _File]]:
        for file in self._folder.glob(f"*{_SUFFIX}"):
            if file != self._own:
                with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
                    yield int(file.stem), _decode(file.read_bytes())


def _unreadable(error: OSError) -> StoreDown:
    return StoreDown(
        f"What the other workers counted cannot be read: {error.strerror or error}.",
        hint="Too many open files? Raise the gateway's limit of them (LimitNOFILE, ulimit -n).", retry_after_s=1.0,
    )


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
