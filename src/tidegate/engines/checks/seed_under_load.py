"""The same seed gives the same answer beside other requests. Few engines are batch-invariant: it is said, not asked of them."""

from __future__ import annotations

import asyncio

from tidegate.engines.probe import SEEDED, SEEDED_TOKENS, Check, Outcome, Probe, failed, parted, passed, unproven

#: Requests beside it.
LOAD = 2


async def _run(probe: Probe) -> Outcome:
    await probe.chat(SEEDED, max_tokens=1)
    alone = await probe.seeded()
    beside, *_others = await asyncio.gather(*(probe.seeded(seed) for seed in range(7, 8 + LOAD)))
    if alone.status != 200 or not alone.text:
        return unproven(f"a seed is refused with {alone.why}" if alone.status != 200 else "the answer has no text")
    if beside.text == alone.text:
        return passed(f"the same {SEEDED_TOKENS} tokens alone and beside {LOAD} other requests")
    return failed(f"beside {LOAD} other requests the answer parts after {parted(alone, beside)} characters: the engine is not batch-invariant")


CHECK = Check(170, "should", "The same seed gives the same answer under load.", _run, prompts=3, tokens=80)
