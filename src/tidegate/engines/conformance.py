"""Does an engine do what the gateway relies on? Checks with a verdict and a line of evidence each: by hand (`tidegate check`), and at registration.

A check is a file of `engines/checks/`. Verdicts: pass; fail; not proven, where the engine, the model or the time gave no proof; not applicable.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from tidegate.core.errors import BadRequest, ContextTooLong, EngineDown, EngineStalled, SettingsError, TidegateError
from tidegate.core.plugins import load, names
from tidegate.core.ports import Engine
from tidegate.engines.openai_http import OpenAIHttp
from tidegate.engines.probe import Check, Level, Outcome, Probe, Verdict, failed, inapplicable, passed, unproven
from tidegate.engines.settings import EngineSettings
from tidegate.engines.vocabulary import Vocabulary, read_vectors, read_vocabulary

_ADAPTERS = "tidegate.engines.adapters"
_CHECKS = "tidegate.engines.checks"
#: Seconds that all checks may take, unless the engine is slow or the caller says otherwise.
USUAL_S = 30.0
#: Seconds that they may take at most where nobody said how long: a slow engine is given the time that was estimated, up to here.
SLOW_S = 120.0
#: Seconds that the checks of a registration may take.
QUICK_S = 20.0
#: An estimate is an estimate: a check begins where that much of it is left, and is given up after that much more.
_MARGIN = 1.5
_LEAST_S = 2.0
#: One check must not take the time of all others: it is given up after this much more than was estimated for it, though never before so many seconds.
_MOST_TIMES = 4.0
_PATIENT_S = 15.0
#: Seconds that a check of a registration waits for the answers that the engine makes for others.
_GIVE_WAY_S = 2.0
#: Finding out who is there may take this part of the time of all checks.
_MEETING = 0.5
#: Seconds for each question of it.
_ANSWER_S = 5.0


class Finding(msgspec.Struct):
    """What one check found."""

    name: str
    level: Level
    verdict: Verdict
    evidence: str
    ms: float


class Report(msgspec.Struct):
    """What all checks found, in their order. `estimate_s` and `limit_s` are 0 where nothing had to be waited for."""

    target: str
    adapter: str
    model: str
    findings: list[Finding]
    seconds: float = 0.0
    estimate_s: float = 0.0
    limit_s: float = 0.0

    @property
    def failed_musts(self) -> list[Finding]:
        """What keeps the engine from being used; empty where nothing does."""
        return [one for one in self.findings if one.level == "must" and one.verdict == "fail"]


class Step(msgspec.Struct):
    """How far it has got: `name` is the check that begins, number `number` of `total`. `estimate_s` is 0 until it is known."""

    number: int
    total: int
    name: str
    estimate_s: float
    limit_s: float


def checks(*, quick: bool = False) -> dict[str, Check]:
    """All checks by name, in the order in which they are run; only those of a registration where `quick`."""
    found: dict[str, Check] = {name: load(_CHECKS, name).CHECK for name in names(_CHECKS)}
    return {name: check for name, check in sorted(found.items(), key=lambda one: one[1].order) if check.quick or not quick}


async def run_checks(
    probe: Probe, target: str, *, quick: bool = False, limit_s: float | None = None, spent_s: float = 0.0,
    progress: Callable[[Step], None] | None = None,
) -> Report:
    """Run the checks, one after the other. Raises EngineDown where the engine cannot be reached at all, SettingsError where it refuses the key.

    `limit_s`: how long all may take; None: `USUAL_S`, or the time that the engine's own speed makes of it, up to `SLOW_S`. What would not fit is
    not proven. `spent_s`: what of it was spent before.
    """
    begun_ns = time.perf_counter_ns() - int(spent_s * 1e9)
    probe.quick = quick
    chosen = checks(quick=quick)
    report = Report(target, probe.adapter, probe.model, [], limit_s=limit_s or (QUICK_S if quick else USUAL_S))
    probe.until_ns = begun_ns + int(report.limit_s * 1e9)
    if progress is not None:
        progress(Step(0, len(chosen), "speed", 0.0, report.limit_s))
    await _measure(probe, quick=quick)
    report.estimate_s = round((time.perf_counter_ns() - begun_ns) / 1e9 + sum([await _estimate_s(probe, *one) for one in chosen.items()]), 1)
    if limit_s is None and not quick:
        report.limit_s = max(USUAL_S, min(report.estimate_s * _MARGIN, SLOW_S))
        probe.until_ns = begun_ns + int(report.limit_s * 1e9)
    for number, (name, check) in enumerate(chosen.items(), 1):
        if quick:
            await probe.idle(_GIVE_WAY_S)  # whoever is being answered goes first
        if progress is not None:
            progress(Step(number, len(chosen), name, report.estimate_s, report.limit_s))
        report.findings.append(await _find(probe, name, check))
    report.seconds = round((time.perf_counter_ns() - begun_ns) / 1e9, 2)
    return report


async def _measure(probe: Probe, *, quick: bool) -> None:
    """The first answers, whose speed the estimate rests on. What is wrong with them is for the checks to say, but for an engine that is not there."""
    try:
        async with asyncio.timeout(max(probe.left_s(), 0.01)):
            short = await probe.short()
            if short.status in (401, 403):
                raise SettingsError(
                    f"The engine refuses the key ({short.why}).", hint="Give one with --api-key-env VARIABLE, or api_key in [engines.NAME]."
                )
            if not quick:
                await probe.pace()
    except (EngineDown, SettingsError):
        raise
    except Exception:  # noqa: BLE001 - an engine under test may answer anything; the checks that ask for the same say what
        return


async def _estimate_s(probe: Probe, name: str, check: Check) -> float:
    spent = check.prompts * probe.first_ms / 1e3 + check.tokens / (probe.decode_per_s or 1e9)
    if name == "context" and probe.prefill_per_s:
        spent += min(await probe.context() or 0, 262_144) / probe.prefill_per_s
    return spent


async def _find(probe: Probe, name: str, check: Check) -> Finding:
    begun_ns = time.perf_counter_ns()
    left_s = probe.left_s()
    # `context` makes its prompt as long as the time allows
    needs_s = 0.0 if name == "context" else await _estimate_s(probe, name, check)
    if left_s < max(needs_s, 0.05):
        outcome = unproven(f"takes about {needs_s:.1f} s, and {max(left_s, 0.0):.1f} s are left (--time-limit)")
    else:
        within_s = left_s if name == "context" else min(left_s, max(_MOST_TIMES * needs_s, _PATIENT_S))
        outcome = await _outcome(probe, check, max(within_s, _LEAST_S))
    return Finding(name, check.level, outcome.verdict, outcome.evidence, round((time.perf_counter_ns() - begun_ns) / 1e6, 1))


async def _outcome(probe: Probe, check: Check, within_s: float) -> Outcome:
    try:
        async with asyncio.timeout(within_s):
            return await check.run(probe)
    except TimeoutError:
        return unproven(f"not over after {within_s:.1f} s (--time-limit)")
    except (EngineDown, EngineStalled) as error:
        return unproven(error.message[:300])  # whether it may be used is for those to say who watch it
    except TidegateError as error:
        if isinstance(error, BadRequest) and not isinstance(error, ContextTooLong):
            return inapplicable(error.message[:300])  # the adapter says that this engine has no way to be asked for it
        return unproven(error.message[:300]) if error.http_status in (429, 503, 504) else failed(error.message[:300])
    except Exception as error:  # noqa: BLE001 - an engine under test may answer anything, and one check must not keep the others from running
        return failed(f"the engine answers what cannot be read: {error!r}"[:300])


# -- an engine by its address


async def check_url(
    url: str, *, adapter: str | None = None, model: str | None = None, api_key: str | None = None, tokenizer: Path | None = None,
    chat_template: str | None = None, limit_s: float | None = None, progress: Callable[[Step], None] | None = None,
) -> Report:
    """`tidegate check URL`. Raises SettingsError and BadRequest for what was asked wrongly, EngineDown where nobody answers."""
    vocabulary = read_vocabulary(tokenizer) if tokenizer is not None else None
    vectors = read_vectors(tokenizer) if tokenizer is not None else []
    if adapter is not None:
        load(_ADAPTERS, adapter)  # a name that is none is said before anybody is asked
    begun_ns = time.perf_counter_ns()
    within_s = (limit_s or USUAL_S) * _MEETING
    probe: Probe | None = None
    try:
        try:
            async with asyncio.timeout(within_s):
                adapter = adapter or await detect(url, api_key)
                model = model or await _first_model(url, api_key, adapter)
                probe = Probe(_engine(adapter, url, model, api_key, chat_template), adapter, model, vocabulary, vectors)
                up = await probe.engine.figures()
        except TimeoutError:
            raise EngineDown(
                f"The engine at {url} did not say within {within_s:g} s what it is and which models it has.",
                hint="Is it hung or overloaded? --time-limit gives it longer; --adapter and --model spare the questions.",
            ) from None
        if not up.get("up"):
            raise EngineDown(str(up.get("why") or "The engine does not answer."), hint="Is it running, and is the address right?")
        return await run_checks(probe, url, limit_s=limit_s, spent_s=(time.perf_counter_ns() - begun_ns) / 1e9, progress=progress)
    finally:
        if probe is not None:
            await probe.close()
            await probe.engine.close()


async def detect(url: str, api_key: str | None = None) -> str:
    """The adapter for the server at an address, by what it answers beside OpenAI's API. Raises EngineDown where nobody answers."""
    known = names(_ADAPTERS)
    engine = OpenAIHttp("check", _section("openai", url, "-", api_key))
    try:
        listed = await _listed(engine)
        owners = {str(one.get("owned_by")) for one in listed.get("data") or () if isinstance(one, dict)}
        found = "openai"
        if "scripted" in owners:
            found = "scripted"
        elif "llamacpp" in owners or "default_generation_settings" in await _told(engine, f"{engine.root}/props"):
            found = "llama_cpp"
        elif "sglang" in owners or "model_path" in await _told(engine, f"{engine.root}/get_model_info"):
            found = "sglang"
        elif "vllm" in owners or ("version" in await _told(engine, f"{engine.root}/version") and owners):
            found = "vllm"
        elif {"model_id", "max_total_tokens"} <= (await _told(engine, f"{engine.root}/info")).keys():
            found = "tgi"
        elif (await _told(engine, f"{engine.root}/v2")).get("name") == "triton":
            raise SettingsError(
                "This is Triton's HTTP port; Tidegate speaks gRPC to it.", hint="Name its gRPC port (8001 by default), with --adapter triton."
            )
        elif not owners and await _is_triton(url, known):
            found = "triton"
        return found if found in known else "openai"
    finally:
        await engine.close()


