"""Whoever leaves frees the slot: a streamed answer that is given up stops being made, by the engine's own count."""

from __future__ import annotations

import asyncio
import time

from tidegate.core.chunk import Chunk
from tidegate.core.flight import Flight
from tidegate.engines.probe import COUNTING, Check, Outcome, Probe, failed, passed, tried, unproven

#: A difference between two times that may be told from the noise of a machine that does other things too.
LEAST_MS = 40.0


async def _run(probe: Probe) -> Outcome:
    return await tried(probe, _by_timing if await probe.busy() is None else _by_count)


async def _by_count(probe: Probe) -> Outcome:
    before = await probe.calm() or 0
    async with _Running(probe) as running:
        await running.begun()
        during = await probe.busy()
        over = running.over
        left_ns = time.perf_counter_ns()
    if over or during is None or during <= before:
        return unproven("the answer was over before its engine could be looked at")
    return await probe.freed(during, left_ns, "a stream that was left")


async def _by_timing(probe: Probe) -> Outcome:
    """The engine counts nothing: how long does a request take behind an answer that was left, and beside one that was not?"""
    if not probe.http:
        return unproven("the engine does not tell how many answers it is making")
    await _short_ms(probe)  # what the first request alone costs: a connection, an empty cache
    alone = await _short_ms(probe)
    async with _Running(probe) as running:
        await running.begun()
        beside = await _short_ms(probe)
    async with _Running(probe) as running:
        await running.begun()
        over = running.over
    behind = await _short_ms(probe)
    if alone is None or beside is None or behind is None:
        return unproven("a request beside another is turned away, which tells nothing of the other")
    return by_times(alone, beside, behind, over=over)


def by_times(alone: float, beside: float, behind: float, *, over: bool = False) -> Outcome:
    """The verdict on how long a request takes, in milliseconds: alone, beside a running answer, and behind one that was left.

    It tells something only where a running answer makes others wait, by more than noise: from `LEAST_MS` and 1.4 times on. `over`: the
    answer that was left had come to its end before.
    """
    said = f"a request takes {alone:.0f} ms alone, {beside:.0f} ms beside a running answer, {behind:.0f} ms behind one that was left"
    waits = beside - alone
    if over or waits < max(LEAST_MS, 0.4 * alone):
        return unproven(f"{said}: no difference to tell by")
    if behind < alone + waits / 3:
        return passed(said)
    return failed(said) if behind > alone + waits * 2 / 3 else unproven(said)


async def _short_ms(probe: Probe) -> float | None:
    run = await probe.chat(COUNTING, max_tokens=8)
    return run.whole_ms if run.status < 400 else None


class _Running:
    """A long answer through the adapter, which is left at the end of the block."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._first = asyncio.Event()

    async def __aenter__(self) -> _Running:
        self._stream = await self._probe.engine.start(self._probe.long_call(), Flight("check"))
        self._relay = asyncio.ensure_future(self._stream.relay(self._take))
        return self

    def _take(self, batch: list[Chunk]) -> None:
        if any(chunk.text for chunk in batch):
            self._first.set()

    async def begun(self) -> None:
        """Until the first token, or the end."""
        first = asyncio.ensure_future(self._first.wait())
        await asyncio.wait((first, self._relay), return_when=asyncio.FIRST_COMPLETED)
        first.cancel()

    @property
    def over(self) -> bool:
        return self._relay.done()

    async def __aexit__(self, *_: object) -> None:
        self._stream.abort()
        self._relay.cancel()
        await asyncio.gather(self._relay, return_exceptions=True)


CHECK = Check(70, "must", "A stream that is left frees its slot.", _run, prompts=4, tokens=24, quick=True)
