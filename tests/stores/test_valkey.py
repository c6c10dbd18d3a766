"""Leases from a real Valkey server: never more than there is, given back, lapsing, and errors that say what is wrong."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.stores.valkey_server import ValkeyServer, free_port, running

from tidegate.core.errors import SettingsError, StoreDown
from tidegate.core.ports import LeaseAnswer, LeaseAsk, RateAsk
from tidegate.stores.resp import Broken, Replies, RespError, address_of, command, connect
from tidegate.stores.settings import ValkeySettings
from tidegate.stores.systems.valkey import Valkey

#: So slow that nothing refills within a test.
AGES_S = 1e9
NO_RATE = RateAsk(0, 0.0, 0, 0, 0, 0)


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with running() as one:
        yield one


@pytest.fixture
def store(server: ValkeyServer, request: pytest.FixtureRequest) -> Valkey:
    """With keys of the test's own."""
    return Valkey(ValkeySettings(url=server.url, timeout_s=5, prefix=f"{request.node.name}:"))


def rate(need: int = 0, want: int = 0, give: int = 0, limit: int = 100, period_s: float = AGES_S) -> RateAsk:
    return RateAsk(limit, period_s, need, need, max(want, need), give)


async def ask(store: Valkey, requests: RateAsk = NO_RATE, *, machine: str = "m1", most: int = 0, used: int = 0, slots: int = 0) -> LeaseAnswer:
    [answer] = await store.renew(machine, 10.0, [LeaseAsk("subject", [requests, NO_RATE, NO_RATE], most, used, slots)])
    return answer


async def test_units_are_leased_once(store: Valkey) -> None:
    """All that machines get together is the limit, to the unit; the last are handed out singly."""
    total = 0
    for turn in range(200):
        answer = await ask(store, rate(need=1, want=40), machine=f"m{turn % 3}")
        if not answer.rates[0].granted:
            break
        total += answer.rates[0].granted
    assert total == 100
    assert turn > 4
    refused = answer.rates[0]
    assert refused.wait_s == pytest.approx(AGES_S / 100, rel=1e-6)
    assert refused.left == 0
    await store.close()


async def test_who_waits_gets_what_there_is(store: Valkey) -> None:
    """Of a hundred requests that wait as many are served as can be, also where it is not all."""
    [answer] = await store.renew("m", 10.0, [LeaseAsk("subject", [RateAsk(100, AGES_S, 1, 130, 130, 0), NO_RATE, NO_RATE], 0, 0, 0)])
    assert answer.rates[0].granted == 100
    await store.close()


async def test_less_than_is_needed_is_not_leased(store: Valkey) -> None:
    """Who needs 60 and finds 50 gets none, and is told when; the 50 are others'."""
    assert (await ask(store, rate(need=50))).rates[0].granted == 50
    answer = (await ask(store, rate(need=60))).rates[0]
    assert (answer.granted, answer.left) == (0, 50)
    assert answer.wait_s == pytest.approx(AGES_S / 10, rel=1e-6)
    assert (await ask(store, rate(need=50))).rates[0].granted == 50
    await store.close()


async def test_what_comes_back_is_there_for_others_and_debts_are_paid(store: Valkey) -> None:
    """Given units can be leased again, never beyond the limit; spent ones beyond a lease are taken off, below zero."""
    await ask(store, rate(need=100))
    assert (await ask(store, rate(need=10, give=30), machine="m2")).rates[0].left == 20 - 0
    assert (await ask(store, rate(give=10**6))).rates[0].left == 100
    await ask(store, rate(give=-150))
    answer = (await ask(store, rate(need=1))).rates[0]
    assert answer.granted == 0
    assert answer.wait_s == pytest.approx(51 * AGES_S / 100, rel=1e-6)
    await store.close()


async def test_a_bucket_refills_by_the_servers_clock(store: Valkey) -> None:
    """1,000 units a second: what was taken is there again, and not more than the limit."""
    quick = rate(need=1000, limit=1000, period_s=1.0)
    assert (await ask(store, quick)).rates[0].granted == 1000
    answer = (await ask(store, quick)).rates[0]
    assert 0 < answer.wait_s <= 1
    await asyncio.sleep(answer.wait_s)
    assert (await ask(store, quick)).rates[0].granted == 1000
    await store.close()


