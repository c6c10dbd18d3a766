"""KeyStore: one suite over every system that serves it."""

from __future__ import annotations

import msgspec
import pytest

from tidegate.core.keys import hash_key, new_key, new_key_id
from tidegate.core.ports import KeyLimits, KeyRecord, KeyStore


def a_key(created_unix_s: float = 1_700_000_000.25, **fields: object) -> KeyRecord:
    return KeyRecord(
        **{
            "id": new_key_id(), "sha256": hash_key(new_key()), "tenant": "harbour", "role": "data", "name": "desk",
            "created_unix_s": created_unix_s, **fields,
        }
    )  # type: ignore[arg-type]  # fmt: skip


async def test_keys_come_back_as_they_were_stored(store: KeyStore) -> None:
    """Every field survives, oldest key first."""
    newer = a_key(1_700_000_001.5, role="admin", requests_per_minute=60, tokens_per_minute=9_000, concurrent=3, money_per_day=12.5)
    older = a_key(revoked_unix_s=1_700_000_100.75)
    await store.add_key(newer)
    await store.add_key(older)
    assert await store.list_keys() == [older, newer]


async def test_a_key_is_revoked_once(store: KeyStore) -> None:
    """Revoking says true the first time and false after, and keeps the first time stamp."""
    key = a_key()
    await store.add_key(key)
    assert await store.revoke_key(key.id)
    (first,) = await store.list_keys()
    assert first.revoked_unix_s is not None
    assert not await store.revoke_key(key.id)
    assert await store.list_keys() == [first]


async def test_limits_change_one_by_one(store: KeyStore) -> None:
    """What is not named stays, 0 takes a limit away; nothing else of the key changes, and no other key does."""
    key, other = a_key(requests_per_minute=60, concurrent=3), a_key(1_700_000_002.0, money_per_day=1.0)
    await store.add_key(key)
    await store.add_key(other)
    assert await store.limit_key(key.id, KeyLimits(concurrent=0, money_per_day=0.25))
    changed = msgspec.structs.replace(key, concurrent=0, money_per_day=0.25)
    assert await store.list_keys() == [changed, other]
    assert await store.limit_key(key.id, KeyLimits(requests_per_minute=0, tokens_per_minute=2**31 - 1))
    assert await store.list_keys() == [msgspec.structs.replace(changed, requests_per_minute=0, tokens_per_minute=2**31 - 1), other]


async def test_a_key_that_does_not_live_cannot_be_limited(store: KeyStore) -> None:
    """False for one that is none, and for one that was revoked."""
    key = a_key()
    await store.add_key(key)
    await store.revoke_key(key.id)
    assert not await store.limit_key(key.id, KeyLimits(concurrent=1))
    assert not await store.limit_key("key_none", KeyLimits(concurrent=1))


async def test_an_unknown_key_cannot_be_revoked(store: KeyStore) -> None:
    """False for a name that is none, also where it holds what a database cannot keep."""
    assert not await store.revoke_key("key_none")
    assert not await store.revoke_key("key_\0")


async def test_adding_a_key_twice_changes_nothing(store: KeyStore) -> None:
    """A second try after a broken connection is not an error."""
    key = a_key()
    await store.add_key(key)
    await store.add_key(key)
    assert await store.list_keys() == [key]


@pytest.mark.parametrize("presented", ["", "tg_", "\ud800", "密钥"])
def test_any_text_can_be_hashed(presented: str) -> None:
    """What a caller presents may be anything; it never raises."""
    assert len(hash_key(presented)) == 64


def test_keys_carry_256_bits() -> None:
    """43 URL-safe characters after the prefix, never the same twice."""
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert {(key[:3], len(key)) for key in keys} == {("tg_", 46)}
