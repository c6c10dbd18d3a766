"""One file of the spool. Whoever holds its lock owns it: appends to it, drains it, removes it.

The lock (flock) ends with its holder, also when that is killed, so a file whose lock is free was left behind and may be adopted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import time
from pathlib import Path

from tidegate.stores.frames import Frame, frames_in

SUFFIX = ".spool"
#: Frames that the store refused. Renamed to SUFFIX they are tried again.
REJECTED = ".rejected"
_NEW = ".new"
#: A file that is not locked and not named yet, and this old, belongs to somebody who was killed between the two.
_STALE_S = 60


class Segment:
    """An open, locked spool file. Sizes and offsets are bytes. Not for several threads at once: the spool holds its lock around it."""

    def __init__(self, path: Path, fd: int, size: int) -> None:
        self.path = path
        self.fd = fd
        self.size = size
        #: Everything before this offset is in the store.
        self.drained = 0
        #: Whole frames after it.
        self.waiting = 0
        #: How often the file was emptied: an offset means something within one life only.
        self.life = 0

    @classmethod
    def create(cls, folder: Path) -> Segment:
        """A new, empty file, locked before it has a name that others look for. Raises OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Sorts by time; the wall clock is only a name here.
        name = f"{time.time_ns() // 1_000_000:013d}-{os.getpid()}-{secrets.token_hex(4)}"
        path = folder / (name + _NEW)
        # O_NONBLOCK means nothing to a disk file; it tells the watchdog for blocked event loops that this write is a short one.
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            named = path.with_suffix(SUFFIX)
            path.rename(named)
        except OSError:
            os.close(fd)
            raise
        return cls(named, fd, 0)

    @classmethod
    def adopt(cls, path: Path) -> Segment | None:
        """A file whose owner is gone, with its frames counted; None where it has an owner or is gone itself. Raises OSError."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        status = os.fstat(fd)
        if status.st_nlink == 0:  # drained and removed by another process between our open and our lock
            os.close(fd)
            return None
        segment = cls(path, fd, status.st_size)
        segment.waiting = sum(1 for _ in segment.frames(limit=None))
        return segment

    def append(self, frame: bytes) -> None:
        """One write. A frame that went in by half is taken out again. Raises OSError; then the file is as it was before."""
        written = os.write(self.fd, frame)
        if written != len(frame):
            try:
                os.ftruncate(self.fd, self.size)
            except OSError:
                self.size += written  # a hole, which readers step over
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # what a short write to a disk file means
        self.size += written
        self.waiting += 1

    def frames(self, limit: int | None, max_bytes: int | None = None) -> list[Frame]:
        """The first frames that are not drained yet, one at least if there is one; `end` is an offset in the file. Raises OSError."""
        base = self.drained
        rest = max(0, self.size - base)
        window = rest if max_bytes is None else min(rest, max_bytes)
        data = os.pread(self.fd, window, base)
        found = frames_in(data, limit, max_bytes, more=window < rest)
        if not found and window < rest:  # one frame larger than the window, or a hole
            found = frames_in(os.pread(self.fd, rest, base), limit, max_bytes)
        return [Frame(frame.payload, base + frame.end) for frame in found] if base else found

    def advance(self, end: int, frames: int) -> None:
        """Everything before `end` is in the store now."""
        self.drained = end
        self.waiting = max(0, self.waiting - frames)

    def empty(self) -> None:
        """Give the room back where all is drained; the file stays open for appends. Raises OSError."""
        os.ftruncate(self.fd, 0)
        self.size = self.drained = self.waiting = 0
        self.life += 1

    def close(self) -> None:
        """Let it go as it is: what is in it is adopted by the next process that looks."""
        os.close(self.fd)

    def remove(self) -> None:
        """Delete the file, then free its lock."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        os.close(self.fd)


def listed(folder: Path) -> list[tuple[Path, int]]:
    """Spool files and files of rejected frames, with their sizes in bytes, oldest first. Raises OSError.

    Files that never got their name, because their maker was killed, are cleared away.
    """
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.name.endswith((SUFFIX, REJECTED)):
                    found.append((Path(entry.path), entry.stat().st_size))
                elif entry.name.endswith(_NEW) and time.time_ns() / 1e9 - entry.stat().st_mtime > _STALE_S:
                    os.unlink(entry.path)
    return sorted(found)
