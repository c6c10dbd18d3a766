"""Several gateway processes on one port: started by fork, restarted when they die or hang, stopped together.

A fork shares what was imported, so a second worker costs memory for its own requests only. The sockets are made before the fork and stay
open in the parent: a worker that died leaves its callers waiting in its socket's queue until the next one is there, and refuses nobody.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from tidegate.core.errors import TidegateError
from tidegate.local.leash import die_with
from tidegate.local.lives import Cause, Lives, Watch

log = logging.getLogger(__name__)

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_WATCHED = {signal.SIGCHLD, *_STOPS}
#: Seconds between a death and the restart: doubled each time, back to the first once the worker lived `_HEALTHY_S`.
_FIRST_DELAY_S = 0.2
_LAST_DELAY_S = 30.0
_HEALTHY_S = 60.0

#: Runs one worker to its end and returns its exit code. Gets the worker's number.
Work = Callable[[int], int]


@dataclass
class _Worker:
    index: int
    pid: int
    began_ns: int
    hung: bool = False


class Workers:
    """`run` forks, so it must be called before the process has an event loop or threads of its own."""

    def __init__(self, lives: Lives, work: Work, ended: Callable[[int], object] = lambda index: None, *, hung_s: float = 0.0) -> None:
        """`ended` is told the number of each worker that ended, however it did, before another one gets it. `hung_s`: seconds of silence after which
        a worker that serves is killed and replaced; 0: never."""
        self._lives = lives
        self._work = work
        self._ended = ended
        self._watch = Watch(lives, hung_s)
        self._running: dict[int, _Worker] = {}
        self._due: dict[int, tuple[int, float]] = {}  # by number: when to start it again, and the delay after that
        self._served: set[int] = set()  # the numbers that were ready once
        self._stopping = False
        self._code = 0

    def run(self) -> int:
        """Until SIGTERM, SIGINT or SIGHUP, which every worker gets. A worker that ends before its number ever served ends them all, with its code:
        what is wrong then is the start. Later it is tried again and again, and the others serve."""
        # Blocked signals wait for sigtimedwait: nothing is lost between two looks, and no handler runs at a bad moment.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        try:
            for index in range(self._lives.workers):
                self._start(index)
            while self._running or (self._due and not self._stopping):
                found = signal.sigtimedwait(_WATCHED, self._next_s())
                if found is not None and found.si_signo in _STOPS:
                    self._stop(found.si_signo)
                self._reap()
                self._kill_hung()
                self._restart()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self._code

    def _start(self, index: int) -> None:
        self._watch.begin(index)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:  # the worker
            code = 1
            try:
                die_with(parent, signal.SIGTERM)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
                self._lives.join(index)
                code = self._work(index)
            except KeyboardInterrupt:
                code = 130
            finally:
                with contextlib.suppress(Exception):
                    logging.shutdown()
                os._exit(code)  # what the parent registered for its own end is not the worker's
        self._running[pid] = _Worker(index, pid, time.perf_counter_ns())

    def _stop(self, number: int) -> None:
        self._stopping = True
        for pid in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _reap(self) -> None:
        for pid, worker in list(self._running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            if self._lives.served(worker.index):
                self._served.add(worker.index)
            del self._running[pid]
            try:
                self._ended(worker.index)
            except TidegateError as error:
                log.error("what worker %d held could not be given back: %s", worker.index, error.message)
            code = os.waitstatus_to_exitcode(status)
            if self._stopping:
                self._code = self._code or max(0, code)
            elif worker.index not in self._served:
                self._code = code if code > 0 else 1
                self._stop(signal.SIGTERM)
            else:
                how, cause = _how(worker, code)
                self._lives.replace(cause)
                lived_s = (time.perf_counter_ns() - worker.began_ns) / 1e9
                delay_s = _FIRST_DELAY_S if lived_s > _HEALTHY_S else self._due.get(worker.index, (0, _FIRST_DELAY_S))[1]
                log.warning("worker %d %s; it is started again in %.1f s", worker.index, how, delay_s)
                self._due[worker.index] = (time.perf_counter_ns() + int(delay_s * 1e9), min(2 * delay_s, _LAST_DELAY_S))

    def _kill_hung(self) -> None:
        """SIGKILL is all that a stopped process hears, and what one in an endless loop cannot put off."""
        silent = self._watch.look(time.perf_counter_ns())
        for worker in self._running.values():
            if worker.index in silent and not worker.hung:
                worker.hung = True
                log.error("worker %d (pid %d) hangs: its event loop stands still. It is killed; server.hung_worker_s", worker.index, worker.pid)
                os.kill(worker.pid, signal.SIGKILL)  # it is not reaped yet, so the pid is its own

    def _restart(self) -> None:
        if self._stopping:
            return
        running = {worker.index for worker in self._running.values()}
        for index, (due_ns, _) in self._due.items():
            if index not in running and time.perf_counter_ns() >= due_ns:
                self._start(index)

    def _next_s(self) -> float:
        running = {worker.index for worker in self._running.values()}
        waits = [due_ns for index, (due_ns, _) in self._due.items() if index not in running]
        most_s = self._watch.every_s
        if not waits:
            return most_s
        return min(most_s, max(0.01, (min(waits) - time.perf_counter_ns()) / 1e9))


def _how(worker: _Worker, code: int) -> tuple[str, Cause]:
    if worker.hung:
        return "hung and was killed", "hung"
    return (f"ended with code {code}", "ended") if code >= 0 else (f"was killed by {signal.Signals(-code).name}", "killed")
