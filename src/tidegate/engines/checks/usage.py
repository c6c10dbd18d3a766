"""Tokens are counted: in the stream too, adding up, and the same as for a whole answer."""

from __future__ import annotations

from tidegate.engines.probe import COUNTING, SHORT_TOKENS, Check, Outcome, Probe, failed, inapplicable, passed, refused, unproven


async def _run(probe: Probe) -> Outcome:
    if "usage" in probe.cannot:
        return inapplicable(probe.cannot["usage"])
    run = await probe.short()
    if run.status != 200:
        return refused(run, "a streamed answer")
    if run.usage is None:
        return failed("the stream carries no usage, though asked for it (stream_options.include_usage): tokens could only be estimated")
    whole = await probe.chat(COUNTING, max_tokens=SHORT_TOKENS, stream=False)
    if whole.status != 200:
        return refused(whole, "a whole answer")
    if whole.usage is None:
        return failed("a whole answer carries no usage")
    for name, counted in (("the stream", run), ("the whole answer", whole)):
        prompt, answer, total = counted.prompt_tokens, counted.tokens, (counted.usage or {}).get("total_tokens")
        if not prompt or answer is None or total != prompt + answer:
            return failed(f"usage of {name} does not add up: {prompt} + {answer} = {total}")
    said = f"stream {run.prompt_tokens} + {run.tokens}, whole {whole.prompt_tokens} + {whole.tokens}"
    if run.prompt_tokens != whole.prompt_tokens:
        return failed(f"{said}: the same prompt is counted differently")
    if run.tokens is not None and run.tokens < len(run.reads):
        return failed(f"{said}: {len(run.reads)} events with text cannot be {run.tokens} tokens")
    if run.tokens == whole.tokens:
        return passed(said)
    return unproven(f"{said}: the answers differ, so their counts may") if run.finish != "length" or whole.finish != "length" else failed(said)


CHECK = Check(40, "must", "Tokens are counted, streamed or not.", _run, tokens=24, quick=True)
