"""Several machines that share a limit, in virtual time: they take, give back, renew and lapse, are killed, lose the store and find it again, in
any order. What they spend together never passes the limit, and in the end all of it is there again.

The store is a model of Valkey's script (stores/systems/valkey.py), line by line; the last test holds the model against a real server.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import selectors
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.stores.valkey_server import running

from tidegate.admission.book import LEFT, SLOTS, USED
from tidegate.admission.leases import IDLE_S, SLOTS_S, Leases
from tidegate.admission.limits import Limits, Ticket
from tidegate.admission.settings import LimitSettings
from tidegate.core.ask import Caller
from tidegate.core.errors import LimitsDown, RateLimited, StoreDown
from tidegate.core.ports import LeaseAnswer, LeaseAsk, RateAnswer, RateAsk
from tidegate.stores.settings import ValkeySettings
from tidegate.stores.systems.valkey import Valkey

KEY = Caller("key", "tenant")
PERIOD_S = 60.0
#: What becomes of a machine's next question: it is lost on its way, or only one of what it asks is answered, or the answer is lost; or it arrives,
#: given up, before the next one.
Fate = Literal["", "before", "half", "after", "late"]


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock goes on to the next timer where nothing else is to be done."""

    def __init__(self) -> None:
        selector = selectors.SelectSelector()
        super().__init__(selector)
        self._now_s = 1000.0
        real = selector.select

        def select(timeout: float | None = None) -> Any:
            assert timeout is not None, "nothing would ever happen"
            self._now_s += max(0.0, timeout)
            return real(0)

        selector.select = select  # type: ignore[method-assign]

    def time(self) -> float:
        return self._now_s


class Server:
    """What Valkey's script does. A key is its fields and when it expires, in microseconds."""

    def __init__(self, now_us: Callable[[], int]) -> None:
        self._now_us = now_us
        self.keys: dict[str, tuple[dict[str, float], float]] = {}

    def fields(self, subject: str) -> dict[str, float]:
        found, expires = self.keys.get(subject, ({}, 0.0))
        return found if expires > self._now_us() else {}

    def lease(self, machine: str, slots_s: float, ask: LeaseAsk) -> LeaseAnswer:
        now, held = self._now_us(), dict(self.fields(ask.subject))
        told, ttl = [], 0.0
        for kind, rate in enumerate(ask.rates):
            granted, wait, left = 0, 0.0, 0.0
            if rate.limit:
                left, period = float(rate.limit), int(rate.period_s * 1e6)
                if f"a{kind}" in held:
                    left = min(left, held[f"l{kind}"] + max(0, now - held[f"a{kind}"]) * rate.limit / period)
                left = min(float(rate.limit), left + rate.give)
                if rate.need <= left:
                    granted = max(min(rate.waited, math.floor(left)), min(rate.want, math.floor(left / 2)))
                    left -= granted
                else:
                    wait = math.ceil((rate.need - left) * period / rate.limit)
                held |= {f"a{kind}": now, f"l{kind}": left}
                ttl = max(ttl, (rate.limit - left) * period / rate.limit)
            told.append(RateAnswer(granted, wait / 1e6, max(0, math.floor(left))))
        slots = 0
        if ask.most:
            others, lease = 0.0, int(slots_s * 1000) * 1000
            for name in [name[2:] for name in held if name[:2] == "x:"]:
                rest = held[f"x:{name}"] - now
                if rest <= 0 or rest > 2 * lease:
                    del held[f"x:{name}"], held[f"s:{name}"]
                elif name != machine:
                    others += held[f"s:{name}"]
                    ttl = max(ttl, rest)
            slots = int(max(ask.used, min(ask.slots, max(0, ask.most - others))))
            if slots:
                held |= {f"s:{machine}": slots, f"x:{machine}": now + lease}
                ttl = max(ttl, lease)
            else:
                held.pop(f"s:{machine}", None)
                held.pop(f"x:{machine}", None)
        self.keys[ask.subject] = held, now + math.ceil(ttl / 1000) * 1000 + 1000
        return LeaseAnswer(told, slots)


