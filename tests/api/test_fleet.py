"""Two engines of one model behind a real gateway: drained by its operator, killed, and shown."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from tests.api.conftest import House, add_keys, start_gateway, start_scripted, stop, until, url_of

from tidegate.cli import main
from tidegate.stores.migrate import migrate


class Pair(House):
    """A gateway with the engines `scripted` and `second`, each with two slots."""

    other: str
    processes: dict[str, subprocess.Popen[bytes]]

    def order(self, name: str, what: str, key: str = "admin") -> httpx.Response:
        with self.client(key) as client:
            return client.post(f"/api/v1/engines/{name}/{what}")

    def ask(self, text: str, order: str = "##n=2##") -> httpx.Response:
        return self.chat(f"{text} {order}", model="scripted")

    def asked(self, word: str) -> set[str]:
        """Which engines answer six requests."""
        before = self._requests()
        for number in range(6):
            answer = self.ask(f"{word} {number}")
            assert answer.status_code == 200, answer.text
        return {name for name, count in self._requests().items() if count > before[name]}

    def _requests(self) -> dict[str, int]:
        urls = {"scripted": self.engine, "second": self.other}
        return {name: httpx.get(url + "/stats").json()["requests"] for name, url in urls.items() if self.processes[name].poll() is None}

    def engines(self) -> dict[str, Any]:
        with self.client("admin") as client:
            found: dict[str, Any] = client.get("/api/v1/engines").json()["engines"]
            return found

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(self.url + "/health").json()
        return found


@pytest.fixture(scope="module", params=["1", "2"], ids=["one worker", "two workers"])
def pair(request: pytest.FixtureRequest, postgres_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    migrate(postgres_dsn)
    keys = asyncio.run(add_keys(postgres_dsn))
    data = tmp_path_factory.mktemp("pair")
    (one, one_url), (two, two_url) = start_scripted(), start_scripted()
    process = start_gateway(
        data, postgres_dsn, one_url, TIDEGATE_SERVER__WORKERS=request.param, TIDEGATE_ENGINES__SCRIPTED__SLOTS="2",
        TIDEGATE_ENGINES__SECOND__ADAPTER="scripted", TIDEGATE_ENGINES__SECOND__URL=two_url, TIDEGATE_ENGINES__SECOND__MODELS='["scripted"]',
        TIDEGATE_ENGINES__SECOND__CONFORMANCE="off", TIDEGATE_ENGINES__SECOND__SLOTS="2", TIDEGATE_FLEET__SLOW_START_S="0",
        TIDEGATE_ADMISSION__FORECAST_S="3600",
    )
    try:
        pair = Pair(url_of(data, process), one_url, keys, data, process)
        pair.other, pair.processes = two_url, {"scripted": one, "second": two}
        yield pair
    finally:
        stop(process)
        for engine in (one, two):
            stop(engine)


def test_drain_and_back(pair: Pair) -> None:
    """An order to one worker holds for all: no new request there, the slots of the lane are those that are left; then it is asked again."""
    workers = pair.health()["admission"]["scripted"]["slots"]
    assert pair.order("scripted", "drain").json()["fleet"]["drained"] is True

    until(lambda: pair.asked("drained") == {"second"}, "the order's way to all workers")
    until(lambda: pair.health()["admission"]["scripted"]["slots"] < workers or workers == 2, "what /health remembers for half a second")
    with pair.client("admin") as client:
        assert client.get("/api/v1/engines").json()["engines"]["scripted"]["fleet"]["drained"] is True
    assert pair.order("scripted", "resume").json()["fleet"].get("drained") is None
    until(lambda: "scripted" in pair.asked("again"), "the way back")


def test_drained_by_the_command_line(pair: Pair) -> None:
    """`tidegate drain` waits until what runs in any worker has ended; `--undo` takes it back."""
    threads = [threading.Thread(target=pair.chat, args=("##t=1000,n=2##",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: sum(engine["fleet"]["requests"] for engine in pair.engines().values()) >= 2, "requests, in whichever worker")
    options = ["--url", pair.url, "--key", pair.keys["admin"]]
    done = CliRunner().invoke(main, ["drain", "second", "--wait", "--time-limit", "20", *options])
    assert done.exit_code == 0, done.output
    assert "drained" in done.output
    assert httpx.get(pair.other + "/stats").json()["active"] == 0
    for thread in threads:
        thread.join(20)
    assert CliRunner().invoke(main, ["drain", "second", "--undo", *options]).exit_code == 0
    assert CliRunner().invoke(main, ["drain", "second", "--url", pair.url, "--key", pair.keys["data"]]).exit_code == 1
    until(lambda: "second" in pair.asked("back"), "the way back")


def test_who_may_order(pair: Pair) -> None:
    """Admin keys alone; an engine that there is not is named with those that there are."""
    assert pair.order("scripted", "drain", "data").status_code == 403
    answer = pair.order("third", "drain")
    assert answer.status_code == 404
    assert "nowhere, scripted, second" in answer.json()["error"]["hint"]


def test_gauges(pair: Pair) -> None:
    """What the choice rests on is told by engine."""
    pair.ask("one")
    said = httpx.get(pair.url + "/metrics").text
    for line in (
        'tidegate_engine_breaker{engine="scripted"} 0.0', 'tidegate_engine_drained{engine="second"} 0.0',
        'tidegate_engine_requests{engine="second"} 0.0', 'tidegate_engine_tokens_in_flight{engine="scripted"} 0.0',
    ):  # fmt: skip
        assert line in said
    assert 'tidegate_engine_tokens_in_flight{engine="nowhere"}' not in said, "nobody chooses there"


def test_a_killed_engine_costs_nobody_an_answer(pair: Pair) -> None:
    """It dies in the middle of 40 requests: each of them is answered. The last test of these: the engine stays dead."""
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(pair.ask, f"{number}", "##t=20,i=2,n=10##") for number in range(40)]
        until(lambda: sum(answer.done() for answer in answers) >= 5, "the first answers")
        pair.processes["second"].kill()
        said = [answer.result() for answer in answers]
    pair.processes["second"].wait(10)
    assert {answer.status_code for answer in said} == {200}, [answer.text for answer in said if answer.status_code != 200]
    assert pair.asked("after") == {"scripted"}
    until(lambda: not pair.health()["engines"]["second"]["up"], "the look that finds it down")
