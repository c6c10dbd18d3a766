"""The live list: server-sent events with HTML in them, for as long as somebody looks.

Every event carries the list and the health figures as they are now, and the browser morphs what it has into it. So a lost event, a
reconnect and a restart need no care, focus and selection stay, and the browser's memory is bounded. At most one event a second; the list
is sent only where a flight has ended since.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from markupsafe import Markup

from tidegate.api.page import health, listing
from tidegate.api.page.deps import PageDeps
from tidegate.api.page.view import Views

MOST_LISTENERS = 64
_PACE_S = 1.0
_BEAT_S = 2.0


class Live:
    """All open live lists of this process."""

    def __init__(self, deps: PageDeps, views: Views, reader: health.HealthReader) -> None:
        self._deps = deps
        self._views = views
        self._reader = reader
        self._waits: set[asyncio.Timeout] = set()
        self._listeners = 0
        self._closed = False

    @property
    def listeners(self) -> int:
        return self._listeners

    @property
    def full(self) -> bool:
        return self._closed or self._listeners >= MOST_LISTENERS

    def close(self) -> None:
        """Ends every live list now: a shutdown must not wait for people who look."""
        self._closed = True
        for wait in self._waits:
            wait.reschedule(asyncio.get_running_loop().time())

    async def events(self, wanted: listing.Wanted, still_in: Callable[[], bool]) -> AsyncIterator[bytes]:
        """The stream's bytes. Ends when `still_in` is false (signed out, key revoked), or at `close`."""
        self._listeners += 1
        try:
            older = await listing.in_store(self._deps.flights, wanted)
            sent_rows, sent_health = Markup(""), Markup("")
            seq = -1
            while not self._closed and still_in():
                if self._deps.live.seq != seq:
                    seq = self._deps.live.seq
                    shown = listing.newest(listing.in_memory(self._deps.live, wanted), older.flights)[:listing.ON_A_PAGE]
                    rows = self._views.rows(shown)
                else:
                    rows = sent_rows
                recent = self._deps.live.recent(wanted.tenant, health.RECENT)
                figures = self._views.health(await self._reader.read(), recent)
                parts = [_partial("#health", figures)] if figures != sent_health else []
                if rows != sent_rows:
                    parts.append(_partial("#rows", rows))
                sent_rows, sent_health = rows, figures
                yield _event(parts) if parts else b": still here\n\n"
                await asyncio.sleep(_PACE_S)
                await self._wait(seq)
        finally:
            self._listeners -= 1

    async def _wait(self, seq: int) -> None:
        """Until a flight ends, the beat is over, or `close` is called."""
        if self._closed:
            return
        try:
            async with asyncio.timeout(_BEAT_S - _PACE_S) as wait:
                self._waits.add(wait)
                try:
                    await self._deps.live.wait_newer(seq)
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            pass


def _partial(target: str, html: Markup) -> Markup:
    return Markup('<hx-partial hx-target="{}" hx-swap="innerMorph">{}</hx-partial>').format(target, html)


def _event(parts: list[Markup]) -> bytes:
    lines = "".join(parts).splitlines()
    return ("".join(f"data: {line}\n" for line in lines) + "\n").encode()
