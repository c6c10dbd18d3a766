"""Weighted fair queueing between flows, shortest predicted work first inside one: shares, order, conservation, no starvation."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidegate.admission.queue import LOOK_AT, Flow, Item, Queue

_MANY = st.lists(st.integers(1, 50), min_size=40, max_size=80)


def item(queue: Queue, tenant: str, work: int, *, at_ns: int = 0, weight: float = 1.0, aging: float = 1.0) -> Item:
    """One that waits since `at_ns`; it costs `work` and takes twice as many nanoseconds."""
    made = Item()
    made.flow = queue.flow(("standard", tenant), weight)
    made.cost = float(work)
    made.slot_ns = 2 * work
    made.order = work + int(aging * at_ns)
    queue.push(made)
    return made


def served(queue: Queue, most: int = 1 << 30) -> list[Item]:
    out = []
    while len(out) < most and (one := queue.pop()) is not None:
        out.append(one)
    return out


def test_the_shortest_predicted_work_of_a_flow_comes_first() -> None:
    """Inside one tenant's class short work passes long work that came before it."""
    queue = Queue()
    long, short, middle = item(queue, "a", 900), item(queue, "a", 10), item(queue, "a", 300)
    assert served(queue) == [short, middle, long]


def test_equal_work_is_first_in_first_out() -> None:
    """Ties keep their order of arrival, however many there are."""
    queue = Queue()
    waiting = [item(queue, "a", 100) for _ in range(50)]
    assert served(queue) == waiting


@given(st.integers(0, 10**10), st.integers(1, 10**10), st.integers(1, 10**10), st.floats(0.1, 10))
def test_waiting_outweighs_work(came_ns: int, long_ns: int, later_ns: int, aging: float) -> None:
    """Whoever comes later than a place's work divided by aging stands behind it, however short it is: nobody is overtaken for ever."""
    queue = Queue()
    long = item(queue, "a", long_ns, at_ns=came_ns, aging=aging)
    item(queue, "a", 1, at_ns=came_ns + int(long_ns / aging) + later_ns, aging=aging)
    assert queue.pop() is long


@settings(max_examples=60)
@given(_MANY, _MANY, st.sampled_from([0.5, 1.0, 2.0, 3.0]))
def test_flows_that_wait_share_by_weight(works_a: list[int], works_b: list[int], weight: float) -> None:
    """While two flows wait, the work served of each, divided by its weight, differs by no more than one item of each (Goyal, Vin and Cheng 1996,
    theorem 1)."""
    queue = Queue()
    for work in works_a:
        item(queue, "a", work, weight=weight)
    for work in works_b:
        item(queue, "b", work)
    a, b = queue.flows["standard", "a"], queue.flows["standard", "b"]
    got = {a: 0.0, b: 0.0}
    while a.items and b.items:
        one = queue.pop()
        assert one is not None
        got[one.flow] += one.cost
        assert abs(got[a] / weight - got[b]) <= max(works_a) / weight + max(works_b) + 1e-6


def test_a_flow_that_was_idle_is_owed_nothing() -> None:
    """Who did not ask for an hour begins at the present virtual time: it gets its share from now on, not an hour's worth at once."""
    queue = Queue()
    for _ in range(100):
        item(queue, "a", 10)
    served(queue, 50)
    for _ in range(100):
        item(queue, "b", 10)
    tenants = [one.flow.key[1] for one in served(queue, 40)]
    assert 18 <= tenants.count("b") <= 22


def test_a_flood_does_not_move_another_tenant_back() -> None:
    """The first request of a quiet tenant is served next but one, whatever waits of another."""
    queue = Queue()
    for _ in range(1000):
        item(queue, "flood", 10)
    served(queue, 5)
    quiet = item(queue, "quiet", 10)
    assert quiet in served(queue, 2)


def test_what_was_predicted_too_short_is_charged_later() -> None:
    """A flow whose work took longer than predicted waits for it: its true time counts."""
    queue = Queue()
    for _ in range(20):
        item(queue, "liar", 1)
        item(queue, "honest", 10)
    work = {"liar": 0, "honest": 0}
    while queue.flows["standard", "honest"].items and queue.flows["standard", "liar"].items:
        one = queue.pop()
        assert one is not None
        work[one.flow.key[1]] += 10
        queue.settle(one.flow, 10 - one.cost)
    assert abs(work["liar"] - work["honest"]) <= 20


def test_what_never_ran_is_given_back() -> None:
    """A charge that is taken back leaves the flow where it was."""
    queue = Queue()
    flow = queue.flow(("standard", "a"), 1.0)
    queue.charge(flow, 10)
    before = queue.tag(flow)
    queue.charge(flow, 1000)
    queue.settle(flow, -1000)
    assert queue.tag(flow) == before


def test_an_item_that_does_not_wait_cannot_be_removed() -> None:
    """Removing twice is a mistake that is told."""
    queue = Queue()
    one = item(queue, "a", 10)
    queue.remove(one)
    with pytest.raises(KeyError):
        queue.remove(one)


def test_leaving_and_coming_leaves_nothing_behind() -> None:
    """A million clients that come and leave while others wait: neither flows nor entries of the heap pile up."""
    queue = Queue()
    item(queue, "stays", 10)
    for n in range(20_000):
        queue.remove(item(queue, f"t{n}", 10))
    assert len(queue.flows) < 2000
    assert len(queue._heap) < 500
    assert queue.waiting == 1


