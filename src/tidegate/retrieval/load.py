"""Reads files in a process of its own, so that a hostile one costs only its own job."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path

import msgspec

from tidegate.core.errors import DocumentUnreadable
from tidegate.retrieval.load_child import LENGTH_BYTES, Outcome
from tidegate.retrieval.loaded import Bounds, Loaded

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
#: Seconds between two looks at the memory of a child that reads.
_LOOK_S = 0.02


class Loader:
    """One child process that reads one file after the other; it is replaced when a file hurt it.

    Use as `async with Loader(bounds) as loader`. One file at a time: who comes second waits.
    """

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.bounds = bounds or Bounds()
        self._child: Process | None = None
        self._served = 0
        self._outgrown = False
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Loader:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def load(self, path: str) -> Loaded:
        """Raises DocumentUnreadable: what is wrong with the file, or which bound it broke. Cancelling it stops the child."""
        async with self._turn:
            outcome = await self._read(path)
        if outcome.loaded is not None:
            return outcome.loaded
        if outcome.failure == "memory":
            raise DocumentUnreadable(
                f"Reading the file takes more than {self.bounds.memory_bytes >> 20} MiB of memory.",
                hint="Split it, or raise retrieval.load_memory_mib.",
            )
        raise DocumentUnreadable(outcome.message, hint=outcome.hint)

    async def _read(self, path: str) -> Outcome:
        used = self._served > 0
        outcome = await self._try(path)
        if outcome.failure == "killed" or (outcome.failure == "memory" and used):
            # Somebody from outside, or the files before that used the memory up: once more, in a fresh process.
            outcome = await self._try(path)
        return outcome

    async def _try(self, path: str) -> Outcome:
        child = self._child = self._child or await self._start()
        healthy = False
        self._outgrown = False
        watching = asyncio.create_task(self._watch_memory(child))
        try:
            async with asyncio.timeout(self.bounds.seconds):
                outcome = await self._exchange(child, path)
            healthy = outcome.failure != "memory"
            return outcome
        except TimeoutError:
            hint = "Split it, or raise retrieval.load_seconds."
            return _unreadable(f"Reading the file takes longer than {self.bounds.seconds:g} s.", hint)
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await child.wait()
            # Native code that runs out of memory aborts instead of raising.
            if self._outgrown or code == -signal.SIGABRT:
                return Outcome(None, "memory")
            if code >= 0:
                see = f"See why: {sys.executable} -m tidegate.retrieval.load_child </dev/null"
                return _unreadable(f"The reading process stopped with exit code {code}.", see)
            died = signal.Signals(-code).name
            outcome = _unreadable(f"The file made its reader crash ({died}).", "It may be damaged on purpose. Export it again.")
            return msgspec.structs.replace(outcome, failure="killed") if code == -signal.SIGKILL else outcome
        finally:
            watching.cancel()
            if not healthy:
                await self._stop()

    async def _watch_memory(self, child: Process) -> None:
        """Kill the child as soon as it holds more memory than it may. Not left to a limit of the kernel's alone: an interpreter that can
        allocate nothing at all does not always get as far as its MemoryError, it may spin for ever on the way there."""
        statm = Path(f"/proc/{child.pid}/statm")
        while child.returncode is None:
            if _resident_bytes(statm) > self.bounds.memory_bytes:
                self._outgrown = True
                child.kill()
                return
            await asyncio.sleep(_LOOK_S)

    async def _exchange(self, child: Process, path: str) -> Outcome:
        assert child.stdin is not None
        assert child.stdout is not None
        frame = msgspec.msgpack.encode((path, self.bounds))
        child.stdin.write(len(frame).to_bytes(LENGTH_BYTES, "big") + frame)
        await child.stdin.drain()
        length = int.from_bytes(await child.stdout.readexactly(LENGTH_BYTES), "big")
        outcome = msgspec.msgpack.decode(await child.stdout.readexactly(length), type=Outcome)
        self._served += 1
        return outcome

    async def _start(self) -> Process:
        self._served = 0
        command = (sys.executable, "-m", "tidegate.retrieval.load_child")
        return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)

    async def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None and child.returncode is None:
            child.kill()
            await child.wait()


def _resident_bytes(statm: Path) -> int:
    try:
        return int(statm.read_bytes().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):  # the process has just ended
        return 0


def _unreadable(message: str, hint: str) -> Outcome:
    return Outcome(None, "unreadable", message, hint)
