"""The list of flights: the newest from memory, older ones from the database, one order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tidegate.core.errors import StoreDown
from tidegate.core.flight import FlightRecord
from tidegate.core.ports import FlightStore, LiveFlights

ON_A_PAGE = 50
#: How far back memory is searched for flights that pass a filter.
_SEARCHED = 1000


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which flights. `tenant` None: of all tenants (admin). Empty `capability` and `end`: any."""

    tenant: str | None
    capability: str = ""
    end: str = ""
    before: str = ""

    def takes(self, flight: FlightRecord) -> bool:
        return (
            (self.tenant is None or flight.tenant == self.tenant)
            and (not self.capability or flight.capability == self.capability)
            and (not self.end or flight.end == self.end)
            and (not self.before or flight.id < self.before)
        )


@dataclass(frozen=True, slots=True)
class Older:
    """What the database knows. `down`: why it could not be asked."""

    flights: Sequence[FlightRecord]
    down: str = ""


def in_memory(live: LiveFlights, wanted: Wanted) -> list[FlightRecord]:
    """Newest first, at most one more than a page."""
    found = [flight for flight in live.recent(wanted.tenant, _SEARCHED) if wanted.takes(flight)]
    return newest(found)


async def in_store(store: FlightStore, wanted: Wanted) -> Older:
    """The same from the database; never raises for a database that is down."""
    try:
        return Older(await store.list_flights(
            tenant=wanted.tenant, capability=wanted.capability or None, end=wanted.end or None, before_id=wanted.before or None,
            limit=ON_A_PAGE + 1,
        ))
    except StoreDown as error:
        return Older([], error.message)


def newest(*several: Iterable[FlightRecord]) -> list[FlightRecord]:
    """Merged, each once, newest first (ids sort by time), at most one more than a page: the one more says that there are older ones."""
    by_id = {flight.id: flight for some in several for flight in some}
    return [by_id[flight_id] for flight_id in sorted(by_id, reverse=True)[:ON_A_PAGE + 1]]


async def find(live: LiveFlights, store: FlightStore, flight_id: str, tenant: str | None) -> FlightRecord | None:
    """One flight from memory, else from the database; None where there is none, or where it is another tenant's. Raises StoreDown."""
    flight = live.find(flight_id) or await store.get_flight(flight_id)
    return flight if flight is not None and (tenant is None or flight.tenant == tenant) else None
