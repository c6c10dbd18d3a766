"""What the scripted engine does on a connection, step by step: bytes to write, times to wait, and acts that are neither."""

from __future__ import annotations

import enum
from collections.abc import Iterator


class Act(enum.Enum):
    """What a step does where it is not a write or a wait."""

    NEXT = "wait for the answer's next token from the steps that all answers share"
    CLOSE = "close the connection after what was written"
    RESET = "reset the connection"
    BREAK = "write what is no HTTP chunk"
    HANG = "do nothing any more"
    STALE = "close it when the next request comes"
    REFUSE = "close it, and the next one as soon as it comes"


#: Bytes: write them. A number: wait until that many ms after the last wait ended. An Act: see there.
Step = bytes | float | Act


def waited(ms: float) -> Iterator[Step]:
    if ms > 0:
        yield ms


def first_bytes(steps: Iterator[Step], left: int) -> Iterator[Step]:
    """The first bytes of a response, then the connection closes."""
    for step in steps:
        if isinstance(step, bytes):
            if len(step) > left:
                yield step[:left]
                yield Act.CLOSE
                return
            left -= len(step)
        yield step


def one_by_one(data: bytes) -> Iterator[Step]:
    for at in range(len(data)):
        yield data[at : at + 1]
        yield 0.0
