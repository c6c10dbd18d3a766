"""Who asks: API keys, looked up by hash in memory and refreshed from the store.

Keys live in the database. A gateway must answer while the database is down, so the last known keys stay in memory and in a snapshot file
(hashes only) that a restarted gateway begins with.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tidegate.api.settings import TenantSettings
from tidegate.core.ask import Caller
from tidegate.core.errors import Forbidden, StoreDown, TidegateError, Unauthorized
from tidegate.core.keys import hash_key
from tidegate.core.ports import KeyRecord, KeyStore

log = logging.getLogger(__name__)

_MISS_PAUSE_NS = 500_000_000


class KeyRing:
    """The known keys. `find` never waits; `look_up` reads the store once more before it says no to a key that may be new."""

    def __init__(self, store: KeyStore, tenants: dict[str, TenantSettings], *, refresh_s: float, snapshot: Path | None = None) -> None:
        self._store = store
        self._tenants = tenants
        self._refresh_s = refresh_s
        self._snapshot = snapshot
        self._callers: dict[str, Caller] = {}
        self._ids: dict[str, Caller] = {}
        #: Good keys that were presented since the last reading: no more than there are, and none need be hashed again.
        self._presented: dict[str, Caller] = {}
        self._read_ns = 0
        self._known = False
        self._reading = asyncio.Lock()
        self._again: asyncio.Task[None] | None = None
        self._saved = b""
        self._warned = False

    def find(self, presented_key: str) -> Caller:
        """Raises Unauthorized where the key is not known or revoked, StoreDown where no keys could be read yet."""
        caller = self.known(presented_key)
        if caller is None:
            raise self._unknown()
        return caller

    def known(self, presented_key: str) -> Caller | None:
        """The caller whose key is known already."""
        caller = self._presented.get(presented_key)
        if caller is None and (caller := self._callers.get(hash_key(presented_key))) is not None:
            self._presented[presented_key] = caller
        return caller

    async def look_up(self, presented_key: str) -> Caller:
        """As `find`, after one more reading of the store where the key is not known: a key works as soon as it was created."""
        caller = self.known(presented_key)
        if caller is not None:
            return caller
        await self._read_again()
        return self.find(presented_key)

    async def _read_again(self) -> None:
        """One reading for all who miss at the same time, at most two a second: a flood of wrong keys must not become a flood of queries."""
        if self._again is None:
            self._again = asyncio.get_running_loop().create_task(self._read_soon())
        await asyncio.shield(self._again)

    async def _read_soon(self) -> None:
        pause_s = (self._read_ns + _MISS_PAUSE_NS - time.perf_counter_ns()) / 1e9
        if pause_s > 0:
            await asyncio.sleep(pause_s)
        self._again = None  # a key made from now on may be newer than this reading
        await self.refresh()

    def by_id(self, key_id: str) -> Caller | None:
        """What the key behind a page's session is now; None where it was revoked."""
        return self._ids.get(key_id)

    def counts(self) -> dict[str, float]:
        """How many keys are known, by role."""
        counts = {"data": 0.0, "admin": 0.0}
        for caller in self._ids.values():
            counts[caller.role] += 1
        return counts

    async def refresh(self) -> None:
        """Read the store; on failure the keys known so far stay valid."""
        async with self._reading:
            try:
                keys = await self._store.list_keys()
            except TidegateError as error:
                if not self._warned:
                    log.warning("keys could not be read, the known ones stay valid: %s", error.message)
                self._warned = True
                return
            finally:
                self._read_ns = time.perf_counter_ns()
            self._warned = False
            self._take(keys)
            self._save(keys)

    async def keep_fresh(self) -> None:
        """Runs until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(self._refresh_s)

    def load_snapshot(self) -> None:
        """Begin with the keys of the last run, if there are any."""
        if self._snapshot is None:
            return
        try:
            keys = msgspec.msgpack.decode(self._snapshot.read_bytes(), type=list[KeyRecord])
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("the snapshot of keys is not readable and is left out: %s", error)
            return
        self._take(keys)

    def _take(self, keys: list[KeyRecord]) -> None:
        callers, ids = {}, {}
        for key in keys:
            if key.revoked_unix_s is None:
                tenant = self._tenants.get(key.tenant)
                caller = Caller(
                    key.id, key.tenant, key.role, tenant.keep if tenant else False, tenant.ttl_s if tenant else 0,
                    key.requests_per_minute, key.tokens_per_minute, key.concurrent, key.money_per_day,
                )
                callers[key.sha256] = ids[key.id] = caller
        self._callers, self._ids, self._presented, self._known = callers, ids, {}, True

    def _save(self, keys: list[KeyRecord]) -> None:
        content = msgspec.msgpack.encode(keys)
        if self._snapshot is None or content == self._saved:
            return
        fresh = self._snapshot.with_suffix(f".{os.getpid()}.new")
        try:
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            fresh.replace(self._snapshot)
            self._saved = content
        except OSError as error:
            log.warning("the snapshot of keys could not be written: %s", error)

    def _unknown(self) -> TidegateError:
        if not self._known:
            return StoreDown(
                "No keys could be read yet: the database cannot be reached.", hint="Try again shortly; see /health.", retry_after_s=2
            )
        return Unauthorized("This API key is not known.", hint="Create one with `tidegate keys create`, or check for a revoked or cut key.")


def presented_key(headers: Mapping[bytes, bytes]) -> str | None:
    """The key in `Authorization: Bearer KEY` or else in `X-API-Key: KEY`; None where there is none. Raises Unauthorized for another scheme alone."""
    value = headers.get(b"authorization")
    if value is not None and value[:7].lower() == b"bearer " and len(value) > 7:
        return value[7:].strip().decode("latin-1")
    key = headers.get(b"x-api-key")
    if key is not None:
        return key.decode("latin-1")
    if value is not None:
        raise Unauthorized("The Authorization header is not `Bearer KEY`.", hint="Send the header `Authorization: Bearer KEY`.")
    return None


def no_key() -> Unauthorized:
    return Unauthorized("There is no API key in the request.", hint="Send the header `Authorization: Bearer KEY`.")


def need_data(caller: Caller) -> Caller:
    """Admin keys manage, data keys ask: an admin key that leaks into an application must not be worth more than its job."""
    if caller.role != "data":
        raise Forbidden("An admin key cannot ask a model.", hint="Use a data key: `tidegate keys create --role data`.")
    return caller


def need_admin(caller: Caller) -> Caller:
    if caller.role != "admin":
        raise Forbidden("This needs an admin key.", hint="Use an admin key: `tidegate keys create --role admin`.")
    return caller
