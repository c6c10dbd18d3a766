"""Whose turn it is: weighted fair queueing between flows, the shortest predicted work first inside a flow.

Between flows: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) for several servers, SFQ(D) (Jin, Chase and Kaur, SIGMETRICS 2004).
A flow is a tenant in a class. When a flow begins to wait its start tag is the larger of the virtual time and its own last finish tag; the
waiting flow with the smallest start tag is served; virtual time is the start tag last served; finish = start + cost / weight. The cost is predicted
from tokens, and settled with the true tokens when the slot is free again, so that nobody gains by what was predicted wrongly.

Inside a flow: dynamic priorities whose urgency grows alike for all (Jackson, Naval Research Logistics Quarterly 7, 1960). With work w (the cost as
time), arrival t and aging a the order is that of w - a * (now - t); as `now` is the same for all, that is the order of w + a * t, which never
changes while somebody waits. Whoever comes after t + w / a stands behind, so nobody starves; equal keys are first in, first out.

Pure: no clock of its own, no I/O.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from itertools import islice

FlowKey = tuple[str, str]

#: Flows that are looked at one by one; of more it is these that stand for all, so that no number of tenants makes a request dear.
LOOK_AT = 5
#: Flows that are kept before those that virtual time has passed are forgotten.
_MOST_FLOWS = 512


class Flow:
    """A tenant in a class. Tags are virtual cost. Of what waits, is booked, and is booked for `soon`: slot time in ns, and cost."""

    __slots__ = (
        "booked_ns", "costs", "debt", "finish", "items", "key", "running", "soon", "soon_cost", "soon_ns", "start", "times", "version",
        "waiting_cost", "waiting_ns", "weight",
    )  # fmt: skip

    def __init__(self, key: FlowKey, weight: float) -> None:
        self.key = key
        self.weight = weight
        self.start = self.finish = self.debt = 0.0  # debt: settled costs that its next item is charged with
        self.version = 0  # 0: nothing waits; else the number of its entry in the heap, older entries are void
        self.items: list[tuple[int, int, Item]] = []  # (key, number, item), in order
        self.times: list[int] = []  # the items' slot times, in the same order
        self.costs: list[float] = []  # their costs
        self.waiting_ns = self.booked_ns = self.soon_ns = 0
        self.waiting_cost = self.soon_cost = 0.0
        self.running = self.soon = 0


class Item:
    """What waits: its predicted `cost` and `slot_ns`; `order` is its key inside the flow and `number` its place among equals."""

    __slots__ = ("cost", "flow", "number", "order", "slot_ns")

    flow: Flow
    cost: float
    slot_ns: int
    order: int
    number: int


class Queue:
    """Flows and what waits in them."""

    def __init__(self) -> None:
        self.flows: dict[FlowKey, Flow] = {}
        #: Flows with anything that waits or is booked for soon.
        self.busy: dict[FlowKey, Flow] = {}
        self.waiting = 0
        self.waiting_ns = self.soon_ns = 0  # slot time of all flows: what waits, is booked for soon
        self.virtual = 0.0
        self._heap: list[tuple[float, int, Flow]] = []
        self._version = 0
        self._number = 0
        self._last_finish = 0.0
        self._forget_at = _MOST_FLOWS

    def flow(self, key: FlowKey, weight: float) -> Flow:
        """The flow of this key; a weight that has changed counts from now on."""
        flow = self.flows.get(key)
        if flow is None:
            if len(self.flows) >= self._forget_at:
                self._forget()
            flow = self.flows[key] = Flow(key, weight)
            flow.finish = self.virtual
        else:
            flow.weight = weight
        return flow

    # -- in and out

    def push(self, item: Item) -> None:
        """Let an item wait. It has its flow, cost, slot time and order."""
        flow = item.flow
        self._number += 1
        item.number = self._number
        at = bisect_right(flow.items, (item.order, item.number))
        flow.items.insert(at, (item.order, item.number, item))
        flow.times.insert(at, item.slot_ns)
        flow.costs.insert(at, item.cost)
        flow.waiting_ns += item.slot_ns
        flow.waiting_cost += item.cost
        self.waiting_ns += item.slot_ns
        self.waiting += 1
        if not flow.version:
            self.busy[flow.key] = flow
            self._enqueue(flow, self.tag(flow))

    def pop(self) -> Item | None:
        """Take out whose turn it is, and charge its flow; None where nothing waits."""
        heap = self._heap
        while heap:
            _, version, flow = heapq.heappop(heap)
            if version != flow.version:
                continue
            item = flow.items.pop(0)[2]
            del flow.times[0], flow.costs[0]
            self._left(flow, item)
            self.virtual = start = flow.start
            cost = item.cost + flow.debt
            if cost < 0.0:
                flow.debt, cost = cost, 0.0
            else:
                flow.debt = 0.0
            flow.finish = finish = start + cost / flow.weight
            if finish > self._last_finish:
                self._last_finish = finish
            if flow.items:
                self._enqueue(flow, finish)
            return item
        return None

    def remove(self, item: Item) -> None:
        """Take out an item that waits, before its turn."""
        flow = item.flow
        at = bisect_right(flow.items, (item.order, item.number)) if flow.items else 0
        if at >= len(flow.items) or flow.items[at][2] is not item:
            raise KeyError("the item does not wait")
        del flow.items[at], flow.times[at], flow.costs[at]
        self._left(flow, item)

    def charge(self, flow: Flow, cost: float) -> None:
        """Something of the flow is served at once, without having waited. Only where nothing waits."""
        self.virtual = start = self.tag(flow)
        flow.finish = finish = start + cost / flow.weight
        if finish > self._last_finish:
            self._last_finish = finish

    def idle(self) -> None:
        """Nothing waits and nothing is served: virtual time goes on to the last finish tag, so that no flow owes for what harmed nobody."""
        self.virtual = max(self.virtual, self._last_finish)

    def settle(self, flow: Flow, more: float) -> None:
        """What was charged cost so much more, or less where negative."""
        if flow.version:
            flow.debt += more
            return
        finish = flow.finish + (more + flow.debt) / flow.weight
        flow.debt = 0.0
        flow.finish = finish if finish > self.virtual else self.virtual

    # -- looking ahead

    def tag(self, flow: Flow) -> float:
        """The start tag of the flow's next item."""
        if flow.version:
            return flow.start
        return flow.finish if flow.finish > self.virtual else self.virtual

    def ahead(self, flow: Flow, order: int) -> tuple[int, float]:
        """What waits in the flow before a newcomer of this order: its slot time and its cost."""
        at = bisect_right(flow.items, (order, self._number + 1))
        return (flow.waiting_ns, flow.waiting_cost) if at == len(flow.items) else (sum(flow.times[:at]), sum(flow.costs[:at]))

    def rivals_ns(self, flow: Flow, ahead_cost: float, soon: float = 0.0) -> tuple[float, float]:
        """Slot time of the other flows that is served before the flow has been served `ahead_cost`: of what waits; and, where the share `soon` of
        what is booked for soon (the flow's own too) comes beside it, of both. Each flow's share at every instant, as in generalised processor
        sharing, and one item more: what has begun is served whole. Among many flows with little each, that one is all there is."""
        busy = self.busy
        if len(busy) < 2 and (not busy or flow.key in busy):
            return 0.0, 0.0
        virtual = self.virtual
        weight = flow.weight
        until = (flow.start if flow.version else flow.finish if flow.finish > virtual else virtual) + ahead_cost / weight
        until_soon = until + soon * flow.soon_cost / weight
        looked = looked_soon = before = before_soon = 0.0
        for other in islice(busy.values(), LOOK_AT):
            if other is flow:
                continue
            if time_ns := other.waiting_ns:
                start = other.start
                looked += time_ns
                gets = (until - start) * other.weight
                cost = other.waiting_cost
                item = other.costs[0]
                if gets >= 0.0:
                    gets += item
                    before += time_ns if cost <= gets else time_ns * gets / cost
                if soon:
                    soon_ns = time_ns + soon * other.soon_ns
                    looked_soon += soon_ns
                    gets = (until_soon - start) * other.weight
                    if gets >= 0.0:
                        gets += item
                        cost += soon * other.soon_cost
                        before_soon += soon_ns if cost <= gets else soon_ns * gets / cost
            elif soon and (soon_ns := other.soon_ns):
                soon_ns *= soon
                looked_soon += soon_ns
                gets = (until_soon - (other.finish if other.finish > virtual else virtual)) * other.weight
                if gets >= 0.0:
                    cost = soon * other.soon_cost
                    gets += other.soon_cost / other.soon
                    before_soon += soon_ns if cost <= gets else soon_ns * gets / cost
        if len(busy) > LOOK_AT:
            rest = self.waiting_ns - flow.waiting_ns
            before *= rest / looked if looked else 0.0
            before_soon *= (rest + soon * (self.soon_ns - flow.soon_ns)) / looked_soon if looked_soon else 0.0
        return before, before_soon if soon else before

    def heaviest(self) -> Flow | None:
        """The flow with the most that waits for its weight, of those that are looked at: whose last place is given up where the queue is full."""
        flows = [flow for flow in islice(self.busy.values(), 2 * LOOK_AT) if flow.items]
        return max(flows, key=lambda flow: flow.waiting_cost / flow.weight, default=None)

    def booked(self, flow: Flow, slot_ns: int) -> None:
        """A place was booked for the flow, or is no longer, where negative."""
        flow.booked_ns += slot_ns

    def due_soon(self, flow: Flow, cost: float, slot_ns: int) -> None:
        """A booked place will be due soon, or no longer is one, where negative."""
        flow.soon_ns += slot_ns
        flow.soon += 1 if slot_ns > 0 else -1
        self.soon_ns += slot_ns
        if flow.soon_ns:
            flow.soon_cost += cost
            self.busy[flow.key] = flow
        else:
            flow.soon_cost = 0.0  # what is left is rounding
            if not flow.items:
                self.busy.pop(flow.key, None)

    # --

    def _enqueue(self, flow: Flow, start: float) -> None:
        self._version += 1
        flow.start, flow.version = start, self._version
        heapq.heappush(self._heap, (start, self._version, flow))
        if len(self._heap) > 4 * len(self.busy) + 64:  # void entries are dropped where they come up, and here
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].version]
            heapq.heapify(self._heap)

    def _left(self, flow: Flow, item: Item) -> None:
        flow.waiting_ns -= item.slot_ns
        flow.waiting_cost -= item.cost
        self.waiting_ns -= item.slot_ns
        self.waiting -= 1
        if not flow.items:
            flow.version = 0
            flow.waiting_cost = 0.0  # what is left is rounding
            if not flow.soon_ns:
                del self.busy[flow.key]

    def _forget(self) -> None:
        """A flow that virtual time has passed says nothing any more: it would begin anew at the same tag."""
        virtual = self.virtual
        self.flows = {
            key: flow for key, flow in self.flows.items() if flow.items or flow.running or flow.booked_ns or flow.finish > virtual
        }
        self._forget_at = max(_MOST_FLOWS, 2 * len(self.flows))
