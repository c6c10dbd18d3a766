"""From the spool to the store, in batches, for as long as the process lives.

Delivery is at least once and the store takes a flight once, so nothing is lost and nothing is double, whoever is killed when. While the
store is down the drain waits, longer and longer up to a bound, and goes on by itself. A flight that the store refuses is set aside, so that
it does not stop those behind it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import msgspec

from tidegate.core.errors import StoreDown
from tidegate.core.ports import FlightStore
from tidegate.stores.frames import Entry, unpack
from tidegate.stores.spool import Batch, Spool

#: Kept texts past their time are deleted this often.
FORGET_EVERY_NS = 60 * 1_000_000_000
#: Other processes' files are looked at this often.
LOOK_EVERY_NS = 1_000_000_000

log = logging.getLogger("tidegate.stores")


class Drain:
    """One per process. `run` until cancelled, then `drain_now` for what came last."""

    def __init__(self, spool: Spool, store: FlightStore) -> None:
        self.spool = spool
        self.store = store
        self._turn = asyncio.Lock()
        self._look_at_ns = 0
        self._forget_at_ns = 0

    async def run(self) -> None:
        """Drain for ever. Ends by being cancelled; a batch that is on its way then is written again later."""
        settings = self.spool.settings
        pause_s = settings.batch_wait_s
        while True:
            try:
                await self._round()
                await self._forget()
                pause_s = settings.batch_wait_s
                self._note(None)
            except StoreDown as down:
                pause_s = min(2 * pause_s, settings.backoff_max_s)
                self._note(down.message)
            except Exception as error:  # noqa: BLE001 - whatever went wrong once, the next flights must get through
                pause_s = min(2 * pause_s, settings.backoff_max_s)
                self._note(f"{type(error).__name__}: {error}")
            await asyncio.sleep(pause_s)

    async def drain_now(self, within_s: float) -> bool:
        """Bring all that waits to the store, at shutdown. False where the time or the store did not suffice: it waits on disk then."""
        try:
            async with asyncio.timeout(within_s):
                await self._round()
        except (StoreDown, TimeoutError, OSError) as error:
            self._note(str(error) or "Time ran out.")
            return False
        return True

    async def _round(self) -> None:
        async with self._turn:
            now_ns = time.perf_counter_ns()
            if now_ns >= self._look_at_ns:
                await asyncio.to_thread(self.spool.look_around)
                self._look_at_ns = now_ns + LOOK_EVERY_NS
            while read := await asyncio.to_thread(self._read):
                batch, entries = read
                await self._write(entries)
                await asyncio.to_thread(self.spool.done, batch)
            self.spool.note_oldest(0)

    def _read(self) -> tuple[Batch, list[Entry]] | None:
        """The next batch, decoded. A frame that cannot be decoded (another version wrote it) is set aside."""
        batch = self.spool.next_batch()
        if batch is None:
            return None
        entries = []
        for frame in batch.frames:
            try:
                entries.append(unpack(frame.payload))
            except msgspec.DecodeError:
                log.error("A spooled flight cannot be read by this version; it is set aside.")
                self.spool.set_aside(frame.payload)
        if entries:
            self.spool.note_oldest(_ended_unix_ns(entries[0]))
        return batch, entries

    async def _write(self, entries: Sequence[Entry]) -> None:
        """All or, where the store refuses one of them, one by one. Raises StoreDown."""
        try:
            await self._store(entries)
        except StoreDown:
            raise
        except Exception as error:  # noqa: BLE001 - any refusal is the same here: find the flight, set it aside
            if len(entries) > 1:
                for entry in entries:
                    await self._write([entry])
                return
            log.error("The store refuses a flight: %s. It is set aside.", type(error).__name__)
            await asyncio.to_thread(self.spool.set_aside, msgspec.json.encode(entries[0]))

    async def _store(self, entries: Sequence[Entry]) -> None:
        if entries:
            await self.store.write_flights([entry.record for entry in entries], [entry.kept for entry in entries if entry.kept])

    async def _forget(self) -> None:
        now_ns = time.perf_counter_ns()
        if now_ns >= self._forget_at_ns:
            await self.store.forget_expired()
            self._forget_at_ns = now_ns + FORGET_EVERY_NS

    def _note(self, error: str | None) -> None:
        before, self.spool.drain_error = self.spool.drain_error, error
        if error and not before:
            log.warning("Flights wait on disk: %s", error)
        elif before and not error:
            log.info("Flights reach the store again.")


class _Times(msgspec.Struct):
    began_unix_ns: int
    whole_ns: int


def _ended_unix_ns(entry: Entry) -> int:
    times = msgspec.json.decode(entry.record, type=_Times)
    return times.began_unix_ns + times.whole_ns
