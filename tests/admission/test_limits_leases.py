"""One limit over several machines: with a real Valkey server, and alone while it is gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.stores.valkey_server import ValkeyServer, running
from tests.waiting import until

from tidegate.admission.book import LEFT, SLOTS, USED, Book
from tidegate.admission.leases import Leases
from tidegate.admission.limits import Limits, Ticket
from tidegate.admission.prices import Prices
from tidegate.admission.settings import LimitSettings, PriceSettings
from tidegate.admission.shared import SharedBook
from tidegate.core.ask import Caller
from tidegate.core.errors import LimitsDown, RateLimited, StoreDown
from tidegate.core.ports import LeaseAnswer, LeaseAsk, RateAnswer
from tidegate.stores.resp import address_of, connect
from tidegate.stores.settings import ValkeySettings
from tidegate.stores.systems.valkey import Valkey

KEY = Caller("key", "tenant")
#: 8.64 of the currency a day for one unit of it a second: a token of money costs 100, so nothing refills within a test.
PRICES = Prices({"m": PriceSettings(input=1_000_000.0)})
COINS = LimitSettings(money_per_day=300.0)


class Counted(Valkey):
    """Counts the questions."""

    rounds = 0

    async def renew(self, machine: str, slots_s: float, asks: Any) -> list[LeaseAnswer]:
        self.rounds += 1
        return await super().renew(machine, slots_s, asks)


class Machine:
    """What a gateway has for its limits, without the gateway."""

    def __init__(
        self, url: str, settings: LimitSettings, when_lost: Literal["share", "refuse", "pass"] = "share", book: Book | None = None
    ) -> None:
        self.store = Counted(ValkeySettings(url=url, timeout_s=5))
        self.leases = Leases(self.store, when_lost, settings.machines)
        self.limits = Limits(settings, prices=PRICES, leases=self.leases, book=book)
        self.keeping = asyncio.get_running_loop().create_task(self.leases.keep())
        self.waited = 0

    async def admit(self, tokens: int = 1, caller: Caller = KEY) -> Ticket:
        ticket = self.limits.admit(caller, tokens, 0, "m")
        if ticket.waits:
            self.waited += 1
            ticket = await ticket.leased()
        return ticket

    async def passes(self, tokens: int = 1) -> bool:
        try:
            (await self.admit(tokens)).settle(tokens)
        except RateLimited:
            return False
        return True

    def word(self, offset: int) -> int:
        [seat] = self.limits._plans["key"].seats
        return self.limits.book.words[seat.at + offset]

    async def stop(self) -> None:
        self.keeping.cancel()
        await asyncio.gather(self.keeping, return_exceptions=True)
        await self.limits.close()


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with running() as one:
        yield one


@pytest.fixture(scope="module")
def shared_server() -> Iterator[ValkeyServer]:
    """For one test's many examples."""
    with running() as one:
        yield one


@contextlib.asynccontextmanager
async def machines(server: ValkeyServer, count: int, settings: LimitSettings, **more: Any) -> AsyncIterator[list[Machine]]:
    found = [Machine(server.url, settings, **more) for _ in range(count)]
    try:
        yield found
    finally:
        for machine in found:
            await machine.stop()


async def drained(machine: Machine) -> int:
    """Ask until it is refused again and again; how many passed."""
    passed = refused = 0
    while refused < 3:
        if await machine.passes():
            passed += 1
        else:
            refused += 1
            await asyncio.sleep(0.15)
    return passed


async def test_two_machines_pass_one_limit_to_the_unit(server: ValkeyServer) -> None:
    """300 units of money that refill too slowly to be seen: both ask until both are refused, and exactly 300 have passed; a unit that one
    leased last and did not need is the other's as soon as it came back."""
    async with machines(server, 2, COINS) as (one, other):
        passed = sum(await asyncio.gather(drained(one), drained(other)))
        assert 290 <= passed <= 300
        await one.leases.give_back()
        await other.leases.give_back()
        for _ in range(200):  # that there was no more is believed for a second
            if passed == 300:
                break
            passed += await other.passes()
            await asyncio.sleep(0.02)
        assert passed == 300
        assert not await one.passes()
        assert not await other.passes()


