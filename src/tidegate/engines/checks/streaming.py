"""Streaming really streams: tokens come apart in time, not all at once at the end."""

from __future__ import annotations

from tidegate.engines.probe import Check, Outcome, Probe, failed, passed, refused, unproven

#: An answer that came in one piece within this time may have been made that quickly.
QUICK_MS = 50.0


async def _run(probe: Probe) -> Outcome:
    run = await probe.short()
    if run.status != 200:
        return refused(run, "a streamed answer")
    if not run.reads:
        return failed("a streamed answer has no text")
    instants = sorted({at_ns for at_ns, _ in run.reads})
    span_ms = (instants[-1] - instants[0]) / 1e6
    said = f"{len(run.reads)} events in {len(instants)} reads over {span_ms:.0f} ms, the first after {run.first_ms:.0f} ms"
    if len(instants) >= max(2, len(run.reads) // 4) and span_ms > 0.1 * run.first_ms / len(run.reads):
        return passed(said)
    if run.whole_ms < QUICK_MS:
        return unproven(f"{said}: too quick to tell")
    if len(run.reads) == 1:
        return unproven(f"{said}: one event has no rhythm")
    return failed(f"{said}: something holds the tokens back")


CHECK = Check(10, "must", "Tokens come apart in time.", _run, tokens=24)
