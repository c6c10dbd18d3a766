"""Stop strings over the seam between what was said and what comes after it: an engine looks for them in what it says itself only."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import Any

from tidegate.core.chunk import Chunk, Usage
from tidegate.core.ports import EngineStream
from tidegate.engines.stream import Take


class _Stopped(Exception):
    """A stop string is complete: nothing more is read."""


class Seam:
    """An `EngineStream` that ends where a stop string ends that began before `stream` did.

    `before`: the text before the stream, up to the longest stop string. `begun`: characters at the stream's beginning that are of an earlier
    call, so that the engine looked for no stop string from them on. Text is held back only as long as it may be part of such a stop string.
    """

    def __init__(self, stream: EngineStream, stops: list[str], before: str, begun: int) -> None:
        self._stream = stream
        self._stops = stops
        self._seam = before
        self._before = len(before)
        self._zone = len(before) + begun
        self._held: list[Chunk] = []
        self._released = 0  # characters that left
        self._watches = True
        self._take: Take | None = None

    @property
    def usage(self) -> Usage:
        """See `core.ports.EngineStream.usage`."""
        return self._stream.usage

    def abort(self) -> None:
        """See `core.ports.EngineStream.abort`."""
        self._stream.abort()

    async def relay(self, take: Take) -> None:
        """See `core.ports.EngineStream.relay`."""
        self._take = take
        try:
            await self._stream.relay(self._look)
        except _Stopped:
            self._stream.abort()
            at_ns = time.perf_counter_ns()
            waits = take([*self._held, Chunk(at_ns, "notice", finish="stop"), Chunk(at_ns, "usage", usage=self.usage)])
            if waits is not None:
                await waits

    def _look(self, batch: list[Chunk]) -> Awaitable[None] | None:
        assert self._take is not None
        if self._watches:
            batch = self._through(batch)
        return self._take(batch) if batch else None

    def _through(self, batch: list[Chunk]) -> list[Chunk]:
        """What of a batch may leave. Raises _Stopped, with what may still leave in `_held`."""
        out: list[Chunk] = []
        for chunk in batch:
            self._held.append(chunk)
            if self._watches and chunk.kind == "text" and chunk.text:
                self._seam += chunk.text
                stop = self._find()
                if stop is not None:
                    self._held = [*out, *_first(self._held, stop - self._before - self._released)]
                    raise _Stopped
                open_end = alive(self._seam, self._stops, self._zone)
                self._watches = open_end or len(self._seam) < self._zone
                if open_end and chunk.finish is None:
                    continue
            elif self._watches and chunk.finish is None and len(self._held) > 1:
                continue  # it stays behind what is held
            out += self._held
            self._released = len(self._seam) - self._before
            self._held = []
        return out

    def _find(self) -> int | None:
        """Where the first stop string begins that began before the engine looked for one, and ended since."""
        found = [self._seam.find(stop, max(0, self._before - len(stop) + 1), self._zone + len(stop) - 1) for stop in self._stops]
        return min((at for at in found if at >= 0), default=None)


def watched(stream: EngineStream, stop: Any, before: str, lead: str = "") -> EngineStream:
    """The stream itself, or in a Seam where a stop string may begin in `before`, or in `lead`, the stream's first text, and end behind it."""
    stops = [stop] if isinstance(stop, str) else [one for one in stop if isinstance(one, str)] if isinstance(stop, list) else []
    stops = [one for one in stops if len(one) > 1]
    if not stops:
        return stream
    before = before[1 - max(map(len, stops)) :]
    ends = (before, before + lead) if lead else (before,)
    return Seam(stream, stops, before, len(lead)) if any(alive(end, stops, len(end)) for end in ends) else stream


def alive(text: str, stops: list[str], zone: int) -> bool:
    """Whether an end of `text` that begins before `zone` is the beginning of a stop string."""
    longest = max(map(len, stops))
    return any(one.startswith(text[at:]) for at in range(max(0, len(text) - longest + 1), min(zone, len(text))) for one in stops)


def _first(chunks: list[Chunk], chars: int) -> list[Chunk]:
    """The chunks up to so many characters of text."""
    kept: list[Chunk] = []
    for chunk in chunks:
        if chunk.kind == "text" and chunk.text:
            if chars <= 0:
                continue
            kept.append(chunk if len(chunk.text) <= chars else Chunk(chunk.at_ns, "text", chunk.text[:chars]))
            chars -= len(chunk.text)
        else:
            kept.append(chunk)
    return kept
