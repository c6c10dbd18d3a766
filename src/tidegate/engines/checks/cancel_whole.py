"""The same for a call that does not stream, as the adapter makes it: whoever leaves frees the slot."""

from __future__ import annotations

import asyncio
import time

from tidegate.core.flight import Flight
from tidegate.engines.probe import FREE_S, LOOK_S, Check, Outcome, Probe, tried, unproven


async def _run(probe: Probe) -> Outcome:
    if await probe.busy() is None:
        return unproven("the engine does not tell how many answers it is making")
    return await tried(probe, _by_count)


async def _by_count(probe: Probe) -> Outcome:
    before = await probe.calm() or 0
    call = asyncio.ensure_future(probe.engine.whole(probe.long_call(), Flight("check")))
    give_up_ns = time.perf_counter_ns() + int(FREE_S * 1e9)
    during = before
    try:
        while not call.done() and during <= before and time.perf_counter_ns() < give_up_ns:
            await asyncio.sleep(LOOK_S)
            during = await probe.busy() or 0
        if during > before and not call.done():
            await asyncio.sleep(min(1.0, 2 * probe.first_ms / 1e3))  # past its prefill, which few engines give up
        over = call.done()
    finally:
        left_ns = time.perf_counter_ns()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    if over or during <= before:
        return unproven("the answer was over before its engine could be looked at")
    streamed = " (the adapter streams it, for the engine would go on)" if "cancel_whole" in probe.cannot else ""
    return await probe.freed(during, left_ns, f"a whole answer that was left{streamed}")


CHECK = Check(80, "must", "A whole answer that is left frees its slot.", _run, prompts=3, tokens=8)
