"""A stream ends with `[DONE]`, behind its `finish_reason`."""

from __future__ import annotations

from tidegate.engines.probe import Check, Outcome, Probe, failed, inapplicable, passed


async def _run(probe: Probe) -> Outcome:
    if not probe.http:
        return inapplicable("no stream of OpenAI's events")
    run = await probe.short()
    if not run.done:
        return failed("the stream ends without [DONE]: its end cannot be told from a cut but by finish_reason")
    return passed(f"[DONE] after {len(run.reads)} events") if run.finish else failed("[DONE] without a finish_reason before it")


CHECK = Check(20, "should", "A stream ends with [DONE].", _run, prompts=0)
