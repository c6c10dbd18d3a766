"""Slots of a tenant's own: nobody else ever has them, whatever happens in which order; where they are lent they come back."""

from __future__ import annotations

import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tidegate.admission.gate import FREE, Gate, Place
from tidegate.admission.pool import Pool, words_for
from tidegate.admission.settings import AdmissionSettings
from tidegate.core.ask import Caller
from tidegate.core.errors import Busy
from tidegate.core.memory import Shared as Memory

S = 1_000_000_000


class House:
    """A gate with 4 slots for everybody, 3 of `acme`, and 2 of `bolt`."""

    def __init__(self, *, lends: bool, forecast_s: float = 600.0) -> None:
        self.now = 1
        self.gate = Gate(AdmissionSettings.model_validate({"forecast_s": forecast_s, "queue": 8}), {}, clock_ns=lambda: self.now)
        self.common = self.gate.open(["m", "twin"], 4)
        self.own = {"acme": self.gate.open(["m", "twin"], 3, "acme", lends=lends), "bolt": self.gate.open(["m", "twin"], 2, "bolt", lends=lends)}
        self.gate.alias("default", "m")

    def enter(self, tenant: str, model: str = "m") -> Place:
        return self.gate.enter(model, Caller(f"key of {tenant}", tenant), prompt_tokens=100, answer_tokens=10)


def running(places: list[Place]) -> int:
    return sum(not place.waits for place in places)


# -- not lent


@pytest.mark.parametrize("model", ["m", "twin", "default"])
def test_a_flood_of_others_leaves_them_free(model: str) -> None:
    """By whatever name the model is asked; and the tenant has its own slots, no others."""
    house = House(lends=False)
    flood = [house.enter("flood", model) for _ in range(12)]
    assert running(flood) == 4
    acme = [house.enter("acme", model) for _ in range(5)]
    assert running(acme) == 3
    for place in flood:
        place.leave(110)
    assert running(acme) == 3, "idle slots of all are not the tenant's"


def test_lanes_are_told_apart() -> None:
    """/health and the metrics have a row for each."""
    house = House(lends=False)
    house.enter("acme")
    assert {name: row[:2] for name, row in house.gate.counts().items()} == {"m": [4, 0], "m@acme": [3, 1], "m@bolt": [2, 0]}
    assert house.gate.figures()["m@acme"]["slots"] == 3


def test_an_engine_that_fails_takes_its_slots_of_both() -> None:
    """Each lane is made smaller by itself, and bounds what begins from then on."""
    house = House(lends=False)
    house.gate.resize("m", 2)
    house.gate.resize("m", 1, "acme")
    assert [running([house.enter(tenant) for _ in range(3)]) for tenant in ("flood", "acme", "bolt")] == [2, 1, 2]


# -- lent


def test_idle_slots_are_lent_but_for_one_of_each() -> None:
    """To who comes and to who waits already; a tenant that comes back finds the one free at once."""
    house = House(lends=True)
    acme = [house.enter("acme") for _ in range(3)]
    flood = [house.enter("flood") for _ in range(8)]
    assert running(flood) == 4 + 1, "one of bolt's"
    for place in acme[:2]:
        place.leave(110)
    assert running(flood) == 4 + 1 + 2
    acme[2].leave(110)
    assert running(flood) == 4 + 1 + 2, "one stays"
    assert not house.enter("acme").waits
    assert not house.enter("bolt").waits


def test_nobody_is_refused_beside_a_slot_that_is_lent() -> None:
    """What is idle is lent before a wait is forecast."""
    house = House(lends=True, forecast_s=0.001)
    assert running([house.enter("flood") for _ in range(4 + 2 + 1)]) == 7
    with pytest.raises(Busy):
        house.enter("flood")


def test_what_was_lent_comes_back_with_the_next_end() -> None:
    """Who lent is served before the others that wait, however many they are."""
    house = House(lends=True)
    flood = [house.enter("flood") for _ in range(12)]
    assert running(flood) == 7
    first, second = house.enter("acme"), house.enter("acme")
    assert (first.waits, second.waits) == (False, True)
    flood[0].leave(110)
    assert not second.waits
    assert running(flood[1:]) == 6
    flood[1].leave(110)
    assert running(flood[2:]) == 6, "more than that is not wanted back"


