"""FlightStore: one suite over every system that serves it."""

from __future__ import annotations

import time

from tidegate.core.chunk import Usage
from tidegate.core.flight import FlightRecord
from tidegate.core.ports import FlightStore

from .flights import a_flight, a_text, as_json

FULL = a_flight(
    tenant="harbour", key_id="key_1", capability="support/answer", model="m", engine="e", stream=True,
    decisions=[(1, "limit", {"left": 3, "share": 0.5, "name": "é"})], token_ns=[5, 6], usage=Usage(12, 34, 5), first_token_ns=5,
    error_code="x", request_sha256="a", answer_sha256="b", answer_chars=3, prompt_version="1", prompt_sha256="c", index_version="2-ab",
    passage_ids=["p1", "p2"], kept=True, thinned=True, version="0.1.0",
)  # fmt: skip


async def test_a_flight_comes_back_as_it_was_written(store: FlightStore) -> None:
    """Every field survives."""
    plain = a_flight()
    await store.write_flights(as_json(FULL, plain), [])
    assert await store.get_flight(FULL.id) == FULL
    assert await store.get_flight(plain.id) == plain


async def test_an_unknown_flight_is_none(store: FlightStore) -> None:
    """None, also for an id that a database cannot keep."""
    assert await store.get_flight("0" * 32) is None
    assert await store.get_flight("\0") is None
    assert await store.get_kept("\0") is None


async def test_writing_twice_is_writing_once(store: FlightStore) -> None:
    """A batch repeated after a lost answer adds nothing, alone or among new flights."""
    first, second = a_flight(1), a_flight(2)
    await store.write_flights(as_json(first), [a_text(first.id)])
    await store.write_flights(as_json(first, second), [a_text(first.id), a_text(second.id)])
    assert await store.list_flights() == [second, first]


async def test_nothing_to_write_is_fine(store: FlightStore) -> None:
    """An empty batch is no error."""
    await store.write_flights([], [])
    assert await store.list_flights() == []


async def test_flights_are_listed_newest_first_in_pages(store: FlightStore) -> None:
    """`before_id` of the last one pages on until none is left."""
    flights = [a_flight(number) for number in range(5)]
    await store.write_flights(as_json(*flights), [])
    seen: list[FlightRecord] = []
    while page := await store.list_flights(limit=2, before_id=seen[-1].id if seen else None):
        assert len(page) <= 2
        seen += page
    assert seen == flights[::-1]


async def test_flights_are_listed_by_tenant_capability_and_end(store: FlightStore) -> None:
    """Filters work alone and together."""
    ours = a_flight(1, tenant="a", capability="x/y")
    cut = a_flight(2, tenant="a", end="cut")
    theirs = a_flight(3, tenant="b", capability="x/y")
    await store.write_flights(as_json(ours, cut, theirs), [])
    assert await store.list_flights(tenant="a") == [cut, ours]
    assert await store.list_flights(capability="x/y") == [theirs, ours]
    assert await store.list_flights(end="cut") == [cut]
    assert await store.list_flights(tenant="a", capability="x/y") == [ours]
    assert await store.list_flights(tenant="c") == []


async def test_what_a_database_cannot_keep_is_marked_and_the_rest_stays(store: FlightStore) -> None:
    """NUL and halves of surrogate pairs, which a client may put into a model's name, become U+FFFD."""
    flight = a_flight(model="a\0b\ud800", decisions=[(1, "x", {"k\0": ["\0", {"a": "\udfff"}]})])
    await store.write_flights(as_json(flight), [])
    found = await store.get_flight(flight.id)
    assert found is not None
    assert found.model == "a\ufffdb\ufffd"
    assert found.decisions == [(1, "x", {"k\ufffd": ["\ufffd", {"a": "\ufffd"}]})]


async def test_a_nul_alone_is_marked(store: FlightStore) -> None:
    """It can be written as JSON, but PostgreSQL would refuse it."""
    flight = a_flight(model="a\0")
    await store.write_flights(as_json(flight), [])
    found = await store.get_flight(flight.id)
    assert found is not None
    assert found.model == "a\ufffd"


async def test_a_backslash_before_u0000_is_not_a_nul(store: FlightStore) -> None:
    r"""The six characters \u0000 are text like any other."""
    flight = a_flight(model="\\u0000")
    await store.write_flights(as_json(flight), [])
    assert await store.get_flight(flight.id) == flight


async def test_kept_text_comes_back_until_its_time_is_over(store: FlightStore) -> None:
    """Text past its time is not handed out, even before it is deleted, and never stored late."""
    flight, late, brief = a_flight(1), a_flight(2), a_flight(3)
    text = a_text(flight.id)
    await store.write_flights(as_json(flight, late, brief), [text, a_text(late.id, left_s=-1), a_text(brief.id, left_s=0.2)])
    assert await store.get_kept(flight.id) == text
    assert await store.get_kept(late.id) is None
    deadline_ns = time.perf_counter_ns() + 10 * 10**9
    while await store.get_kept(brief.id):
        assert time.perf_counter_ns() < deadline_ns
    assert await store.forget_expired() == 1  # it was there, and only hidden


async def test_expired_text_is_forgotten(store: FlightStore) -> None:
    """`forget_expired` deletes what is past its time, says how many, and leaves the flight."""
    flight, other = a_flight(1), a_flight(2)
    await store.write_flights(as_json(flight, other), [a_text(flight.id, left_s=0.05), a_text(other.id)])
    deadline_ns = time.perf_counter_ns() + 10 * 10**9
    while not (gone := await store.forget_expired()):
        assert time.perf_counter_ns() < deadline_ns
    assert gone == 1
    assert await store.get_kept(flight.id) is None
    assert await store.get_kept(other.id) is not None
    assert await store.get_flight(flight.id) == flight
