"""Workers that hang, with real processes: they are found, killed and replaced, and nobody else is."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

#: Long enough that a worker which may run does, on a machine under load, and short enough to be waited for.
HUNG_S = 3.0
BOUND_S = 60.0


class Family:
    """A parent with two workers, and what they say."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-m", "tests.local.drive_workers", str(HUNG_S)], stdout=subprocess.PIPE, text=True)
        self._said: queue.Queue[str] = queue.Queue()
        self._reading = threading.Thread(target=self._read)
        self._reading.start()
        self.pids = dict(self.served() for _ in range(2))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(line.strip())

    def next(self) -> str:
        """What happened next, waited for."""
        return self._said.get(timeout=BOUND_S)

    def served(self) -> tuple[int, int]:
        """The next thing is that a worker serves: its number and pid."""
        what, index, pid = self.next().split()
        assert what == "serves"
        return int(index), int(pid)

    def stop(self) -> str:
        """Its last words."""
        self.process.terminate()
        self.process.wait(BOUND_S)
        self._reading.join(BOUND_S)
        last = ""
        while not self._said.empty():
            last = self._said.get()
        return last

    def close(self) -> None:
        for pid in (self.process.pid, *self.pids.values()):
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue
        if self.process.poll() is None:
            self.stop()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def family() -> Iterator[Family]:
    found = Family()
    try:
        yield found
    finally:
        found.close()


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGUSR1, signal.SIGUSR2], ids=["stopped", "endless loop", "call that never returns"])
def test_a_worker_that_hangs_is_replaced(family: Family, how: signal.Signals) -> None:
    """It is killed, what it held is given back, and another one has its number; the other worker is not touched, and the stop is a clean one."""
    os.kill(family.pids[0], how)
    assert family.next() == "ended 0"
    index, pid = family.served()
    assert (index, pid != family.pids[0]) == (0, True)
    family.pids[0] = pid
    assert family.stop() == "over ended=0 killed=0 hung=1"
    assert family.process.returncode == 0


def test_who_was_stopped_together_and_goes_on_is_spared(family: Family) -> None:
    """A worker stands still, and soon its parent does, for longer than the bound. The parent goes on first: that the worker still stands when it
    looks again is not held against it."""
    os.kill(family.pids[0], signal.SIGSTOP)
    os.kill(family.pids[1], signal.SIGKILL)
    assert family.next() == "ended 1"
    family.pids[1] = family.served()[1]  # between the two the parent has seen the last sign of the other
    os.kill(family.process.pid, signal.SIGSTOP)
    time.sleep(1.5 * HUNG_S)  # the time itself is what is tested
    os.kill(family.pids[1], signal.SIGKILL)
    os.kill(family.process.pid, signal.SIGCONT)
    assert family.next() == "ended 1"
    os.kill(family.pids[0], signal.SIGCONT)
    family.pids[1] = family.served()[1]
    assert family.stop() == "over ended=0 killed=2 hung=0"


def test_a_parent_that_was_stopped_spares_its_workers(family: Family) -> None:
    """They gave their signs meanwhile."""
    os.kill(family.process.pid, signal.SIGSTOP)
    time.sleep(1.5 * HUNG_S)  # the time itself is what is tested
    os.kill(family.process.pid, signal.SIGCONT)
    os.kill(family.pids[0], signal.SIGKILL)
    assert family.next() == "ended 0"
    family.pids[0] = family.served()[1]
    assert family.stop() == "over ended=0 killed=1 hung=0"


def test_a_stopped_worker_holds_up_no_stop(family: Family) -> None:
    """SIGTERM waits for a process that does not run: its parent does not wait for ever."""
    os.kill(family.pids[1], signal.SIGSTOP)
    assert family.stop().startswith("over")
    assert family.process.returncode == 0
