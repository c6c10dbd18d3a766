"""The dead man's switch of a drill: `python -m tidegate.local.drill_switch`. The only one who stops a process, so that it is the one who lets it go.

It reads orders from standard input, a line each, and answers each with a line: `ok`, or what went wrong.

    freeze PID TICKS               stop the process and all below it (SIGSTOP)
    slow PID TICKS RUN_MS STOP_MS  let it run and stop it in turns

When its input ends, in whatever way the drill ended (done, Ctrl-C, kill -9), or its time is up, everything goes on again (SIGCONT) and it ends. It
has a session of its own: a Ctrl-C at the terminal does not reach it. A process is known by pid and start time, so another one that got the same
pid is left alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

from tidegate.local.process import Process


class Switch:
    """What is held, and what is slowed."""

    def __init__(self, limit_s: float) -> None:
        self._end_ns = time.perf_counter_ns() + int(limit_s * 1e9)
        self._held: list[Process] = []
        self._slowed: list[tuple[Process, float, float]] = []
        self._running = True  # the slowed ones
        self._turn_ns = 0

    def serve(self) -> None:
        """Until the input ends, or the time is up."""
        buffer = b""
        try:
            while (wait_s := self._wait_s()) is not None:
                if not select.select([0], [], [], wait_s)[0]:
                    continue
                read = os.read(0, 4096)
                if not read:
                    return
                *lines, buffer = (buffer + read).split(b"\n")
                for line in lines:
                    print(self._obey(line.decode("ascii", "replace").split()), flush=True)
        finally:
            self._let_go()

    def _wait_s(self) -> float | None:
        """Seconds until something is due: the next turn of what is slowed, or the end. None: it is the end."""
        now_ns = time.perf_counter_ns()
        if now_ns >= self._end_ns:
            return None
        if not self._slowed:
            return (self._end_ns - now_ns) / 1e9
        if now_ns >= self._turn_ns:
            self._running = not self._running
            for process, _, _ in self._slowed:
                _send(process, signal.SIGCONT if self._running else signal.SIGSTOP)
            _, run_ms, stop_ms = self._slowed[0]
            self._turn_ns = now_ns + int((run_ms if self._running else stop_ms) * 1e6)
        return max(0.0, (min(self._turn_ns, self._end_ns) - now_ns) / 1e9)

    def _obey(self, order: list[str]) -> str:
        try:
            process = Process(int(order[1]), int(order[2]))
            if order[0] == "slow":
                run_ms, stop_ms = float(order[3]), float(order[4])
                if not _send(process, signal.SIGCONT):
                    return "it is gone"
                self._slowed.append((process, run_ms, stop_ms))
                return "ok"
            if order[0] != "freeze":
                return f"no order {order[0]!r}"
            # Parents first: what is stopped has no more children.
            todo = [process]
            while todo:
                one = todo.pop(0)
                self._held.append(one)
                if not _send(one, signal.SIGSTOP) and one is process:
                    return "it is gone"
                todo += _children(one)
        except (ValueError, IndexError):
            return "an order is: freeze PID TICKS, or slow PID TICKS RUN_MS STOP_MS"
        except PermissionError:
            return "not permitted: it belongs to another user"
        return "ok"

    def _let_go(self) -> None:
        for process in [*reversed(self._held), *(one for one, _, _ in self._slowed)]:
            with contextlib.suppress(OSError):
                _send(process, signal.SIGCONT)


def _send(process: Process, number: signal.Signals) -> bool:
    """False where it is gone. Raises PermissionError."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if not process.alive():
            return False
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
    return True


def _children(process: Process) -> list[Process]:
    """By /proc/PID/stat, whose second word, the command's name, may hold blanks and brackets."""
    found: list[Process] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text("ascii", "replace").rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if parent == process.pid and (child := Process.of(int(stat.parent.name))) is not None:
            found.append(child)
    return found


def main() -> None:
    """The seconds after which everything goes on in any case are the argument."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(0))  # let go, then end
    print("ok", flush=True)
    Switch(float(sys.argv[1])).serve()


if __name__ == "__main__":
    main()
