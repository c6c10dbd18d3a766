"""How a flight lies in a spool file, so that what is torn is recognised and what is whole is found.

    magic 4 | length 4 | crc32 4 | payload: JSON [FlightRecord, KeptText or null]

Numbers are little-endian and unsigned; the checksum covers the payload. After a torn or spoilt frame reading goes on at the next magic
whose frame is whole, so a hole (a power cut may leave zeros) costs the frames in the hole and no others.

The record lies there as the JSON that the database takes, so that the drain only cuts it out: nothing is decoded and encoded again.
"""

from __future__ import annotations

import struct
import zlib

import msgspec

from tidegate.core.flight import FlightRecord
from tidegate.core.ports import KeptText
from tidegate.stores.clean import json_text

MAGIC = b"tgf\x01"
_HEAD = struct.Struct("<4sII")
#: No flight is larger: a length above it is a spoilt head, not a promise to wait for.
MAX_PAYLOAD = 256 * 1024 * 1024


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """What one frame carries: `record` is the JSON of a FlightRecord."""

    record: msgspec.Raw
    kept: KeptText | None = None


class Frame(msgspec.Struct, frozen=True):
    """A whole frame found in a file: `payload` lies before `end`, an offset in the bytes that were searched."""

    payload: bytes
    end: int


_decode = msgspec.json.Decoder(Entry).decode
#: How nearly every payload ends: no text was kept.
_NOT_KEPT = b"},null]"


def pack(record: FlightRecord, kept: KeptText | None = None) -> bytes:
    """A finished flight as one frame. Raises what a fact raises that has no JSON and cannot say itself as text."""
    return frame(b"[%b,%b]" % (json_text(record), json_text(kept) if kept is not None else b"null"))


def frame(payload: bytes) -> bytes:
    """Any payload as one frame."""
    return _HEAD.pack(MAGIC, len(payload), zlib.crc32(payload)) + payload


def unpack(payload: bytes) -> Entry:
    """The entry of a whole frame. Raises msgspec.DecodeError where it is none."""
    # The checksum says that the bytes are what somebody packed, and only an entry begins and ends like this: the record is cut out.
    if payload.endswith(_NOT_KEPT) and payload.startswith(b"[{"):
        return Entry(msgspec.Raw(payload[1:-6]))
    return _decode(payload)


def frames_in(data: bytes, limit: int | None = None, max_bytes: int | None = None, *, more: bool = False) -> list[Frame]:
    """The whole frames in `data`, in order: at most `limit`, and none that begins at or after `max_bytes`.

    `more`: `data` is the beginning of something longer, so a frame that it does not hold to its end is left for later.
    """
    found: list[Frame] = []
    at, size, head = 0, len(data), _HEAD.size
    while (limit is None or len(found) < limit) and (max_bytes is None or at < max_bytes):
        if at + head <= size:
            magic, length, crc = _HEAD.unpack_from(data, at)
            end = at + head + length
            if magic == MAGIC and end <= size:
                payload = data[at + head : end]
                if zlib.crc32(payload) == crc:
                    found.append(Frame(payload, end))
                    at = end
                    continue
            elif magic == MAGIC and length <= MAX_PAYLOAD and more:
                break
        frame = next_frame(data, at)
        if frame is None:
            break
        found.append(frame)
        at = frame.end
    return found


def next_frame(data: bytes | memoryview, start: int) -> Frame | None:
    """The first whole frame at or after `start`; None where there is none."""
    view = memoryview(data)
    while True:
        frame = _frame_at(view, start)
        if frame is not None:
            return frame
        start = _find_magic(view, start + 1)
        if start < 0:
            return None


def _frame_at(view: memoryview, start: int) -> Frame | None:
    if start < 0 or start + _HEAD.size > len(view):
        return None
    magic, length, crc = _HEAD.unpack_from(view, start)
    end = start + _HEAD.size + length
    if magic != MAGIC or length > MAX_PAYLOAD or end > len(view):
        return None
    payload = bytes(view[start + _HEAD.size : end])
    return Frame(payload, end) if zlib.crc32(payload) == crc else None


def _find_magic(view: memoryview, start: int) -> int:
    found = bytes(view[start:]).find(MAGIC)
    return -1 if found < 0 else start + found
