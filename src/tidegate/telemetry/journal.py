"""Flights that a worker has finished since it last told what it counted, in a mapped file: what is in it survives the worker, however it ends.

Two halves take turns: with each telling the other one begins, empty. So while a telling is on its way to the disk, the flights before it and those
after it both stand here, each half with the number of the telling that it comes after.

    half    number of the telling, bytes that are used (8 bytes each) | flights: length (4 bytes), msgpack
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tidegate.core.flight import FlightRecord

#: Bytes of a half: a thousand flights and more. What has no room there until the next telling would be lost with its worker.
HALF_BYTES = 1 << 20
_HEAD = struct.Struct("=QQ")
_LENGTH = struct.Struct("=I")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FlightRecord).decode


class Journal:
    """The one that this process writes."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            # All of it is had now: a disk that were full later would kill the process at a write.
            os.posix_fallocate(file, 0, 2 * HALF_BYTES)
            self._map = mmap.mmap(file, 2 * HALF_BYTES)
        finally:
            os.close(file)
        self.number = 0
        self._first = self._used = 0

    def add(self, record: FlightRecord) -> None:
        """A flight that ended."""
        told = _encode(record)
        at, size = self._first + _HEAD.size + self._used, _LENGTH.size + len(told)
        if self._used + size > HALF_BYTES - _HEAD.size:
            return
        self._map[at : at + size] = _LENGTH.pack(len(told)) + told
        self._used += size
        _HEAD.pack_into(self._map, self._first, self.number, self._used)  # last: a reader sees whole flights only

    def turn(self) -> int:
        """All that is in it is counted in the telling with the number that this gives; what comes now comes after it."""
        self.number += 1
        self._first, self._used = HALF_BYTES - self._first, 0
        _HEAD.pack_into(self._map, self._first, self.number, 0)
        return self.number


def since(path: Path, number: int) -> Iterator[FlightRecord]:
    """The flights of a journal that are in no telling up to this number. Raises OSError."""
    with open(path, "rb") as file:
        for first in (0, HALF_BYTES):
            file.seek(first)
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                return
            of, used = _HEAD.unpack(head)
            if of < number or used > HALF_BYTES:
                continue
            yield from _flights(file.read(used))


def _flights(told: bytes) -> Iterator[FlightRecord]:
    at = 0
    while at + _LENGTH.size <= len(told):
        (size,) = _LENGTH.unpack_from(told, at)
        at += _LENGTH.size
        yield _decode(told[at : at + size])
        at += size
