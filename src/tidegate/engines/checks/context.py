"""The context is as large as the engine claims: what is longer is refused as such, not cut, and what fits passes."""

from __future__ import annotations

import msgspec

from tidegate.core.errors import ContextTooLong, TidegateError
from tidegate.engines.probe import PACE_WORDS, Check, Outcome, Probe, Run, failed, inapplicable, passed, refused, unproven
from tidegate.engines.refusal import refusal

#: A prompt that fills the context to here proves it.
_FULL = 0.9
#: Room for the answer and what the estimate of tokens per word may be wrong by.
_SPARE = 32
#: Tokens of context beyond which nothing is tried: the prompt alone would be megabytes.
_MOST = 262_144


async def _run(probe: Probe) -> Outcome:
    if "usage" in probe.cannot:
        return inapplicable("the engine counts no prompt tokens")
    claimed = await probe.context()
    few = await probe.pace()
    if few.status != 200:
        return refused(few, f"a prompt of {PACE_WORDS} words")
    if claimed is None or not few.prompt_tokens:
        return unproven("the engine claims no context length" if claimed is None else "the engine does not tell the tokens of a prompt")
    if claimed > _MOST:
        return unproven(f"{claimed:,} tokens are claimed, more than is tried ({_MOST:,})")
    own = (await probe.fill(1)).prompt_tokens or 0  # the template's, and one word's
    per_word = max((few.prompt_tokens - own) / (PACE_WORDS - 1), 0.2)
    turned_away, wrong = await _overflow(probe, int(claimed * 1.1 / per_word) + _SPARE, claimed)
    if wrong:
        return failed(wrong)
    per_s = probe.prefill_per_s or 1.0
    tokens = min(int(claimed * 0.97) - _SPARE, int(probe.left_s() * 0.8 * per_s))
    if tokens < claimed / 4:
        return unproven(f"{turned_away}; filling {claimed:,} tokens takes about {claimed / per_s:.0f} s, which are not left (--time-limit)")
    long = await probe.fill(int((tokens - own) / per_word))
    if long.status >= 500:
        return refused(long, "a prompt that should fit")
    if long.status != 200:
        return failed(f"{claimed:,} tokens are claimed, but a prompt of about {tokens:,} is refused with {long.why}")
    filled = long.prompt_tokens or 0
    said = f"{filled:,} of {claimed:,} claimed tokens pass in {long.first_ms / 1e3:.1f} s; {turned_away}"
    return passed(said) if filled >= _FULL * (claimed - _SPARE) else unproven(f"{said}; more would not fit the time (--time-limit)")


async def _overflow(probe: Probe, words: int, claimed: int) -> tuple[str, str]:
    """How a prompt longer than the context was refused; or what is wrong."""
    try:
        over = await probe.fill(words)
    except ContextTooLong as error:  # from an adapter alone
        return f"more are refused ({error.message[:80]})", ""
    except TidegateError as error:
        return "", f"a prompt longer than the context ends in: {error.message[:160]}"
    return _judge(over, claimed)


def _judge(over: Run, claimed: int) -> tuple[str, str]:
    if over.status == 200:
        counted = over.prompt_tokens
        if counted is not None and counted > claimed:
            return "", f"{claimed:,} tokens are claimed, but a prompt of {counted:,} is taken: the claim is not the truth"
        if over.error:
            return f"more end in an error event ({str(over.error.get('message'))[:80]})", ""
        return "", f"a prompt longer than the context of {claimed:,} is not refused but cut ({counted or 'unknown'} tokens counted)"
    error = refusal("The engine", over.status, {}, msgspec.json.encode({"error": over.error}))
    if not isinstance(error, ContextTooLong):
        return "", f"a prompt longer than the context is refused in words that do not say so ({over.why})"
    real, asked = over.error.get("n_ctx"), over.error.get("n_prompt_tokens")
    if isinstance(real, int) and real != claimed:
        return "", f"{claimed:,} tokens are claimed, but the refusal says {real:,}"
    return f"{f'{asked:,}' if isinstance(asked, int) else 'more'} are refused with {over.status}", ""


CHECK = Check(900, "must", "The context is as large as claimed.", _run, prompts=3)
