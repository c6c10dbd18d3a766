"""Booked places: when somebody who was refused may come back, and pass.

A refusal books a place for its key at the instant that `Retry-After` names. Instants of a flow follow each other at the rate at which it can be
served, so that refusals spread as if they had waited. A booking is claimed by the very same request (the digest of its body) at or after its
instant; one that nobody claimed for a while by any request of its key, for a body may have changed. Who claims one passes whatever the
forecast is, and has its place in the flow's order by its instant. What nobody claims lapses. A booking never keeps a slot idle: it only
counts, with the share of bookings that were claimed lately, as work that comes before a newcomer's.

Pure: no clock of its own, no I/O.
"""

from __future__ import annotations

import heapq
import math
from typing import Any

from tidegate.admission.queue import Flow, Queue

#: A client's clock and the rounding of what it was told may bring it this much too early.
EARLY_NS = 250_000_000
#: After this long behind the instant that was told, any request of the key may claim a booking.
OTHERS_NS = 1_000_000_000
#: The share of bookings that are claimed is a mean over about so many.
_NEWEST = 32
_LEAST_SHARE = 0.05
_SECOND_NS = 1_000_000_000


class Booking:
    """A place at `due_ns` for the request `request` of the key `who`, of which it was told `told_ns`; held until `lapses_ns`. `open` until it was
    claimed or has lapsed."""

    __slots__ = ("cost", "due_ns", "flow", "lapses_ns", "open", "request", "slot_ns", "soon", "told_ns", "who")

    def __init__(self, flow: Flow, who: str, request: str, cost: float, slot_ns: int, due_ns: int, told_ns: int, lapses_ns: int) -> None:
        self.flow = flow
        self.who = who
        self.request = request
        self.cost = cost
        self.slot_ns = slot_ns
        self.due_ns = due_ns
        self.told_ns = told_ns
        self.lapses_ns = lapses_ns
        self.open = True
        self.soon = False


#: By an instant, then by number.
_Heap = list[tuple[int, int, Booking]]


class Bookings:
    """All bookings of a lane. `claimed`: the share that was claimed lately; `lapsed`: how many were not."""

    def __init__(self, queue: Queue, most: int, lapse_ns: int, soon_ns: int) -> None:
        """`most`: of one flow; `lapse_ns`: how long a place is held behind its instant; `soon_ns`: what is due within it comes before newcomers."""
        self._queue = queue
        self._most = most
        self._lapse_ns = lapse_ns
        self._soon_ns = soon_ns
        self._number = 0
        self._of_flow: dict[Flow, int] = {}
        #: By key and request, and by key alone.
        self._of_request: dict[tuple[str, str], _Heap] = {}
        self._of_key: dict[str, _Heap] = {}
        self._far: _Heap = []  # by their instant
        self._soon: _Heap = []  # by when they lapse
        self.count = self.lapsed = 0
        self._weights = 0.0  # of the flows that have booked
        self._next_ns: dict[Flow, int] = {}  # the instant behind a flow's last
        self.claimed = 1.0

    def look(self, now_ns: int) -> None:
        """What time brings: bookings become due soon, or lapse."""
        far, soon, until_ns = self._far, self._soon, now_ns + self._soon_ns
        while far and far[0][0] <= until_ns:
            _, number, booking = heapq.heappop(far)
            if booking.open:
                booking.soon = True
                self._queue.due_soon(booking.flow, booking.cost, booking.slot_ns)
                heapq.heappush(soon, (booking.lapses_ns, number, booking))
        while soon and soon[0][0] < now_ns:
            booking = heapq.heappop(soon)[2]
            if booking.open:
                self._close(booking)
                self.lapsed += 1
                self.claimed += (0.0 - self.claimed) / _NEWEST
        if self.claimed < _LEAST_SHARE:
            self.claimed = _LEAST_SHARE

    def claim(self, who: str, request: str, now_ns: int) -> Booking | None:
        """The request's own booking where it is due, else the key's earliest that nobody claimed for a while; it is closed. Else None."""
        own = self._of_request.get((who, request))
        booking = own[0][2] if own else None
        if booking is None or booking.due_ns > now_ns + EARLY_NS:
            others = self._of_key.get(who)
            booking = others[0][2] if others else None
            if booking is None or booking.told_ns + OTHERS_NS > now_ns:
                return None
        self._close(booking)
        self.claimed += (1.0 - self.claimed) / _NEWEST
        return booking

    def book(self, flow: Flow, who: str, request: str, cost: float, slot_ns: int, now_ns: int, soonest_ns: int, slots: float) -> Booking | int:
        """Book a place at `soonest_ns` or after the flow's last, where its places are served by `slots` that it shares with all flows that have
        booked. Where it has booked as many as it may: the instant alone."""
        booked = self._of_flow.get(flow, 0)
        due_ns = max(soonest_ns, self._next_ns.get(flow, 0))
        if booked >= self._most:
            return due_ns
        if not booked:
            self._weights += flow.weight
        self._next_ns[flow] = due_ns + int(slot_ns / slots * self._weights / flow.weight)
        # `Retry-After` tells whole seconds, rounded up: who keeps to it comes up to a second later.
        told_ns = now_ns + math.ceil((due_ns - now_ns) / _SECOND_NS) * _SECOND_NS
        booking = Booking(flow, who, request, cost, slot_ns, due_ns, told_ns, told_ns + self._lapse_ns)
        self._number += 1
        entry = (due_ns, self._number, booking)
        heapq.heappush(self._far, entry)
        heapq.heappush(self._of_request.setdefault((who, request), []), entry)
        heapq.heappush(self._of_key.setdefault(who, []), entry)
        self._of_flow[flow] = booked + 1
        self._queue.booked(flow, slot_ns)
        self.count += 1
        return booking

    def _close(self, booking: Booking) -> None:
        booking.open = False
        flow = booking.flow
        if booking.soon:
            self._queue.due_soon(flow, -booking.cost, -booking.slot_ns)
        self._queue.booked(flow, -booking.slot_ns)
        self.count -= 1
        left = self._of_flow[flow] - 1
        if left:
            self._of_flow[flow] = left
        else:
            del self._of_flow[flow]
            del self._next_ns[flow]
            self._weights = self._weights - flow.weight if self._of_flow else 0.0  # what is left is rounding
        _trim(self._of_request, (booking.who, booking.request))
        _trim(self._of_key, booking.who)


def _trim(heaps: dict[Any, _Heap], key: Any) -> None:
    """Drop what is closed from the front, and the heap where nothing is left of it."""
    heap = heaps.get(key)
    while heap and not heap[0][2].open:
        heapq.heappop(heap)
    if heap is not None and not heap:
        del heaps[key]
