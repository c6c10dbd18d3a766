"""The newest finished flights, in memory: a ring that never grows past its bounds."""

from __future__ import annotations

import asyncio
from collections import deque

from tidegate.core.flight import FlightRecord
from tidegate.core.ports import KeptText

#: Token stamps that all flights in the ring may hold together; about 40 bytes each, so about 8 MB.
MAX_STAMPS = 200_000


class RecentFlights:
    """A FlightSink and the LiveFlights port. One event loop writes and reads it: no lock.

    `limit` flights at most, and no more than `max_stamps` token stamps together; the newest flight always stays.
    """

    def __init__(self, limit: int = 512, max_stamps: int = MAX_STAMPS) -> None:
        self._limit = limit
        self._max_stamps = max_stamps
        self._ring: deque[FlightRecord] = deque()
        self._by_id: dict[str, FlightRecord] = {}
        self._stamps = 0
        self._seq = 0
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def seq(self) -> int:
        """The number of the newest flight; 0 before the first."""
        return self._seq

    def finished(self, record: FlightRecord, kept: KeptText | None = None) -> None:
        """Keeps the record and wakes whoever waits for a newer one."""
        ring = self._ring
        ring.append(record)
        self._by_id[record.id] = record
        self._stamps += len(record.token_ns)
        self._seq += 1
        while len(ring) > 1 and (len(ring) > self._limit or self._stamps > self._max_stamps):
            self._forget(ring.popleft())
        if self._waiters:
            self._wake()

    def _forget(self, oldest: FlightRecord) -> None:
        self._stamps -= len(oldest.token_ns)
        self._by_id.pop(oldest.id, None)

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def recent(self, tenant: str | None, limit: int, after_seq: int = 0) -> list[FlightRecord]:
        """Newest first, at most `limit`, only those numbered above `after_seq`; of one tenant, or of all where `tenant` is None."""
        found: list[FlightRecord] = []
        for age, record in enumerate(reversed(self._ring)):
            if len(found) >= limit or self._seq - age <= after_seq:
                break
            if tenant is None or record.tenant == tenant:
                found.append(record)
        return found

    def find(self, flight_id: str) -> FlightRecord | None:
        """The flight with this id while it is in the ring."""
        return self._by_id.get(flight_id)

    async def wait_newer(self, seq: int) -> int:
        """Returns the newest number as soon as it is above `seq`. The caller bounds the wait; cancelling it is safe."""
        while self._seq <= seq:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self._waiters:  # cancelled before a flight came: leave nothing behind
                    self._waiters.remove(waiter)
        return self._seq
