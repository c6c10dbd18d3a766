"""The sum over all workers: each writes what it counted to a file, once a second; whoever is asked adds the others' files to its own.

A file is named by its process, and stays when that dies: what it had counted still counts, so counters never fall. What is still running
(gauges) counts only for processes that live.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tidegate.telemetry.metrics import Counted, Metrics

#: Seconds between two writings.
EVERY_S = 1.0
_SUFFIX = ".msgpack"


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


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_File).decode


def clear(folder: Path) -> None:
    """Forget what earlier runs counted; called before the first worker starts."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for file in folder.glob(f"*{_SUFFIX}"):
        file.unlink(missing_ok=True)


class Shared:
    """One worker's view of all. `counts_now` reads this worker's own rooms."""

    def __init__(self, folder: Path, metrics: Metrics, counts_now: Callable[[], Counts]) -> None:
        self._folder = folder
        self._metrics = metrics
        self._counts_now = counts_now
        self._own = folder / f"{os.getpid()}{_SUFFIX}"

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
        return _encode(_File(self._metrics.counted(), self._counts_now()))

    def _write(self, told: bytes) -> None:
        new = self._own.with_suffix(".new")
        new.write_bytes(told)
        new.replace(self._own)  # a reader sees the old file or the new one, never half

    def sum(self) -> Metrics:
        """What all workers counted, those that died included; of the others at most EVERY_S old."""
        total = Metrics()
        total.add(self._metrics.counted())
        for _, told in self._others():
            total.add(told.counted)
        return total

    def counts(self) -> Counts:
        """The rooms' figures, summed."""
        total = self._counts_now()
        for pid, told in self._others():
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
                with contextlib.suppress(OSError, msgspec.DecodeError):
                    yield int(file.stem), _decode(file.read_bytes())


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
