"""Booked places: when somebody who was refused may come back, and pass.

A refusal books a place for its key at the instant that `Retry-After` names. Instants of a flow follow each other at the rate at which it can be
served, so that refusals spread as if they had waited. A booking is claimed by the very same request (the digest of its body) at or after its
instant; one that nobody claimed for a while by any request of its key that costs no more, for a body may have changed. Who claims one passes
whatever the forecast is, and has its place in the flow's order by its instant. What nobody claims lapses. A booking never keeps a slot idle: it only
counts, with the share of bookings that were claimed lately, as work that comes before a newcomer's.

Pure: no clock of its own, no I/O.
"""

from __future__ import annotations

import heapq
import math
from collections import deque

from tidegate.admission.queue import Flow, Queue

#: A client's clock and the rounding of what it was told may bring it this much too early.
EARLY_NS = 250_000_000
#: After this long behind the instant that was told, any request of the key that costs no more may claim a booking.
OTHERS_NS = 1_000_000_000
#: The share of bookings that are claimed is a mean over about so many.
_NEWEST = 32
_LEAST_SHARE = 0.05
_SECOND_NS = 1_000_000_000


class Booking:
    """A place at `due_ns` for the `request` of the key `who`, of which it was told `told_ns`. `open` until it was claimed or has lapsed."""

    __slots__ = ("cost", "due_ns", "flow", "open", "request", "slot_ns", "soon", "told_ns", "who")

    def __init__(self, flow: Flow, who: str, request: str, cost: float, slot_ns: int, due_ns: int, told_ns: int) -> None:
        self.flow = flow
        self.who = who
        self.request = request
        self.cost = cost
        self.slot_ns = slot_ns
        self.due_ns = due_ns
        self.told_ns = told_ns
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
        self._others_ns = min(OTHERS_NS, lapse_ns)
        self._soon_ns = soon_ns
        self._number = 0
        self._of_flow: dict[Flow, int] = {}
        #: By key and request: one, or several of one body, the earliest first.
        self._of_request: dict[tuple[str, str], list[Booking]] = {}
        self._far: _Heap = []  # by their instant
        self._soon: _Heap = []  # by what was told
        #: Those that nobody claimed for a while: by when they lapse, and by key.
        self._late: deque[Booking] = deque()
        self._late_of: dict[str, deque[Booking]] = {}
        self.count = self.lapsed = 0
        self._weights = 0.0  # of the flows that have booked
        self._next_ns: dict[Flow, int] = {}  # the instant behind a flow's last
        self.claimed = 1.0

    def look(self, now_ns: int) -> None:
        """What time brings: bookings become due soon, are late, or lapse."""
        far, soon = self._far, self._soon
        while far and far[0][0] <= now_ns + self._soon_ns:
            _, number, booking = heapq.heappop(far)
            if booking.open:
                booking.soon = True
                self._queue.due_soon(booking.flow, booking.cost, booking.slot_ns)
                heapq.heappush(soon, (booking.told_ns, number, booking))
        while soon and (not soon[0][2].open or soon[0][0] + self._others_ns <= now_ns):
            booking = heapq.heappop(soon)[2]
            if booking.open:
                self._late.append(booking)
                self._late_of.setdefault(booking.who, deque()).append(booking)
        late = self._late
        while late and (not late[0].open or late[0].told_ns + self._lapse_ns < now_ns):
            booking = late.popleft()
            if booking.open:
                self._close(booking)
                self.lapsed += 1
                self.claimed = max(_LEAST_SHARE, self.claimed - self.claimed / _NEWEST)

    def claim(self, who: str, request: str, cost: float, now_ns: int) -> Booking | None:
        """The request's own booking where it is due, else the key's earliest that nobody claimed for a while, if the request costs no more than was
        booked; it is closed. Else None."""
        own = self._of_request.get((who, request))
        booking = own[0] if own is not None else None
        if booking is None or booking.due_ns > now_ns + EARLY_NS:
            late = self._late_of.get(who)
            if late is None or cost > late[0].cost:
                return None
            booking = late[0]
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
        booking = Booking(flow, who, request, cost, slot_ns, due_ns, told_ns)
        self._number += 1
        heapq.heappush(self._far, (due_ns, self._number, booking))
        same = self._of_request.get((who, request))
        if same is None:
            self._of_request[who, request] = [booking]
        else:  # instants of a flow only grow, so the earliest stays first
            same.append(booking)
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
        same = self._of_request[booking.who, booking.request]
        if len(same) == 1:
            del self._of_request[booking.who, booking.request]
        else:
            same.remove(booking)
        late = self._late_of.get(booking.who)
        while late and not late[0].open:
            late.popleft()
        if late is not None and not late:
            del self._late_of[booking.who]
