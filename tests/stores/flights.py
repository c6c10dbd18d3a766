"""Flights for tests."""

from __future__ import annotations

import time
from typing import Any

from tidegate.core.flight import FlightRecord, new_flight_id
from tidegate.core.ports import KeptText
from tidegate.stores.clean import json_text


def a_flight(number: int = 0, **fields: Any) -> FlightRecord:
    """A small finished flight; higher numbers are newer."""
    began_unix_ns = 1_700_000_000_000_000_000 + number * 1_000_000
    known: dict[str, Any] = {
        "id": new_flight_id(began_unix_ns), "began_unix_ns": began_unix_ns, "whole_ns": 7, "laps": [("read", 3), ("close", 4)],
        "route": "/v1/chat/completions", "end": "stop", "http_status": 200,
    }  # fmt: skip
    return FlightRecord(**known | fields)


def a_text(flight_id: str, left_s: float = 60) -> KeptText:
    """Kept text that lives for `left_s`."""
    return KeptText(flight_id, "harbour", round(time.time_ns() / 1e9 + left_s, 3), b"\0sealed\xff")


def as_json(*flights: FlightRecord) -> list[bytes]:
    """Flights as the spool gives them to a store."""
    return [json_text(flight) for flight in flights]
