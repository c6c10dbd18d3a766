"""One-time links: `/login?token=...` signs in once, so that a fresh start can print an address that just works.

A token is a file in a folder that only its owner can read, named by the token's SHA-256. Whoever deletes the file has used the token, and
a file can be deleted only once: that makes it single-use, also between processes (the supervisor prints the link, the gateway takes it).
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from pathlib import Path
from typing import Protocol

import msgspec

from tidegate.core.ask import Caller

LIFE_S = 3600


class OneTimeTokens(Protocol):
    """Where a link's token is turned into who it signs in."""

    def redeem(self, token: str) -> Caller | None:
        """The caller, the first time; None for a token that is unknown, used or too old."""
        ...


class _Note(msgspec.Struct):
    caller: Caller
    expires_unix_s: float


class TokenFolder:
    """One-time tokens as files in `folder`, which is created with mode 0700."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def issue(self, caller: Caller, life_s: float = LIFE_S) -> str:
        """A new token that signs `caller` in once, within `life_s`. Raises OSError where the folder cannot be written."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._sweep()
        token = secrets.token_urlsafe(32)
        note = msgspec.json.encode(_Note(caller, _now_s() + life_s))
        descriptor = os.open(self._file(token), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(note)
        return token

    def redeem(self, token: str) -> Caller | None:
        """See OneTimeTokens."""
        file = self._file(token)
        try:
            note = _read(file)
            file.unlink()
        except OSError:  # no such token, or another request was quicker
            return None
        return note.caller if note is not None and note.expires_unix_s > _now_s() else None

    def _file(self, token: str) -> Path:
        return self._folder / hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()

    def _sweep(self) -> None:
        for file in self._folder.iterdir():
            try:
                note = _read(file)
                if note is None or note.expires_unix_s <= _now_s():
                    file.unlink()
            except OSError:  # used in this very moment
                continue


def _read(file: Path) -> _Note | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Note)
    except msgspec.MsgspecError:  # half-written: a token nobody was given
        return None


def _now_s() -> float:
    return time.time_ns() / 1e9