async def _is_triton(url: str, known: list[str]) -> bool:
    """Whether somebody speaks Triton's gRPC there; False too where the package for it is missing."""
    if "triton" not in known:
        return False
    try:
        engine = _engine("triton", url, "-", None)
    except TidegateError:
        return False
    try:
        return bool((await engine.figures()).get("up"))
    finally:
        await engine.close()


async def _listed(engine: OpenAIHttp) -> dict[str, Any]:
    """What it says to the one question that every engine answers, if only with a refusal: whoever is silent here is silent everywhere."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await engine.get_json(f"{engine.base}/models")
    except EngineDown:
        raise
    except TimeoutError:
        raise EngineDown(
            f"The engine did not list its models within {_ANSWER_S:g} s.", hint="Is it hung or overloaded? Its log may say why."
        ) from None
    except TidegateError:
        return {}


async def _told(engine: OpenAIHttp, path: str) -> dict[str, Any]:
    """The JSON object at a path; {} where there is none."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await engine.get_json(path)
    except EngineDown:
        raise
    except (TidegateError, TimeoutError):
        return {}


async def _first_model(url: str, api_key: str | None, adapter: str) -> str:
    if adapter != "triton":
        engine = OpenAIHttp("check", _section("openai", url, "-", api_key))
        try:
            listed = await engine.get_json(f"{engine.base}/models")
        finally:
            await engine.close()
        found = [str(one["id"]) for one in listed.get("data") or () if isinstance(one, dict) and one.get("id")]
        if found:
            return found[0]
    raise SettingsError("The engine does not list its models.", hint="Name one with --model.")


