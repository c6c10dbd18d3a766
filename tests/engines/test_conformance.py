"""Conformance checks: what each one passes and what it fails, on answers made to order; and whole reports, on engines that run."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tidegate.bench.behaviour import Behaviour, curve
from tidegate.bench.script import Request
from tidegate.bench.scripted import Scripted, start
from tidegate.core.errors import BadRequest, EngineDown, EngineError, EngineRefused, SettingsError
from tidegate.core.plugins import load, names
from tidegate.engines import conformance
from tidegate.engines.checks.cancel import by_times
from tidegate.engines.conformance import Step, check_file, check_url, checks, detect, exit_code, run_checks
from tidegate.engines.openai_http import OpenAIHttp
from tidegate.engines.probe import SHORT_TOKENS, Check, Outcome, Probe, Run
from tidegate.engines.settings import EngineSettings
from tidegate.engines.vocabulary import Vocabulary

from .test_vocabulary import VOCABULARIES, gguf, needs_data, spm, written

CHECKS: dict[str, Check] = {name: load("tidegate.engines.checks", name).CHECK for name in names("tidegate.engines.checks")}
WORDS = [f" {number}," for number in range(1, SHORT_TOKENS + 1)]


def answer(
    words: list[str] | None = None, *, finish: str | None = "length", usage: dict[str, Any] | None = None, gap_ms: float = 5.0, **fields: Any
) -> Run:
    """An answer as a good engine gives it: 24 words, 5 ms apart."""
    said = WORDS if words is None else words
    reads = [(int((20 + number * gap_ms) * 1e6), word) for number, word in enumerate(said)]
    counted = {"prompt_tokens": 10, "completion_tokens": len(said), "total_tokens": 10 + len(said)} if usage is None else usage
    end_ns = reads[-1][0] + 1_000_000 if reads else 20_000_000
    facts: dict[str, Any] = {"end_ns": end_ns, "text": "".join(said), "finish": finish, "usage": counted or None, "done": True, "reads": reads}
    return Run(**(facts | fields))


class Canned(Probe):
    """An engine whose answers are laid out beforehand: each call takes the next, the last stays."""

    def __init__(self, *runs: Run | Exception, **said: Any) -> None:
        engine = OpenAIHttp("test", EngineSettings(url="http://127.0.0.1:1", models=["m"]))
        super().__init__(engine, "llama_cpp", "m", said.pop("vocabulary", None))
        self.cannot = said.pop("cannot", {})
        self.runs = list(runs)
        self.said = said
        self.asked: list[dict[str, Any]] = []

    def _next(self, fields: dict[str, Any]) -> Run:
        self.asked.append(fields)
        run = self.runs.pop(0) if len(self.runs) > 1 else self.runs[0]
        if isinstance(run, Exception):
            raise run
        return run

    async def ask(self, kind: Any, body: dict[str, Any], *, stream: bool) -> Run:
        return self._next(body)

    async def adapted(self, prompt: str, *, max_tokens: int, **fields: Any) -> Run:
        return self._next({"prompt": prompt})

    async def post(self, body: bytes) -> Run:
        return self._next({"bytes": body})

    async def busy(self) -> int | None:
        found = self.said.get("busy")
        return int(found.pop(0) if len(found) > 1 else found[0]) if found else None

    async def calm(self) -> int | None:
        return await self.busy()

    async def context(self) -> int | None:
        return self.said.get("context")

    async def tokenize(self, text: str, *, special: bool = False) -> list[int] | None:
        tokenize = self.said.get("tokenize")
        return tokenize(text, special) if tokenize else None


async def verdict(name: str, probe: Probe) -> Outcome:
    outcome = await CHECKS[name].run(probe)
    assert outcome.evidence
    return outcome


def error(status: int, message: str, **more: Any) -> Run:
    return Run(status=status, error={"message": message, **more}, end_ns=1_000_000)


# -- each check --


@pytest.mark.parametrize(
    ("run", "wanted"),
    [
        (answer(), "pass"),
        (answer(gap_ms=0.0), "not proven"),  # 21 ms in all: it may have been made that quickly
        (answer(gap_ms=0.0, sent_ns=-500_000_000), "fail"),
        (answer(["all at once"], sent_ns=-500_000_000), "not proven"),
        (answer([]), "fail"),
        (error(400, "no streams here"), "fail"),
        (error(429, "slow down"), "not proven"),
    ],
)
async def test_streaming(run: Run, wanted: str) -> None:
    """Tokens that come together at the end of a long wait were held back; a busy engine is not ill."""
    assert (await verdict("streaming", Canned(run))).verdict == wanted


@pytest.mark.parametrize(("run", "wanted"), [(answer(), "pass"), (answer(done=False), "fail"), (answer(finish=None), "fail")])
async def test_done(run: Run, wanted: str) -> None:
    """[DONE] stands behind a finish_reason."""
    assert (await verdict("done", Canned(run))).verdict == wanted


@pytest.mark.parametrize(
    ("run", "wanted"),
    [
        (answer(), "pass"),
        (answer(finish="stop"), "not proven"),
        (answer(finish=None), "fail"),
        (answer(usage={"prompt_tokens": 1, "completion_tokens": 40, "total_tokens": 41}), "fail"),
    ],
)
async def test_length(run: Run, wanted: str) -> None:
    """More tokens than were asked for, or an end without a reason, is wrong."""
    assert (await verdict("length", Canned(run))).verdict == wanted


def counted(prompt: int, completion: int, total: int) -> Run:
    return answer(usage={"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total})


@pytest.mark.parametrize(
    ("streamed", "whole", "wanted"),
    [
        (answer(), answer(), "pass"),
        (answer(usage={}), answer(), "fail"),
        (answer(), answer(usage={}), "fail"),
        (counted(10, 24, 30), answer(), "fail"),  # does not add up
        (counted(11, 24, 35), answer(), "fail"),  # the same prompt is counted differently
        (counted(10, 3, 13), answer(), "fail"),  # fewer tokens than events
        (counted(10, 25, 35), answer(), "fail"),
        (answer(finish="stop"), counted(10, 30, 40), "not proven"),  # other answers have other counts
    ],
)
async def test_usage(streamed: Run, whole: Run, wanted: str) -> None:
    """Usage is there, adds up, and is the same streamed and whole."""
    assert (await verdict("usage", Canned(streamed, whole))).verdict == wanted


async def test_usage_is_not_asked_of_an_engine_that_has_none() -> None:
    """The adapter's reason is the evidence."""
    assert await verdict("usage", Canned(answer(), cannot={"usage": "It counts nothing."})) == Outcome("not applicable", "It counts nothing.")


