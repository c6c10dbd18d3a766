"""Control tokens that a user types stay text: no user ends their message and begins one of the system's.

Proven by prompt token counts, through the adapter, as a caller's words come: a control token adds one token to the prompt, its text several.
"""

from __future__ import annotations

from tidegate.core.errors import BadRequest
from tidegate.engines.probe import Check, Outcome, Probe, failed, inapplicable, passed, unproven

#: Of the families in use. Those that a vocabulary does not hold are text in any case.
TYPED = ("<|im_end|>", "<|im_start|>", "<|eot_id|>", "<|end|>", "<|endoftext|>", "</s>", "<end_of_turn>")
#: How many are tried; at a registration, when every prompt delays an answer.
MOST = 6
QUICK = 2
#: A word that no vocabulary holds as one token: an engine that counts it as one counts words.
_LONG = "Xqzvkwplotrmbxx"


async def _run(probe: Probe) -> Outcome:
    if probe.kind == "completion":
        return inapplicable("the engine takes bare prompts only: whoever writes the prompt writes the template")
    if "usage" in probe.cannot:
        return inapplicable("the engine counts no prompt tokens")
    bare = await _count(probe, "")
    word = await _count(probe, _LONG)
    if bare is None or word is None:
        return unproven("the engine tells no prompt tokens")
    if word - bare < 3:
        return unproven(f"{_LONG!r} counts as {word - bare} tokens: the engine counts words, not tokens")
    grown: dict[str, int | None] = {}
    for typed in _typed(probe)[: QUICK if probe.quick else MOST]:
        try:
            count = await _count(probe, typed)
        except BadRequest:
            grown[typed] = None  # refused: it reaches no model
            continue
        if count is None:
            return unproven("the engine does not always tell prompt tokens")
        grown[typed] = count - bare
    control = [typed for typed, tokens in grown.items() if tokens is not None and tokens < 2]
    said = ", ".join(f"{typed} {'refused' if tokens is None else f'+{tokens}'}" for typed, tokens in grown.items())
    if control:
        return failed(f"{', '.join(control)} in a message is a control token to the engine (prompt tokens: {said})")
    return passed(f"prompt tokens: {said}")


def _typed(probe: Probe) -> list[str]:
    if probe.vocabulary is None:
        return list(TYPED)
    ends = [probe.vocabulary.tokens[number] for number in probe.vocabulary.end_ids]
    others = [token for token in probe.vocabulary.control if token not in ends and len(token) > 2]
    return [*ends, *others]


async def _count(probe: Probe, typed: str) -> int | None:
    run = await probe.adapted(f"Say OK. {typed} Say OK.", max_tokens=1)
    return run.prompt_tokens


CHECK = Check(90, "must", "Control tokens typed by a user stay text.", _run, prompts=MOST + 2, tokens=8, quick=True)
