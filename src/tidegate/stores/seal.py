"""Prompt and answer text under policy `keep`: encrypted before it leaves the gateway's memory.

AES-256-GCM; the flight's id is authenticated with it, so one flight's text cannot be put in another's place. The secret lies in a file
that only its owner may read, or comes by the environment.

    version 1 | nonce 12 | ciphertext and tag
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tidegate.core.errors import SettingsError
from tidegate.stores.clean import clean_value

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

#: Environment variable that holds the secret as 64 hex digits or base64 of 32 bytes; it wins over the file.
VARIABLE = "TIDEGATE_SECRET"
_VERSION = b"\x01"
_NONCE = 12
_KEY = 32


class Seal:
    """Seals and opens texts with one secret. Cheap to make: file and library are only touched at first use."""

    def __init__(self, file: Path, environment: Mapping[str, str] = os.environ) -> None:
        self.file = file
        self._environment = environment
        self._made: AESGCM | None = None
        self._known = b""

    def seal(self, flight_id: str, text: dict[str, Any]) -> bytes:
        """The text, encrypted for this flight. Raises SettingsError where the secret cannot be had."""
        nonce = secrets.token_bytes(_NONCE)
        try:
            plain = msgspec.json.encode(text)
        except UnicodeEncodeError:  # half a surrogate pair in a prompt
            plain = msgspec.json.encode(clean_value(text))
        return _VERSION + nonce + self._cipher().encrypt(nonce, plain, _bound(flight_id))

    def open(self, flight_id: str, sealed: bytes) -> dict[str, Any]:
        """The text. Raises SettingsError where it was sealed with another secret, for another flight, or was changed."""
        from cryptography.exceptions import InvalidTag

        nonce, body = sealed[1 : 1 + _NONCE], sealed[1 + _NONCE :]
        try:
            if sealed[:1] != _VERSION or len(nonce) != _NONCE:
                raise InvalidTag
            plain = self._cipher().decrypt(nonce, body, _bound(flight_id))
        except InvalidTag as error:
            raise SettingsError(
                f"The kept text of flight {flight_id} cannot be opened with this secret.",
                hint=f"It was sealed with another one: bring back {self.file} or {VARIABLE} as it was.",
            ) from error
        return msgspec.json.decode(plain, type=dict[str, Any])

    def derive(self, purpose: str) -> bytes:
        """32 bytes that only this secret gives for this purpose (HMAC-SHA256): what signs sessions must not be what seals texts."""
        return hmac.digest(self._secret(), f"tidegate {purpose}".encode(), "sha256")

    def _cipher(self) -> AESGCM:
        if self._made is None:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # 20 ms, and most gateways never keep a text

            self._made = AESGCM(self._secret())
        return self._made

    def _secret(self) -> bytes:
        # Read once: what happens to the file later must not change what a running process seals with.
        if not self._known:
            self._known = self._find()
        return self._known

    def _find(self) -> bytes:
        given = self._environment.get(VARIABLE)
        if given:
            return _parse(given, VARIABLE)
        try:
            return _read(self.file) if self.file.exists() else _create(self.file)
        except OSError as error:
            raise SettingsError(
                f"The secret {self.file} cannot be read or made: {error.strerror}.", hint=f"Mend its rights, or set {VARIABLE}."
            ) from error


def _bound(flight_id: str) -> bytes:
    return f"tidegate flight {flight_id}".encode()


def _parse(text: str, where: str) -> bytes:
    text = text.strip()
    try:
        key = bytes.fromhex(text) if len(text) == 2 * _KEY else base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        key = b""
    if len(key) != _KEY:
        raise SettingsError(f"The secret in {where} is not {_KEY} bytes as hex or base64.", hint="Make one with: openssl rand -hex 32")
    return key


def _read(file: Path) -> bytes:
    if file.stat().st_mode & 0o077:
        raise SettingsError(f"The secret {file} can be read by others.", hint=f"Run: chmod 600 {file}")
    return _parse(file.read_text("ascii", "replace"), str(file))


def _create(file: Path) -> bytes:
    """Two processes may come here at once: both write a file of their own, one gets to give it the name, both use that one."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = file.with_name(f"{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as out:
            out.write(secrets.token_hex(_KEY) + "\n")
            out.flush()
            os.fsync(out.fileno())  # a secret that is lost in a power cut takes every sealed text with it
        with contextlib.suppress(FileExistsError):
            os.link(own, file)
    finally:
        own.unlink()
    return _read(file)
