"""`max_tokens` is obeyed, and an answer that it ends says `length`."""

from __future__ import annotations

from tidegate.engines.probe import SHORT_TOKENS, Check, Outcome, Probe, failed, passed, refused, unproven


async def _run(probe: Probe) -> Outcome:
    run = await probe.short()
    if run.status != 200:
        return refused(run, f"an answer of at most {SHORT_TOKENS} tokens")
    said = f"finish_reason {run.finish!r}, {run.tokens if run.tokens is not None else 'unknown'} of {SHORT_TOKENS} tokens"
    if run.tokens is not None and run.tokens > SHORT_TOKENS:
        return failed(f"{said}: more than was asked for")
    if run.finish == "length":
        return passed(said)
    if run.finish is None:
        return failed(f"{said}: nothing tells why the answer ended")
    return unproven(f"{said}: the answer ended by itself before the limit")


CHECK = Check(30, "must", "max_tokens is obeyed, and the end says so.", _run, prompts=0, quick=True)
