"""What is wrong with a request is said as an error of the 4xx kind, in JSON, with a message."""

from __future__ import annotations

from tidegate.engines.probe import Check, Outcome, Probe, Run, failed, inapplicable, passed


async def _run(probe: Probe) -> Outcome:
    if not probe.http:
        return inapplicable("no requests of OpenAI's API")
    broken = await probe.post(b'{"model": "x", "messages": [')
    wrong = _wrong("broken JSON", broken)
    if wrong:
        return failed(wrong)
    typed = await probe.ask("chat", {"messages": "no list"}, stream=False)
    wrong = _wrong("messages that are no list", typed)
    if wrong:
        return failed(wrong)
    model, probe.model = probe.model, "no-such-model"
    try:
        unknown = await probe.chat("Say OK.", max_tokens=1, stream=False)
    finally:
        probe.model = model
    said = f"broken JSON {broken.status}, wrong type {typed.status}"
    if unknown.status == 200:
        return passed(f"{said}; an unknown model's name is ignored")
    wrong = _wrong("an unknown model", unknown)
    return failed(wrong) if wrong else passed(f"{said}, unknown model {unknown.status}")


def _wrong(what: str, run: Run) -> str:
    if run.status == 200:
        return f"{what} is answered with 200"
    if not 400 <= run.status < 500:
        return f"{what} is answered with {run.why}, which reads as the engine's own fault"
    if run.broken or not run.error.get("message"):
        return f"{what} is answered with {run.status} and no message in JSON"
    return ""


CHECK = Check(130, "should", "Wrong requests are refused with a reason.", _run, prompts=1)
