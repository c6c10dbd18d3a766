"""A stop string ends the answer, and nothing of it is in the answer, also where it lies across the borders of tokens."""

from __future__ import annotations

from tidegate.engines.probe import COUNTING, SHORT_TOKENS, Check, Outcome, Probe, Run, failed, inapplicable, passed, refused, unproven

#: Characters of a stop string on each side of a border.
_AROUND = 3


async def _run(probe: Probe) -> Outcome:
    if "stop" in probe.cannot:
        return inapplicable(probe.cannot["stop"])
    first = await probe.short()
    stop = across_borders(first)
    if not stop:
        return unproven("the answer is too short or too even to take a stop string from it")
    run = await probe.chat(COUNTING, max_tokens=SHORT_TOKENS * 2, stop=[stop])
    if run.status != 200:
        return refused(run, "a stop string")
    said = f"stop string {stop!r} across a border: finish_reason {run.finish!r} after {run.tokens or len(run.reads)} tokens"
    if stop in run.text:
        return failed(f"{said}, and it is in the answer")
    part = next((stop[:n] for n in range(len(stop) - 1, 0, -1) if run.text.endswith(stop[:n])), "")
    if run.finish == "stop" and run.text == first.text.partition(stop)[0]:
        return passed(said)
    if run.finish == "stop":
        return failed(f"{said}, and {part!r} of it is left") if part and first.text.startswith(run.text) else passed(f"{said}, of another answer")
    return unproven(f"{said}: it did not come up again")


def across_borders(run: Run) -> str:
    """Characters around the border of two events, where the text holds them only there; empty where there are none such."""
    text = "".join(said for _, said in run.reads)
    at = 0
    for number, (_, said) in enumerate(run.reads[:-1]):
        at += len(said)
        stop = text[max(at - _AROUND, 0) : at + _AROUND]
        if number >= len(run.reads) // 3 and len(stop) == 2 * _AROUND and stop.strip() == stop and text.find(stop) == at - _AROUND:
            return stop
    return ""


CHECK = Check(60, "must", "Stop strings end an answer and stay out of it.", _run, tokens=24, quick=True)
