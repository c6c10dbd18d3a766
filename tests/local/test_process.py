"""Processes known by pid and start time."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tidegate.local.process import Process, start_ticks

_DEAF = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"


def test_a_pid_file_leads_back_to_the_same_process(tmp_path: Path) -> None:
    """What was written is found while it lives."""
    me = Process.of(os.getpid())
    assert me is not None
    me.write(tmp_path / "me.pid")
    assert Process.read(tmp_path / "me.pid") == me


@pytest.mark.parametrize("text", ["", "{", "123", '{"pid": 1}', '{"pid": "x", "start_ticks": 1, "boot_id": ""}'])
def test_a_broken_pid_file_names_nobody(tmp_path: Path, text: str) -> None:
    """A file cut by a full disk is as good as none."""
    (tmp_path / "x.pid").write_text(text)
    assert Process.read(tmp_path / "x.pid") is None


def test_another_boot_is_another_process(tmp_path: Path) -> None:
    """Start ticks count from the boot: the same pair after a reboot is a stranger."""
    me = Process.of(os.getpid())
    assert me is not None
    file = tmp_path / "me.pid"
    me.write(file)
    file.write_text(file.read_text().replace('boot_id": "', 'boot_id": "other'))
    assert Process.read(file) is None


def test_a_zombie_is_gone() -> None:
    """Dead and not yet reaped counts as dead."""
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert start_ticks(child.pid) is None
    child.wait()


def test_stop_goes_on_to_the_next_signal() -> None:
    """A process that does not hear SIGTERM is killed after its time."""
    with subprocess.Popen([sys.executable, "-c", _DEAF], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "deaf\n"
        process = Process.of(child.pid)
        assert process is not None
        assert not asyncio.run(process.stop(((signal.SIGTERM, 0.05),)))
        assert asyncio.run(process.stop(((signal.SIGTERM, 0.05), (signal.SIGKILL, 20.0))))


def test_stop_spares_a_process_that_only_has_the_pid() -> None:
    """A reused pid gets no signal."""
    with subprocess.Popen(["sleep", "600"]) as child:
        process = Process.of(child.pid)
        assert process is not None
        assert asyncio.run(Process(process.pid, process.ticks + 1).stop(((signal.SIGKILL, 1.0),)))
        assert child.poll() is None
        child.kill()
