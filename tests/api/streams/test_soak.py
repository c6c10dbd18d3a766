"""Two thousand clients that leave at random moments leave nothing behind: no generation, no connection, no task, and a flight each."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import Any

import pytest
from tests.api.streams.conftest import Open, until

from tidegate.api.exchange import Exchange
from tidegate.bench.leavers import leave_at_random


class Counting(set[Exchange]):
    """Running exchanges, and how many there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = 0

    def add(self, exchange: Exchange) -> None:
        self.begun += 1
        super().add(exchange)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "settings"),
    [
        (1, {}), (2, {"slow_reader": "coalesce", "leave": "drain", "drain_tokens": 20}), (3, {"slow_reader": "drop", "slow_reader_s": 0.5}),
        (4, {"callers_may": ["drain", "keep"], "drain_tokens": 20, "grace_s": 0.5, "replay_streams": 50}),
    ],
)
async def test_nothing_is_left_behind(open_gateway: Open, caplog: pytest.LogCaptureFixture, seed: int, settings: dict[str, Any]) -> None:
    """Whatever the policies: when the last client has left, nothing runs, nothing is open, and every request has ended in one flight."""
    gateway = await open_gateway(**settings)
    gateway.house.running = running = Counting()
    policies = ("cancel", "drain", "keep") if "callers_may" in settings else ()
    left = await leave_at_random(gateway.host, gateway.port, gateway.keys["data"], clients=500, at_once=100, seed=seed, policies=policies)
    await until(lambda: not running and gateway.engine.active == 0)
    await until(lambda: not gateway.state.tasks and not gateway.state.connections)
    assert gateway.notes.booked == len(gateway.notes.flights) == running.begun
    assert running.begun >= left.sent * 0.95, "a client that resets at once may not have been seen"
    assert not left.failed
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    await until(lambda: len(gateway.house.kept) == 0)
    assert gateway.house.kept.size == 0
    ours = {asyncio.current_task(), gateway._time}
    await until(lambda: {task for task in asyncio.all_tasks() if task not in ours} == set())
    gc.collect()
    assert [found for found in gc.get_objects() if isinstance(found, Exchange) and found.house is gateway.house] == []