async def test_slots_are_leased_to_the_number(store: Valkey) -> None:
    """Two machines hold no more than may run, whoever asks how often; what one gives up the other gets."""
    assert (await ask(store, most=10, slots=7)).slots == 7
    assert (await ask(store, most=10, slots=7, machine="m2")).slots == 3
    assert (await ask(store, most=10, slots=7)).slots == 7
    assert (await ask(store, most=10, slots=2)).slots == 2
    assert (await ask(store, most=10, slots=9, machine="m2")).slots == 8
    await store.close()


async def test_slots_of_a_machine_that_died_lapse(store: Valkey) -> None:
    """After its lease others have them, and not before."""
    [held] = await store.renew("dead", 1.0, [LeaseAsk("subject", [NO_RATE] * 3, 5, 0, 5)])
    assert held.slots == 5
    assert (await ask(store, most=5, slots=5)).slots == 0
    for _ in range(200):
        if (await ask(store, most=5, slots=5)).slots == 5:
            break
        await asyncio.sleep(0.02)
    else:
        pytest.fail("the slots of a dead machine never lapsed")
    await store.close()


async def test_a_machine_that_runs_more_than_it_may_is_counted_as_it_is(store: Valkey) -> None:
    """It counted alone for a while: others get nothing until it has come down."""
    assert (await ask(store, most=4, used=6, slots=7)).slots == 6
    assert (await ask(store, most=4, slots=1, machine="m2")).slots == 0
    assert (await ask(store, most=4, used=2, slots=3)).slots == 3
    assert (await ask(store, most=4, slots=1, machine="m2")).slots == 1
    await store.close()


async def test_a_key_lives_no_longer_than_it_says_something(store: Valkey, server: ValkeyServer) -> None:
    """A bucket that is full again is as good as none: the server forgets it."""
    await ask(store, rate(need=60, limit=60, period_s=60))
    connection = await connect(address_of(server.url))
    [key] = await connection.send("KEYS", f"{store._prefix}*")  # type: ignore[misc]
    left_ms = await connection.send("PTTL", key)
    assert isinstance(left_ms, int)
    assert 50_000 < left_ms <= 60_002
    connection.close()
    await store.close()


async def test_scripts_that_somebody_flushed_are_sent_again(store: Valkey, server: ValkeyServer) -> None:
    """Nobody notices, and nothing is counted twice."""
    await ask(store, rate(need=10))
    connection = await connect(address_of(server.url))
    await connection.send("SCRIPT", "FLUSH")
    connection.close()
    assert (await ask(store, rate(need=10))).rates[0].left == 80
    await store.close()


async def test_many_asks_are_one_round(store: Valkey) -> None:
    """In order, each with its own answer."""
    asks = [LeaseAsk(f"s{number}", [rate(need=number % 100), NO_RATE, NO_RATE], 0, 0, 0) for number in range(500)]
    answers = await store.renew("m1", 10.0, asks)
    assert [answer.rates[0].granted for answer in answers] == [number % 100 for number in range(500)]
    await store.close()


@given(steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 60), st.floats(0, 1)), max_size=25))
@settings(max_examples=15, deadline=None)
def test_whatever_machines_lease_and_give_back_the_sum_is_the_limit(
    server: ValkeyServer, steps: list[tuple[int, int, int, float]]
) -> None:
    """What all machines hold and what is left is the limit, after every step."""

    async def walk() -> None:
        store = Valkey(ValkeySettings(url=server.url, timeout_s=5, prefix="sum:"))
        connection = await connect(address_of(server.url), [("FLUSHDB",)])
        connection.close()
        held = [0, 0, 0]
        for machine, need, more, share in steps:
            give = int(held[machine] * share)
            answer = (await ask(store, rate(need=need, want=need + more, give=give), machine=f"m{machine}")).rates[0]
            held[machine] += answer.granted - give
            assert sum(held) + answer.left == 100
        await store.close()

    asyncio.run(walk())


def test_it_works_on_the_gateways_event_loop(server: ValkeyServer) -> None:
    """uvloop, over TCP and over a socket file alike."""

    async def lease() -> None:
        store = Valkey(ValkeySettings(url=server.url, timeout_s=5, prefix="uvloop:"))
        assert (await ask(store, rate(need=3))).rates[0].left == 97
        await store.close()

    uvloop.run(lease())


# -- when it is not there


