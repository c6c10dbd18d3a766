"""What came of a call: the chunks of a stream, taken as the product takes them, their text, and what the flight was told."""

from __future__ import annotations

import asyncio
from typing import Any

from tidegate.core.ask import EngineCall
from tidegate.core.chunk import Chunk
from tidegate.core.flight import Flight
from tidegate.core.ports import Engine, EngineStream

from .conftest import BOUND_S


async def read(engine: Engine, call: EngineCall, flight: Flight | None = None, got: list[Chunk] | None = None) -> list[Chunk]:
    """All chunks of a call's stream; `got` holds them also where the stream ends in an error."""
    return await collect(await engine.start(call, flight or Flight("test")), got)


async def collect(stream: EngineStream, got: list[Chunk] | None = None) -> list[Chunk]:
    got = [] if got is None else got
    async with asyncio.timeout(BOUND_S):
        await stream.relay(got.extend)
    return got


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks if chunk.kind == "text")


def decided(flight: Flight) -> list[str]:
    return [what for _, what, _ in flight.decisions]


def facts_of(flight: Flight, what: str) -> list[dict[str, Any]]:
    return [facts for _, decision, facts in flight.decisions if decision == what]
