"""What passes between the embedder's process and its callers: frames on a unix socket, a u32 length (big-endian) and a msgpack message.

A call carries an id of the caller's choice, unique among its calls that run; answers come in any order. `Cancel` has no answer, and a call
that was cancelled may still get one.
"""

from __future__ import annotations

import struct
from typing import Any, Literal

import msgspec

from tidegate.retrieval.embedder_texts import TextKind

#: The longest message, either way. 1,000 vectors take 1.5 MB.
MAX_FRAME_BYTES = 4 << 20
#: Texts in one call; a client sends more in several.
MAX_TEXTS = 512

_LENGTH = struct.Struct(">I")


class Embed(msgspec.Struct, tag="embed", frozen=True):
    """Answered by Vectors or Failed."""

    id: int
    kind: TextKind
    texts: list[str]


class Count(msgspec.Struct, tag="count", frozen=True):
    """Answered by Counts or Failed."""

    id: int
    texts: list[str]


class Info(msgspec.Struct, tag="info", frozen=True):
    """Answered by Figures, at once even where others wait."""

    id: int


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """The caller of `id` no longer waits."""

    id: int


class Vectors(msgspec.Struct, tag="vectors", frozen=True):
    """`rows`: float32, little-endian, one row after the other. `fingerprint`: of the model that made them; older processes give none."""

    id: int
    rows: bytes
    fingerprint: str = ""


class Counts(msgspec.Struct, tag="counts", frozen=True):
    """One count for each text."""

    id: int
    counts: list[int]


class Figures(msgspec.Struct, tag="figures", frozen=True):
    """Live figures for /health."""

    id: int
    figures: dict[str, Any]


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """`refused`: the texts cannot be embedded; `busy`: too many calls wait; `broken`: anything else."""

    id: int
    why: Literal["refused", "busy", "broken"]
    message: str
    hint: str = ""


Call = Embed | Count | Info
Answer = Vectors | Counts | Figures | Failed

CALLS: msgspec.msgpack.Decoder[Call | Cancel] = msgspec.msgpack.Decoder(Call | Cancel)
ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_ENCODER = msgspec.msgpack.Encoder()


class Malformed(Exception):
    """The other side does not speak this protocol: the connection is of no more use."""


def frame(message: Call | Cancel | Answer) -> bytes:
    """The message as it goes over the socket."""
    body = _ENCODER.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts what the socket gives, in whatever pieces, into messages' bytes."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes. Raises Malformed for a length beyond MAX_FRAME_BYTES, before holding any of it."""
        held = self._held
        held += data
        whole, at = [], 0
        while len(held) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(held, at)
            if length > MAX_FRAME_BYTES:
                raise Malformed(f"a frame of {length:,} bytes, {MAX_FRAME_BYTES:,} at most")
            end = at + _LENGTH.size + length
            if len(held) < end:
                break
            whole.append(bytes(held[at + _LENGTH.size : end]))
            at = end
        del held[:at]
        return whole