ENDS = {"<|im_end|>": [2], "<|endoftext|>": [0]}


def end_tokens(text: str, special: bool) -> list[int]:
    return ENDS.get(text, [9, 9]) if special else [7, 8, 9]


@pytest.mark.parametrize(
    ("runs", "wanted", "said"),
    [
        ([answer(["Yes"], finish="stop"), answer([], finish="stop")], "pass", "stops by itself after 1"),
        ([answer(["Yes", "<|im_end|>"], finish="length")], "fail", "says '<|im_end|>' as text"),
        ([answer(["Yes"], finish="stop"), answer([], finish="stop"), answer(["x"], finish="length")], "fail", "<|endoftext|> (0) ends no answer"),
        ([answer(finish="length")] * 3 + [answer([], finish="stop")], "pass", "<|im_end|> (2), <|endoftext|> (0) ends it"),
        ([answer(finish="length")], "not proven", "went on for 64 tokens"),
    ],
)
async def test_eos(runs: list[Run], wanted: str, said: str) -> None:
    """An answer ends by itself; each end token, sampled, ends one; and none of them comes out as text."""
    probe = Canned(*runs, tokenize=end_tokens)
    outcome = await verdict("eos", probe)
    assert (outcome.verdict, said in outcome.evidence) == (wanted, True), outcome


async def test_eos_tries_the_ids_that_the_vocabulary_says(tmp_path: Path) -> None:
    """Its own EOS and the template's end token, by their ids."""
    template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    from tidegate.engines.vocabulary import read_vocabulary

    vocabulary = read_vocabulary(written(tmp_path, spm(tokenizer__chat_template=template)))
    probe = Canned(answer(["Yes"], finish="stop"), vocabulary=vocabulary)
    assert (await verdict("eos", probe)).verdict == "pass"
    assert [body["logit_bias"] for body in probe.asked[1:]] == [{"2": 100}, {"3": 100}]


