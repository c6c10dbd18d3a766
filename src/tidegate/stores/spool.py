"""The local flight spool: each finished flight is on disk, in the page cache, before the last bytes of its answer leave.

One write per flight, no fsync: a killed process loses nothing, a power cut may lose the last second. Files lie in one folder, which several
processes share, each writing to a file of its own. The spool is bounded: near the bound token stamps are left out, at the bound new flights
are counted as lost. It never raises into the path and never deletes what is not in the store.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Literal

import msgspec

from tidegate.core.errors import SettingsError
from tidegate.core.flight import FlightRecord
from tidegate.core.ports import KeptText
from tidegate.stores.frames import Frame, frame, pack
from tidegate.stores.segment import REJECTED, SUFFIX, Segment, listed
from tidegate.stores.settings import SpoolSettings

#: Most bytes of one batch, so that a transaction stays small however large the texts are.
BATCH_BYTES = 2 * 1024 * 1024
#: A state is left only when there is this much less than what brought it, or the log would flicker.
CALM = 0.8

State = Literal["ok", "near", "full", "failing"]

log = logging.getLogger("tidegate.stores")


class Batch(msgspec.Struct, frozen=True):
    """Frames to be stored next: all from one file, between two offsets of one life of it."""

    segment: Segment
    life: int
    start: int
    frames: list[Frame]


class Spool:
    """FlightSink on local disk. `finished` may be called from any thread; `next_batch`, `done` and `look_around` are for the drain."""

    def __init__(self, folder: Path, settings: SpoolSettings) -> None:
        """Makes folder and file. Raises SettingsError where they cannot be made."""
        self.folder = folder
        self.settings = settings
        #: Why the drain does not get on; None while it does. Set by the drain.
        self.drain_error: str | None = None
        self.lost = 0
        self.rejected = 0
        self._state: State = "ok"
        self._near_bytes = int(settings.max_bytes * settings.near_share)
        self._other_bytes = 0
        self._oldest_unix_ns = 0
        # Appends take the first alone, for microseconds; the drain takes the second around its file work, and the first inside it.
        self._lock = threading.Lock()
        self._drain_lock = threading.Lock()
        try:
            self._active = Segment.create(folder)
        except OSError as error:
            raise SettingsError(
                f"The flight spool cannot be written in {folder}: {error.strerror}.", hint="Make the folder writable, or set spool.folder."
            ) from error
        #: Ours, oldest first; the last one is the active one.
        self._segments: deque[Segment] = deque([self._active])
        self._own_bytes = 0

    # -- on the path

    def finished(self, record: FlightRecord, kept: KeptText | None = None) -> None:
        """Append one flight. Never raises: what cannot be written is counted in `lost`."""
        with self._lock:
            try:
                self._append(record, kept)
            except OSError as error:
                self._lose("failing", f"{error.strerror}", "Make room, or mend the disk.")
            except Exception as error:  # noqa: BLE001 - an answer must leave, whatever is wrong with its record
                self.lost += 1
                log.error("The flight %s cannot be spooled: %s.", record.id, type(error).__name__)

    def _append(self, record: FlightRecord, kept: KeptText | None) -> None:
        held = self._own_bytes + self._other_bytes
        if held >= self._near_bytes and self._state == "ok":
            self._enter("near", logging.WARNING, f"is at {held} of {self.settings.max_bytes} bytes: token stamps are left out")
        if self._state != "ok" and record.token_ns:
            record = msgspec.structs.replace(record, token_ns=[], thinned=True)  # a copy: other sinks have the same record
        packed = pack(record, kept)
        if held + len(packed) > self.settings.max_bytes:
            why = f"it is at its bound of {self.settings.max_bytes} bytes"
            self._lose("full", why, "Bring the database back, or raise spool.max_bytes.")
            return
        # The drain changes files in time, off the path; this is for a spool that nobody drains.
        if self._active.size >= 2 * self.settings.segment_bytes:
            self._rotate()
        before = self._active.size
        try:
            self._active.append(packed)
        finally:
            self._own_bytes += self._active.size - before
        if not self._oldest_unix_ns:
            self._oldest_unix_ns = record.began_unix_ns + record.whole_ns
        if self._state == "failing":
            self._enter("near", logging.WARNING, "can write again")

    def _lose(self, state: State, why: str, hint: str) -> None:
        self.lost += 1
        if self._state != state:
            self._enter(state, logging.ERROR, f"loses flights: {why}. {hint}")

    def _enter(self, state: State, level: int, what: str) -> None:
        self._state = state
        log.log(level, "The flight spool %s %s.", self.folder, what.rstrip("."))

    def _rotate(self) -> None:
        self._active = Segment.create(self.folder)
        self._segments.append(self._active)

    # -- for the drain

    def look_around(self) -> None:
        """Adopt what killed processes left behind, see how much others hold, change files in time. Raises OSError."""
        with self._drain_lock:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            ours = {segment.path for segment in self._segments}
            adopted: list[Segment] = []
            others = 0
            found = listed(self.folder)
            for path, size in found:
                if path in ours:
                    continue
                segment = Segment.adopt(path) if path.suffix == SUFFIX else None
                if segment is None:
                    others += size
                else:
                    adopted.append(segment)
            with self._lock:
                self._segments.extendleft(reversed(adopted))
                self._own_bytes += sum(segment.size for segment in adopted)
                self._other_bytes = others
                # A file that somebody deleted is drained all the same, but a killed process could not find it again: begin another.
                if self._active.size >= self.settings.segment_bytes or self._active.path not in dict(found):
                    self._rotate()
                self._calm_down()

    def next_batch(self) -> Batch | None:
        """What is to be stored next, oldest file first; None where all is stored. The same again until `done`. Raises OSError."""
        with self._drain_lock:
            for segment in list(self._segments):
                closed = segment is not self._active  # asked before it is read: what comes in meanwhile waits for the next look
                frames = segment.frames(self.settings.batch_flights, BATCH_BYTES)
                if frames:
                    return Batch(segment, segment.life, segment.drained, frames)
                if closed:
                    segment.waiting = 0  # what is left behind its last whole frame is torn: its flight was never answered
                self._tidy(segment)
            return None

    def done(self, batch: Batch) -> None:
        """The batch is in the store. Saying it twice, or too late, changes nothing. Raises OSError."""
        with self._drain_lock:
            segment = batch.segment
            if segment not in self._segments or (segment.life, segment.drained) != (batch.life, batch.start):
                return
            with self._lock:
                segment.advance(batch.frames[-1].end, len(batch.frames))
            self._tidy(segment)

    def note_oldest(self, unix_ns: int) -> None:
        """The oldest flight that waits ended at this instant of the wall clock; 0: none waits."""
        with self._lock:
            self._oldest_unix_ns = unix_ns if unix_ns or not any(segment.waiting for segment in self._segments) else self._oldest_unix_ns

    def set_aside(self, payload: bytes) -> None:
        """Keep a frame that the store refuses in a file beside the spool, so that it stops nobody and is not lost."""
        self.rejected += 1
        path = self.folder / f"{os.getpid()}{REJECTED}"
        try:
            with open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(frame(payload))
        except OSError as error:
            self.lost += 1
            log.error("A flight that the database refused cannot be set aside in %s: %s.", path, error.strerror)

    def _tidy(self, segment: Segment) -> None:
        """Give back the room of a file in which nothing waits."""
        with self._lock:
            if segment is not self._active:
                if segment.waiting == 0:
                    self._segments.remove(segment)
                    self._own_bytes -= segment.size
                    segment.remove()
            elif segment.size and segment.drained == segment.size:
                self._own_bytes -= segment.size
                segment.empty()
            self._calm_down()

    def _calm_down(self) -> None:
        held = self._own_bytes + self._other_bytes
        if self._state in ("near", "full") and held < CALM * self._near_bytes:
            self._enter("ok", logging.INFO, "has room again")

    # -- beside the path

    def figures(self) -> dict[str, Any]:
        """Live figures for /health. `records_waiting` are this process's and those it adopted; `bytes` are the whole folder's."""
        with self._lock:
            waiting = sum(segment.waiting for segment in self._segments)
            age_s = (time.time_ns() - self._oldest_unix_ns) / 1e9 if waiting and self._oldest_unix_ns else 0.0
            return {
                "state": self._state,
                "bytes": self._own_bytes + self._other_bytes,
                "max_bytes": self.settings.max_bytes,
                "near": self._own_bytes + self._other_bytes >= self._near_bytes,
                "records_waiting": waiting,
                "lost": self.lost,
                "rejected": self.rejected,
                "oldest_age_s": max(0.0, age_s),
                "last_drain_error": self.drain_error,
            }

    def close(self) -> None:
        """Let the files go: those in which nothing waits are removed, the others wait for the next process."""
        with self._drain_lock, self._lock:
            for segment in self._segments:
                if segment.waiting:
                    segment.close()
                else:
                    segment.remove()
            self._segments.clear()