class Machine(RuleBasedStateMachine):
    """Two tenants with slots of their own and two without, who come, leave, wait, give up; and engines that come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[tuple[str, Place]] = []
        self.whole = {"": 4, "acme": 3, "bolt": 2}
        self.shrunk = False

    @initialize(lends=st.booleans())
    def begin(self, lends: bool) -> None:
        self.lends = lends
        self.house = House(lends=lends, forecast_s=30.0)

    @rule(tenant=st.sampled_from(["acme", "bolt", "flood", "flood", "other"]), model=st.sampled_from(["m", "twin", "default"]))
    def enter(self, tenant: str, model: str) -> None:
        alone = tenant in self.house.own and not any(who == tenant for who, _ in self.inside)
        try:
            place = self.house.enter(tenant, model)
        except Busy:
            assert not alone, "a tenant's own slot is there for it"
            return
        assert not (alone and place.waits and not self.shrunk), "a tenant's own slot is there for it"
        assert place is not FREE
        if place.waits:
            place.on_turn = self.forget
        self.inside.append((tenant, place))

    def forget(self) -> None:
        """Who was given up is inside no more."""
        self.inside = [one for one in self.inside if one[1].error is None]

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), tokens=st.sampled_from([0, 110]))
    def leave(self, data: st.DataObject, tokens: int) -> None:
        at = data.draw(st.integers(0, len(self.inside) - 1))
        _, place = self.inside.pop(at)
        place.leave(tokens)

    @rule(ms=st.sampled_from([1, 500, 20_000]))
    def later(self, ms: int) -> None:
        self.house.now += ms * 1_000_000

    @rule(common=st.integers(1, 6), acme=st.integers(1, 4))
    def resize(self, common: int, acme: int) -> None:
        self.whole |= {"": common, "acme": acme}
        self.house.gate.resize("m", common)
        self.house.gate.resize("m", acme, "acme")
        self.shrunk = True  # what ran before goes on: sums may be over the new ones until it ends

    @invariant()
    def nobody_has_what_is_anothers(self) -> None:
        if not hasattr(self, "house"):
            return
        house, whole = self.house, self.whole
        for tenant, lane in house.own.items():
            mine = [place for who, place in self.inside if who == tenant]
            assert (lane.running, lane.queue.waiting) == (running(mine), len(mine) - running(mine)), "its lane holds its own requests alone"
            assert 1 <= lane.slots <= whole[tenant]
            assert not lane.queue.waiting or lane.running >= lane.slots, "nobody waits while a slot is free"
            assert self.lends or lane.slots == whole[tenant]
        common = house.common
        others = [place for who, place in self.inside if who not in house.own]
        assert (common.running, common.queue.waiting) == (running(others), len(others) - running(others))
        assert self.lends or common.slots == whole[""]
        if not self.shrunk:
            assert common.running + sum(lane.running for lane in house.own.values()) <= sum(whole.values())
            assert max(common.running, whole[""]) + sum(lane.slots for lane in house.own.values()) <= sum(whole.values()), "no slot is in two lanes"
            if common.queue.waiting:
                idle = sum(max(0, whole[tenant] - max(1, lane.running + lane.queue.waiting)) for tenant, lane in house.own.items())
                assert common.running >= whole[""] + (idle if self.lends else 0), "nobody waits beside idle slots that are lent"


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestIsolationMachine = Machine.TestCase


# -- lent, in several workers


class Worker:
    """One of two workers that share an engine: 4 slots of everybody, 4 of `acme`, which lends."""

    def __init__(self, memory: Memory, worker: int) -> None:
        mine = copy.copy(memory)
        mine.join(worker)
        self.gate = Gate(AdmissionSettings.model_validate({"forecast_s": 600}), {}, clock_ns=lambda: 1)
        self.pools = {tenant: Pool(mine, number) for number, tenant in enumerate(("", "acme"))}
        self.lanes = {
            tenant: self.gate.open(["m"], shared.resize(4, None), tenant, lends=bool(tenant)) for tenant, shared in self.pools.items()
        }
        self.places: list[tuple[str, Place]] = []

    def look(self) -> None:
        """As the gateway does from time to time."""
        for tenant, shared in self.pools.items():
            self.gate.resize("m", shared.settle(self.lanes[tenant]), tenant)

    def enter(self, tenant: str) -> Place:
        self.places.append((tenant, self.gate.enter("m", Caller(f"key of {tenant}", tenant), prompt_tokens=100, answer_tokens=10)))
        return self.places[-1][1]

    def running(self, tenant: str | None = None) -> int:
        return running([place for who, place in self.places if tenant in (None, who)])


def two_workers() -> list[Worker]:
    memory = Memory(words_for(2, 2), 2)
    workers = [Worker(memory, number) for number in range(2)]
    for _ in range(4):
        for worker in workers:
            worker.look()
    return workers


def looks(workers: list[Worker]) -> None:
    for _ in range(4):
        for worker in workers:
            worker.look()


def test_what_one_worker_lent_comes_back_for_a_tenant_in_another() -> None:
    """Slots that its tenant had in the first worker are lent to a flood there. As the flood's requests end, they go to where the tenant waits now,
    and are not lent again; until then nobody else has them."""
    workers = first, second = two_workers()
    begun = [first.enter("acme") for _ in range(3)]
    looks(workers)
    for place in begun:
        place.leave(110)
    first.places.clear()
    flood = [first.enter("flood") for _ in range(12)]
    for _ in range(2):
        second.enter("flood")
    looks(workers)
    lent = first.running() + second.running() - 4
    assert lent == 2
    acme = [second.enter("acme") for _ in range(3)]
    looks(workers)
    assert first.running() + second.running() <= 8
    for place in flood[:lent]:
        place.leave(110)
        first.places.remove(("flood", place))
        looks(workers)
        assert first.running("flood") + second.running() <= 8
    assert running(acme) == 3, "while others of the flood wait"
    assert first.running("flood") + second.running("flood") >= 4, "slots of all are still the flood's"


class Workers(RuleBasedStateMachine):
    """Requests come and go in two workers, and each looks at what both share when it likes."""

    @initialize()
    def begin(self) -> None:
        self.workers = two_workers()

    @rule(at=st.integers(0, 1), tenant=st.sampled_from(["acme", "flood", "other"]))
    def enter(self, at: int, tenant: str) -> None:
        self.workers[at].enter(tenant)

    @rule(at=st.integers(0, 1), number=st.integers(0, 99))
    def leave(self, at: int, number: int) -> None:
        places = self.workers[at].places
        if places:
            places.pop(number % len(places))[1].leave(110)

    @rule(at=st.integers(0, 1))
    def look(self, at: int) -> None:
        self.workers[at].look()

    @invariant()
    def no_slot_is_in_two_places(self) -> None:
        if hasattr(self, "workers"):
            assert sum(worker.running() for worker in self.workers) <= 8
            assert sum(worker.running("acme") for worker in self.workers) <= 4


Workers.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestWorkers = Workers.TestCase
