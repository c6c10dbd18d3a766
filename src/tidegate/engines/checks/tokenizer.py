"""The engine's tokenizer is the configured one: the same ids, or where it does not tell ids the same number of prompt tokens."""

from __future__ import annotations

from tidegate.engines.probe import Check, Outcome, Probe, failed, inapplicable, passed, unproven

#: Texts on which tokenizers differ: blanks, digits, contractions, scripts, emoji, code.
TEXTS = (
    "Hello, world!", "  two  blanks  and a\ttab", "line one\n\nline two\n", "I've been told he's there, we'll see", "1 22 333 4444 3.14159",
    "你好，世界。今天天气很好", "Äpfel und Öl, naïve café", "Привет, как дела?", "🚀 (normal) 😶‍🌫️ ✅ 🦙🦙", "def f(x):\n    return x**2  # comment",
    "https://example.org/a?b=c&d=%20e", "កាន់តែពិសេស", "........!!!!!!??????", "CamelCase snake_case kebab-case",
)  # fmt: skip
#: How many texts are compared by prompt counts, each of which costs an answer.
COUNTED = 4


async def _run(probe: Probe) -> Outcome:
    vocabulary = probe.vocabulary
    if vocabulary is None and probe.quick:
        return inapplicable("no tokenizer is configured")
    told = await probe.tokenize(TEXTS[0])
    if vocabulary is None:
        return await _with_itself(probe) if told is not None else inapplicable("no tokenizer is configured, and the engine offers none")
    if vocabulary.why_not:
        return unproven(f"the configured vocabulary cannot be computed here: {vocabulary.why_not}")
    texts = [*TEXTS, *(text for text, _ in probe.vectors if text)]
    if told is None:
        return await _by_counts(probe, [(text, len(vocabulary.encode(text))) for text in TEXTS[:COUNTED]], "the configured vocabulary")
    wrong: list[str] = []
    for text in texts:
        ids = await probe.tokenize(text)
        if ids != vocabulary.encode(text):
            wrong.append(f"{text[:24]!r} is {len(ids or ())} tokens there, {len(vocabulary.encode(text))} here")
    if wrong:
        return failed(f"{len(wrong)} of {len(texts)} texts become other ids than the configured vocabulary's: {wrong[0]}")
    return passed(f"{len(texts)} of {len(texts)} texts become the configured vocabulary's ids")


async def _with_itself(probe: Probe) -> Outcome:
    """No vocabulary of ours: does the engine count prompts as its own /tokenize does? That it should is nobody's demand."""
    counted = [(text, len(await probe.tokenize(text) or ())) for text in TEXTS[:COUNTED]]
    found = await _by_counts(probe, counted, "its own /tokenize")
    return unproven(found.evidence) if found.verdict == "fail" else found


async def _by_counts(probe: Probe, counted: list[tuple[str, int]], whose: str) -> Outcome:
    """A bare prompt may get one BOS token more, the same for every text."""
    more: dict[int, str] = {}  # how many more, and the first text that has so many
    for text, tokens in counted:
        run = await probe.complete(text, max_tokens=1, stream=False) if probe.http else None
        if run is None or run.status != 200 or run.prompt_tokens is None:
            return unproven("the engine tells neither ids nor the tokens of a bare prompt")
        more.setdefault(run.prompt_tokens - tokens, f"{text[:24]!r} is {run.prompt_tokens}, not {tokens}")
    said = f"prompt tokens of {len(counted)} texts against {whose}"
    if len(more) > 1 or not set(more) <= {0, 1}:
        return failed(f"{said}: {more[max(more, key=abs)]}")
    return passed(f"{said}: equal{' but for one BOS' if 1 in more else ''}")


CHECK = Check(110, "must", "The tokenizer is the configured one.", _run, prompts=COUNTED, tokens=4, quick=True)
