"""Log-probabilities are offered and make sense: one for each token, none above zero, the likeliest first; with ids where the engine tells them."""

from __future__ import annotations

import math

from tidegate.engines.probe import COUNTING, Check, Outcome, Probe, failed, inapplicable, passed

_TOKENS = 8
#: Engines compute in half precision: a probability may come out a little above one.
_SLACK = 1e-3


async def _run(probe: Probe) -> Outcome:
    if not probe.http:
        return inapplicable("no log-probabilities in this protocol")
    run = await probe.chat(COUNTING, max_tokens=_TOKENS, logprobs=True, top_logprobs=2)
    if run.status != 200:
        return inapplicable(f"refused with {run.why}")
    if not run.logprobs:
        return failed("asked for, not refused, and not given")
    for one in run.logprobs:
        value, top = one.get("logprob"), one.get("top_logprobs") or []
        if not isinstance(value, int | float) or math.isnan(value) or value > _SLACK:
            return failed(f"{value!r} is no log-probability")
        likeliest = max((t.get("logprob", -math.inf) for t in top), default=value)
        if value > likeliest + _SLACK or sum(math.exp(t.get("logprob", -math.inf)) for t in top) > 1 + 10 * _SLACK:
            return failed(f"the token's {value:.3f} is above the likeliest of the alternatives ({likeliest:.3f}), or these are above 1 in sum")
    told = f"{len(run.logprobs)} for {run.tokens} tokens, {sum('id' in one for one in run.logprobs)} with ids"
    if run.tokens is not None and len(run.logprobs) != run.tokens:
        return failed(f"{told}: not one for each token")
    return passed(f"{told}, P of the first {math.exp(run.logprobs[0]['logprob']):.3f}")


CHECK = Check(140, "should", "Log-probabilities make sense.", _run, tokens=8)
