"""Finished flights for the tests of this room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tidegate.core.chunk import Usage
from tidegate.core.flight import FlightRecord, new_flight_id

BEGAN_NS = 1_700_000_000_000_000_000


def make_flight(**changes: Any) -> FlightRecord:
    """A clean streamed answer of 100 ms, unless told otherwise."""
    facts: dict[str, Any] = {
        "id": new_flight_id(BEGAN_NS),
        "began_unix_ns": BEGAN_NS,
        "whole_ns": 100_000_000,
        "laps": [("parse", 1_000_000), ("engine.first_byte", 59_000_000), ("stream", 40_000_000)],
        "route": "/v1/chat/completions",
        "end": "stop",
        "http_status": 200,
        "tenant": "acme",
        "key_id": "key_1",
        "model": "smollm2",
        "engine": "local",
        "stream": True,
        "token_ns": [60_000_000, 70_000_000, 100_000_000],
        "first_token_ns": 60_000_000,
        "usage": Usage(12, 3, 4, True),
    }
    return FlightRecord(**(facts | changes))


@pytest.fixture
def flight() -> Callable[..., FlightRecord]:
    """Makes a finished flight; what is given differs from a clean streamed answer of 100 ms."""
    return make_flight
