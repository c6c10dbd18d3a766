"""The newest flights stay in memory, within bounds, and can be waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tidegate.core.flight import FlightRecord
from tidegate.telemetry.recent import RecentFlights

MakeFlight = Callable[..., FlightRecord]


def test_the_newest_come_first(flight: MakeFlight) -> None:
    """`recent` is newest first and stops at its limit."""
    ring = RecentFlights()
    for n in range(5):
        ring.finished(flight(id=f"f{n}"))
    assert [record.id for record in ring.recent(None, 3)] == ["f4", "f3", "f2"]


def test_a_tenant_sees_only_its_own(flight: MakeFlight) -> None:
    """Another tenant's flights are not listed, and do not use up the limit."""
    ring = RecentFlights()
    for n in range(6):
        ring.finished(flight(id=f"f{n}", tenant="acme" if n % 2 else "other"))
    assert [record.id for record in ring.recent("acme", 2)] == ["f5", "f3"]


def test_only_what_is_newer_is_told(flight: MakeFlight) -> None:
    """With `after_seq` a page gets each flight once."""
    ring = RecentFlights()
    ring.finished(flight(id="old"))
    seen = ring.seq
    ring.finished(flight(id="new"))
    assert [record.id for record in ring.recent(None, 10, after_seq=seen)] == ["new"]
    assert ring.recent(None, 10, after_seq=ring.seq) == []


def test_the_ring_never_grows_past_its_limit(flight: MakeFlight) -> None:
    """The oldest leaves, and cannot be found any more."""
    ring = RecentFlights(limit=3)
    for n in range(10):
        ring.finished(flight(id=f"f{n}"))
    assert len(ring.recent(None, 100)) == 3
    assert ring.find("f6") is None
    found = ring.find("f9")
    assert found is not None
    assert found.id == "f9"


def test_long_streams_shorten_the_ring(flight: MakeFlight) -> None:
    """Token stamps are bounded too, but the newest flight always stays."""
    ring = RecentFlights(limit=100, max_stamps=1000)
    for n in range(10):
        ring.finished(flight(id=f"f{n}", token_ns=list(range(300))))
    assert [record.id for record in ring.recent(None, 100)] == ["f9", "f8", "f7"]
    ring.finished(flight(id="huge", token_ns=list(range(5000))))
    assert [record.id for record in ring.recent(None, 100)] == ["huge"]


async def test_a_waiter_wakes_when_a_flight_ends(flight: MakeFlight) -> None:
    """`wait_newer` returns the new number, at once where there is one already."""
    ring = RecentFlights()
    waiting = asyncio.ensure_future(ring.wait_newer(0))
    await asyncio.sleep(0)
    assert not waiting.done()
    ring.finished(flight())
    assert await asyncio.wait_for(waiting, 5) == 1
    assert await ring.wait_newer(0) == 1


async def test_a_waiter_that_gave_up_leaves_nothing_behind() -> None:
    """A page that is closed a thousand times costs no memory."""
    ring = RecentFlights()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ring.wait_newer(0), 0.001)
    assert ring._waiters == []
