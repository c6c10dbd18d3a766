"""The live list: bounded, and gone with its reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from stand_in import House, app_of, record

from tidegate.api.page import listing, live
from tidegate.api.page.live import Live

ALL = listing.Wanted(None)


@pytest.fixture
def lists(house: House, monkeypatch: pytest.MonkeyPatch) -> Live:
    """The live lists of a page, in a hurry."""
    monkeypatch.setattr(live, "_PACE_S", 0.0)
    app_of(house)
    assert house.page is not None
    return house.page.live


async def after(events: AsyncIterator[bytes]) -> str:
    async with asyncio.timeout(5):
        return (await anext(events)).decode()


async def test_the_first_event_is_the_list_as_it_is(house: House, lists: Live) -> None:
    """So a reconnect needs no memory of what was sent before."""
    house.live.records = [record(n) for n in range(3)]
    events = lists.events(ALL, lambda: True)
    first = await after(events)
    assert all(record(n).id in first for n in range(3))
    assert 'hx-target="#rows"' in first
    assert 'hx-target="#health"' in first
    await events.aclose()  # type: ignore[attr-defined]


async def test_a_flight_appears_when_it_ended(house: House, lists: Live) -> None:
    """Newest first, without a poll."""
    house.live.records = [record(0)]
    events = lists.events(ALL, lambda: True)
    await after(events)
    following = asyncio.ensure_future(after(events))
    await asyncio.sleep(0)
    house.live.add(record(1))
    second = await following
    assert second.index(record(1).id) < second.index(record(0).id)
    await events.aclose()  # type: ignore[attr-defined]


async def test_every_event_is_well_formed(house: House, lists: Live) -> None:
    """Each line is a data line; one empty line ends it."""
    house.live.records = [record(n) for n in range(60)]
    events = lists.events(ALL, lambda: True)
    first = await after(events)
    assert first.endswith("\n\n")
    assert all(line.startswith("data: ") for line in first[:-2].split("\n"))
    await events.aclose()  # type: ignore[attr-defined]


async def test_the_filter_and_the_tenant_hold_for_what_is_sent(house: House, lists: Live) -> None:
    """Another tenant's flight, and one that the filter does not take, are never in the stream."""
    house.live.records = [record(0, tenant="globex"), record(1, tenant="acme", end="cut"), record(2, tenant="acme", end="stop")]
    events = lists.events(listing.Wanted("acme", end="cut"), lambda: True)
    first = await after(events)
    assert record(1).id in first
    assert record(0).id not in first
    assert record(2).id not in first
    await events.aclose()  # type: ignore[attr-defined]


async def test_listeners_are_counted_down_when_they_go(house: House, lists: Live) -> None:
    """Also when they go in the middle of waiting."""
    waiting = []
    for _ in range(5):
        events = lists.events(ALL, lambda: True)
        await after(events)
        waiting.append(asyncio.ensure_future(anext(events)))
    await asyncio.sleep(0)
    assert lists.listeners == 5
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert lists.listeners == 0


async def test_close_ends_every_list_at_once(house: House, lists: Live) -> None:
    """A shutdown does not wait for open pages, and no new one is let in."""
    async def read() -> int:
        return len([event async for event in lists.events(ALL, lambda: True)])

    readers = [asyncio.ensure_future(read()) for _ in range(3)]
    async with asyncio.timeout(5):
        while lists.listeners < 3:  # noqa: ASYNC110 - the count has no event of its own
            await asyncio.sleep(0)
    lists.close()
    async with asyncio.timeout(2):
        assert all(await asyncio.gather(*readers))
    assert lists.full


async def test_a_revoked_session_stops_the_list(house: House, lists: Live) -> None:
    """Before the next event is sent."""
    answers = iter([True, False])
    house.live.records = [record(0)]
    events = lists.events(ALL, lambda: next(answers))
    await after(events)
    house.live.add(record(1))
    with pytest.raises(StopAsyncIteration):
        await after(events)


async def test_a_store_that_is_down_does_not_stop_the_list(house: House, lists: Live) -> None:
    """What memory holds is shown."""
    house.flights.down = True
    house.live.records = [record(0)]
    events = lists.events(ALL, lambda: True)
    assert record(0).id in await after(events)
    await events.aclose()  # type: ignore[attr-defined]


async def test_health_that_does_not_answer_is_unknown(house: House, lists: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """And holds nobody up."""
    async def hang() -> dict[str, Any]:
        raise TimeoutError
    monkeypatch.setattr(lists._reader, "_ask", hang)
    events = lists.events(ALL, lambda: True)
    assert "unknown" in await after(events)
    await events.aclose()  # type: ignore[attr-defined]
