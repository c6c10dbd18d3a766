"""An exchange books its flight and answers, whatever fails beside it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tidegate.api.auth import KeyRing
from tidegate.api.exchange import Exchange, House
from tidegate.core.ask import Caller, Deadline
from tidegate.core.errors import NotFound, SettingsError
from tidegate.core.flight import FlightRecord
from tidegate.core.ports import KeptText
from tidegate.stores.systems.memory import Memory

KEPT = Caller("key", "tenant", keep=True, ttl_s=60)


class Notes:
    """A FlightSink that notes what it is given."""

    def __init__(self) -> None:
        self.given: list[tuple[FlightRecord, KeptText | None]] = []

    def finished(self, record: FlightRecord, kept: KeptText | None = None) -> None:
        self.given.append((record, kept))


@pytest.mark.parametrize("failure", [SettingsError("The secret cannot be read."), RecursionError("deep"), OSError(5, "I/O")])
@pytest.mark.parametrize("stream", [False, True])
async def test_text_that_cannot_be_kept_stops_no_answer(failure: Exception, stream: bool) -> None:
    """Where the seal fails, the answer leaves whole and its flight is booked, without a text."""
    sent: list[dict[str, Any]] = []
    notes = Notes()

    def seal(flight_id: str, text: dict[str, Any]) -> bytes:
        raise failure

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    async def route(exchange: Exchange) -> None:
        exchange.new_ask(KEPT).text.append("words")
        exchange.flight.end = "stop"
        if stream:
            assert exchange.start_stream(b"first ") is None
            await exchange.end_stream(b"last")
        else:
            await exchange.json(200, json.dumps("words").encode())

    house = House(KeyRing(Memory(), {}, refresh_s=1.0), [notes], b"secret", seal, 1000, 10.0)
    await Exchange(house, {"path": "/v1/x", "method": "POST", "headers": []}, receive, send).run(route)
    assert sent[0]["status"] == 200
    assert sent[-1]["body"] == (b"last" if stream else b'"words"\n')
    [(record, kept)] = notes.given
    assert (record.end, record.http_status, record.kept, kept) == ("stop", 200, False, None)


async def returns_without_an_answer(exchange: Exchange) -> None:
    exchange.new_ask(KEPT)


async def refuses(exchange: Exchange) -> None:
    raise NotFound("There is none.")


async def breaks(exchange: Exchange) -> None:
    raise ZeroDivisionError


async def breaks_in_the_stream(exchange: Exchange) -> None:
    exchange.start_stream(b"data: x\n\n")
    raise ZeroDivisionError


async def breaks_after_its_end(exchange: Exchange) -> None:
    await exchange.json(200, b"{}")
    raise ZeroDivisionError


async def is_stopped(exchange: Exchange) -> None:
    raise asyncio.CancelledError


async def runs_late(exchange: Exchange) -> None:
    exchange.new_ask(KEPT).deadline = Deadline(0.0)
    exchange.watch()
    exchange.look(time.perf_counter_ns())
    await asyncio.sleep(10)


async def is_left(exchange: Exchange) -> None:
    exchange.new_ask(KEPT)
    exchange.watch()
    exchange.left()
    exchange.left()
    await asyncio.sleep(10)


async def is_left_when_late(exchange: Exchange) -> None:
    exchange.new_ask(KEPT).deadline = Deadline(0.0)
    exchange.watch()
    exchange.left()
    exchange.look(time.perf_counter_ns())
    await asyncio.sleep(10)


async def answers_twice(exchange: Exchange) -> None:
    exchange.flight.end = "stop"
    exchange.start_stream(b"data: x\n\n")
    await exchange.end_stream(b"data: [DONE]\n\n")
    raise NotFound("Too late.")


@pytest.mark.parametrize(
    ("route", "end", "status"),
    [
        (returns_without_an_answer, "error", 500), (refuses, "refused", 404), (breaks, "error", 500), (breaks_in_the_stream, "error", 200),
        (breaks_after_its_end, "error", 200), (is_stopped, "error", 503), (runs_late, "error", 504), (is_left, "client_gone", 499),
        (is_left_when_late, "client_gone", 499), (answers_twice, "stop", 200),
    ],
)  # fmt: skip
async def test_every_way_out_books_one_flight(route: Callable[[Exchange], Awaitable[None]], end: str, status: int) -> None:
    """However a route ends, there is exactly one flight, and nothing runs on."""
    notes = Notes()

    async def send(message: dict[str, Any]) -> None: ...

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    house = House(KeyRing(Memory(), {}, refresh_s=1.0), [notes], b"secret", lambda flight_id, text: b"", 1000, 10.0)
    before = asyncio.all_tasks()
    with contextlib.suppress(asyncio.CancelledError):
        await Exchange(house, {"path": "/v1/x", "method": "POST", "headers": []}, receive, send).run(route)
    [(record, _)] = notes.given
    assert (record.end, record.http_status) == (end, status)
    assert not house.running
    for task in asyncio.all_tasks() - before:  # whoever waits to see the client leave ends with the connection
        task.cancel()


async def test_one_request_takes_nobody_elses_deadline_along(caplog: pytest.LogCaptureFixture) -> None:
    """Where the look at one request fails, the log says so and the others are looked at as ever."""
    house = House(KeyRing(Memory(), {}, refresh_s=1.0), [Notes()], b"secret", lambda flight_id, text: b"", 1000, 10.0)
    looked: list[str] = []

    class Odd(Exchange):
        def look(self, now_ns: int) -> None:
            looked.append(self.path)
            raise ZeroDivisionError

    async def nothing(*_: Any) -> dict[str, Any]:
        return {}

    for path in ("/one", "/two"):
        house.running.add(Odd(house, {"path": path, "method": "POST", "headers": []}, nothing, nothing))  # type: ignore[arg-type]
    house._look()
    assert sorted(looked) == ["/one", "/two"]
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
