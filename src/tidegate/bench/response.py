"""The scripted engine's response to a request, as steps on its connection."""

from __future__ import annotations

from collections.abc import Iterator

from tidegate.bench.act import Act, Step, first_bytes, waited
from tidegate.bench.events import streamed
from tidegate.bench.script import Request
from tidegate.bench.whole import REFUSALS, whole


def answer(request: Request) -> Iterator[Step]:
    """The steps of the whole response."""
    orders = request.orders
    refused = REFUSALS.get(orders.fault)
    if refused is not None:
        yield from waited(orders.first_ms)
        yield refused
    elif orders.fault == "hang":
        yield Act.HANG
    elif orders.fault == "die":
        yield from waited(orders.first_ms)
        yield Act.CLOSE
    elif orders.fault == "cut_bytes":
        yield from first_bytes(streamed(request) if request.stream else whole(request), orders.at)
    elif orders.fault == "huge_head":
        yield b"HTTP/1.1 200 OK\r\n"
        for number in range(4096):
            yield b"x-filler-%d: %b\r\n" % (number, b"f" * 1000)
        yield Act.HANG
    elif request.stream:
        yield from streamed(request)
    else:
        yield from whole(request)
    if orders.fault == "stale":
        yield Act.STALE
    elif orders.fault == "close_idle":
        yield Act.CLOSE
    elif orders.fault == "refuse_next":
        yield Act.REFUSE
