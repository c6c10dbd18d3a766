"""What the page needs from the house, handed over by the composition."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from tidegate.api.page.tokens import OneTimeTokens
from tidegate.core.ask import Caller
from tidegate.core.document import PagePicture
from tidegate.core.ports import FileStore, FlightStore, LiveFlights


class Keys(Protocol):
    """From a presented key to who asks; a key that was made a moment ago is known, too."""

    async def look_up(self, presented_key: str) -> Caller:
        """Raises Unauthorized, or StoreDown where keys could not be read yet."""
        ...


class Pictures(Protocol):
    """Pages of kept files."""

    async def page(self, file_sha256: str, number: int) -> PagePicture:
        """Raises NotFound, DocumentUnreadable, Busy, StoreDown."""
        ...


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

    - `health`: the body of /health; see health.py for the names that are shown
    - `secret`: signs the session cookie; the same for all workers
    - `files`: what passages were read from; None where passages are kept elsewhere
    - `current`: what a signed-in caller is now; None where the key was revoked since. Asked on every request of the page.
    """

    callers: Keys
    live: LiveFlights
    flights: FlightStore
    health: Callable[[], Awaitable[dict[str, Any]]]
    capabilities: Callable[[], list[CapabilityView]]
    secret: bytes
    one_time_tokens: OneTimeTokens
    files: FileStore | None
    pictures: Pictures
    current: Callable[[Caller], Caller | None] = field(default=lambda caller: caller)
    version: str = ""
