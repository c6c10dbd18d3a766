"""A real gateway process on a real database, with the scripted engine behind it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.waiting import until_blocking as until

from tidegate.api.control import NewKey, make_key
from tidegate.stores.migrate import migrate
from tidegate.stores.settings import StoreSettings
from tidegate.stores.systems.postgres import Postgres

CAPABILITIES = Path(__file__).parent / "capabilities"


@dataclass
class House:
    """The gateway under test: where it is, its keys, and the engine behind it."""

    url: str
    engine: str
    keys: dict[str, str]
    data: Path
    process: subprocess.Popen[bytes]

    def client(self, key: str = "data", **more: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {self.keys[key]}"}, timeout=30, **more)

    def chat(self, order: str, *, key: str = "data", **fields: Any) -> httpx.Response:
        with self.client(key) as client:
            return client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": order}], **fields})

    def flight(self, flight_id: str) -> dict[str, Any]:
        with self.client("admin") as client:
            answer = client.get(f"/api/v1/flights/{flight_id}")
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found

    def flight_ended(self, flight_id: str) -> bool:
        with self.client("admin") as client:
            return client.get(f"/api/v1/flights/{flight_id}").status_code == 200

    def flights(self) -> list[dict[str, Any]]:
        with self.client("admin") as client:
            found: list[dict[str, Any]] = client.get("/api/v1/flights", params={"limit": 200}).json()["flights"]
            return found

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(self.engine + "/stats").json()
        return found


def start_scripted() -> tuple[subprocess.Popen[bytes], str]:
    process = subprocess.Popen([sys.executable, "-m", "tidegate.bench.scripted", "--port", "0"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    line = process.stdout.readline().decode()
    return process, "http://" + line.split()[-1]


async def add_keys(dsn: str) -> dict[str, str]:
    store = Postgres(StoreSettings(dsn=dsn))
    keys = {}
    for name, wanted in {
        "data": NewKey(tenant="default", role="data", name="", requests_per_minute=0, tokens_per_minute=0),
        "other": NewKey(tenant="other", role="data", name="", requests_per_minute=0, tokens_per_minute=0),
        "admin": NewKey(tenant="ops", role="admin", name="", requests_per_minute=0, tokens_per_minute=0),
        "kept": NewKey(tenant="kept", role="data", name="", requests_per_minute=0, tokens_per_minute=0),
        "two": NewKey(tenant="default", role="data", name="", requests_per_minute=2, tokens_per_minute=0),
        "second": NewKey(tenant="default", role="data", name="", requests_per_minute=0, tokens_per_minute=0),
        "tokens": NewKey(tenant="default", role="data", name="", requests_per_minute=0, tokens_per_minute=1000),
    }.items():
        keys[name], record = make_key(wanted)
        await store.add_key(record)
    await store.close()
    return keys


def start_gateway(data: Path, dsn: str, engine: str, **more: str) -> subprocess.Popen[bytes]:
    data.mkdir(parents=True, exist_ok=True)
    config = data / "tidegate.toml"
    config.write_text(
        f'[server]\nport = 0\nkeys_refresh_s = 0.2\n[store]\ndsn = "{dsn}"\n[local]\ndata = "{data}"\nembedder = false\n'
        f'[budgets]\nprofile = "embedded"\n[capabilities]\nfolders = ["{CAPABILITIES}"]\n[tenants.kept]\nkeep = true\n'
        f'[engines.scripted]\nadapter = "scripted"\nurl = "{engine}"\nmodels = ["scripted"]\ninter_token_s = 2.0\nconformance = "off"\n'
        "[generation]\nmax_resumes = 0\n"  # what breaks off is seen; tests/api/test_guard.py has them go on
        "[door]\nv1 = true\nv1_injection = true\n"
        "[fleet]\nmax_retry_after_s = 0\n"  # one test's 429 is not to hold off the next one; tests/pipeline/test_retry.py has it obeyed
        '[engines.nowhere]\nadapter = "openai"\nurl = "http://127.0.0.1:9"\nmodels = ["nowhere"]\n'
    )
    (data / "run" / "gateway.json").unlink(missing_ok=True)
    with open(data / "gateway.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tidegate.cli", "serve", "--config", str(config)], stderr=log, env={**os.environ, **more}
        )


def url_of(data: Path, process: subprocess.Popen[bytes]) -> str:
    note = data / "run" / "gateway.json"

    def noted() -> bool:
        assert process.poll() is None, (data / "gateway.log").read_text()
        return note.exists() and json.loads(note.read_bytes())["pid"] == process.pid

    until(noted, "the gateway's start", 30)
    url: str = json.loads(note.read_bytes())["url"]
    until(lambda: _answers(url), "the gateway's first answer")
    return url


def _answers(url: str) -> bool:
    try:
        return httpx.get(url + "/health").status_code in (200, 503)
    except httpx.TransportError:
        return False


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(30)
    if process.stdout is not None:
        process.stdout.close()


def workers(process: subprocess.Popen[bytes]) -> list[int]:
    """The pids of a gateway's workers."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.fixture(scope="session")
def house(postgres_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    migrate(postgres_dsn)
    keys = asyncio.run(add_keys(postgres_dsn))
    engine, engine_url = start_scripted()
    data = tmp_path_factory.mktemp("gateway")
    process = start_gateway(data, postgres_dsn, engine_url)
    try:
        yield House(url_of(data, process), engine_url, keys, data, process)
    finally:
        stop(process)
        stop(engine)


@pytest.fixture(autouse=True)
def waterfalls_add_up(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test: each flight's parts add up to its whole, within 1 ms or 1 %."""
    yield
    if "house" not in request.fixturenames:
        return
    for flight in request.getfixturevalue("house").flights():
        parts_ns = sum(spent_ns for _, spent_ns in flight["laps"])
        assert abs(parts_ns - flight["whole_ns"]) <= max(1_000_000, flight["whole_ns"] // 100), flight
