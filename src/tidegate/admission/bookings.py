"""Booked places: when somebody who was refused may come back, and pass.

A refusal books a place for its key at the instant that `Retry-After` names. The work of all booked places of a flow is in that instant, so that
refusals spread over the time that serving them takes, as if they had waited. A booking is claimed by the key's first request at or after its
instant: it passes whatever the forecast is, and has its place in the flow's order since it was refused. What nobody claims lapses. A booking never
keeps a slot idle: it only counts, with the share of bookings that were claimed lately, as work that comes before a newcomer's.

Pure: no clock of its own, no I/O.
"""

from __future__ import annotations

import heapq
import math

from tidegate.admission.queue import Flow, Queue

#: A client's clock and the rounding of what it was told may bring it this much too early.
EARLY_NS = 250_000_000
#: The share of bookings that are claimed is a mean over about so many.
_NEWEST = 32
_LEAST_SHARE = 0.05
_SECOND_NS = 1_000_000_000


class Booking:
    """A place at `due_ns` for `who`, refused first at `made_ns`; held until `lapses_ns`. `open` until it was claimed or has lapsed."""

    __slots__ = ("due_ns", "flow", "lapses_ns", "made_ns", "open", "soon", "who", "work_ns")

    def __init__(self, flow: Flow, who: str, work_ns: int, made_ns: int, due_ns: int, lapses_ns: int) -> None:
        self.flow = flow
        self.who = who
        self.work_ns = work_ns
        self.made_ns = made_ns
        self.due_ns = due_ns
        self.lapses_ns = lapses_ns
        self.open = True
        self.soon = False


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
        self._of_key: dict[str, list[tuple[int, int, Booking]]] = {}
        self._far: list[tuple[int, int, Booking]] = []  # by their instant
        self._soon: list[tuple[int, int, Booking]] = []  # by when they lapse
        self.count = self.lapsed = 0
        self.claimed = 1.0

    def look(self, now_ns: int) -> None:
        """What time brings: bookings become due soon, or lapse."""
        far, soon, until_ns = self._far, self._soon, now_ns + self._soon_ns
        while far and far[0][0] <= until_ns:
            _, number, booking = heapq.heappop(far)
            if booking.open:
                booking.soon = True
                self._queue.due_soon(booking.flow, booking.work_ns)
                heapq.heappush(soon, (booking.lapses_ns, number, booking))
        while soon and soon[0][0] < now_ns:
            booking = heapq.heappop(soon)[2]
            if booking.open:
                self._close(booking)
                self.lapsed += 1
                self.claimed += (0.0 - self.claimed) / _NEWEST
        if self.claimed < _LEAST_SHARE:
            self.claimed = _LEAST_SHARE

    def claim(self, who: str, now_ns: int) -> Booking | None:
        """The key's earliest booking where it is due, and it is closed; else None."""
        own = self._of_key.get(who)
        while own:
            due_ns, _, booking = own[0]
            if booking.open and due_ns > now_ns + EARLY_NS:
                return None
            heapq.heappop(own)
            if not own:
                del self._of_key[who]
            if booking.open:
                self._close(booking)
                self.claimed += (1.0 - self.claimed) / _NEWEST
                return booking
        return None

    def book(self, flow: Flow, who: str, work_ns: int, made_ns: int, now_ns: int, due_ns: int) -> Booking | None:
        """Book a place; None where the flow has booked as many as it may."""
        booked = self._of_flow.get(flow, 0)
        if booked >= self._most:
            return None
        # `Retry-After` tells whole seconds, rounded up: who keeps to it comes up to a second later.
        told_ns = math.ceil((due_ns - now_ns) / _SECOND_NS) * _SECOND_NS
        booking = Booking(flow, who, work_ns, made_ns, due_ns, now_ns + told_ns + self._lapse_ns)
        self._number += 1
        entry = (due_ns, self._number, booking)
        heapq.heappush(self._far, entry)
        heapq.heappush(self._of_key.setdefault(who, []), entry)
        self._of_flow[flow] = booked + 1
        self._queue.booked(flow, work_ns)
        self.count += 1
        return booking

    def _close(self, booking: Booking) -> None:
        booking.open = False
        flow = booking.flow
        if booking.soon:
            self._queue.due_soon(flow, -booking.work_ns)
        self._queue.booked(flow, -booking.work_ns)
        self.count -= 1
        left = self._of_flow[flow] - 1
        if left:
            self._of_flow[flow] = left
        else:
            del self._of_flow[flow]
        own = self._of_key.get(booking.who)
        while own and not own[0][2].open:
            heapq.heappop(own)
        if own is not None and not own:
            del self._of_key[booking.who]