async def test_a_server_that_is_gone_is_said_and_found_again() -> None:
    """StoreDown while it is away, and answers as soon as it is back."""
    with tempfile.TemporaryDirectory(prefix="tg-", dir="/tmp") as folder:
        server = ValkeyServer(Path(folder))
        store = Valkey(ValkeySettings(url=server.url, timeout_s=5))
        with pytest.raises(StoreDown, match="Valkey cannot be used"):
            await store.renew("m", 1.0, [])
        server.start()
        assert await store.renew("m", 1.0, []) == []
        server.stop()
        with pytest.raises(StoreDown):
            await ask(store, rate(need=1))
        server.start()
        assert (await ask(store, rate(need=1))).rates[0].granted == 1
        await store.close()
        server.stop()


async def test_a_server_that_hangs_is_gone_after_the_timeout() -> None:
    """And a late answer is never taken for the answer to another question."""
    with running() as server:
        store = Valkey(ValkeySettings(url=server.url, timeout_s=0.2))
        await ask(store, rate(need=1))
        server.hang()
        with pytest.raises(StoreDown, match="did not answer within"):
            await ask(store, rate(need=50))
        server.hang(False)
        patient = Valkey(ValkeySettings(url=server.url, timeout_s=10))
        answer = await ask(patient, rate(need=7))
        assert answer.rates[0].granted == 7
        await store.close()
        await patient.close()


async def test_a_password_is_used_and_a_wrong_one_is_said() -> None:
    """From the address."""
    port = free_port()
    with running("--requirepass", "open/sesame", port=port):
        store = Valkey(ValkeySettings(url=f"valkey://default:open%2Fsesame@127.0.0.1:{port}/3", timeout_s=5))
        assert (await ask(store, rate(need=1))).rates[0].granted == 1
        await store.close()
        wrong = Valkey(ValkeySettings(url=f"valkey://:wrong@127.0.0.1:{port}", timeout_s=5))
        with pytest.raises(StoreDown, match="WRONGPASS"):
            await ask(wrong, rate(need=1))


@pytest.mark.parametrize("url", ["http://host", "valkey://", "valkey://host:99999", "valkey://host/x", "unix://", "host:6379", "rediss://[::1"])
def test_an_address_that_is_none_is_refused_at_the_start(url: str) -> None:
    """With an example of one that is."""
    with pytest.raises(SettingsError, match=r"valkey\.url is no address") as refused:
        Valkey(ValkeySettings(url=url))
    assert "valkey://host:6379/0" in (refused.value.hint or "")


# -- the protocol


def encoded(value: Any) -> bytes:
    match value:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % value
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(value), value)
        case str():
            return b"+" + value.encode() + b"\r\n"
        case _:
            return b"*%d\r\n" % len(value) + b"".join(map(encoded, value))


VALUES = st.recursive(
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.binary(max_size=40), lambda inner: st.lists(inner, max_size=5), max_leaves=12
)


@given(st.lists(VALUES, max_size=8), st.data())
def test_replies_are_the_same_however_they_are_cut(values: list[Any], data: st.DataObject) -> None:
    """Cut anywhere, a reply is whole or waits."""
    raw, replies, found = b"".join(map(encoded, values)), Replies(), []
    while raw:
        size = data.draw(st.integers(1, len(raw)))
        found += replies.feed(raw[:size])
        raw = raw[size:]
    assert found == values


@given(st.binary(max_size=200))
def test_bytes_that_are_no_reply_are_an_error_and_never_a_crash(raw: bytes) -> None:
    """Broken, or replies, or waiting for more; nothing else."""
    replies = Replies()
    try:
        for at in range(0, len(raw), 7):
            replies.feed(raw[at : at + 7])
    except Broken:
        pass


@pytest.mark.parametrize("raw", [b"$99999999999\r\n", b"*2147483647\r\n", b"*1\r\n" * 40 + b":1\r\n", b":12x\r\n", b"$2\r\nabcd\r\n", b"?\r\n"])
def test_absurd_replies_are_refused(raw: bytes) -> None:
    """Before memory is spent on them."""
    with pytest.raises(Broken):
        Replies().feed(raw)


def test_an_error_is_a_reply_in_its_place() -> None:
    """The replies behind it are read on."""
    error, after = Replies().feed(b"-NOSCRIPT No matching script.\r\n:1\r\n")
    assert isinstance(error, RespError)
    assert (error.code, after) == ("NOSCRIPT", 1)


def test_a_command_is_a_list_of_strings() -> None:
    """As the protocol wants it."""
    assert command("GET", b"a b", 7) == b"*3\r\n$3\r\nGET\r\n$3\r\na b\r\n$1\r\n7\r\n"
