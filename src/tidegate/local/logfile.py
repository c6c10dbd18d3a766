"""The log of one part: written by the child itself, bounded from outside."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


class LogFile:
    """`PATH` and, once it grew past `max_bytes`, `PATH.1`: never more than about twice the bound.

    The child holds the file open in append mode, so it can be copied aside and cut to zero under it; a line written in between is lost.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.max_bytes = max_bytes

    def open(self) -> int:
        """A file descriptor for a child; the caller closes it."""
        self.trim()
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def trim(self) -> None:
        """Rotate where the file is past its bound."""
        try:
            if self.path.stat().st_size <= self.max_bytes:
                return
            shutil.copyfile(self.path, self.path.with_name(self.path.name + ".1"))
        except FileNotFoundError:
            return
        except OSError:
            pass  # no room for the older file: what matters is that this one is cut
        os.truncate(self.path, 0)

    def size(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def tail(self, since: int, lines: int = 8) -> str:
        """The last lines written after offset `since`, for an error message."""
        try:
            with self.path.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(since if since <= end else 0, end - 8192))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(text.strip().splitlines()[-lines:])
