"""One managed child process: started, probed, watched, restarted, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.core.errors import LocalPartError
from tidegate.local.identity import Identity
from tidegate.local.leash import leash
from tidegate.local.logfile import LogFile
from tidegate.local.process import Process, StopSteps

#: Seconds between a death and the restart: doubled each time, back to the first once the child lived `_HEALTHY_S`.
_FIRST_DELAY_S = 0.2
_LAST_DELAY_S = 30.0
_HEALTHY_S = 60.0
_PROBE_EVERY_S = 0.05

#: How a child says that the disk is full (the second is PostgreSQL's hint after a short write); a full disk may leave it speechless, too.
_DISK_FULL = (os.strerror(errno.ENOSPC), "Check free disk space", os.strerror(errno.EDQUOT))
_HARDLY_ANYTHING_BYTES = 1_000_000

#: Tells what happened to a child, in words for people.
Tell = Callable[[str], None]


@dataclass(frozen=True)
class ChildSpec:
    """How one child is run.

    `ready` is asked again and again until it says True (it may not raise, and each try must be bounded); `death_signal` is what the kernel
    sends when this process dies; `env` is the child's whole environment.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log: LogFile
    pid_file: Path
    ready: Callable[[], Awaitable[bool]]
    ready_within_s: float = 60.0
    death_signal: signal.Signals = signal.SIGKILL
    stop_steps: StopSteps = ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0))
    identity: Identity | None = None
    pass_fds: Sequence[int] = ()
    cwd: Path | None = None
    hint: str | None = None


@dataclass
class Child:
    """A running child, or one that should run. All methods belong to one event loop and one thread (see leash.die_with)."""

    spec: ChildSpec
    restarts: int = 0
    ready: bool = False
    _process: subprocess.Popen[bytes] | None = None
    _gone: asyncio.Event = field(default_factory=asyncio.Event)
    _pidfd: int = -1
    _log_offset: int = 0
    _last_end: str = "It did not run yet."

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start it and wait until it is ready. Raises LocalPartError with its log's last lines; what was started is then gone again."""
        self._spawn()
        try:
            await self._until_ready()
        except LocalPartError:
            await self.stop()
            raise
        self.ready = True

    async def keep(self, tell: Tell) -> None:
        """Restart it whenever it dies, until cancelled. A start that fails is a death like any other."""
        delay_s = _FIRST_DELAY_S
        while True:
            began_ns = time.perf_counter_ns()
            await self._gone.wait()
            self.ready = False
            self.restarts += 1
            if time.perf_counter_ns() - began_ns > _HEALTHY_S * 1e9:
                delay_s = _FIRST_DELAY_S
            tell(f"{self.spec.name} {self._last_end}; restart {self.restarts} in {delay_s:.1f} s")
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LAST_DELAY_S)
            try:
                await self.start()
            except LocalPartError as error:
                tell(error.message)
            else:
                tell(f"{self.spec.name} is back (restart {self.restarts})")

    async def stop(self, hasten: asyncio.Event | None = None) -> bool:
        """Send each of the stop signals in turn and wait its seconds; `hasten` cuts all waits but the last. True when the child is gone."""
        self.ready = False
        last = self.spec.stop_steps[-1]
        for step in self.spec.stop_steps:
            if self._process is None or self._gone.is_set():
                break
            self._process.send_signal(step[0])
            await _first_of((self._gone, None if step is last else hasten), step[1])
        gone = self._process is None or self._gone.is_set()
        if gone:
            self.spec.pid_file.unlink(missing_ok=True)
        return gone

    async def run_to_end(self, within_s: float) -> None:
        """For a helper that does its work and ends: raises LocalPartError unless it ends with 0 in time."""
        self._spawn()
        try:
            await _first_of((self._gone,), within_s)
        finally:
            ended = self._gone.is_set()
            await self.stop()
        if not ended:
            raise self._error(f"{self.spec.name} took longer than {within_s:.0f} s.")
        if self._process is None or self._process.returncode != 0:
            raise self._error(f"{self.spec.name} {self._last_end}.")

    def _spawn(self) -> None:
        spec, who = self.spec, self.spec.identity
        switch = who if who is not None and who.switch else None
        self._gone = asyncio.Event()
        self._log_offset = spec.log.size()
        log = spec.log.open()
        try:
            self._process = subprocess.Popen(
                list(spec.argv), env=dict(spec.env), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=spec.cwd, pass_fds=spec.pass_fds,
                start_new_session=True,  # a Ctrl-C at the terminal reaches us alone: we stop the children, in order
                user=switch.uid if switch else None, group=switch.gid if switch else None, extra_groups=[] if switch else None,
                preexec_fn=leash(spec.death_signal),  # noqa: PLW1509 - it only calls prctl, through a library that is loaded already
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise LocalPartError(f"{spec.name} cannot be started: {spec.argv[0]}: {error}", hint=spec.hint) from error
        finally:
            os.close(log)
        self._pidfd = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)
        # A full disk takes the pid file, not the kernel's death signal; a running Tidegate must be able to restart its parts.
        with contextlib.suppress(OSError):
            if (process := Process.of(self._process.pid)) is not None:
                process.write(spec.pid_file)

    def _reap(self) -> None:
        assert self._process is not None
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()
        self._last_end = f"ended with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        self._gone.set()

    async def _until_ready(self) -> None:
        end_ns = time.perf_counter_ns() + int(self.spec.ready_within_s * 1e9)
        while not await self.spec.ready():
            if self._gone.is_set():
                raise self._error(f"{self.spec.name} {self._last_end} before it was ready.")
            if time.perf_counter_ns() > end_ns:
                raise self._error(f"{self.spec.name} was not ready within {self.spec.ready_within_s:.0f} s.")
            await asyncio.sleep(_PROBE_EVERY_S)

    def _error(self, message: str) -> LocalPartError:
        said = self.spec.log.tail(self._log_offset)
        hint = self.spec.hint
        if any(words in said for words in _DISK_FULL) or shutil.disk_usage(self.spec.log.path.parent).free < _HARDLY_ANYTHING_BYTES:
            hint = "The disk is full: free some space, or set local.data to a folder on a larger disk."
        return LocalPartError(f"{message} Its log {self.spec.log.path} ends with:\n{said or '(nothing)'}", hint=hint)


async def _first_of(events: Sequence[asyncio.Event | None], within_s: float) -> None:
    """Wait until one of the events is set, at most `within_s` seconds."""
    waits = [asyncio.ensure_future(event.wait()) for event in events if event is not None]
    try:
        await asyncio.wait(waits, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await wait
