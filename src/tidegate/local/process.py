"""A process that is not our child but was started by an earlier run: known by pid and start time, so a reused pid is never taken for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path

from tidegate.core.errors import LocalPartError

#: Signals of an orderly stop, each with the seconds to wait before the next.
StopSteps = tuple[tuple[signal.Signals, float], ...]


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot (/proc/PID/stat, field 22). None where it is gone, or dead and not yet reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the command's name may hold blanks and brackets
    return None if fields[0] in "ZX" else int(fields[19])


def boot_id() -> str:
    """Differs after every boot: start ticks count from there."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class Process:
    """One process of this boot, for ever: the pair of pid and start time is not given out twice."""

    pid: int
    ticks: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        ticks = start_ticks(pid)
        return None if ticks is None else cls(pid, ticks)

    @classmethod
    def read(cls, pid_file: Path) -> Process | None:
        """The process that `pid_file` names, if that very process still lives."""
        try:
            noted = json.loads(pid_file.read_text("ascii"))
            process = cls(int(noted["pid"]), int(noted["start_ticks"]))
            same_boot = noted["boot_id"] == boot_id()
        except (OSError, ValueError, KeyError, TypeError):
            return None  # absent, or cut by a full disk: the parent-death signal is what we rely on then
        return process if same_boot and process.alive() else None

    def write(self, pid_file: Path) -> None:
        new = pid_file.with_suffix(".new")
        new.write_text(json.dumps({"pid": self.pid, "start_ticks": self.ticks, "boot_id": boot_id()}), "ascii")
        new.replace(pid_file)

    def alive(self) -> bool:
        return start_ticks(self.pid) == self.ticks

    async def stop(self, steps: StopSteps) -> bool:
        """Send each signal and wait its seconds until the process is gone. False where it outlived all of them."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            # The pidfd holds on to whichever process has the pid now; checked after opening, it is ours or nobody's.
            if not self.alive():
                return True
            for step, wait_s in steps:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, step)
                if await _readable(pidfd, wait_s):
                    return True
            return False
        finally:
            os.close(pidfd)


#: The database's server stops in its own way and time (see postgres.py).
_NOT_OURS = "postgres.pid"


async def stop_leftovers(run: Path) -> None:
    """Stop the children of an earlier run that was killed, all at once. Raises LocalPartError where one outlives even SIGKILL."""
    async with asyncio.TaskGroup() as stopping:
        for pid_file in _pid_files(run):
            stopping.create_task(_stop_leftover(pid_file))


def _pid_files(run: Path) -> list[Path]:
    return [pid_file for pid_file in run.glob("*.pid") if pid_file.name != _NOT_OURS]


async def _stop_leftover(pid_file: Path) -> None:
    left = Process.read(pid_file)
    if left is not None and not await left.stop(((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0))):
        raise LocalPartError(
            f"The {pid_file.stem} of an earlier run (pid {left.pid}) does not stop.", hint="It hangs in the kernel: restart the machine.",
        )


async def _readable(pidfd: int, wait_s: float) -> bool:
    """A pidfd turns readable when its process ends."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + wait_s
    while not select.select([pidfd], [], [], 0)[0]:
        if loop.time() > end_s:
            return False
        await asyncio.sleep(0.02)
    return True
