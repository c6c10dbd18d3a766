"""`tidegate up` as a user starts it: a process of its own, with real parts and a stub gateway."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tidegate.local.process import Process

PATIENCE_S = 30.0
_ROOT = os.geteuid() == 0


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "as_root: about what root does; left out for other users")
    config.addinivalue_line("markers", "mounts: mounts a small disk; left out where that is not allowed")
    config.addinivalue_line("markers", "two_cores: divides the machine's cores; left out where there is one alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Facts about root are none for other users: such tests are left out, not skipped, since a skip means that something is missing."""
    unfit = [name for name, fits in (("as_root", _ROOT), ("mounts", _may_mount()), ("two_cores", len(os.sched_getaffinity(0)) > 1)) if not fits]
    out = [item for item in items if any(item.get_closest_marker(name) for name in unfit)]
    if out:
        items[:] = [item for item in items if item not in out]
        config.hook.pytest_deselected(items=out)


@functools.cache
def _may_mount() -> bool:
    """CAP_SYS_ADMIN (bit 21) among the effective capabilities: containers often take it from root."""
    effective = re.search(r"^CapEff:\s*(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return _ROOT and effective is not None and bool(int(effective[1], 16) >> 21 & 1)


def wait_for(what: str, true: Callable[[], Any]) -> Any:
    """Waits for a condition, bounded; returns its value."""
    end = time.perf_counter() + PATIENCE_S
    while not (value := true()):
        assert time.perf_counter() < end, f"waited in vain for {what}"
        time.sleep(0.02)
    return value


def descendants(pid: int) -> list[Process]:
    """All processes below `pid`."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
        except OSError:
            continue
    found, todo = [], [pid]
    while todo:
        below = parents.get(todo.pop(), [])
        todo += below
        found += [process for child in below if (process := Process.of(child))]
    return found


class Up:
    """A running `tidegate up`."""

    def __init__(self, home: Path, data: Path | None = None, env: dict[str, str] | None = None, **plan: Any) -> None:
        self.data = data or home / "data"
        settings = {"data": str(self.data), "postgres": False, "engine": False, "embedder": False} | plan.pop("settings", {})
        given = {"settings": settings, "port": 20000 + os.getpid() % 20000} | plan
        driver = Path(__file__).with_name("drive_up.py")
        self.process = subprocess.Popen(
            [sys.executable, str(driver), json.dumps(given)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | (env or {}),
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def said(self, pattern: str) -> re.Match[str]:
        """Waits for a line that matches."""
        def look() -> re.Match[str] | None:
            found = next((match for line in list(self.lines) if (match := re.search(pattern, line))), None)
            assert found or self.process.poll() is None, f"it ended with {self.process.returncode} and said:\n" + "\n".join(self.lines)
            return found

        match: re.Match[str] = wait_for(f"a line like {pattern!r} in {self.lines}", look)
        return match

    def ready(self) -> Up:
        self.said("^curl ")
        return self

    @property
    def url(self) -> str:
        return self.said(r"page +(http://\S+)/$")[1]

    def gateway(self) -> dict[str, Any]:
        """Who the gateway is and what it was told."""
        answer: dict[str, Any] = httpx.get(self.url, timeout=PATIENCE_S).json()
        return answer

    def child(self, name: str) -> Process | None:
        return Process.read(self.data / "run" / f"{name}.pid")

    def processes(self) -> list[Process]:
        return descendants(self.process.pid)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code

    def destroy(self) -> None:
        """Whatever a failed test left: asked to end, then killed with all below it."""
        if self.process.poll() is None:
            left = self.processes()
            self.process.terminate()
            try:
                self.process.wait(PATIENCE_S / 3)
            except subprocess.TimeoutExpired:
                self.process.kill()
            for process in left:
                if process.alive():
                    os.kill(process.pid, signal.SIGKILL)
        self.ended()
        assert self.process.stdout is not None
        self.process.stdout.close()


def _short_folder() -> Path:
    """In memory where there is room: the clusters made here need not survive a power cut, and their fsyncs would wait for the disk."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 1_000_000_000
    folder = Path(tempfile.mkdtemp(prefix="tg-", dir=memory if roomy else "/tmp"))
    folder.chmod(0o711)
    return folder


@pytest.fixture
def home() -> Iterator[Path]:
    """A short folder for one test, which other users may enter."""
    folder = _short_folder()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def small_disk(home: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    disk = home / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=755", "tidegate", disk], check=True)
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.fixture
def start(home: Path) -> Iterator[Callable[..., Up]]:
    """Starts `tidegate up` in the test's folder; whatever still runs at the end is stopped."""
    started: list[Up] = []

    def begin(**plan: Any) -> Up:
        started.append(Up(home, **plan))
        return started[-1]

    yield begin
    for up in started:
        up.destroy()


@pytest.fixture(scope="module")
def whole() -> Iterator[Up]:
    """One `tidegate up` with database, engine and embedder, shared by a module's tests."""
    folder = _short_folder()
    up = Up(folder, settings={"postgres": True, "engine": True, "embedder": True})
    try:
        yield up.ready()
    finally:
        up.destroy()
        shutil.rmtree(folder, ignore_errors=True)