def _section(adapter: str, url: str, model: str, api_key: str | None, chat_template: str | None = None) -> EngineSettings:
    fields = {"adapter": adapter, "url": url, "models": [model], "api_key": api_key, "chat_template": chat_template}
    try:
        return EngineSettings.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        said = error.errors()[0]
        raise SettingsError(f"{'.'.join(map(str, said['loc']))}: {said['msg']}", hint="Example: tidegate check http://127.0.0.1:8000") from None


def _engine(adapter: str, url: str, model: str, api_key: str | None, chat_template: str | None = None) -> Engine:
    built: Engine = load(_ADAPTERS, adapter).build("check", _section(adapter, url, model, api_key, chat_template))
    return built


# -- a file alone


def check_file(path: Path) -> Report:
    """`tidegate check FILE.gguf`: what a vocabulary alone can prove. Raises BadRequest where the file cannot be read."""
    begun_ns = time.perf_counter_ns()
    vocabulary = read_vocabulary(path)
    report = Report(str(path), "gguf", vocabulary.name or vocabulary.architecture, [])
    for name, look in _OFFLINE.items():
        at_ns = time.perf_counter_ns()
        outcome = look(vocabulary, read_vectors(path))
        report.findings.append(Finding(name, "must", outcome.verdict, outcome.evidence, round((time.perf_counter_ns() - at_ns) / 1e6, 1)))
    report.seconds = round((time.perf_counter_ns() - begun_ns) / 1e9, 2)
    return report


