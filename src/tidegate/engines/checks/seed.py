"""The same seed gives the same answer, alone."""

from __future__ import annotations

from tidegate.engines.probe import SEEDED, SEEDED_TOKENS, Check, Outcome, Probe, failed, parted, passed, refused, unproven


async def _run(probe: Probe) -> Outcome:
    await probe.chat(SEEDED, max_tokens=1)  # so that both find the prompt in the engine's cache
    first, second = await probe.seeded(), await probe.seeded()
    if first.status != 200:
        return refused(first, "a seed")
    if not first.text:
        return unproven("the answer has no text")
    if first.text == second.text:
        return passed(f"two answers of {SEEDED_TOKENS} tokens at temperature 1 are the same")
    return failed(f"two answers of {SEEDED_TOKENS} tokens part after {parted(first, second)} characters")


CHECK = Check(160, "should", "The same seed gives the same answer.", _run, prompts=3, tokens=40)
