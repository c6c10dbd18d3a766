"""Waiting for a slot as a caller sees it: a real gateway before a scripted engine with two slots."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tests.api.conftest import House, add_keys, start_gateway, start_scripted, stop, until, url_of

from tidegate.admission.gate import Gate
from tidegate.admission.settings import AdmissionSettings
from tidegate.api import waiting
from tidegate.core.ask import Ask, Caller, Deadline
from tidegate.core.errors import Busy
from tidegate.core.flight import Flight
from tidegate.stores.migrate import migrate

#: An answer of the engine that lasts until its client is done with it.
LONG = "##t=1,i=50,n=20000##"
QUICK = "##t=1,i=1,n=2##"


@pytest.fixture(scope="module")
def gated(postgres_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A gateway of its own whose engine has two slots; the forecast may be an hour."""
    more = {"TIDEGATE_SERVER__HEAD_WAIT_S": "0.2", "TIDEGATE_STREAMS__CALLERS_MAY": '["drain"]'}
    yield from gateway(postgres_dsn, tmp_path_factory, TIDEGATE_ADMISSION__FORECAST_S="3600", **more)


@pytest.fixture(scope="module")
def hasty(postgres_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One at which nobody may wait, and whose requests end after two seconds."""
    yield from gateway(postgres_dsn, tmp_path_factory, TIDEGATE_ADMISSION__FORECAST_S="0.001")


def gateway(dsn: str, folders: pytest.TempPathFactory, **more: str) -> Iterator[House]:
    migrate(dsn)
    keys = asyncio.run(add_keys(dsn))
    data = folders.mktemp("gated")
    engine, engine_url = start_scripted()
    process = start_gateway(data, dsn, engine_url, TIDEGATE_ENGINES__SCRIPTED__SLOTS="2", **more)
    try:
        yield House(url_of(data, process), engine_url, keys, data, process)
    finally:
        stop(process)
        stop(engine)


class Clock:
    now = 1

    def __call__(self) -> int:
        return self.now


async def test_who_need_not_wait_goes_when_the_forecast_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs takes longer than was forecast: its place is given up as soon as that is seen, the flight says so, and the queue is empty."""
    monkeypatch.setattr(waiting, "LOOK_S", 0.001)
    clock = Clock()
    gate = Gate(AdmissionSettings(forecast_s=600), clock_ns=clock)
    bounded = gate.open(["m"], 1)
    for _ in range(20):
        place = gate.enter("m", Caller("k", "t"), prompt_tokens=100)
        clock.now += 1_000_000_000
        place.leave(150)
    running = gate.enter("m", Caller("k", "t"), prompt_tokens=100)
    place = gate.enter("m", Caller("k", "t"), prompt_tokens=100, within_ns=5_000_000_000)
    flight = Flight("/test")
    waits = asyncio.create_task(waiting.turn(place, flight, 5.0))
    for _ in range(5):
        await asyncio.sleep(0.002)
    assert not waits.done(), "it comes in time, by all that is known"
    clock.now += 6_000_000_000
    with pytest.raises(Busy, match="5 s"):
        await waits
    assert (bounded.queue.waiting, bounded.running) == (0, 1)
    assert [what for _, what, _ in flight.decisions] == ["not_queued"]
    running.leave(150)


def lane(house: House) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(house.url + "/health").json()["admission"]["scripted"]
    return found


class Streams:
    """Answers that run until they are let go."""

    def __init__(self, house: House) -> None:
        self.house = house
        self._ends: list[threading.Event] = []
        self._pool = ThreadPoolExecutor(8)
        self._running: list[Future[None]] = []

    def start(self, key: str = "data", **headers: str) -> Callable[[], None]:
        """One that has a slot or waits for it; what is returned has its client leave."""
        end = threading.Event()
        self._ends.append(end)
        self._running.append(self._pool.submit(self._read, end, key, headers))
        return end.set

    def _read(self, end: threading.Event, key: str, headers: dict[str, str]) -> None:
        """By a bare socket: it can leave at any moment, also while nothing comes."""
        body = json.dumps({"messages": [{"role": "user", "content": LONG}], "stream": True}).encode()
        address = urlsplit(self.house.url)
        said = {"host": address.netloc, "authorization": f"Bearer {self.house.keys[key]}", "content-length": str(len(body)), **headers}
        with socket.create_connection((address.hostname, address.port)) as connection:
            head = "".join(f"{name}: {value}\r\n" for name, value in said.items())
            connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n".encode() + body)
            connection.settimeout(0.05)
            while not end.is_set():
                try:
                    if not connection.recv(65_536):
                        return
                except TimeoutError:
                    continue

    def close(self) -> None:
        for end in self._ends:
            end.set()
        for one in self._running:
            one.result(30)
        self._pool.shutdown()


@pytest.fixture
def streams(gated: House) -> Iterator[Streams]:
    made = Streams(gated)
    yield made
    made.close()
    until(lambda: lane(gated)["running"] == lane(gated)["waiting"] == 0, "the end of all")


def fill(house: House, streams: Streams) -> list[Callable[[], None]]:
    ends = [streams.start() for _ in range(2)]
    until(lambda: lane(house)["running"] == 2, "two that run")
    return ends


def test_a_third_waits_and_is_told_how_long(gated: House, streams: Streams) -> None:
    """The engine is never given more than its slots; who waited has it in a header, in a lap and in a decision with the forecast."""
    ends = fill(gated, streams)
    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(gated.chat, QUICK)
        until(lambda: lane(gated)["waiting"] == 1, "one that waits")
        assert gated.stats()["active"] == 2
        ends[0]()
        answer = third.result(30)
    assert answer.status_code == 200
    waited_ms = int(answer.headers["x-tidegate-queue-ms"])
    flight = gated.flight(answer.headers["x-request-id"])
    queue_ns = sum(spent_ns for part, spent_ns in flight["laps"] if part == "queue")
    assert queue_ns / 1e6 >= waited_ms - 1
    (queued,) = [facts for _, what, facts in flight["decisions"] if what == "queued"]
    assert queued["tenant_class"] == "standard"
    assert queued["ahead"] == 0
    assert abs(queued["waited_s"] * 1000 - waited_ms) <= 1
    metrics = httpx.get(gated.url + "/metrics").text
    assert 'tidegate_admission_slots{model="scripted"} 2.0' in metrics
    assert "tidegate_admission_forecast_error_seconds_count" in metrics


def test_a_prompt_is_unread_until_the_first_token_of_its_stream(gated: House, streams: Streams) -> None:
    """The gate is told of first tokens: while both streams run, nothing is left to read for the engine."""
    fill(gated, streams)
    until(lambda: lane(gated)["unread_tokens"] == 0, "both first tokens")
    assert lane(gated)["running"] == 2


async def test_only_a_stream_tells_its_first_token() -> None:
    """Who asks for a whole answer has none that is seen: its prompt does not count as unread."""
    gate = Gate(AdmissionSettings())
    bounded = gate.open(["m"], 2)
    for stream, unread in ((False, 0), (True, 100)):
        ask = Ask(Flight("test"), Caller("k", "t"), Deadline(60.0), stream=stream)
        place = waiting.enter(gate, ask, "m", 100, 0)
        assert bounded.speeds.unread == unread
        assert (ask.on_first_token is not None) == stream
        place.leave()


def test_who_gets_a_slot_at_once_is_not_told_of_a_queue(gated: House) -> None:
    """Where nothing waits there is no header, no lap and no decision."""
    answer = gated.chat(QUICK)
    assert "x-tidegate-queue-ms" not in answer.headers
    flight = gated.flight(answer.headers["x-request-id"])
    assert "queue" not in [part for part, _ in flight["laps"]]
    assert "queued" not in [what for _, what, _ in flight.get("decisions", [])]


@pytest.mark.parametrize("headers", [{}, {"x-tidegate-leave": "drain"}], ids=["cancel", "drain"])
def test_a_client_that_leaves_while_it_waits_frees_its_place(gated: House, streams: Streams, headers: dict[str, str]) -> None:
    """Its place is gone at once, its flight says that it left, and nothing was sent to the engine for it. Where running answers are drained, too."""
    fill(gated, streams)
    before = gated.stats()["requests"]
    leave = streams.start(**headers)
    until(lambda: lane(gated)["waiting"] == 1, "one that waits")
    leave()
    until(lambda: lane(gated)["waiting"] == 0, "its place freed")
    assert lane(gated)["running"] == 2
    until(lambda: any(one["end"] == "client_gone" and not one.get("engine") for one in gated.flights()), "its flight")
    assert gated.stats()["requests"] == before


def test_a_waiting_stream_has_its_head_and_comments(gated: House, streams: Streams) -> None:
    """A stream that waits longer than the head may wait begins with comments, so that proxies keep it; the answer follows in it."""
    ends = fill(gated, streams)
    body = {"messages": [{"role": "user", "content": QUICK}], "stream": True}
    with gated.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert next(lines).startswith(": waiting")
        until(lambda: lane(gated)["waiting"] == 1, "one that waits")
        ends[0]()
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_a_newer_message_frees_the_place_of_the_older_one(gated: House, streams: Streams) -> None:
    """Barge-in cuts also what still waits: the queue holds the newer message alone."""
    fill(gated, streams)
    mine = {"x-tidegate-conversation": "one", "x-tidegate-barge-in": "1"}
    streams.start(**mine)
    until(lambda: lane(gated)["waiting"] == 1, "the older one")
    streams.start(**mine)
    until(lambda: any(one.get("error_code") == "superseded" for one in gated.flights()), "the cut")
    until(lambda: lane(gated)["waiting"] == 1, "the newer one alone")


def test_a_wait_over_the_bound_is_429_with_retry_after(hasty: House) -> None:
    """The third is refused at once with `busy`, the instant of its place, and a flight that ended as refused."""
    streams = Streams(hasty)
    try:
        fill(hasty, streams)
        answer = hasty.chat(QUICK)
        assert answer.status_code == 429
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("busy", "rate_limit_error")
        assert int(answer.headers["retry-after"]) >= error["retry_after_s"] > 0
        flight = hasty.flight(error["trace_id"])
        assert flight["end"] == "refused"
        assert [facts["code"] for _, what, facts in flight["decisions"] if what == "not_queued"] == ["busy"]
        until(lambda: lane(hasty)["booked"] == 1, "the booked place")
    finally:
        streams.close()
    until(lambda: lane(hasty)["running"] == 0, "the end of all")


def test_a_capability_is_refused_alike(hasty: House) -> None:
    """A capability that asks the model stands in the same queue as /v1."""
    streams = Streams(hasty)
    try:
        fill(hasty, streams)
        with hasty.client() as client:
            answer = client.post("/api/v1/test/stream", json={"order": QUICK})
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "busy"
    finally:
        streams.close()
    until(lambda: lane(hasty)["running"] == 0, "the end of all")


def test_the_deadline_holds_while_a_request_waits(postgres_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A request whose time is up in the queue ends as deadline_exceeded, and its place is free."""
    for house in gateway(postgres_dsn, tmp_path_factory, TIDEGATE_SERVER__DEADLINE_S="1.5"):
        for _ in range(10):  # so that the forecast of the third is short, and it is let in
            assert house.chat(QUICK).status_code == 200
        with ThreadPoolExecutor(3) as pool:
            answers = [one.result(30) for one in [pool.submit(house.chat, LONG) for _ in range(3)]]
        assert {answer.status_code for answer in answers} == {504}
        assert {json.loads(answer.content)["error"]["code"] for answer in answers} == {"deadline_exceeded"}
        until(lambda: lane(house)["running"] == lane(house)["waiting"] == 0, "the end of all")  # noqa: B023