@pytest.mark.parametrize(
    ("second", "wanted"),
    [
        (lambda stop, text: answer([text.partition(stop)[0]], finish="stop"), "pass"),
        (lambda stop, text: answer([text.partition(stop)[0], stop], finish="stop"), "fail"),
        (lambda stop, text: answer([text.partition(stop)[0], stop[:2]], finish="stop"), "fail"),
        (lambda stop, text: answer(["something else"], finish="length"), "not proven"),
        (lambda stop, text: error(400, "no stop strings here"), "fail"),
    ],
)
async def test_stop(second: Any, wanted: str) -> None:
    """A stop string that lies across a border of tokens ends the answer, and neither it nor its beginning is in it."""
    first = answer()
    probe = Canned(first)

    class Obeys(Canned):
        def _next(self, fields: dict[str, Any]) -> Run:
            return second(fields["stop"][0], first.text) if "stop" in fields else first  # type: ignore[no-any-return]

    probe = Obeys(first)
    outcome = await verdict("stop", probe)
    assert outcome.verdict == wanted, outcome


def typed(grows: dict[str, int]) -> Any:
    """Prompt tokens of a message: 20, and what the control token in it adds (6 as text)."""

    class Counts(Canned):
        def _next(self, fields: dict[str, Any]) -> Run:
            typed_in = fields["prompt"].removeprefix("Say OK. ").removesuffix(" Say OK.")
            more = grows.get(typed_in, 6) if typed_in else 0
            return answer(["O"], usage={"prompt_tokens": 20 + more, "completion_tokens": 1, "total_tokens": 21 + more})

    return Counts


async def test_special_tokens_that_are_text() -> None:
    """Text of a control token takes several tokens."""
    outcome = await verdict("special_tokens", typed({})(answer()))
    assert outcome.verdict == "pass"
    assert "<|im_end|> +6" in outcome.evidence


async def test_special_tokens_that_are_control() -> None:
    """One token more means that the engine took the text for the control token itself; the evidence names it."""
    outcome = await verdict("special_tokens", typed({"<|end|>": 1})(answer()))
    assert outcome.verdict == "fail"
    assert outcome.evidence.startswith("<|end|> in a message is a control token")


async def test_special_tokens_where_words_are_counted() -> None:
    """An engine that counts words proves nothing."""
    assert (await verdict("special_tokens", typed({"Xqzvkwplotrmbxx": 1})(answer()))).verdict == "not proven"