def test_many_flows_are_told_from_a_few() -> None:
    """With hundreds of tenants that wait, the time before a newcomer is still near the truth: two items of each, where each has four."""
    queue = Queue()
    for n in range(50 * LOOK_AT):
        for _ in range(4):
            item(queue, f"t{n}", 10)
    newcomer = queue.flow(("standard", "new"), 1.0)
    assert queue.rivals_ns(newcomer, 10)[0] == pytest.approx(50 * LOOK_AT * 40)


def test_rivals_get_no_more_than_they_wait_for() -> None:
    """A rival with little work is through soon: the rest of the slots is the flow's own. A heavy one has its share, and the item that it is in."""
    queue = Queue()
    item(queue, "small", 5)
    for _ in range(10):
        item(queue, "heavy", 50, weight=2.0)
    flow = queue.flow(("standard", "own"), 1.0)
    assert queue.rivals_ns(flow, 100) == (pytest.approx(10 + 400 + 100), pytest.approx(10 + 400 + 100))


@pytest.mark.parametrize("flows", [2, LOOK_AT])
@pytest.mark.parametrize("most", [1, 2, 10])
def test_what_is_said_to_come_before_a_newcomer_is_what_comes(flows: int, most: int) -> None:
    """Over many queues, whose flows have one item each or several: the slot time that is served before a newcomer, on average within a tenth."""
    chance = random.Random(1)
    said = came = 0.0
    for _ in range(300):
        queue = Queue()
        for number in range(flows):
            for _ in range(chance.randint(1, most)):
                item(queue, f"t{number}", chance.randint(1, 100))
        for _ in range(chance.randint(0, flows)):
            queue.pop()
        newcomer = queue.flow(("standard", "new"), 1.0)
        said += queue.rivals_ns(newcomer, 0.0)[0]
        waiting = item(queue, "new", chance.randint(1, 100))
        while (one := queue.pop()) is not None and one is not waiting:
            came += one.slot_ns
    assert said == pytest.approx(came, rel=0.1)


def test_what_is_booked_for_soon_counts_beside_what_waits() -> None:
    """The second figure holds the rivals' booked places that are due soon, by the share of them that are claimed, up to their share of the slots."""
    queue = Queue()
    item(queue, "rival", 5)
    rival, flow = queue.flows["standard", "rival"], queue.flow(("standard", "own"), 1.0)
    queue.booked(rival, 80)
    queue.due_soon(rival, 40.0, 80)
    assert queue.rivals_ns(flow, 100, 0.5) == (pytest.approx(10), pytest.approx(10 + 40))
    assert queue.rivals_ns(flow, 10, 0.5)[1] == pytest.approx((10 + 40) * (10 + 5) / 25)
    queue.remove(rival.items[0][2])
    assert queue.rivals_ns(flow, 0, 0.5) == (0.0, pytest.approx(40)), "none waits, and one that is booked comes"
    assert queue.rivals_ns(flow, 0) == (0.0, 0.0)
    queue.due_soon(rival, -40.0, -80)
    assert not queue.busy


class Machine(RuleBasedStateMachine):
    """Any order of what may happen to a queue, beside a plain model of who waits."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue()
        self.waiting: list[Item] = []
        self.running: list[Item] = []
        self.now = 0

    @rule(tenant=st.sampled_from("abcdefgh"), work=st.integers(0, 1000), weight=st.sampled_from([0.5, 1.0, 2.0]), later=st.integers(0, 500))
    def push(self, tenant: str, work: int, weight: float, later: int) -> None:
        self.now += later
        self.waiting.append(item(self.queue, tenant, work, at_ns=self.now, weight=weight))

    @rule()
    def pop(self) -> None:
        virtual = self.queue.virtual
        one = self.queue.pop()
        assert (one is None) == (not self.waiting)
        if one is not None:
            same = [other for other in self.waiting if other.flow is one.flow]
            assert one is min(same, key=lambda other: (other.order, other.number))
            self.waiting.remove(one)
            self.running.append(one)
            assert self.queue.virtual >= virtual

    @precondition(lambda self: self.waiting)
    @rule(which=st.randoms(use_true_random=False))
    def remove(self, which: object) -> None:
        one = which.choice(self.waiting)  # type: ignore[attr-defined]
        self.queue.remove(one)
        self.waiting.remove(one)

    @precondition(lambda self: self.running)
    @rule(more=st.integers(-1000, 3000))
    def settle(self, more: int) -> None:
        one = self.running.pop(0)
        self.queue.settle(one.flow, max(-one.cost, more))

    @rule()
    def forget(self) -> None:
        self.queue._forget()

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        queue = self.queue
        assert queue.waiting == len(self.waiting)
        assert queue.waiting_ns == sum(one.slot_ns for one in self.waiting)
        flows: set[Flow] = {one.flow for one in self.waiting}
        assert set(queue.busy.values()) == flows
        for flow in flows:
            own = sorted((one for one in self.waiting if one.flow is flow), key=lambda one: (one.order, one.number))
            assert [entry[2] for entry in flow.items] == own
            assert flow.times == [one.slot_ns for one in own]
            assert flow.costs == [one.cost for one in own]
            assert (flow.waiting_ns, flow.waiting_cost) == (sum(flow.times), sum(flow.costs))
            assert flow.start >= queue.virtual
            for at, one in enumerate(own):
                if at == 0 or own[at - 1].order < one.order:
                    assert queue.ahead(flow, one.order - 1) == (sum(flow.times[:at]), sum(flow.costs[:at]))

    def teardown(self) -> None:
        rest = served(self.queue)
        assert len(rest) == len(self.waiting)
        assert set(map(id, rest)) == set(map(id, self.waiting))
        assert not self.queue.busy


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestQueueMachine = Machine.TestCase
