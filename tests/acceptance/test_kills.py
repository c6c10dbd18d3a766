"""Parts are killed at random while requests run: nothing that was answered is lost, nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytestmark = [pytest.mark.local, pytest.mark.slow, pytest.mark.timeout(400)]

REQUESTS = 200


class Up:
    """A running `tidegate up`."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.log = data.parent / "up.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tidegate.cli", "up", "--data", str(data), "--port", "0"],
                stdout=log, stderr=log, cwd=data.parent, start_new_session=True,
            )
        wait(lambda: "curl" in self.log.read_text() or self.process.poll() is not None, 120)
        assert self.process.poll() is None, self.log.read_text()
        line = next(line for line in self.log.read_text().splitlines() if line.startswith("curl"))
        self.url = line.split("/api/")[0].split()[-1]
        self.key = (data / "first-key").read_text().strip()

    def parts(self) -> dict[str, int]:
        """Pids of the parts that may be killed: the supervisor's own children, by the pid files that it keeps."""
        found = {}
        for file in (self.data / "run").glob("*.pid"):
            pid = json.loads(file.read_bytes())["pid"]
            if Path(f"/proc/{pid}").exists():
                found[file.stem] = pid
        return found

    def ask(self) -> str | None:
        """The flight's id of an answer that came whole, else None."""
        try:
            answer = httpx.post(
                self.url + "/v1/chat/completions", headers={"authorization": f"Bearer {self.key}"}, timeout=60,
                json={"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 2},
            )
        except httpx.TransportError:
            return None  # the gateway died with this request: it was not answered
        return answer.headers.get("x-request-id") if answer.status_code == 200 else None


def wait(true: object, within_s: float) -> None:
    end_ns = time.perf_counter_ns() + int(within_s * 1e9)
    while not true():  # type: ignore[operator]
        assert time.perf_counter_ns() < end_ns, "it did not happen in time"
        time.sleep(0.05)


def processes_of(data: Path) -> list[str]:
    """Command lines of every process that names the data folder or runs in it."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            command = (proc / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            folder = os.readlink(proc / "cwd")
        except OSError:
            continue
        if proc.name != str(os.getpid()) and (str(data) in command or folder.startswith(str(data))):
            found.append(f"{proc.name} {command}")
    return found


@pytest.fixture
def up(data_home: Path, request: pytest.FixtureRequest) -> Iterator[Up]:
    data = data_home / request.node.name[:20] / "data"  # short: a socket's path has little room
    data.parent.mkdir(mode=0o711)
    running = Up(data)
    yield running
    if running.process.poll() is None:
        running.process.send_signal(signal.SIGTERM)
        running.process.wait(60)


def test_kills_lose_no_answer_and_leave_no_orphan(up: Up) -> None:
    """200 answered requests, while engine, database and gateway are killed (-9) three times each: all have their record; nothing stays after
    Ctrl-C."""
    chance = random.Random(4711)
    victims = ["engine", "gateway", "postgres"] * 3 + ["embedder"]
    chance.shuffle(victims)
    answered: list[str] = []
    give_up_ns = time.perf_counter_ns() + 300 * 1_000_000_000

    def ask() -> None:
        while (len(answered) < REQUESTS or killer.is_alive()) and time.perf_counter_ns() < give_up_ns:
            if flight_id := up.ask():
                answered.append(flight_id)
            else:
                time.sleep(0.05)  # a part is down just now, and says so at once

    def kill() -> None:
        for name in victims:
            time.sleep(chance.uniform(0.1, 1.0))
            wait(lambda name=name: name in up.parts(), 60)
            with contextlib.suppress(ProcessLookupError, KeyError):  # it ended in this very moment
                os.kill(up.parts()[name], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    workers = [threading.Thread(target=ask) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in [*workers, killer]:
        worker.join()
    assert len(answered) >= REQUESTS
    wait(lambda: up.ask() is not None, 90)

    with httpx.Client(base_url=up.url, headers={"authorization": f"Bearer {up.key}"}, timeout=30) as client:
        for flight_id in answered:
            wait(lambda flight_id=flight_id: client.get(f"/api/v1/flights/{flight_id}").status_code == 200, 30)

    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(60) == 0
    assert processes_of(up.data) == []


def test_a_killed_supervisor_leaves_nothing_and_the_next_start_works(up: Up) -> None:
    """kill -9 of `tidegate up` itself: every part goes with it, and the same folder starts again."""
    assert up.ask()
    up.process.kill()
    up.process.wait()
    wait(lambda: processes_of(up.data) == [], 40)
    up.log.unlink()
    again = Up(up.data)
    try:
        assert again.key == up.key
        assert again.ask()
    finally:
        again.process.send_signal(signal.SIGTERM)
        assert again.process.wait(60) == 0
