"""The end of sequence stops an answer, by its id: nothing of the template comes out behind it.

Families disagree: a vocabulary may say one id while its chat template ends an answer with another. So the engine is made to sample each of
them, where ids are known and `logit_bias` is obeyed; and a short answer has to end by itself.
"""

from __future__ import annotations

import re

from tidegate.engines.probe import Check, Outcome, Probe, failed, passed, unproven

#: What reads as a control token: it belongs to no answer.
LEAKED = re.compile(r"<[|｜][^<>|｜\s]{1,40}[|｜]>|</s>|<(?:eos|end_of_turn|start_of_turn)>|\[/?INST\]")
#: The last control tokens of chat templates in use; those that are one token of the engine's vocabulary are tried.
ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "</s>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<eos>", "<|return|>")
_TASKS = ("Answer with one word: is water wet? yes or no", "What is the capital of France? Answer with its name alone.", "Say OK and nothing else.")
_TOKENS = 64


async def _run(probe: Probe) -> Outcome:
    stopped = ""
    for task in _TASKS:
        run = await probe.chat(task, max_tokens=_TOKENS)
        leak = LEAKED.search(run.text)
        if leak:
            return failed(f"the answer says {leak.group()!r} as text: the template's end is not the engine's")
        if run.finish == "stop":
            stopped = f"an answer stops by itself after {run.tokens or len(run.reads)} of {_TOKENS} tokens"
            break
    tried = await _forced(probe) if probe.http else {}
    wrong = [name for name, finish in tried.items() if finish != "stop"]
    if wrong and len(wrong) < len(tried):
        return failed(f"sampled, {', '.join(wrong)} ends no answer (finish_reason {tried[wrong[0]]!r}), while others do")
    forced = f"sampled, {', '.join(tried)} ends it" if tried and not wrong else "ids could not be tried"
    if stopped:
        return passed(f"{stopped}; {forced}")
    if tried and not wrong:
        return passed(f"no short answer ended within {_TOKENS} tokens; {forced}")
    return unproven(f"{len(_TASKS)} short answers went on for {_TOKENS} tokens; {forced}")


async def _forced(probe: Probe) -> dict[str, str | None]:
    """Token -> the finish_reason of an answer that was made to begin with it."""
    found: dict[str, str | None] = {}
    for name, token_id in (await end_ids(probe)).items():
        run = await probe.chat(_TASKS[0], max_tokens=4, logit_bias={str(token_id): 100})
        if run.status == 200:
            found[f"{name} ({token_id})"] = run.finish
    return found


async def end_ids(probe: Probe) -> dict[str, int]:
    """The tokens that should end an answer, as the vocabulary says, else those known ends that are one token to the engine."""
    vocabulary = probe.vocabulary
    if vocabulary is not None:
        return {vocabulary.tokens[number]: number for number in vocabulary.end_ids}
    if probe.adapter != "llama_cpp":
        return {}  # elsewhere /tokenize does not say whether it parsed a control token or a word
    found: dict[str, int] = {}
    for name in ENDS:
        ids = await probe.tokenize(name, special=True)
        if ids is None:
            return {}
        plain = await probe.tokenize(name)
        if len(ids) == 1 and plain != ids:
            found[name] = ids[0]
    return found


CHECK = Check(50, "must", "The end of sequence ends an answer.", _run, prompts=4, tokens=70)