async def test_special_tokens_that_are_refused() -> None:
    """What is refused reaches no model."""
    runs = [
        answer(["O"], usage={"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}) for tokens in (20, 30)
    ]
    outcome = await verdict("special_tokens", Canned(*runs, BadRequest("A control token.")))
    assert outcome.verdict == "pass"
    assert "<|im_end|> refused" in outcome.evidence


@pytest.mark.parametrize(
    ("run", "wanted"),
    [
        (answer(["你", "好", "😀"]), "pass"),
        (answer(["plain"]), "not proven"),
        (answer(["你", "\ufffd", "好"]), "fail"),
        (answer(["你", "\ufffd"]), "pass"),  # the limit fell into a character
        (answer(["你", "\ufffd"], finish="stop"), "fail"),
        (answer(["你", "\ud83d"]), "fail"),
        (answer(["你"], broken="bytes that are no UTF-8"), "fail"),
    ],
)
async def test_utf8(run: Run, wanted: str) -> None:
    """Characters that come broken are a fault, but for the last one of an answer that its limit cut."""
    assert (await verdict("utf8", Canned(run))).verdict == wanted


def vocabulary() -> Vocabulary:
    return Vocabulary({
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["▁", *(f"<0x{byte:02X}>" for byte in range(256))],
        "tokenizer.ggml.scores": [-1.0] * 257, "tokenizer.ggml.add_space_prefix": False,
    })


async def test_a_tokenizer_that_agrees() -> None:
    """The same ids for every text."""
    mine = vocabulary()
    outcome = await verdict("tokenizer", Canned(answer(), vocabulary=mine, tokenize=lambda text, special: mine.encode(text)))
    assert (outcome.verdict, outcome.evidence[:8]) == ("pass", "14 of 14")


async def test_a_tokenizer_that_does_not() -> None:
    """One id off in one text is enough."""
    mine = vocabulary()
    def tokenize(text: str, special: bool) -> list[int]:
        return [*mine.encode(text), *([5] if "Öl" in text else [])]

    outcome = await verdict("tokenizer", Canned(answer(), vocabulary=mine, tokenize=tokenize))
    assert outcome.verdict == "fail"
    assert outcome.evidence.startswith("1 of 14 texts")


@pytest.mark.parametrize(("bos", "wanted"), [({0}, "pass"), ({1}, "pass"), ({2}, "fail"), ({0, 1}, "fail")])
async def test_a_tokenizer_by_prompt_counts(bos: set[int], wanted: str) -> None:
    """Where the engine tells no ids, its counts are the vocabulary's, but for one BOS on all."""
    mine = vocabulary()

    class Counts(Canned):
        def _next(self, fields: dict[str, Any]) -> Run:
            more = sorted(bos)[len(self.asked) % len(bos)]
            self.asked.append(fields)
            return answer(["x"], usage={"prompt_tokens": len(mine.encode(fields["prompt"])) + more, "completion_tokens": 1, "total_tokens": 0})

    outcome = await verdict("tokenizer", Counts(answer(), vocabulary=mine))
    assert outcome.verdict == wanted
    if wanted == "fail":  # both counts are told, of the text that is furthest off
        text, _, counts = outcome.evidence.partition(": ")[2].partition(" is ")
        ours = len(mine.encode(ast.literal_eval(text)))
        assert counts == f"{ours + max(bos)}, not {ours}"


async def test_no_tokenizer_is_configured() -> None:
    """And the engine offers none."""
    assert (await verdict("tokenizer", Canned(answer()))).verdict == "not applicable"


@pytest.mark.parametrize(
    ("runs", "wanted"),
    [
        ([error(400, "bad JSON"), error(422, "wrong type"), error(404, "no such model")], "pass"),
        ([error(400, "bad JSON"), error(400, "wrong type"), answer()], "pass"),
        ([error(500, "parse error")], "fail"),
        ([error(400, "bad JSON"), answer()], "fail"),
        ([error(400, "")], "fail"),
    ],
)
async def test_errors(runs: list[Run], wanted: str) -> None:
    """A caller's mistake is a 4xx with a message; 500 reads as the engine's own."""
    assert (await verdict("errors", Canned(*runs))).verdict == wanted


def logprobs(*values: float, top: float = -0.1, **more: Any) -> Run:
    told = [{"token": "x", "logprob": value, "top_logprobs": [{"token": "x", "logprob": top}], **more} for value in values]
    return answer(["x"] * len(values), logprobs=told)


@pytest.mark.parametrize(
    ("run", "wanted"),
    [
        (logprobs(-0.1, -0.5, id=3), "pass"),
        (logprobs(0.4), "fail"),
        (logprobs(float("nan")), "fail"),
        (logprobs(-0.05, top=-3.0), "fail"),  # likelier than the likeliest
        (answer(logprobs=[{"token": "x", "logprob": -0.1}]), "fail"),  # one for 24 tokens
        (answer(), "fail"),
        (error(400, "logprobs are not supported"), "not applicable"),
    ],
)
async def test_logprobs(run: Run, wanted: str) -> None:
    """One for each token, none above zero, none above the likeliest."""
    assert (await verdict("logprobs", Canned(run))).verdict == wanted


@pytest.mark.parametrize(
    ("text", "finish", "wanted"),
    [
        ('{"colour": "red", "count": 3, "sure": true}', "stop", "pass"),
        ('{"colour": "pink", "count": 3, "sure": true}', "stop", "fail"),
        ("Once upon a time", "stop", "fail"),
        ('{"colour": "re', "length", "not proven"),
    ],
)
async def test_json_schema(text: str, finish: str, wanted: str) -> None:
    """Valid against the schema, not merely JSON."""
    assert (await verdict("json_schema", Canned(answer([text], finish=finish)))).verdict == wanted


async def test_seed() -> None:
    """Two answers with one seed are one answer."""
    assert (await verdict("seed", Canned(answer(["a"]), answer(["a"]), answer(["a"])))).verdict == "pass"
    outcome = await verdict("seed", Canned(answer(["a"]), answer(["ab"]), answer(["ac"])))
    assert (outcome.verdict, "after 1 characters" in outcome.evidence) == ("fail", True)


async def test_seed_under_load() -> None:
    """The first of the answers at once has the same seed as the one alone."""
    assert (await verdict("seed_under_load", Canned(answer([""]), answer(["a"]), answer(["a"]), answer(["b"])))).verdict == "pass"
    assert (await verdict("seed_under_load", Canned(answer([""]), answer(["a"]), answer(["b"])))).verdict == "fail"


class Context(Canned):
    """An engine with a context of 1,000 tokens that says `claims`; `over`: what a longer prompt gets."""

    def __init__(self, claims: int, over: Run | None, real: int = 1000) -> None:
        super().__init__(answer(), context=claims)
        self.over, self.real = over, real

    def _next(self, fields: dict[str, Any]) -> Run:
        tokens = 10 + len(fields["messages"][0]["content"].split())
        if tokens <= self.real:
            return answer(["x"], usage={"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1})
        if self.over is None:
            return answer(["x"], usage={"prompt_tokens": self.real, "completion_tokens": 1, "total_tokens": self.real + 1})
        return self.over


OVER = error(400, "too long", type="exceed_context_size_error", n_prompt_tokens=1200, n_ctx=1000)


@pytest.mark.parametrize(
    ("probe", "wanted", "said"),
    [
        (Context(1000, OVER), "pass", "of 1,000 claimed tokens pass"),
        (Context(1000, None), "fail", "not refused but cut (1000 tokens counted)"),
        (Context(1000, OVER, real=5000), "fail", "the claim is not the truth"),
        (Context(1000, error(400, "this model's maximum context length is 1000 tokens"), real=600), "fail", "of about 938 is refused"),
        (Context(900, OVER, real=900), "fail", "the refusal says 1,000"),
        (Context(1000, error(500, "assertion failed")), "fail", "words that do not say so"),
        (Context(1000, error(400, "bad request")), "fail", "words that do not say so"),
    ],
)
async def test_context(probe: Probe, wanted: str, said: str) -> None:
    """A longer prompt is refused as such, and what fits passes: the claim is the truth."""
    outcome = await verdict("context", probe)
    assert (outcome.verdict, said in outcome.evidence) == (wanted, True), outcome


async def test_a_context_that_does_not_fit_the_time_is_not_proven() -> None:
    """The evidence says what it would have taken."""
    probe = Context(1000, OVER)
    probe.until_ns = 0
    outcome = await verdict("context", probe)
    assert (outcome.verdict, "takes about" in outcome.evidence) == ("not proven", True)


@pytest.mark.parametrize(
    ("busy", "wanted"),
    [
        ([0], "pass"),
        ([1], "fail"),  # it goes on
        ([1, 1, 0], "pass"),
        ([2, 3, 2], "pass"),  # others came, and the count lagged: ours went all the same
        ([2], "fail"),
    ],
)
async def test_a_slot_is_free_when_the_count_falls(busy: list[int], wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the engine is at rest: it may be answering others. `busy` are its counts after an answer was left while one ran."""
    from tidegate.engines import probe

    monkeypatch.setattr(probe, "FREE_S", 0.05 if wanted == "fail" else 100.0)
    monkeypatch.setattr(probe, "LOOK_S", 0.0)
    assert (await Canned(answer(), busy=list(busy)).freed(1, time.perf_counter_ns(), "it")).verdict == wanted


# -- the whole --


@pytest.fixture
async def engine() -> AsyncIterator[Scripted]:
    """Quick, with a rhythm."""
    engine = await start(behaviour=Behaviour(curve("5"), curve("3"), slots=4))
    yield engine
    await engine.close()


class Deaf(Behaviour):
    """Does not obey stop strings."""

    def apply(self, request: Request, body: dict[str, Any]) -> Request:
        return super().apply(request, {key: value for key, value in body.items() if key != "stop"})



async def test_a_whole_report(engine: Scripted) -> None:
    """Every check has its verdict, in the order of the checks, twice the same."""
    first, second = await check_url(engine.url), await check_url(engine.url)
    assert [one.name for one in first.findings] == list(checks())
    assert [(one.name, one.verdict) for one in first.findings] == [(one.name, one.verdict) for one in second.findings]
    assert {one.name: one.verdict for one in first.findings if one.level == "must"} == {
        "streaming": "pass", "length": "not proven", "usage": "pass", "eos": "pass", "stop": "pass", "cancel": "pass", "cancel_whole": "pass",
        "special_tokens": "not proven", "utf8": "pass", "tokenizer": "not proven", "context": "not proven",
    }
    assert (first.adapter, first.model, first.failed_musts, exit_code(first)) == ("scripted", "scripted", [], 0)
    assert msgspec.json.decode(msgspec.json.encode(first))["findings"][0]["level"] == "must"


async def test_a_must_that_fails_is_exit_code_1(engine: Scripted) -> None:
    """And it is the one that was broken."""
    engine.behaviour = Deaf(curve("5"), curve("3"))
    report = await check_url(engine.url)
    assert ([one.name for one in report.failed_musts], exit_code(report)) == (["stop"], 1)


async def test_an_engine_that_goes_on_for_nobody(engine: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own count the slot of a client that left is never free."""
    from tidegate.engines import probe

    monkeypatch.setattr(probe, "FREE_S", 0.05)
    stats = engine.stats
    monkeypatch.setattr(engine, "stats", lambda: stats() | {"active": engine.active + engine.aborted})
    report = await check_url(engine.url)
    found = {one.name: one for one in report.findings}
    assert found["cancel"].verdict == "fail"
    assert "still being made" in found["cancel"].evidence


async def test_cancel_by_timing() -> None:
    """An engine that counts nothing is judged by how long the next request waits for its only slot."""
    engine = await start(behaviour=Behaviour(curve("30"), curve("15"), slots=1))
    try:
        report = await check_url(engine.url, adapter="openai")
    finally:
        await engine.close()
    found = {one.name: one for one in report.findings}
    assert found["cancel"].verdict == "pass", found["cancel"]
    assert "alone" in found["cancel"].evidence
    assert found["cancel_whole"].verdict == "not proven"


@pytest.mark.parametrize(("alone", "beside", "behind", "verdict"), [
    pytest.param(0, 1, 5, "not proven", id="noise-where-a-request-takes-no-time"),
    pytest.param(10, 45, 45, "not proven", id="noise-where-it-takes-little"),
    pytest.param(500, 600, 600, "not proven", id="little-where-it-takes-long"),
    pytest.param(5, 400, 12, "pass", id="free-at-once"),
    pytest.param(5, 400, 390, "fail", id="still-taken"),
    pytest.param(5, 400, 200, "not proven", id="half-of-it"),
])
def test_times_tell_only_what_noise_does_not(alone: float, beside: float, behind: float, verdict: str) -> None:
    """A must is not failed by some milliseconds."""
    assert by_times(alone, beside, behind).verdict == verdict
    assert by_times(alone, beside, behind, over=True).verdict == "not proven"


async def test_cancel_by_timing_fails_where_it_fails_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bad moment is none of the engine's; an engine of one slot that makes answers for nobody fails."""
    engine = await start(behaviour=Behaviour(curve("5"), curve("5"), slots=1))
    times = iter([5.0, 5.0, 400.0, 390.0, 5.0, 5.0, 400.0, 10.0])

    async def taken(_: Probe) -> float:
        return next(times)

    monkeypatch.setattr("tidegate.engines.checks.cancel._short_ms", taken)
    try:
        built = load("tidegate.engines.adapters", "openai").build("test", EngineSettings(adapter="openai", url=engine.url, models=["scripted"]))
        probe = Probe(built, "openai", "scripted")
        assert (await checks()["cancel"].run(probe)).verdict == "pass"
        times = iter([5.0, 5.0, 400.0, 390.0] * 3)
        assert (await checks()["cancel"].run(probe)).verdict == "fail"
        await probe.close()
        await built.close()
    finally:
        await engine.close()


async def test_a_real_context_is_found() -> None:
    """An engine that claims 300 tokens and refuses more."""
    engine = await start(behaviour=Behaviour(context=300))
    try:
        report = await check_url(engine.url, adapter="openai")
    finally:
        await engine.close()
    found = {one.name: one for one in report.findings}
    assert found["context"].verdict == "pass", found["context"]
    assert "of 300 claimed tokens pass" in found["context"].evidence


async def test_what_does_not_fit_the_time_is_not_proven() -> None:
    """The short answer alone takes longer than all may: the rest is not begun."""
    engine = await start(behaviour=Behaviour(curve("100"), curve("100")))
    steps: list[Step] = []
    try:
        report = await check_url(engine.url, limit_s=2.0, progress=steps.append)
    finally:
        await engine.close()
    late = [one for one in report.findings if "are left" in one.evidence or "not over after" in one.evidence]
    assert late
    assert {one.verdict for one in late} == {"not proven"}
    assert steps[-1].estimate_s > 2.0
    assert [step.name for step in steps[1:]] == list(checks())


async def test_a_registration_checks_cheap_musts_only(engine: Scripted) -> None:
    """No should, and nothing that takes long."""
    assert all(check.level == "must" for check in checks(quick=True).values())
    assert set(checks(quick=True)) == {"length", "usage", "stop", "cancel", "special_tokens", "tokenizer"}
    settings = EngineSettings(adapter="scripted", url=engine.url, models=["scripted"])
    built = load("tidegate.engines.adapters", "scripted").build("test", settings)
    probe = Probe(built, "scripted", "scripted")
    report = await run_checks(probe, engine.url, quick=True)
    await probe.close()
    await built.close()
    assert [one.name for one in report.findings] == list(checks(quick=True))
    assert report.failed_musts == []


@pytest.mark.parametrize(
    ("raised", "wanted"),
    [
        (EngineDown("gone"), "not proven"), (EngineRefused("busy", engine_status=429), "not proven"), (EngineError("garbage"), "fail"),
        (AttributeError("'int' object has no attribute 'get'"), "fail"), (BadRequest("The model has no input for it."), "not applicable"),
    ],
)
async def test_what_a_check_meets_is_a_verdict(raised: Exception, wanted: str) -> None:
    """An engine that restarts or is busy is not ill; one that answers nonsense is. No check keeps the others from running."""
    probe = Canned(answer(), raised)
    report = await run_checks(probe, "test", quick=True)
    assert [one.name for one in report.findings] == list(checks(quick=True))
    assert {one.verdict for one in report.findings if one.name == "usage"} == {wanted}


async def test_an_engine_of_bare_prompts() -> None:
    """Where there is no chat template all checks ask with bare prompts."""
    probe = Canned(error(400, "no chat template"), answer())
    await probe.short()
    assert probe.kind == "completion"
    assert "prompt" in probe.asked[-1]
    assert (await verdict("special_tokens", probe)).verdict == "not applicable"


async def test_an_engine_that_takes_no_messages_by_its_adapter() -> None:
    """The same where the adapter says so; and where it cannot ask for an answer of so many tokens at all, nothing is held against the engine."""
    probe = Canned(EngineError("It takes prompts only."), answer())
    assert (await probe.short()).status == 200
    assert probe.kind == "completion"
    probe = Canned(EngineError("It takes prompts only."), BadRequest("It has no input for max_tokens."))
    report = await run_checks(probe, "test", quick=True)
    assert (probe.kind, report.failed_musts) == ("completion", [])


async def test_nobody_there() -> None:
    """Not a verdict but an error."""
    with pytest.raises(EngineDown):
        await check_url("http://127.0.0.1:1")


@asynccontextmanager
async def _silent(asked: list[bytes], *, drips: bool = False) -> AsyncIterator[str]:
    """A server that never ends an answer: it says nothing, or drips blanks."""
    serving: list[asyncio.Task[Any] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        with contextlib.suppress(ConnectionError):
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            if drips:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99999999\r\n\r\n")
            while drips and not reader.at_eof() and not writer.is_closing():  # closed: uvloop's write raises no ConnectionError
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.02)
            await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.gather(*(one for one in serving if one is not None))


@pytest.mark.parametrize("drips", [False, True])
async def test_a_server_that_hangs_or_drips_costs_no_more_than_its_share_of_the_time(drips: bool) -> None:
    """Finding out who is there is part of the time limit."""
    async with _silent([], drips=drips) as url:
        with pytest.raises(EngineDown, match=r"did not say within 0\.1 s") as caught:
            await check_url(url, limit_s=0.2)
    assert "--time-limit" in str(caught.value.hint)


async def test_an_engine_that_does_not_list_its_models_is_asked_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its silence there is not waited for again at each other path."""
    asked: list[bytes] = []
    monkeypatch.setattr(conformance, "_ANSWER_S", 0.1)
    async with _silent(asked) as url:
        with pytest.raises(EngineDown, match=r"did not list its models within 0\.1 s"):
            await detect(url)
    assert len(asked) == 1


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """A file is a regular file."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadRequest, match="is no regular file"):
        check_file(tmp_path / "pipe")


@pytest.mark.parametrize(("url", "why"), [("ftp://host", "must begin with http"), ("http://u:p@host", "must not carry a user")])
async def test_addresses_that_are_none(url: str, why: str) -> None:
    """Said as a mistake of the caller's."""
    with pytest.raises(SettingsError, match=why):
        await check_url(url)


def test_every_check_is_in_the_docs() -> None:
    """With its level and what it proves, in the order of the report."""
    page = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text("utf-8")
    rows = [f"| `{name}` | {check.level} | {check.about} |" for name, check in checks().items()]
    found = [page.find(row) for row in rows]
    assert found == sorted(found)
    assert -1 not in found
    assert ", ".join(f"`{name}`" for name in checks(quick=True)) in page


# -- which engine it is --

LISTS: dict[str, dict[str, Any]] = {
    "llama_cpp": {"/v1/models": {"data": [{"id": "m", "owned_by": "llamacpp"}]}},
    "vllm": {"/v1/models": {"data": [{"id": "m", "owned_by": "vllm"}]}, "/version": {"version": "0.32.0"}},
    "sglang": {"/v1/models": {"data": [{"id": "m", "owned_by": "sglang"}]}},
    "tgi": {"/v1/models": {"data": [{"id": "m", "owned_by": "-"}]}, "/info": {"model_id": "m", "max_total_tokens": 4096}},
    "openai": {"/v1/models": {"data": [{"id": "m", "owned_by": "somebody"}]}},
}


async def _listing(paths: dict[str, Any]) -> tuple[asyncio.Server, str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                while (await reader.readline()).strip():
                    pass
                said = paths.get(line.split()[1].decode())
                body = json.dumps(said if said is not None else {"error": {"message": "no route"}}).encode()
                status = b"200 OK" if said is not None else b"404 Not Found"
                writer.write(b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("name", [name for name in LISTS if name in names("tidegate.engines.adapters")])
async def test_engines_are_told_apart(name: str) -> None:
    """By what each answers beside OpenAI's API."""
    server, url = await _listing(LISTS[name])
    try:
        assert await detect(url) == name
    finally:
        server.close()


async def test_tritons_http_port_is_named_as_such() -> None:
    """Tidegate speaks gRPC to Triton: the error names the port that is meant."""
    server, url = await _listing({"/v2": {"name": "triton", "version": "2.51.0"}})
    try:
        with pytest.raises(SettingsError, match="Triton's HTTP port"):
            await detect(url)
    finally:
        server.close()


# -- files --


def test_a_file_is_checked_for_what_it_can_prove(tmp_path: Path) -> None:
    """Vectors beside it, its end tokens, its control tokens; a context is only a claim."""
    file = written(tmp_path, spm(tokenizer__chat_template="{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"))
    (tmp_path / "toy.gguf.inp").write_text("ab\n__ggml_vocab_test__\nb\n__ggml_vocab_test__\n")
    (tmp_path / "toy.gguf.out").write_text(" 8\n 4 6\n")
    report = check_file(file)
    assert {one.name: one.verdict for one in report.findings} == {
        "tokenizer": "pass", "eos": "not proven", "special_tokens": "pass", "context": "not proven",
    }
    assert "2 </s>, but the chat template ends an answer with 3 <|end|>" in report.findings[1].evidence
    assert exit_code(report) == 0
    (tmp_path / "toy.gguf.out").write_text(" 8\n 6\n")
    assert [one.name for one in check_file(file).failed_musts] == ["tokenizer"]


def test_a_file_without_an_end_fails(tmp_path: Path) -> None:
    """No engine could tell when an answer is over."""
    file = written(tmp_path, gguf(tokenizer__ggml__model="llama", tokenizer__ggml__tokens=["a"], tokenizer__ggml__scores=[0.0]))
    assert "eos" in {one.name for one in check_file(file).failed_musts}


@needs_data
@pytest.mark.parametrize(("family", "eos"), [("gpt-2", "pass"), ("phi-3", "not proven"), ("qwen2", "not proven")])
def test_real_vocabularies(family: str, eos: str) -> None:
    """All three tokenize as llama.cpp does; two end their chats with another token than their EOS."""
    report = check_file(VOCABULARIES / f"ggml-vocab-{family}.gguf.gz")
    assert {one.name: one.verdict for one in report.findings} == {
        "tokenizer": "pass", "eos": eos, "special_tokens": "pass", "context": "not proven",
    }