Vectors = list[tuple[str, list[int]]]


def _tokenizer(vocabulary: Vocabulary, vectors: Vectors) -> Outcome:
    if vocabulary.why_not:
        return unproven(f"its ids cannot be computed here: {vocabulary.why_not}")
    size = f"{len(vocabulary.tokens):,} tokens, {vocabulary.kind} ({vocabulary.pre})"
    if not vectors:
        return unproven(f"{size}; no test vectors lie beside the file (NAME.gguf.inp, NAME.gguf.out)")
    wrong = [text for text, ids in vectors if vocabulary.encode(text) != ids]
    if wrong:
        return failed(f"{size}; {len(wrong)} of {len(vectors)} test vectors become other ids, the first {wrong[0][:32]!r}")
    return passed(f"{size}; {len(vectors)} of {len(vectors)} test vectors become the ids beside the file")


def _eos(vocabulary: Vocabulary, _vectors: Vectors) -> Outcome:
    named = {number: f"{number} {vocabulary.tokens[number]}" for number in vocabulary.end_ids}
    if vocabulary.eos_id is None:
        return failed("the vocabulary names no end of sequence")
    ends = vocabulary.template_end_id
    if not vocabulary.chat_template:
        return passed(f"EOS is {named[vocabulary.eos_id]}; there is no chat template")
    if ends is None:
        return unproven(f"EOS is {named[vocabulary.eos_id]}; the chat template puts no token of its own behind an answer")
    if ends in (vocabulary.eos_id, vocabulary.eot_id):
        return passed(f"EOS is {named[vocabulary.eos_id]}; the chat template ends an answer with {named[ends]}")
    return unproven(
        f"EOS is {named[vocabulary.eos_id]}, but the chat template ends an answer with {named[ends]}: an engine has to stop at both; check it running"
    )


def _special_tokens(vocabulary: Vocabulary, _vectors: Vectors) -> Outcome:
    if vocabulary.why_not:
        return unproven(f"its ids cannot be computed here: {vocabulary.why_not}")
    control = vocabulary.control
    if not control:
        return inapplicable("the vocabulary has no control tokens")
    typed = {token: vocabulary.encode(token) for token in control}
    ends = set(vocabulary.end_ids)
    wrong = [token for token, ids in typed.items() if vocabulary.id_of(token) in ids]
    wrong += [vocabulary.tokens[number] for number in ends if number in vocabulary.encode(vocabulary.tokens[number])]
    if wrong:
        return failed(f"typed as text, {', '.join(wrong[:4])} is a control token all the same")
    sizes = [len(ids) for ids in typed.values()]
    return passed(f"typed as text, {len(control)} of {len(control)} control tokens become {min(sizes)} to {max(sizes)} ordinary ones")


def _context(vocabulary: Vocabulary, _vectors: Vectors) -> Outcome:
    if vocabulary.context is None:
        return unproven("the file claims no context length")
    return unproven(f"the file claims {vocabulary.context:,} tokens; only a running engine shows how many are real")


_OFFLINE: dict[str, Callable[[Vocabulary, Vectors], Outcome]] = {
    "tokenizer": _tokenizer, "eos": _eos, "special_tokens": _special_tokens, "context": _context,
}


def exit_code(report: Report) -> int:
    """0: no must failed; 1: one did."""
    return 1 if report.failed_musts else 0