async def test_nobody_waits_for_a_lease_but_the_first_and_the_last(server: ValkeyServer) -> None:
    """Of 5,000 requests that a limit allows fewer than 1 in 100 ask the store on their way; units are fetched before they are gone."""
    async with machines(server, 2, LimitSettings(requests_per_minute=100_000)) as (one, other):
        for _ in range(2500):
            for machine in (one, other):
                assert await machine.passes()
            await asyncio.sleep(0)
        assert one.waited + other.waited < 50
        assert one.store.rounds + other.store.rounds < 250


async def test_many_at_once_are_leased_for_together(server: ValkeyServer) -> None:
    """A burst on a key that nothing is leased for: a few questions, and all pass that may."""
    async with machines(server, 1, LimitSettings(requests_per_minute=200)) as [one]:
        passed = await asyncio.gather(*(one.passes() for _ in range(300)))
        assert 200 <= sum(passed) <= 203
        assert one.store.rounds < 20


async def test_runs_at_a_time_are_one_number_for_all_machines(server: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four may run: whoever asks, never five; a place that one gives up the other gets."""
    monkeypatch.setattr("tidegate.admission.leases.IDLE_S", 0.5)
    monkeypatch.setattr("tidegate.admission.leases.BEAT_S", 0.2)
    async with machines(server, 2, LimitSettings(concurrent=4)) as (one, other):
        running: list[Ticket] = []
        for turn in range(12):
            with contextlib.suppress(RateLimited):
                running.append(await (one, other)[turn % 2].admit())
                assert len(running) <= 4
        # One machine may hold a spare place for its next run; it lets go of it within a few seconds.
        assert len(running) >= 3
        assert one.word(USED) + other.word(USED) == len(running)
        for ticket in running:
            ticket.settle(1)
        mine: list[Ticket] = []

        async def again() -> None:
            while len(mine) < 4:
                with contextlib.suppress(RateLimited):
                    mine.append(await other.admit())
                await asyncio.sleep(0.05)

        await asyncio.wait_for(again(), 20)
        with pytest.raises(RateLimited, match="4 requests at a time"):
            await one.admit()
        for ticket in mine:
            ticket.settle(1)


async def test_what_is_not_used_goes_back(server: ValkeyServer) -> None:
    """A machine that stops leaves all that it did not spend to the others."""
    async with machines(server, 1, COINS) as [other]:
        async with machines(server, 1, COINS) as [one]:
            assert await one.passes(20)
            assert one.word(LEFT + 2) > 0
        assert await other.passes(250)
        assert await other.passes(30)
        assert not await other.passes(1)


async def test_true_counts_are_settled_with_all(server: ValkeyServer) -> None:
    """What a run did not use is there for the other machine in time, and what it used beyond is owed by all."""
    settings = LimitSettings(tokens_per_minute=1000)
    async with machines(server, 2, settings) as (one, other):
        (await one.admit(900)).settle(100)
        await one.leases.give_back()
        assert await other.passes(850)
        (await one.admit(10)).settle(2000)
        await one.leases.give_back()
        with pytest.raises(RateLimited) as refused:
            await other.admit(500)
        assert (refused.value.retry_after_s or 0) > 60


async def test_a_run_that_never_ran_gives_back_its_lease(server: ValkeyServer) -> None:
    """Refunded, its units are the next one's."""
    async with machines(server, 1, LimitSettings(requests_per_minute=1)) as [one]:
        for _ in range(5):
            (await one.admit()).refund()
        assert await one.passes()
        assert not await one.passes()


async def test_idle_leases_and_slots_are_given_up(server: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to ask a machine that has nothing to do for what it holds."""
    monkeypatch.setattr("tidegate.admission.leases.IDLE_S", 0.3)
    monkeypatch.setattr("tidegate.admission.leases.BEAT_S", 0.1)
    settings = LimitSettings(concurrent=50, money_per_day=300.0)
    async with machines(server, 2, settings) as (one, other):
        assert await one.passes(20)
        await until(lambda: not one.word(SLOTS) and not one.word(LEFT + 2), "the give-back")
        assert await other.passes(280)


async def test_workers_of_a_machine_lease_as_one(server: ValkeyServer) -> None:
    """What a killed worker had drawn from the machine's leases is in them again, and so are its places."""
    settings = LimitSettings(tokens_per_minute=1000, concurrent=4)
    book = SharedBook(64, 2)
    book.join(0)
    async with machines(server, 1, settings, book=book) as [one]:
        (await one.admit(10)).settle(10)
        await one.admit(30)
        await one.admit(20)
        left, slots = one.word(LEFT + 1), one.word(SLOTS)  # just before: a lease may have been renewed meanwhile
        assert one.word(USED) == 2
        assert book.reclaim(0) == 2
        assert (one.word(USED), one.word(LEFT + 1)) == (0, left + 30 + 20)
        assert one.word(SLOTS) == slots
        book.join(0)
        (await one.admit(10)).settle(10)


WHAT = st.sampled_from(["admit", "admit", "settle", "refund", "back", "kill"])
STEPS = st.lists(st.tuples(WHAT, st.integers(0, 1), st.integers(1, 90)), max_size=30)


@given(STEPS)
@settings(max_examples=12, deadline=None)
def test_whatever_happens_machines_never_pass_a_limit_together(shared_server: ValkeyServer, steps: list[tuple[str, int, int]]) -> None:
    """Runs, refunds, leases given back and machines killed in the middle, in any order: what ran and what is reserved is never more than the
    limit, and where nothing was killed all of it can be used in the end."""

    async def walk() -> None:
        connection = await connect(address_of(shared_server.url), [("FLUSHALL",)])
        connection.close()
        await asyncio.sleep(0)
        both = [Machine(shared_server.url, COINS) for _ in range(2)]
        running: list[tuple[int, int, Ticket]] = []
        used, killed = 0, False
        for what, number, tokens in steps:
            if what == "admit":
                with contextlib.suppress(RateLimited):
                    running.append((number, tokens, await both[number].admit(tokens)))
            elif what == "back":
                await both[number].leases.give_back()
            elif what == "kill":
                killed = True
                used += sum(tokens for of, tokens, _ in running if of == number)  # nobody knows, so they count as used
                running = [one for one in running if one[0] != number]
                both[number].keeping.cancel()
                await asyncio.gather(both[number].keeping, return_exceptions=True)
                await both[number].store.close()
                both[number] = Machine(shared_server.url, COINS)
            elif running:
                _, reserved, ticket = running.pop(tokens % len(running))
                if what == "refund":
                    ticket.refund()
                else:
                    ticket.settle(reserved)
                    used += reserved
            assert used + sum(tokens for _, tokens, _ in running) <= 300
        for _, reserved, ticket in running:
            ticket.settle(reserved)
            used += reserved
        for machine in both:
            await machine.stop()
        if not killed:
            last = Machine(shared_server.url, COINS)
            if used < 300:
                (await last.admit(300 - used)).settle(300 - used)
            with pytest.raises(RateLimited):
                await last.admit()
            await last.stop()

    asyncio.run(walk())


# -- when it is gone


async def test_alone_a_machine_uses_its_share(server: ValkeyServer) -> None:
    """Half of every limit with two machines; what it had leased is not lost, and when the server is back all is one again."""
    settings = LimitSettings(requests_per_minute=100, machines=2)
    async with machines(server, 1, settings) as [one]:
        assert await one.passes()
        server.stop()
        passed = [await one.passes() for _ in range(150)]
        assert not one.leases.up
        # Its share is 50; before the loss is noticed it also spends what it has leased.
        assert 50 <= sum(passed) <= 50 + 20
        assert one.limits.figures()["shared"] is False
        assert one.limits.figures()["means"] == "this machine uses its own share of every limit"
        assert one.limits.book.fallbacks >= 50
        with pytest.raises(RateLimited, match="is used up: 50 requests per minute"):
            await one.admit()
        server.start()
        await until(lambda: one.leases.up, "the way back")
        assert await one.passes()
        assert one.limits.figures()["shared"] is True


async def test_runs_at_a_time_are_shared_out_too(server: ValkeyServer) -> None:
    """Of five places each of two machines has two, and at least one where there are fewer than machines."""
    server.stop()
    for most, mine in ((5, 2), (1, 1)):
        async with machines(server, 1, LimitSettings(concurrent=most, machines=2)) as [one]:
            running = [await one.admit() for _ in range(mine)]
            with pytest.raises(RateLimited, match=f"{mine} requests at a time"):
                await one.admit()
            for ticket in running:
                ticket.settle(1)
            (await one.admit()).settle(1)


async def test_refuse_refuses_and_pass_lets_pass(server: ValkeyServer) -> None:
    """As the setting says; never by accident. Who has no limit is not touched by either."""
    server.stop()
    settings = LimitSettings(tokens_per_minute=10, keys={})
    async with machines(server, 1, settings, when_lost="refuse") as [one]:
        with pytest.raises(LimitsDown, match="cannot be reached: Valkey cannot be used") as refused:
            await one.admit()
        assert refused.value.http_status == 503
        assert refused.value.retry_after_s == 1.0
    async with machines(server, 1, settings, when_lost="pass") as [one]:
        for _ in range(100):
            assert await one.passes(50)
        assert one.limits.book.fallbacks == 100


async def test_a_store_that_hangs_makes_nobody_wait_twice(server: ValkeyServer) -> None:
    """Who asked waits for the timeout; all others are decided at once, by the share."""
    async with machines(server, 1, LimitSettings(requests_per_minute=100)) as [one]:
        one.store._timeout_s = 0.3
        server.hang()
        assert await one.passes()
        assert not one.leases.up
        waited = one.waited
        for _ in range(20):
            assert await one.passes()
        assert one.waited == waited
        server.hang(False)
        await until(lambda: one.leases.up, "the way back")


async def test_one_who_leaves_takes_the_answer_from_nobody(server: ValkeyServer) -> None:
    """Two wait for the same lease; one is cancelled, the other passes."""
    async with machines(server, 1, LimitSettings(requests_per_minute=100)) as [one]:
        first = asyncio.ensure_future(one.admit())
        second = asyncio.ensure_future(one.admit())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        (await second).settle(1)


class Liar:
    """A store that grants what it likes."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers
        self.asked: list[LeaseAsk] = []

    async def renew(self, machine: str, slots_s: float, asks: Sequence[LeaseAsk]) -> list[LeaseAnswer]:
        self.asked += asks
        answer = self.answers.pop(0) if self.answers else []
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    async def close(self) -> None: ...


async def test_a_fault_of_the_store_leaves_nobody_waiting() -> None:
    """Whatever it raises, who waits is answered: refused, not hung."""
    leases = Leases(Liar([RuntimeError("broken")]), "share", 2)
    limits = Limits(LimitSettings(requests_per_minute=10), leases=leases)
    ticket = limits.admit(KEY, 1)
    with pytest.raises((RuntimeError, RateLimited, LimitsDown)):
        await asyncio.wait_for(ticket.leased(), 5)


async def test_a_debt_is_owed_until_it_has_arrived() -> None:
    """What was used beyond a lease is not forgotten because the store was away when it was to be told."""
    nothing = RateAnswer(0, 0.0, 0)
    granted, paid = ([LeaseAnswer([nothing, RateAnswer(units, 0.0, 0), nothing], 0)] for units in (100, 0))
    store = Liar([granted, StoreDown("away"), paid])
    leases = Leases(store, "share", 2)
    limits = Limits(LimitSettings(tokens_per_minute=1000), leases=leases)
    (await limits.admit(KEY, 10).leased()).settle(500)
    await leases.give_back()
    assert not leases.up
    leases.up = True
    await leases.give_back()
    assert [ask.rates[1].give for ask in store.asked] == [0, -400, -400]
    [seat] = limits._plans["key"].seats
    assert limits.book.words[seat.at + LEFT + 1] == 0
