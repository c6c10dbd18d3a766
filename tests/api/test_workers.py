"""`tidegate serve` with several workers: one port, one sum, nobody refused while a worker is started again."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.api.conftest import House, start_gateway, stop, until, url_of

ASK = {"messages": [{"role": "user", "content": "##n=3##"}]}


@pytest.fixture
def served(house: House, postgres_dsn: str, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    process = start_gateway(tmp_path, postgres_dsn, house.engine, TIDEGATE_SERVER__WORKERS="2")
    try:
        yield process, url_of(tmp_path, process)
    finally:
        stop(process)


def workers(process: subprocess.Popen[bytes]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def ask(url: str, key: str) -> int:
    """On a connection of its own, which the kernel gives to either worker."""
    return httpx.post(url + "/v1/chat/completions", headers={"authorization": f"Bearer {key}"}, json=ASK, timeout=30).status_code


def counted(url: str, key: str) -> float:
    text = httpx.get(url + "/metrics", headers={"authorization": f"Bearer {key}"}).text
    found = re.findall(r'^tidegate_requests_total\{.*route="/v1/chat/completions".*status="200"\} (\S+)$', text, re.M)
    return sum(map(float, found))


def test_metrics_are_the_sum_of_all_workers(house: House, served: tuple[subprocess.Popen[bytes], str]) -> None:
    """Whichever worker is asked, it tells what all of them counted, also what one counted that was killed since."""
    process, url = served
    assert [ask(url, house.keys["data"]) for _ in range(20)] == [200] * 20
    until(lambda: [counted(url, house.keys["admin"]) for _ in range(6)] == [20.0] * 6, "the sum in every worker")
    first = workers(process)
    os.kill(first[0], signal.SIGKILL)
    until(lambda: len(workers(process)) == 2 and workers(process) != first, "a new worker")
    until(lambda: [counted(url, house.keys["admin"]) for _ in range(6)] == [20.0] * 6, "the sum after a death")


def test_a_dead_worker_refuses_nobody(house: House, served: tuple[subprocess.Popen[bytes], str]) -> None:
    """Its socket stays open in the parent: who connects meanwhile waits for the next worker."""
    process, url = served
    os.kill(workers(process)[0], signal.SIGKILL)
    assert [ask(url, house.keys["data"]) for _ in range(12)] == [200] * 12


def test_a_worker_that_dies_again_before_it_serves_stops_nobody(house: House, served: tuple[subprocess.Popen[bytes], str]) -> None:
    """Killed once more while it starts, it is started again all the same: the other serves on, and so does the parent."""
    process, url = served
    first = workers(process)
    os.kill(first[0], signal.SIGKILL)
    until(lambda: bool(set(workers(process)) - set(first)), "a new worker")
    os.kill((set(workers(process)) - set(first)).pop(), signal.SIGKILL)
    assert [ask(url, house.keys["data"]) for _ in range(12)] == [200] * 12
    until(lambda: len(workers(process)) == 2, "two workers again")
    assert process.poll() is None
    assert first[1] in workers(process)


def test_a_stop_ends_all_workers(house: House, postgres_dsn: str, tmp_path: Path) -> None:
    """SIGTERM to the parent: every worker ends, the exit code is 0, and the port is free."""
    process = start_gateway(tmp_path, postgres_dsn, house.engine, TIDEGATE_SERVER__WORKERS="3")
    url = url_of(tmp_path, process)
    pids = workers(process)
    assert len(pids) == 3
    stop(process)
    assert process.returncode == 0
    assert not any(_lives(pid) for pid in pids)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url + "/health")


def test_workers_die_with_a_killed_parent(house: House, postgres_dsn: str, tmp_path: Path) -> None:
    """However the parent went, no worker is left behind."""
    process = start_gateway(tmp_path, postgres_dsn, house.engine, TIDEGATE_SERVER__WORKERS="2")
    url_of(tmp_path, process)
    pids = workers(process)
    process.kill()
    process.wait(10)
    until(lambda: not any(_lives(pid) for pid in pids), "the workers' end")


def test_a_start_that_cannot_work_ends_at_once(house: House, tmp_path: Path) -> None:
    """A worker that never served is not started again and again: its error is said and its code is the command's."""
    (tmp_path / "spool").write_text("no folder")
    process = start_gateway(tmp_path, "postgresql://127.0.0.1:9/x", house.engine, TIDEGATE_SERVER__WORKERS="2")
    try:
        assert process.wait(30) == 2
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert "error: The flight spool cannot be written" in (tmp_path / "gateway.log").read_text()


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
