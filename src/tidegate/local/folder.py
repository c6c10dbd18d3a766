"""The data folder: made, checked, locked. Everything that `tidegate up` keeps on this machine lies below it."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tidegate.core.errors import LocalPartError

#: A unix socket's path may have 107 bytes; the longest name we put into a socket folder is PostgreSQL's ".s.PGSQL.5432.lock".
_SOCKET_PATH_MAX = 107
_LONGEST_NAME = len("/.s.PGSQL.5432.lock")

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class DataFolder:
    """One data folder. `run` holds pid files and sockets, `log` the logs; both are ours alone (0700)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = path / "run"
        self.log = path / "log"
        self._lock = -1

    def open(self, min_free_mb: int) -> None:
        """Make and check it, and take its lock. Raises LocalPartError: no permission, no room, or another `tidegate up` runs on it."""
        with explained(self.path):
            # Others may pass through root's folder (0711): the database below runs as another user. What is private has its own 0700.
            own_folder(self.path, 0o711 if os.geteuid() == 0 else 0o700)
            self._take_lock()
            own_folder(self.run, 0o700)
            own_folder(self.log, 0o700)
            check_room(self.path, min_free_mb)

    def close(self) -> None:
        """Give the lock back."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def sockets(self) -> Path:
        """Where sockets go: `run`, or where its path is too long for a socket, a short folder of our own."""
        return socket_folder(self.run)

    def _take_lock(self) -> None:
        self._lock = take_lock(self.path / "lock", f"The data folder {self.path} is in use by another `tidegate up` or `serve`")


def take_lock(path: Path, message: str) -> int:
    """An exclusive lock as an open file descriptor; the kernel drops it when this process ends, however it ends.

    Raises LocalPartError with `message` and the holder's pid where it is taken.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        raise LocalPartError(f"{message} (pid {holder}).", hint=f"Stop it (kill {holder}), or set local.data to another folder.") from None
    os.truncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode("ascii"), 0)
    return lock


def check_room(path: Path, min_free_mb: int) -> None:
    """Raises LocalPartError where the disk that holds `path` has less room."""
    free_mb = shutil.disk_usage(path).free // 1_000_000
    if free_mb < min_free_mb:
        raise LocalPartError(
            f"The disk of {path} has {free_mb} MB free; at least {min_free_mb} MB are wanted (local.min_free_disk_mb).",
            hint="Free some space, or set local.data to a folder on a larger disk.",
        )


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns the system's refusals about files below `path` into LocalPartErrors that say what to do."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        if error.errno in _DISK_FULL:
            raise LocalPartError(
                f"The disk is full: {where}.", hint="Free some space, or set local.data to a folder on a larger disk.",
            ) from error
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            raise LocalPartError(
                f"No permission to write {where}: {error.strerror}.",
                hint="Give this user the folder (chown), or set local.data to a folder that it may write.",
            ) from error
        if isinstance(error, FileExistsError | NotADirectoryError):
            raise LocalPartError(f"{where} is not a folder.", hint="Set local.data to a folder.") from error
        raise


def own_folder(path: Path, mode: int) -> None:
    """Make a folder, its parents too, with this mode whatever the umask. One that is there keeps its mode: it may be the user's own. Raises OSError,
    LocalPartError where there can be none."""
    if not path.is_dir():
        try:
            path.mkdir(parents=True)
        except FileNotFoundError as error:
            raise LocalPartError(f"{error.filename} cannot be made there.", hint="Set local.data to a folder that can be.") from error
        path.chmod(mode)


def fits_socket(folder: Path) -> bool:
    """Are the paths of sockets in this folder short enough?"""
    return len(os.fsencode(folder)) + _LONGEST_NAME <= _SOCKET_PATH_MAX


def socket_folder(wanted: Path) -> Path:
    """`wanted`, or where a socket's path below it would be too long, a short private folder named after it."""
    if fits_socket(wanted):
        return wanted
    name = f"tidegate-{os.geteuid()}-{short_hash(wanted)}"
    short = Path("/tmp") / name  # noqa: S108 - it is checked below to be ours and private
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    # `su` keeps the variable of the user before: their folder is not ours to write.
    if runtime and os.access(runtime, os.W_OK | os.X_OK) and fits_socket(Path(runtime) / name):
        short = Path(runtime) / name
    short.mkdir(mode=0o700, exist_ok=True)
    found = short.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise LocalPartError(
            f"{short} should be a private folder of ours, but somebody else made it or others may enter it.",
            hint="Remove it, or set local.data to a folder with a shorter path.",
        )
    return short


def short_hash(path: Path) -> str:
    """16 hex digits that stand for a path."""
    return hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]
