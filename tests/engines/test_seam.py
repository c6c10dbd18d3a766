"""Stop strings over the seam between what was said and what comes after it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tidegate.bench.scripted import Scripted
from tidegate.core.ask import Said
from tidegate.core.chunk import Chunk, Usage
from tidegate.core.flight import Flight
from tidegate.core.ports import EngineStream
from tidegate.engines.seam import watched

from .conftest import Build, ask, until


class Told:
    """A stream of given batches of text, as an engine would give it that looks for stop strings in what it says itself."""

    def __init__(self, batches: list[list[str]], *, last: bool = True) -> None:
        self.batches = [[Chunk(1, "text", text) for text in batch] for batch in batches]
        if last:
            self.batches.append([Chunk(1, "notice", finish="length"), Chunk(1, "usage", usage=self.usage)])
        self.aborted = False
        self.most_held = 0

    @property
    def usage(self) -> Usage:
        return Usage(1, 2)

    def abort(self) -> None:
        self.aborted = True

    async def relay(self, take: Callable[[list[Chunk]], Awaitable[None] | None]) -> None:
        for batch in self.batches:
            waits = take(list(batch))
            if waits is not None:
                await waits


async def read(stream: EngineStream) -> tuple[str, list[Any]]:
    got: list[Chunk] = []
    await stream.relay(got.extend)
    assert all(chunk.text or chunk.finish or chunk.usage for chunk in got)
    return "".join(chunk.text for chunk in got), [chunk.finish for chunk in got if chunk.finish]


def stopped(before: str, rest: str, stops: list[str], zone: int) -> str:
    """What of `rest` may be seen: the same, thought simply. Stops that begin behind `zone` are the engine's own business."""
    whole = before + rest
    ends = [at for stop in stops for at in range(zone) if whole.startswith(stop, at) and at + len(stop) > len(before)]
    return whole[len(before) : min(ends)] if ends else rest


LETTERS = st.text("ab", max_size=6)


@given(LETTERS, st.lists(st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3), max_size=4), st.lists(LETTERS, max_size=2), LETTERS)
async def test_a_stop_over_the_seam(before: str, batches: list[list[str]], stops: list[str], lead: str) -> None:
    """For any text, pieces and stop strings: what is seen ends where a stop string begins that reaches over the seam, and nothing else changes."""
    assume(not any(stop in lead for stop in stops if len(stop) > 1))  # the engine saw to that itself
    if lead:
        batches = [[piece for piece in (lead[:1], lead[1:]) if piece], *batches]
    rest = "".join(text for batch in batches for text in batch)
    stream = Told(batches)
    seen, finish = await read(watched(stream, stops, before, lead))
    long = [stop for stop in stops if len(stop) > 1]
    assert seen == stopped(before, rest, long, len(before + lead))
    assert (finish == ["stop"]) == stream.aborted
    assert finish in (["stop"], ["length"])


async def test_text_waits_no_longer_than_it_must() -> None:
    """What can be part of no stop string leaves at once."""
    got: list[list[str]] = []
    stream = watched(Told([["b"], ["c", "x"], ["y"]]), ["abcd"], "xxa")

    def take(batch: list[Chunk]) -> None:
        got.append([chunk.text for chunk in batch if chunk.text])

    await stream.relay(take)
    assert got == [["b", "c", "x"], ["y"], []]


@pytest.mark.parametrize("stop", [None, [], "x", ["ab"], [7], {"a": 1}])
async def test_nothing_to_watch(stop: Any) -> None:
    """Where no stop string can reach over the seam, the stream is the engine's own."""
    stream = Told([["b"]])
    assert watched(stream, stop, "b") is stream


async def test_an_engine_is_freed(build: Build, server: Scripted) -> None:
    """A stream that is over at the seam is given up at the engine too."""
    engine = build("scripted")
    stream = await engine.continue_from(ask("##n=1000,i=5##", stop="the quick"), Said(" the", 1), Flight("test"))
    assert await read(stream) == ("", ["stop"])
    await until(lambda: not server.active)
    assert server.aborted == 1
