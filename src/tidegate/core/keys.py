"""API keys: how they look and how they are stored.

A key carries 256 random bits. A slow hash (argon2, scrypt) protects secrets that people choose, because those can be guessed one by one;
nobody guesses one of 2**256, so plain SHA-256 is as safe here and costs under a microsecond on the request's path.
"""

from __future__ import annotations

import hashlib
import secrets

PREFIX = "tg_"


def new_key() -> str:
    """A new key: `tg_` and 43 characters of URL-safe base64. Shown once, never stored."""
    return PREFIX + secrets.token_urlsafe(32)


def new_key_id() -> str:
    """The name under which a key is listed and revoked: `key_` and 12 hex digits. Not secret."""
    return "key_" + secrets.token_hex(6)


def hash_key(key: str) -> str:
    """What the store keeps: the key's SHA-256, 64 hex digits. Any text may be given, also one that is no key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
