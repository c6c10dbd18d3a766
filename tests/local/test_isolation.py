"""A tenant on cores of its own, on the real stack: `tidegate up` with its database, its engine and the tenant's."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.embedded_engine import needs_engine
from tests.local.conftest import wait_for

from tidegate.local.process import Process

pytestmark = [pytest.mark.local, pytest.mark.two_cores, needs_engine]


@dataclass
class Stack:
    """A running `tidegate up` in which the tenant of the first key, `default`, has the core `core`."""

    data: Path
    core: int
    process: subprocess.Popen[bytes]
    url: str

    def part(self, name: str) -> int:
        process = Process.read(self.data / "run" / f"{name}.pid")
        assert process is not None, name
        return process.pid

    def tidegate(self, *args: str) -> str:
        argv = [sys.executable, "-m", "tidegate.cli", *args, "--set", f"local.data={self.data}"]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True, cwd=self.data.parent).stdout.strip()

    def engine_of(self, key: str) -> str:
        """Which engine answers, by the flight."""
        body = {"messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 2}
        with httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {key}"}, timeout=60) as client:
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            flights: list[dict[str, Any]] = client.get("/api/v1/flights").json()["flights"]
        return str(flights[0]["engine"])


@pytest.fixture(scope="module")
def stack(data_home: Path) -> Iterator[Stack]:
    data, core = data_home / "isolation" / "data", max(os.sched_getaffinity(0))
    data.parent.mkdir(mode=0o711)
    config, none = data.parent / "tidegate.toml", data.parent / "capabilities"
    none.mkdir()
    config.write_text(
        f'[local]\ndata = "{data}"\nembedder = false\npostgres_shared_buffers_mb = 32\nengine_slots = 1\n[server]\nport = 0\n'
        f'[capabilities]\nfolders = ["{none}"]\n'
        f'[tenants.default]\nisolation = "device"\ncores = [{core}]\n'
    )
    log = data.parent / "up.log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "tidegate.cli", "up", "--config", str(config)], stdout=out, stderr=out, cwd=data.parent, start_new_session=True,
        )
    try:
        wait_for("the start", lambda: "curl" in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        assert f"for the tenant default alone, on core {core}" in log.read_text()
        yield Stack(data, core, process, json.loads((data / "run" / "gateway.json").read_bytes())["url"])
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        shutil.rmtree(data.parent, ignore_errors=True)


def cores_of(pid: int) -> set[int]:
    """The cores on which any thread of a process may run, as the kernel tells them."""
    found: set[int] = set()
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        listed = re.search(r"^Cpus_allowed_list:\s*(\S+)$", status.read_text(), re.MULTILINE)
        assert listed is not None
        for span in listed[1].split(","):
            first, _, last = span.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found


def test_the_tenants_engine_runs_on_its_core_and_nothing_else_does(stack: Stack) -> None:
    """Every thread of the tenant's engine, and every thread of the supervisor and the other parts, by /proc."""
    assert cores_of(stack.part("engine-own1")) == {stack.core}
    for pid in (stack.process.pid, *map(stack.part, ("engine", "gateway", "postgres"))):
        assert cores_of(pid) == os.sched_getaffinity(0) - {stack.core}


def test_each_tenant_is_answered_by_its_own_engine(stack: Stack) -> None:
    """The first key's by the one on its core, another tenant's by the engine of all; and after a crash on the same core again."""
    first = (stack.data / "first-key").read_text().strip()
    other = stack.tidegate("keys", "create", "--tenant", "other")
    assert (stack.engine_of(first), stack.engine_of(other)) == ("own1", "local")
    before = stack.part("engine-own1")
    os.kill(before, signal.SIGKILL)

    def back() -> bool:
        process = Process.read(stack.data / "run" / "engine-own1.pid")
        return process is not None and process.pid != before and cores_of(process.pid) == {stack.core}

    wait_for("the engine's next life", back)
    assert stack.engine_of(other) == "local"
