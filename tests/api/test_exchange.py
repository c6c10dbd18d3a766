"""An exchange books its flight and answers, whatever fails beside it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tidegate.api.auth import KeyRing
from tidegate.api.exchange import Exchange, House
from tidegate.core.ask import Caller
from tidegate.core.errors import SettingsError
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
