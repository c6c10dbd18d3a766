"""Finds the files under the paths that were named: each once, in a steady order, with a reason for each that is not taken."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import msgspec


class Found(msgspec.Struct):
    """`sizes`: the files to be read, absolute, links resolved, with their bytes. `skipped` and `failed`: path and why. `folders`: those that were
    named and walked."""

    sizes: dict[Path, int] = {}
    skipped: list[tuple[str, str]] = []
    failed: list[tuple[str, str]] = []
    folders: list[Path] = []

    @property
    def files(self) -> list[Path]:
        return list(self.sizes)


def walk(paths: Iterable[Path], suffixes: Collection[str]) -> Found:
    """Hidden files and folders are skipped unless named; links are followed, each folder once."""
    found = Found()
    seen: set[tuple[int, int]] = set()
    for path in paths:
        root = path.expanduser().absolute()
        before = len(found.failed)
        if _is_dir(root, found):
            found.folders.append(root.resolve())
            for file in _files(root, found, seen):
                _take(file, suffixes, found, seen)
        elif len(found.failed) == before:
            _take(root, suffixes, found, seen)
    found.sizes = dict(sorted(found.sizes.items()))
    return found


def shown(path: Path | str) -> str:
    """A path as text that can be printed and stored: a name is bytes, and not always UTF-8."""
    return os.fsencode(path).decode("utf-8", "replace")


def _is_dir(path: Path, found: Found) -> bool:
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        found.failed.append((shown(path), _why(error)))
        return False


def _files(root: Path, found: Found, seen: set[tuple[int, int]]) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        found.failed.append((shown(error.filename), f"folder not read: {_why(error)}"))

    for folder, subfolders, files in os.walk(root, onerror=unreadable, followlinks=True):
        if not _first_visit(folder, seen):
            subfolders.clear()
            continue
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def _first_visit(folder: str, seen: set[tuple[int, int]]) -> bool:
    try:
        status = os.stat(folder)
    except OSError:
        return False  # it vanished while we walked
    return _add(seen, (status.st_dev, status.st_ino))


def _take(file: Path, suffixes: Collection[str], found: Found, seen: set[tuple[int, int]]) -> None:
    try:
        status = file.stat()
    except OSError as error:
        found.failed.append((shown(file), _why(error)))
        return
    suffix = file.suffix.lower()
    if not stat.S_ISREG(status.st_mode):
        found.skipped.append((shown(file), "not a regular file"))
    elif suffix not in suffixes:
        kind = f"no loader for {suffix}" if suffix else "no suffix"
        found.skipped.append((shown(file), f"{kind} (known: {', '.join(sorted(suffixes))})"))
    elif _add(seen, (status.st_dev, status.st_ino)):
        real = file.resolve()
        if str(real) == shown(real):
            found.sizes[real] = status.st_size
        else:
            found.failed.append((shown(real), "its name is not UTF-8: rename it, for documents are known by their names"))


def _add(seen: set[tuple[int, int]], key: tuple[int, int]) -> bool:
    if key in seen:
        return False
    seen.add(key)
    return True


def _why(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file or folder"
    return (error.strerror or str(error)).lower()
