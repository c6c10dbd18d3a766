"""Limits on a real gateway: shared by its workers, given back when one is killed, told in /health."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.api.conftest import House, start_gateway, stop, until, url_of, workers
from tests.stores.valkey_server import ValkeyServer, running

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


def ask(url: str, key: str, body: dict[str, object]) -> httpx.Response:
    """On a connection of its own, which the kernel gives to either worker."""
    return httpx.post(url + "/v1/chat/completions", headers={"authorization": f"Bearer {key}"}, json=body, timeout=30)


def test_workers_share_a_keys_limit(house: House, served: tuple[subprocess.Popen[bytes], str]) -> None:
    """Two requests a minute are two, whichever worker each connection falls to."""
    _, url = served
    statuses = [ask(url, house.keys["two"], SHORT).status_code for _ in range(12)]
    assert sorted(statuses) == [200] * 2 + [429] * 10


def test_new_limits_of_a_key_hold_in_every_worker_without_a_restart(house: House, served: tuple[subprocess.Popen[bytes], str]) -> None:
    """A key that is told to have one run at a time has one, whichever worker a connection falls to; and any number again when that is taken back."""
    _, url = served
    admin = {"authorization": f"Bearer {house.keys['admin']}"}
    made = httpx.post(url + "/api/v1/keys", headers=admin, json={"tenant": "edits", "concurrent": 50}).json()

    def limit(**limits: float) -> int:
        return httpx.patch(f"{url}/api/v1/keys/{made['id']}", headers=admin, json=limits).status_code

    body = {**LONG, "stream": True}
    with httpx.stream("POST", url + "/v1/chat/completions", headers={"authorization": f"Bearer {made['key']}"}, json=body, timeout=30) as running:
        assert running.status_code == 200
        assert limit(concurrent=1) == 204
        until(lambda: {ask(url, made["key"], SHORT).status_code for _ in range(8)} == {429}, "the limit in both workers")
        assert "The limit of this key is used up: 1 requests at a time." in ask(url, made["key"], SHORT).text
        assert limit(concurrent=0) == 204
        until(lambda: {ask(url, made["key"], SHORT).status_code for _ in range(8)} == {200}, "the limit's end in both workers")
    listed = next(key for key in httpx.get(url + "/api/v1/keys", headers=admin).json()["keys"] if key["id"] == made["id"])
    assert (listed["concurrent"], listed["money_per_day"], listed["requests_per_minute"]) == (0, 0.0, 0)


@pytest.mark.parametrize(
    ("limits", "says"),
    [({"concurrent": -1}, "concurrent"), ({"money_per_day": -0.5}, "money_per_day"), ({"money_per_day": 1e9}, "money_per_day"), ({"rpm": 1}, "rpm")],
    ids=["negative", "negative money", "huge", "unknown"],
)
def test_limits_that_are_none_are_refused_by_name(house: House, limits: dict[str, float], says: str) -> None:
    """And so is a change of a key that does not live."""
    with house.client("admin") as client:
        wrong = client.patch("/api/v1/keys/key_none", json=limits)
        assert (wrong.status_code, says in wrong.text) == (422, True)
        assert client.patch("/api/v1/keys/key_none", json={"concurrent": 1}).status_code == 404
    with house.client("data") as client:
        assert client.patch("/api/v1/keys/key_none", json={"concurrent": 1}).status_code == 403


def test_money_that_cannot_be_counted_is_not_spent(house: House) -> None:
    """A key with a limit of money is refused where models have no price, with what is to be done; it is never served uncounted."""
    with house.client("admin") as client:
        key = client.post("/api/v1/keys", json={"tenant": "edits", "money_per_day": 1.0}).json()["key"]
    answer = ask(house.url, key, SHORT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "limits_down")
    assert "'scripted' has no price" in answer.json()["error"]["message"]


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


# -- two gateways and a Valkey server

LIMITED = {"TIDEGATE_LIMITS__EACH_TENANT": "{requests_per_minute = 60}", "TIDEGATE_LIMITS__WHEN_LOST": "share", "TIDEGATE_VALKEY__TIMEOUT_S": "5"}


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    with running() as one:
        yield one


@pytest.fixture
def two(house: House, postgres_dsn: str, tmp_path: Path, valkey: ValkeyServer) -> Iterator[list[str]]:
    """The addresses of two gateways, the first with two workers."""
    with contextlib.ExitStack() as stack:
        running = []
        for name, workers in (("one", "2"), ("other", "1")):
            more = {**LIMITED, "TIDEGATE_VALKEY__URL": valkey.url, "TIDEGATE_SERVER__WORKERS": workers}
            process = start_gateway(tmp_path / name, postgres_dsn, house.engine, **more)
            stack.callback(stop, process)
            running.append((tmp_path / name, process))
        yield [url_of(data, process) for data, process in running]


def limits_of(url: str) -> dict[str, object]:
    found: dict[str, object] = httpx.get(url + "/health").json()["limits"]
    return found


def test_gateways_share_a_tenants_limit(house: House, two: list[str]) -> None:
    """60 requests a minute are 60 and what refills meanwhile, over three workers of two gateways."""
    assert [limits_of(url)["shared"] for url in two] == [True, True]
    began_ns = time.perf_counter_ns()
    statuses = [ask(two[turn % 2], house.keys["other"], SHORT).status_code for turn in range(110)]
    took_s = (time.perf_counter_ns() - began_ns) / 1e9
    assert set(statuses) == {200, 429}
    # A machine may hold its last lease, an eighth of the limit, for a moment longer than these requests take.
    assert 50 <= statuses.count(200) <= 60 + took_s + 1


def test_a_gateway_that_lost_the_server_says_so_everywhere(house: House, two: list[str], valkey: ValkeyServer) -> None:
    """It answers on, with its share; /health, the page's figures and the metrics tell; and it finds the server again."""
    url = two[1]
    assert ask(url, house.keys["other"], SHORT).status_code == 200
    valkey.stop()
    until(lambda: limits_of(url)["shared"] is False, "the loss")
    statuses = [ask(url, house.keys["other"], SHORT).status_code for _ in range(50)]
    assert 429 in statuses  # half of 60
    assert statuses[:10] == [200] * 10
    health = httpx.get(url + "/health").json()
    assert health["status"] == "degraded"
    assert any("limits that all machines share cannot be reached" in why and "its own share" in why for why in health["why"])
    metrics = httpx.get(url + "/metrics", headers={"authorization": f"Bearer {house.keys['admin']}"}).text
    assert 'tidegate_limits_shared{by="valkey"} 0.0' in metrics
    [counted] = [line for line in metrics.splitlines() if line.startswith("tidegate_limits_fallbacks_total ")]
    assert float(counted.split()[1]) >= 40
    valkey.start()
    until(lambda: limits_of(url)["shared"] is True, "the way back")
    until(lambda: not any("machines share" in why for why in httpx.get(url + "/health").json()["why"]), "a health without it")
