"""Characters of several bytes come whole, though tokens may hold only a part of one."""

from __future__ import annotations

from tidegate.engines.probe import Check, Outcome, Probe, Run, failed, passed, refused, unproven

#: A bare prompt that even a small model goes on with in kind.
_GOES_ON = "你好世界😀，你好世界😀，你好世界😀，你好世界😀，你"
_ASKED = "Repeat this line three times, exactly as it is: 你好世界😀 café 🎉"
_TOKENS = 32
_LOST = "\ufffd"


async def _run(probe: Probe) -> Outcome:
    run = await probe.complete(_GOES_ON, max_tokens=_TOKENS) if probe.http else Run(status=404)
    if run.status != 200 or run.text.isascii():
        run = await probe.chat(_ASKED, max_tokens=_TOKENS)
    if run.status != 200:
        return refused(run, "a prompt that is not ASCII")
    if run.broken:
        return failed(f"the engine sends {run.broken}")
    wide = [text for _, text in run.reads if not text.isascii()]
    said = f"{sum(not char.isascii() for char in run.text)} characters beyond ASCII in {len(wide)} of {len(run.reads)} events"
    if _LOST in run.text[:-1] or (_LOST in run.text and run.finish != "length"):
        return failed(f"{said}, {run.text.count(_LOST)} of them broken (U+FFFD)")
    if any("\ud800" <= char <= "\udfff" for char in run.text):
        return failed(f"{said}, some of them halves of surrogate pairs")
    if not wide:
        return unproven("the model says nothing beyond ASCII")
    return passed(f"{said}, all whole")


CHECK = Check(100, "must", "Characters of several bytes come whole.", _run, prompts=2, tokens=32)