class Way:
    """A machine's way to the server. `granted`: by kind, units that the server has given it; `given`: units that it has sent back."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.cut = False
        self.fate: Fate = ""
        self.delay_s = 0.0
        self.granted, self.given = [0, 0, 0], [0, 0, 0]
        self.asking = 0
        self._late: list[Callable[[], object]] = []

    async def renew(self, machine: str, slots_s: float, asks: Sequence[LeaseAsk]) -> list[LeaseAnswer]:
        for ask in asks:
            for kind, rate in enumerate(ask.rates):
                self.given[kind] += rate.give
        self.asking += 1
        try:
            return await self._renew(machine, slots_s, asks)
        except StoreDown:
            for ask in asks:  # a debt is owed again
                for kind, rate in enumerate(ask.rates):
                    self.given[kind] -= min(0, rate.give)
            raise
        finally:
            self.asking -= 1

    async def _renew(self, machine: str, slots_s: float, asks: Sequence[LeaseAsk]) -> list[LeaseAnswer]:
        await self._pass()
        while self._late:
            self._late.pop(0)()
        fate, self.fate = (self.fate, "") if asks else ("", self.fate)
        if fate == "late":
            self._late.append(lambda: self._lease(machine, slots_s, asks))
        if fate in ("before", "late"):
            raise StoreDown("lost on its way")
        answers = self._lease(machine, slots_s, asks[:1] if fate == "half" else asks)
        await self._pass()
        if fate:
            raise StoreDown("the answer is lost")
        return answers

    async def _pass(self) -> None:
        if not self.cut:
            await asyncio.sleep(self.delay_s)
        if self.cut:
            raise StoreDown("away")

    def _lease(self, machine: str, slots_s: float, asks: Sequence[LeaseAsk]) -> list[LeaseAnswer]:
        answers = [self._server.lease(machine, slots_s, ask) for ask in asks]
        for answer in answers:
            for kind, rate in enumerate(answer.rates):
                self.granted[kind] += rate.granted
        return answers

    async def close(self) -> None: ...


@dataclass(eq=False)
class Run:
    machine: Machine
    ticket: Ticket
    tokens: int
    leased: bool


class Machine:
    """What a gateway has for its limits. `spent`: requests and tokens from leases, those that run included."""

    def __init__(self, loop: VirtualLoop, server: Server, rules: LimitSettings, ahead_s: float) -> None:
        self.way = Way(server)
        self.leases = Leases(self.way, rules.when_lost, rules.machines)
        self.limits = Limits(rules, leases=self.leases, clock_ns=lambda: int((loop.time() + ahead_s) * 1e9))
        self.keeping = loop.create_task(self.leases.keep())
        self.spent = [0, 0]

    def word(self, offset: int) -> int:
        plan = self.limits._plans.get("key")
        return self.limits.book.words[plan.seats[0].at + offset] if plan is not None else 0

    @property
    def name(self) -> str:
        return self.limits.book.name


@dataclass
class Told:
    """What is known of all machines that ever were: what they spent from leases; `beyond`: more than had been reserved."""

    spent: list[int] = field(default_factory=lambda: [0, 0])
    beyond: int = 0


class Machines(RuleBasedStateMachine):
    """Up to three machines, one key with limits of requests, tokens and runs at a time."""

    @initialize(
        when_lost=st.sampled_from(["refuse", "share"]), requests=st.sampled_from([0, 5, 40]), tokens=st.sampled_from([0, 60, 900]),
        runs=st.sampled_from([0, 1, 4]), count=st.integers(2, 3), ahead_s=st.sampled_from([0.0, 5000.0]),
    )  # fmt: skip
    def begin(self, when_lost: Literal["refuse", "share"], requests: int, tokens: int, runs: int, count: int, ahead_s: float) -> None:
        self.loop = VirtualLoop()
        self.server = Server(lambda: int(self.loop.time() * 1e6))
        self.limits = LimitSettings(
            requests_per_minute=requests or (5 if not tokens and not runs else 0), tokens_per_minute=tokens, concurrent=runs, machines=count,
            when_lost=when_lost,
        )  # fmt: skip
        self.most = [self.limits.requests_per_minute, tokens]
        self.began_s = self.loop.time()
        self.ahead_s = ahead_s
        self.machines = [self.machine() for _ in range(count)]
        self.told = Told()
        self.full = 1  # how often the server's bucket was full of a sudden: at the start, and where it lost all
        self.lost = False  # any question, ever
        self.disturbed = False  # a question was lost, or the server's memory: what runs may be unknown to it for a moment
        self.running: list[Run] = []
        self.waiting: list[tuple[Machine, int, asyncio.Task[Ticket]]] = []
        self.turn()

    def machine(self) -> Machine:
        return Machine(self.loop, self.server, self.limits, self.ahead_s * len(getattr(self, "machines", [])))

    def do(self, work: Coroutine[Any, Any, Any]) -> None:
        self.loop.run_until_complete(work)
        for one in [one for one in self.waiting if one[2].done()]:
            self.waiting.remove(one)
            machine, tokens, task = one
            if not task.cancelled():
                with contextlib.suppress(RateLimited, LimitsDown):
                    self.begun(machine, tokens, task.result())

    def turn(self) -> None:
        """A few turns of the loop, in which no time passes."""

        async def turns() -> None:
            for _ in range(8):
                await asyncio.sleep(0)

        self.do(turns())

    def begun(self, machine: Machine, tokens: int, ticket: Ticket) -> None:
        leased = ticket._way is ticket._plan.leased
        self.running.append(Run(machine, ticket, tokens, leased))
        self.count(machine, leased, 1, tokens)

    def count(self, machine: Machine, leased: bool, requests: int, tokens: int) -> None:
        if leased:
            for spent in (self.told.spent, machine.spent):
                spent[0] += requests
                spent[1] += tokens

    # -- what happens

    @rule(number=st.integers(0, 2), tokens=st.integers(1, 60), times=st.integers(1, 4))
    def admit(self, number: int, tokens: int, times: int) -> None:
        machine = self.machines[number % len(self.machines)]

        async def admit() -> None:
            for _ in range(times):
                with contextlib.suppress(RateLimited, LimitsDown):
                    ticket = machine.limits.admit(KEY, tokens)
                    if ticket.waits:
                        self.waiting.append((machine, tokens, self.loop.create_task(_leased(ticket))))
                    else:
                        self.begun(machine, tokens, ticket)

        self.do(admit())
        self.turn()

    @rule(number=st.integers(0, 99), used=st.integers(0, 120))
    def settle(self, number: int, used: int) -> None:
        if self.running:
            run = self.running.pop(number % len(self.running))
            run.ticket.settle(used)
            self.count(run.machine, run.leased, 0, used - run.tokens)
            if run.leased:
                self.told.beyond += max(0, used - run.tokens)

    @rule(number=st.integers(0, 99))
    def refund(self, number: int) -> None:
        if self.running:
            run = self.running.pop(number % len(self.running))
            run.ticket.refund()
            self.count(run.machine, run.leased, -1, -run.tokens)

    @rule(number=st.integers(0, 99))
    def client_leaves(self, number: int) -> None:
        if self.waiting:
            self.waiting[number % len(self.waiting)][2].cancel()
            self.turn()

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.5, 1.1, 3.0, 7.0, 12.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.do(asyncio.sleep(seconds))

    @rule(number=st.integers(0, 2), seconds=st.sampled_from([0.0, 0.0, 0.02, 0.3]))
    def way_takes(self, number: int, seconds: float) -> None:
        self.machines[number % len(self.machines)].way.delay_s = seconds

    @rule(number=st.integers(0, 2), fate=st.sampled_from(["before", "half", "after", "late"]))
    def question_is_lost(self, number: int, fate: Fate) -> None:
        self.machines[number % len(self.machines)].way.fate = fate
        self.lost = self.disturbed = True

    @rule(number=st.integers(0, 2))
    def store_is_lost(self, number: int) -> None:
        self.machines[number % len(self.machines)].way.cut = True
        self.lost = self.disturbed = True

    @rule()
    def store_is_found(self) -> None:
        for machine in self.machines:
            machine.way.cut = False

    @rule()
    def store_loses_all(self) -> None:
        self.server.keys.clear()
        self.full += 1
        self.disturbed = True

    @rule(number=st.integers(0, 2))
    def give_back(self, number: int) -> None:
        self.do(self.machines[number % len(self.machines)].leases.give_back())

    @rule(number=st.integers(0, 2))
    def kill(self, number: int) -> None:
        """What ran on it counts as used, and its leases are nobody's."""
        number %= len(self.machines)
        machine = self.machines[number]
        machine.keeping.cancel()
        if machine.leases._asking is not None:
            machine.leases._asking.cancel()
        for one in self.waiting:
            if one[0] is machine:
                one[2].cancel()
        self.running = [run for run in self.running if run.machine is not machine]
        self.machines[number] = Machine(self.loop, self.server, self.limits, self.ahead_s * number)
        self.turn()

    # -- what is true all the time

    @invariant()
    def what_is_spent_was_there(self) -> None:
        """All that was ever spent from leases is no more than the bucket held and has got since."""
        if not hasattr(self, "told"):
            return
        for kind, beyond in ((0, 0), (1, self.told.beyond)):
            if limit := self.most[kind]:
                got = limit * (self.loop.time() - self.began_s) / PERIOD_S
                assert self.told.spent[kind] - beyond <= self.full * limit + got + 1e-6

    @invariant()
    def no_machine_has_more_than_it_got(self) -> None:
        """What it holds, has spent and has given back is what the server gave it; less is lost with an answer, never more."""
        for machine in getattr(self, "machines", []):
            for kind in (0, 1):
                if self.most[kind]:
                    has = machine.word(LEFT + kind) + machine.spent[kind] + machine.way.given[kind]
                    assert has <= machine.way.granted[kind]
                    if not self.lost and not machine.way.asking:
                        assert has == machine.way.granted[kind]

    @invariant()
    def no_more_run_than_may(self) -> None:
        """While nothing is lost, runs at a time are one number for all machines, and the server knows them."""
        if not hasattr(self, "told") or not self.limits.concurrent:
            return
        used = [machine.word(USED) for machine in self.machines]
        fields: dict[str, float] = {}
        for subject in self.server.keys:
            fields = self.server.fields(subject)
        held = [fields.get(f"s:{machine.name}", 0.0) for machine in self.machines]
        known = all(has >= runs for has, runs in zip(held, used, strict=True))
        if self.disturbed:
            whole = sum(value for name, value in fields.items() if name[:2] == "s:") <= self.limits.concurrent
            quiet = not any(machine.way.cut or machine.way.fate or machine.way._late or machine.way.asking for machine in self.machines)
            same = all(machine.word(SLOTS) <= has for machine, has in zip(self.machines, held, strict=True))
            self.disturbed = not (known and whole and quiet and same and all(machine.leases.up for machine in self.machines))
        else:
            assert known
            assert sum(used) <= self.limits.concurrent

    def teardown(self) -> None:
        """Once all runs are over and the store is there, nothing is missing: what lay idle went back, what was lost has lapsed or refilled."""
        if not hasattr(self, "told"):
            return
        for machine in self.machines:
            machine.way.cut, machine.way.fate = False, ""
        self.do(asyncio.sleep(5.0))
        for run in self.running:
            run.ticket.settle(run.tokens)
        longest_s = PERIOD_S * (2 + self.told.beyond / (self.most[1] or 1))
        self.do(asyncio.sleep(max(longest_s, IDLE_S + SLOTS_S + 5)))
        try:
            assert not self.waiting
            for machine in self.machines:
                assert [machine.word(at) for at in (USED, SLOTS, LEFT, LEFT + 1)] == [0, 0, 0, 0]
            last = self.machine()
            self.machines.append(last)
            tickets: list[Ticket] = []
            most = min(limit for limit in (self.limits.concurrent, self.most[0], self.most[1], 1000) if limit)
            for _ in range(most):
                self.do(self._all_of_it(last, tickets, self.most[1] // most if self.most[1] else 1))
            assert len(tickets) == most
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()

    async def _all_of_it(self, machine: Machine, tickets: list[Ticket], tokens: int) -> None:
        ticket = machine.limits.admit(KEY, tokens)
        tickets.append(await ticket.leased() if ticket.waits else ticket)


async def _leased(ticket: Ticket) -> Ticket:
    return await ticket.leased()


TestLeaseMachines = Machines.TestCase
TestLeaseMachines.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)



@pytest.mark.parametrize("used", [10, 900])
def test_the_true_count_of_a_long_run_reaches_the_store(used: int) -> None:
    """A key without a limit of runs at a time has one run, longer than what is called idle, and nothing after it: what it did not use is there
    for the other machines, and what it used beyond is owed."""
    loop = VirtualLoop()
    server = Server(lambda: int(loop.time() * 1e6))
    machine = Machine(loop, server, LimitSettings(tokens_per_minute=1000), 0.0)

    async def walk() -> None:
        ticket = await machine.limits.admit(KEY, 500).leased()
        await asyncio.sleep(3 * IDLE_S)
        ticket.settle(used)
        await asyncio.sleep(2 * IDLE_S)
        machine.keeping.cancel()
        await asyncio.gather(machine.keeping, return_exceptions=True)

    loop.run_until_complete(walk())
    loop.close()
    assert machine.word(LEFT + 1) == 0
    assert machine.way.granted[1] - machine.way.given[1] == used


#: What a subject is limited to: of each kind a day's units, so that nothing refills while a test runs; and runs at a time.
MOST = st.tuples(*[st.sampled_from([0, 1, 7, 300])] * 3, st.sampled_from([0, 1, 4]))
#: need, waited, want, give
UNITS = st.tuples(st.integers(0, 40), st.integers(0, 80), st.integers(0, 40), st.integers(-50, 50))
#: Of one machine: for each kind, and runs that it has and wants.
ASKS = st.lists(st.tuples(st.sampled_from("ab"), st.tuples(UNITS, UNITS, UNITS), st.integers(0, 5), st.integers(0, 6)), max_size=20)
Asks = list[tuple[str, tuple[tuple[int, int, int, int], ...], int, int]]


def test_the_model_is_as_the_server() -> None:
    """Whatever two machines ask, the model grants what the real script grants."""
    with running() as real:
        number = 0

        @given(MOST, ASKS)
        @settings(max_examples=100, deadline=None)
        def holds(most: tuple[int, int, int, int], asks: Asks) -> None:
            nonlocal number
            number += 1
            asyncio.run(_same(real.url, str(number), most, asks))

        holds()


async def _same(url: str, subject: str, most: tuple[int, int, int, int], asks: Asks) -> None:
    store, model = Valkey(ValkeySettings(url=url, timeout_s=10)), Server(lambda: time.time_ns() // 1000)
    for machine, units, used, slots in asks:
        ask = LeaseAsk(subject, [RateAsk(limit, 86_400.0, *one) for limit, one in zip(most, units, strict=False)], most[3], used, slots)
        [said] = await store.renew(machine, 3600.0, [ask])
        expected = model.lease(machine, 3600.0, ask)
        assert said.slots == expected.slots
        for real, other in zip(said.rates, expected.rates, strict=True):
            assert (real.granted, real.left) == (other.granted, other.left)
            assert abs(real.wait_s - other.wait_s) < 120
    await store.close()
