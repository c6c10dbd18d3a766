"""Keys in memory: what is known, what is read again, and what is remembered over a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tidegate.api.auth import KeyRing, presented_key
from tidegate.api.settings import TenantSettings
from tidegate.core.errors import StoreDown, Unauthorized
from tidegate.core.keys import hash_key
from tidegate.core.ports import KeyRecord


class Store:
    """Keys to order; counts readings."""

    def __init__(self, *keys: str) -> None:
        self.keys = list(keys)
        self.down = False
        self.readings = 0

    async def list_keys(self) -> list[KeyRecord]:
        self.readings += 1
        await asyncio.sleep(0)
        if self.down:
            raise StoreDown("down")
        return [KeyRecord(f"id-{key}", hash_key(key), "acme", "data", "", 0.0) for key in self.keys]

    async def add_key(self, key: KeyRecord) -> None: ...

    async def revoke_key(self, key_id: str) -> bool:
        return False


def ring(store: Store, snapshot: Path | None = None) -> KeyRing:
    return KeyRing(store, {"acme": TenantSettings(keep=True, ttl_s=60)}, refresh_s=60, snapshot=snapshot)


async def test_a_key_made_right_after_a_reading_works_at_once() -> None:
    """However short ago the store was read: a key that is there when it is presented is accepted."""
    store = Store()
    keys = ring(store)
    await keys.refresh()
    store.keys.append("new")
    assert (await keys.look_up("new")).tenant == "acme"


async def test_a_flood_of_wrong_keys_is_few_readings() -> None:
    """A hundred wrong keys at once are one reading more."""
    store = Store("good")
    keys = ring(store)
    await keys.refresh()
    refused = await asyncio.gather(*(keys.look_up(f"wrong-{n}") for n in range(100)), return_exceptions=True)
    assert all(isinstance(error, Unauthorized) for error in refused)
    assert store.readings == 2


async def test_a_caller_that_leaves_does_not_take_the_reading_along() -> None:
    """Others wait for the same reading."""
    store = Store()
    keys = ring(store)
    first = asyncio.ensure_future(keys.look_up("new"))
    second = asyncio.ensure_future(keys.look_up("new"))
    await asyncio.sleep(0)
    store.keys.append("new")
    first.cancel()
    assert (await second).keep is True


async def test_known_keys_outlive_the_database_and_the_process(tmp_path: Path) -> None:
    """Down: the known keys stay. Restarted while down: those of the snapshot, which holds no key."""
    store = Store("good")
    file = tmp_path / "keys"
    keys = ring(store, file)
    await keys.refresh()
    store.down = True
    await keys.refresh()
    assert keys.find("good").key_id == "id-good"
    again = ring(store, file)
    with pytest.raises(StoreDown):
        again.find("good")
    again.load_snapshot()
    assert again.find("good").tenant == "acme"
    assert b"good" not in file.read_bytes().replace(b"id-good", b"")
    assert file.stat().st_mode & 0o077 == 0


async def test_a_spoilt_snapshot_is_left_out(tmp_path: Path) -> None:
    """Rubbish in the file is no reason not to start."""
    file = tmp_path / "keys"
    file.write_bytes(b"\x00rubbish")
    keys = ring(Store(), file)
    keys.load_snapshot()
    with pytest.raises(StoreDown):
        keys.find("any")


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([(b"authorization", b"Bearer tg_x")], "tg_x"),
        ([(b"authorization", b"bearer  tg_x ")], "tg_x"),
        ([(b"x-api-key", b"tg_x")], "tg_x"),
        ([(b"x-api-key", b"tg_x"), (b"authorization", b"Basic a proxy's own")], "tg_x"),
        ([(b"x-api-key", b"other"), (b"authorization", b"Bearer tg_x")], "tg_x"),
        ([(b"host", b"x")], None),
        ([(b"authorization", b"Bearer \xff")], "\xff"),
    ],
)
def test_where_a_key_may_stand(headers: list[tuple[bytes, bytes]], key: str | None) -> None:
    """Both headers, any case of the scheme, any bytes."""
    assert presented_key(dict(headers)) == key
