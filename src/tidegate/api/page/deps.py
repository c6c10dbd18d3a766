"""What the page needs from the house, handed over by the composition."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tidegate.api.page.tokens import OneTimeTokens
from tidegate.core.ask import Caller
from tidegate.core.ports import CallerLookup, FlightStore, LiveFlights


@dataclass(frozen=True, slots=True)
class CapabilityView:
    """A capability as the page shows it. `path` is "GROUP/NAME"; the form is drawn from `input_schema`."""

    path: str
    description: str
    input_schema: dict[str, Any]
    streams: bool = True


@dataclass(frozen=True, slots=True)
class PageDeps:
    """The page's ports.

    - `health`: the body of /health as a dict; see health.py for the names that are shown
    - `secret`: signs the session cookie; the same for all workers
    - `current`: what a signed-in caller is now; None where the key was revoked since. Asked on every request of the page.
    """

    callers: CallerLookup
    live: LiveFlights
    flights: FlightStore
    health: Callable[[], Awaitable[dict[str, Any]]]
    capabilities: Callable[[], list[CapabilityView]]
    secret: bytes
    one_time_tokens: OneTimeTokens
    current: Callable[[Caller], Caller | None] = field(default=lambda caller: caller)
    version: str = ""
