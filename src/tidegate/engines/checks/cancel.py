"""Whoever leaves frees the slot: a streamed answer that is given up stops being made, by the engine's own count."""

from __future__ import annotations

import asyncio
import time

from tidegate.core.chunk import Chunk
from tidegate.core.flight import Flight
from tidegate.engines.probe import COUNTING, Check, Outcome, Probe, failed, passed, unproven


async def _run(probe: Probe) -> Outcome:
    before = await probe.busy()
    if before is None:
        return await _by_timing(probe)
    begun = asyncio.Event()

    def take(batch: list[Chunk]) -> None:
        if any(chunk.text for chunk in batch):
            begun.set()

    stream = await probe.engine.start(probe.long_call(), Flight("check"))
    relay = asyncio.ensure_future(stream.relay(take))
    first = asyncio.ensure_future(begun.wait())
    try:
        await asyncio.wait((first, relay), return_when=asyncio.FIRST_COMPLETED)
        during = await probe.busy()
        over = relay.done()
    finally:
        left_ns = time.perf_counter_ns()
        stream.abort()
        first.cancel()
        relay.cancel()
        await asyncio.gather(relay, first, return_exceptions=True)
    if over or during is None or during <= before:
        return unproven("the answer was over before its engine could be looked at")
    return await probe.freed(before, left_ns, "a stream that was left")


async def _by_timing(probe: Probe) -> Outcome:
    """The engine counts nothing: how long does a request take behind an answer that was left, and beside one that was not?"""
    if not probe.http:
        return unproven("the engine does not tell how many answers it is making")
    await probe.chat(COUNTING, max_tokens=8)
    alone = (await probe.chat(COUNTING, max_tokens=8)).whole_ms
    stream = await probe.engine.start(probe.long_call(), Flight("check"))
    relay = asyncio.ensure_future(stream.relay(lambda batch: None))
    try:
        beside = (await probe.chat(COUNTING, max_tokens=8)).whole_ms
        over = relay.done()
    finally:
        stream.abort()
        relay.cancel()
        await asyncio.gather(relay, return_exceptions=True)
    behind = (await probe.chat(COUNTING, max_tokens=8)).whole_ms
    said = f"a request takes {alone:.0f} ms alone, {beside:.0f} ms beside a running answer, {behind:.0f} ms behind one that was left"
    if over or beside < 1.4 * alone:
        return unproven(f"{said}: no difference to tell by")
    if behind < alone + (beside - alone) / 3:
        return passed(said)
    return failed(said) if behind > alone + (beside - alone) * 2 / 3 else unproven(said)


CHECK = Check(70, "must", "A stream that is left frees its slot.", _run, prompts=2, tokens=8, quick=True)
