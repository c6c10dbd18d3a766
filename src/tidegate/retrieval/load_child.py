"""The process that reads files: `python -m tidegate.retrieval.load_child`.

Parsing is where hostile input does harm, so it happens here, under a memory limit, and the parent kills it when its time is up. Frames in
and out: four bytes of length, big-endian, then msgpack. In: [path, bounds]. Out: Outcome.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
import signal
import sys
from typing import Any, BinaryIO, Literal

import msgspec

from tidegate.core.errors import DocumentUnreadable
from tidegate.core.plugins import names
from tidegate.retrieval import magic
from tidegate.retrieval.loaded import Bounds, Load, Loaded, with_appendix

SOCKET = "tidegate.retrieval.loaders"
LENGTH_BYTES = 4
_PR_SET_PDEATHSIG = 1
#: Address space that a reader may take, in times of the memory that it may hold. The parent sees to the memory; this stops one huge allocation.
_ROOM = 4


class Outcome(msgspec.Struct, omit_defaults=True):
    """What became of one file: `loaded`, or why not. `memory`: the limit was hit, perhaps because of the files before. `killed`: the parent saw the
    reader killed, by somebody else."""

    loaded: Loaded | None = None
    failure: Literal["unreadable", "memory", "killed"] | None = None
    message: str = ""
    hint: str | None = None


def by_suffix() -> dict[str, Load]:
    """Every loader's `load` by the suffixes that it names."""
    modules = [importlib.import_module(f"{SOCKET}.{name}") for name in names(SOCKET)]
    return {suffix: module.load for module in modules for suffix in module.SUFFIXES}


def read(loaders: dict[str, Load], path: str, bounds: Bounds) -> Outcome:
    """Never raises what a file can cause."""
    suffix = os.path.splitext(path)[1].lower()
    try:
        with open(path, "rb") as file:
            magic.check(file.read(magic.HEAD_BYTES), suffix)
        if suffix not in loaders:
            known = ", ".join(sorted(loaders))
            raise DocumentUnreadable(f"There is no loader for {suffix or 'files without a suffix'}.", hint=f"Known: {known}.")
        loaded = loaders[suffix](path, bounds)
        if not any(block.kind != "heading" for block in loaded.blocks):
            raise DocumentUnreadable("The document holds no text" + (" but headings." if loaded.blocks else "."))
        return Outcome(_encodable(with_appendix(loaded)))
    except DocumentUnreadable as error:
        return Outcome(None, "unreadable", error.message, error.hint)
    except OSError as error:
        return Outcome(None, "unreadable", f"The file cannot be read: {error.strerror}.", "Check its permissions.")
    except MemoryError:
        return Outcome(None, "memory")
    except Exception as error:  # noqa: BLE001 - a parser raises whatever a malformed file makes it raise; the file is at fault, the rest goes on
        return Outcome(None, "unreadable", f"The file is malformed ({type(error).__name__}: {str(error)[:200]}).")


def _encodable(loaded: Loaded) -> Loaded:
    """A lone surrogate, which a damaged file may hold, can neither be sent nor stored: U+FFFD stands for it, and a note says so."""
    try:
        msgspec.msgpack.encode(loaded)
    except UnicodeEncodeError:
        note = "Broken characters (lone surrogates) were replaced by U+FFFD."
        mended = msgspec.convert(_mended(msgspec.to_builtins(loaded)), Loaded)
        return msgspec.structs.replace(mended, notes=[*mended.notes, note])
    return loaded


def _mended(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_mended(name): _mended(one) for name, one in value.items()}
    return [_mended(one) for one in value] if isinstance(value, (list, tuple)) else value


def main() -> None:
    """Serves frames until the parent closes the pipe."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    # Libraries that print would break the frames: what they print goes to stderr.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    loaders = by_suffix()
    limit = None
    while frame := _read_frame(sys.stdin.buffer):
        path, bounds = msgspec.msgpack.decode(frame, type=tuple[str, Bounds])
        if limit != bounds.memory_bytes * _ROOM:
            limit = bounds.memory_bytes * _ROOM
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        answer = msgspec.msgpack.encode(read(loaders, path, bounds))
        answers.write(len(answer).to_bytes(LENGTH_BYTES, "big") + answer)
        answers.flush()


def _read_frame(stream: BinaryIO) -> bytes:
    """b"" at the end of the stream."""
    head = stream.read(LENGTH_BYTES)
    return stream.read(int.from_bytes(head, "big")) if len(head) == LENGTH_BYTES else b""


if __name__ == "__main__":
    main()
