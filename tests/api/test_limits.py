"""Limits on a real gateway: shared by its workers, given back when one is killed, told in /health."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.api.conftest import House, start_gateway, stop, until, url_of

SHORT = {"messages": [{"role": "user", "content": "##n=3##"}]}
LONG = {"messages": [{"role": "user", "content": "##t=20000,n=3##"}]}


@pytest.fixture
def served(house: House, postgres_dsn: str, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    process = start_gateway(
        tmp_path, postgres_dsn, house.engine, TIDEGATE_SERVER__WORKERS="2", TIDEGATE_LIMITS__TENANTS='{other = {concurrent = 2}}',
    )
    try:
        yield process, url_of(tmp_path, process)
    finally:
        stop(process)


def workers(process: subprocess.Popen[bytes]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def ask(url: str, key: str, body: dict[str, object]) -> httpx.Response:
    """On a connection of its own, which the kernel gives to either worker."""
    return httpx.post(url + "/v1/chat/completions", headers={"authorization": f"Bearer {key}"}, json=body, timeout=30)


def test_workers_share_a_keys_limit(house: House, served: tuple[subprocess.Popen[bytes], str]) -> None:
    """Two requests a minute are two, whichever worker each connection falls to."""
    _, url = served
    statuses = [ask(url, house.keys["two"], SHORT).status_code for _ in range(12)]
    assert sorted(statuses) == [200] * 2 + [429] * 10


def test_what_a_killed_worker_had_reserved_comes_back(house: House, served: tuple[subprocess.Popen[bytes], str]) -> None:
    """Both places of a tenant are held by runs; their workers are killed in the middle, and others pass."""
    process, url = served

    def hold() -> None:
        while ask(url, house.keys["other"], LONG).status_code == 429:  # a short one had the place
            pass

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(hold) for _ in range(2)]
        until(lambda: ask(url, house.keys["other"], SHORT).status_code == 429, "both places taken")
        refused = ask(url, house.keys["other"], SHORT)
        assert "The limit of tenant other is used up: 2 requests at a time." in refused.text
        for pid in workers(process):
            os.kill(pid, signal.SIGKILL)
        for one in running:
            with pytest.raises(httpx.HTTPError):
                one.result()
    assert [ask(url, house.keys["other"], SHORT).status_code for _ in range(4)] == [200] * 4


def test_health_tells_what_limits_are_counted_in(house: House, served: tuple[subprocess.Popen[bytes], str]) -> None:
    """How many are counted, and how many may be."""
    _, url = served
    ask(url, house.keys["two"], SHORT)
    until(lambda: httpx.get(url + "/health").json()["limits"]["subjects"] >= 1, "a subject in the count")
    assert httpx.get(url + "/health").json()["limits"]["most_subjects"] == 131_072
