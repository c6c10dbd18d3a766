"""The built model on disk: made once per version, found again by name, trusted only when its digest is right.

The file's name carries the digest of its content, so that one rename publishes both. A process that finds another one building waits for
it; one that was killed while it built leaves a lock that is already free and a temporary file that the next build overwrites.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from tidegate.core.errors import LocalPartError
from tidegate.retrieval.e5_graph import Precision, build_graph
from tidegate.retrieval.e5_weights import E5Weights

#: Goes up whenever `build_graph` makes something else of the same weights.
BUILDER = 1
_DIGITS = 32


def load_graph(weights: E5Weights, version: str, folder: Path, precision: Precision = "int8") -> bytes:
    """The model made of `weights`, from `folder` where it is there and whole, else built and put there.

    `version` is that of the package the weights came with. Blocks: reading takes 20 ms, building half a second. Raises LocalPartError where
    the folder cannot be used or a package is missing.
    """
    name = f"e5-small-{version}-{BUILDER}" + ("" if precision == "int8" else f"-{precision}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _find(folder, name) or _build(weights, folder, name, precision)
    except OSError as error:
        raise LocalPartError(
            f"The embedder's model cannot be kept in {folder}: {error.strerror or error}.",
            hint="It needs 25 MB there and the right to write; name another folder, or make room.",
        ) from error


def _find(folder: Path, name: str) -> bytes | None:
    for path in folder.glob(f"{name}-{'?' * _DIGITS}.onnx"):
        content = path.read_bytes()
        if path.stem.endswith(_digest(content)):
            return content
        path.unlink(missing_ok=True)  # damaged: cut short, or changed by hand
    return None


def _build(weights: E5Weights, folder: Path, name: str, precision: Precision) -> bytes:
    with _alone(folder / f"{name}.lock"):
        found = _find(folder, name)  # another process may have been quicker
        if found is not None:
            return found
        content = build_graph(weights, precision)
        unfinished = folder / f"{name}.tmp"
        unfinished.write_bytes(content)
        unfinished.replace(folder / f"{name}-{_digest(content)}.onnx")
        return content


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGITS]
