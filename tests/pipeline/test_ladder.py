"""The ladder on fakes that fail to order: which failure leads to which rung, and what is never done."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.ask import Ask, Caller, Deadline, EngineAnswer, EngineCall, Passage, Said
from tidegate.core.chunk import Chunk, Usage
from tidegate.core.errors import (
    Busy,
    CannotContinue,
    ContextTooLong,
    EmbedderDown,
    EngineCut,
    EngineDown,
    EngineError,
    EngineRefused,
    EngineStalled,
    NoAnswer,
    NotFound,
    SettingsError,
    StoreDown,
    TidegateError,
)
from tidegate.core.flight import Flight
from tidegate.core.plugins import load as load_plugin
from tidegate.core.ports import Engine, EngineStream
from tidegate.core.search import Filter
from tidegate.engines.cause import Cause
from tidegate.pipeline.capability import Capability, load
from tidegate.pipeline.ladder import Enter, Ladder
from tidegate.pipeline.parts import Parts
from tidegate.pipeline.settings import BudgetSettings
from tidegate.retrieval.search import Searched, Steps

INPUT = {"type": "object", "properties": {"question": {"type": "string"}}, "required": ["question"]}
ANSWER = {
    "type": "object", "required": ["answer", "citations"], "additionalProperties": False,
    "properties": {"answer": {"type": "string", "minLength": 1}, "citations": {"type": "array"}},
}
TEMPLATE = "{% block system %}{{ rung }} {{ searched }}{% endblock %}{% block user %}{{ input.question }}{% endblock %}"
MESSAGE = '[[ladder]]\nrung = "message"\ncode = "support_unavailable"\nmessage = "Nobody can answer just now."\nhint = "Call us."\n'
MANIFEST = """
stages = ["retrieve", "prompt", "generate", "cite"]
model = "large"
[budgets]
retrieve_s = 0.2
total_s = 30.0
[faq]
file = "faq.toml"
[[ladder]]
rung = "no_retrieval"
note = "Without documents:"
[[ladder]]
rung = "small_model"
model = "small"
[[ladder]]
rung = "faq"
""" + MESSAGE
#: What a loaded machine keeps too: these tests are of other things.
PATIENT = BudgetSettings(profile="embedded", retrieve_s=2.0, first_token_s=30.0)
NO_RETRIEVAL = '[[ladder]]\nrung = "no_retrieval"\nnote = "Without documents:"\n'
FAQ = '[defaults]\ncitations = []\n[[entry]]\nkeywords = ["hours"]\noutput = { answer = "From nine to five." }\n'


def write(
    folder: Path, manifest: str = MANIFEST, output: object = ANSWER, faq: str = FAQ, budgets: BudgetSettings = PATIENT
) -> Capability:
    here = folder / "group" / "name"
    (here / "prompts" / "v1").mkdir(parents=True, exist_ok=True)
    (here / "capability.toml").write_text(manifest)
    (here / "input.schema.json").write_text(json.dumps(INPUT))
    (here / "output.schema.json").write_text(json.dumps(output))
    (here / "prompts" / "v1" / "template.jinja").write_text(TEMPLATE)
    (here / "faq.toml").write_text(faq)
    return load(here, budgets)


class Stream:
    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.usage = Usage(10, 1)

    async def relay(self, take: Any) -> None:
        for piece in self.engine.says:
            if rest := take([Chunk(time.perf_counter_ns(), text=piece)]):
                await rest
        if self.engine.breaks is not None:
            raise self.engine.breaks
        if self.engine.hangs:
            await asyncio.Event().wait()
        take([Chunk(time.perf_counter_ns(), kind="usage", finish="stop", usage=Usage(10, len(self.engine.says)))])

    def abort(self) -> None: ...


class FakeEngine:
    """`fails` at once, or `says` its pieces and then `breaks` or `hangs`."""

    def __init__(
        self, name: str, says: list[str] | None = None, *, fails: Exception | None = None, breaks: Exception | None = None, hangs: bool = False
    ) -> None:
        self.name = name
        self.models: tuple[str, ...] = (name,)
        self.says, self.fails, self.breaks, self.hangs = says or [], fails, breaks, hangs
        self.calls: list[EngineCall] = []
        self.takes_s = 0.0

    async def start(self, call: EngineCall, flight: Flight) -> Stream:
        self.calls.append(call)
        await asyncio.sleep(self.takes_s)
        if self.fails is not None:
            raise self.fails
        return Stream(self)

    async def whole(self, call: EngineCall, flight: Flight) -> EngineAnswer:
        raise AssertionError("capabilities stream from the engine")

    async def continue_from(self, call: EngineCall, said: Said, flight: Flight, *, forbid: str = "") -> EngineStream:
        raise CannotContinue("It cannot.")

    async def figures(self) -> dict[str, Any]:
        return {"up": True}

    async def close(self) -> None: ...


class Fleet:
    def __init__(self, *engines: FakeEngine) -> None:
        self.engines = {engine.name: engine for engine in engines}

    def find(self, model: str | None, ask: Ask | None = None) -> tuple[Engine, str]:
        if model not in self.engines:
            raise NotFound(f"There is no model {model!r}.")
        return self.engines[model], model

    def instances(self, model: str | None, ask: Ask | None = None) -> list[tuple[Engine, str]]:
        return [self.find(model)]

    def another(self, model: str | None, ask: Ask, tried: Sequence[Engine], cause: Cause, *, free: bool = False) -> tuple[Engine, str] | None:
        return None

    def blame(self, engine: Engine) -> None: ...


class Searcher:
    def __init__(self, fails: TidegateError | None = None, hangs: bool = False) -> None:
        self.fails, self.hangs, self.searches = fails, hangs, 0

    async def find(self, question: str, *, k: int, wanted: Filter, collection: str, steps: Steps, ask: Ask) -> Searched:
        self.searches += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.fails is not None:
            raise self.fails
        return Searched([Passage("p1", "doc.md", "Doc", "Nine to five.", 0.9)], "index-1")


class Bench:
    """One capability with its ladder, and what became of one request."""

    def __init__(self, capability: Capability, large: FakeEngine, small: FakeEngine | None = None, search: Searcher | None = None) -> None:
        self.search, self.large = search or Searcher(), large
        parts = Parts(Fleet(large, *([small] if small else [])), self.search)
        stages = [load_plugin("tidegate.pipeline.stages", name).build(capability, parts) for name in capability.manifest.stages]
        self.ladder = Ladder(capability, stages, parts)
        self.seen: list[str] = []
        self.ask = Ask(Flight("/test"), Caller("key", "tenant"), Deadline(60))
        self.ask.capability = "group/name"

    async def run(
        self, question: str = "What are your hours?", *, stream: bool = False, failed: TidegateError | None = None, enter: Enter | None = None
    ) -> Ask:
        self.ask.input = {"question": question}
        if stream:
            self.ask.emit = lambda batch: self.seen.extend(chunk.text for chunk in batch if chunk.kind == "text")
        await self.ladder.walk(self.ask, failed, enter)
        return self.ask

    def steps(self) -> list[tuple[str, str]]:
        return [(facts["rung"], facts["to"]) for _, what, facts in self.ask.flight.decisions if what == "stepped_down"]

    def passed_over(self) -> dict[str, str]:
        return {facts["rung"]: facts["why"] for _, what, facts in self.ask.flight.decisions if what == "rung_passed_over"}


def rung(ask: Ask) -> str:
    return ask.landing.rung if ask.landing is not None else "full"


def down() -> EngineDown:
    return EngineDown("It is down.")


OOM = EngineRefused("CUDA out of memory.", engine_status=500, engine_code="server_error")


async def test_where_all_is_well_nobody_steps_down(tmp_path: Path) -> None:
    """The full answer, with its passages, and no word of a ladder."""
    bench = Bench(write(tmp_path), FakeEngine("large", ["Nine."]), FakeEngine("small", ["small"]))
    ask = await bench.run()
    assert ask.answer is not None
    assert (rung(ask), ask.answer["answer"], len(ask.passages), bench.steps()) == ("full", "Nine.", 1, [])


@pytest.mark.parametrize(
    "error",
    [
        down(), OOM, EngineStalled("Silent."), EngineError("It refuses our key."),
        EngineRefused("Slow down.", engine_status=429, retry_after_s=7), EngineRefused("Loading.", engine_status=503),
        EngineRefused("Request failed during generation: CUDA out of memory.", engine_status=424),
    ],
)
async def test_an_engine_that_fails_is_not_asked_again(tmp_path: Path, error: TidegateError) -> None:
    """Down, out of memory, silent, busy: the small model answers, from the passages that were found already; the rung without documents, which
    would ask the same model, is passed over."""
    large, small = FakeEngine("large", fails=error), FakeEngine("small", ["Small."])
    bench = Bench(write(tmp_path), large, small)
    ask = await bench.run()
    assert ask.answer is not None
    assert (rung(ask), ask.answer["answer"]) == ("small_model", "Small.")
    assert (len(large.calls), bench.search.searches, len(ask.passages)) == (1, 1, 1)
    assert bench.passed_over() == {"no_retrieval": "it asks 'large' too"}
    assert ask.landing is not None
    assert ask.landing.cause == error.public_code
    assert (ask.flight.model, ask.flight.engine, ask.flight.end) == ("small", "small", "stop")


@pytest.mark.parametrize("error", [StoreDown("Gone."), EmbedderDown("Gone.")])
@pytest.mark.parametrize("stream", [False, True])
async def test_without_the_database_the_answer_says_so(tmp_path: Path, error: TidegateError, stream: bool) -> None:
    """No retrieval: the same model answers without passages, and its answer begins with the rung's sentence, streamed or not."""
    bench = Bench(write(tmp_path), FakeEngine("large", ["Nine."]), FakeEngine("small"), Searcher(fails=error))
    ask = await bench.run(stream=stream)
    assert ask.answer is not None
    assert (rung(ask), ask.answer, ask.flight.index_version) == ("no_retrieval", {"answer": "Without documents:\n\nNine.", "citations": []}, "")
    assert "".join(bench.seen) == (ask.answer["answer"] if stream else "")
    assert ask.call is not None
    assert ask.call.body["messages"][0]["content"] == "no_retrieval False"


async def test_a_search_that_hangs_costs_its_own_budget(tmp_path: Path) -> None:
    """A database that does not answer is a database that is down, after budgets.retrieve_s."""
    bench = Bench(write(tmp_path), FakeEngine("large", ["Nine."]), FakeEngine("small"), Searcher(hangs=True))
    assert rung(await bench.run()) == "no_retrieval"
    assert bench.steps() == [("full", "no_retrieval")]


async def test_budgets_that_the_capability_does_not_say_are_those_of_the_profile(tmp_path: Path) -> None:
    """A silent engine is cancelled after the common first_token_s, and the next rung answers; the search has the capability's own time."""
    capability = write(tmp_path, budgets=BudgetSettings(profile="gpu", retrieve_s=30.0, first_token_s=0.05))
    assert (capability.budgets.retrieve_s, capability.budgets.first_token_s) == (0.2, 0.05)
    ask = await Bench(capability, FakeEngine("large", hangs=True), FakeEngine("small", ["Small."])).run()
    assert (rung(ask), ask.landing and ask.landing.cause) == ("small_model", "engine_stalled")


async def test_with_database_and_engine_down_the_small_model_leaves_documents_out_too(tmp_path: Path) -> None:
    """Two failures: a rung rests on neither, and its answer says both."""
    bench = Bench(write(tmp_path), FakeEngine("large", fails=down()), FakeEngine("small", ["Small."]), Searcher(fails=StoreDown("Gone.")))
    ask = await bench.run()
    assert ask.answer is not None
    assert ask.landing is not None
    assert (rung(ask), ask.answer["answer"]) == ("small_model", "Without documents:\n\nSmall.")
    assert ask.landing.note == "Without documents: A smaller model gave this answer."
    assert (ask.landing.cause, bench.search.searches) == ("store_down", 1)


async def test_a_prompt_that_is_too_long_loses_its_passages(tmp_path: Path) -> None:
    """What we added goes first."""
    large = FakeEngine("large", ["Nine."])
    bench = Bench(write(tmp_path), large, FakeEngine("small"))
    fails = iter([ContextTooLong("Too long.")])

    async def start(call: EngineCall, flight: Flight) -> Stream:
        if error := next(fails, None):
            raise error
        return Stream(large)

    large.start = start  # type: ignore[method-assign]
    ask = await bench.run()
    assert (rung(ask), ask.passages) == ("no_retrieval", [])


async def test_a_callers_own_text_that_is_too_long_stays_the_callers_mistake(tmp_path: Path) -> None:
    """Where no passage was in the prompt and no rung helps, the 400 of the full answer stands: coming back with the same text is in vain."""
    manifest = MANIFEST.replace('"retrieve", ', "").replace(NO_RETRIEVAL, "")
    long = ContextTooLong("Too long.")
    bench = Bench(write(tmp_path, manifest), FakeEngine("large", fails=long), FakeEngine("small", fails=ContextTooLong("Too long.")))
    with pytest.raises(ContextTooLong) as error:
        await bench.run("Something else?")
    assert error.value is long


@pytest.mark.parametrize("error", [EngineRefused("No such parameter.", engine_status=400), EngineRefused("Unfit.", engine_status=422)])
async def test_a_callers_mistake_steps_nowhere(tmp_path: Path, error: TidegateError) -> None:
    """The engine's 400 leaves as it is."""
    bench = Bench(write(tmp_path), FakeEngine("large", fails=error), FakeEngine("small", ["Small."]))
    with pytest.raises(EngineRefused):
        await bench.run()
    assert (bench.steps(), bench.passed_over()) == ([], {})


async def test_faq_then_message(tmp_path: Path) -> None:
    """No engine at all: a question that the FAQ knows is answered, another one gets the message, with code, ticket and when to come back."""
    busy = EngineRefused("Slow down.", engine_status=429, retry_after_s=7)

    def bench() -> Bench:
        return Bench(write(tmp_path), FakeEngine("large", fails=busy), FakeEngine("small", fails=down()))

    known = bench()
    ask = await known.run()
    assert (rung(ask), ask.answer, ask.passages) == ("faq", {"citations": [], "answer": "From nine to five."}, [])
    unknown = bench()
    with pytest.raises(NoAnswer) as error:
        await unknown.run("What does it cost?")
    said = error.value
    assert (said.http_status, said.public_code, said.message, said.hint) == (503, "support_unavailable", "Nobody can answer just now.", "Call us.")
    assert (said.cause, said.retry_after_s) == (busy.public_code, 7)
    assert said.ticket == unknown.ask.ticket
    assert unknown.steps() == [("full", "small_model"), ("small_model", "faq"), ("faq", "message")]


async def test_a_gate_that_is_too_busy_leads_past_its_model(tmp_path: Path) -> None:
    """Who may not wait for the full answer is not let in by another door to the same model."""
    large = FakeEngine("large", ["Nine."])
    bench = Bench(write(tmp_path), large, FakeEngine("small", fails=down()))
    ask = await bench.run(failed=Busy("All slots are taken.", retry_after_s=4))
    assert (rung(ask), large.calls) == ("faq", [])


@pytest.mark.parametrize(("busy", "lands"), [(False, "small_model"), (True, "faq")])
async def test_a_rung_waits_for_a_slot_of_its_own_model(tmp_path: Path, busy: bool, lands: str) -> None:
    """Once each; where that is too busy, the next rung is tried and nothing is asked."""
    entered: list[str] = []

    async def enter(model: str) -> None:
        entered.append(model)
        if busy and model == "small":
            raise Busy("All slots are taken.")

    small = FakeEngine("small", ["Small."])
    bench = Bench(write(tmp_path), FakeEngine("large", fails=down()), small)
    ask = await bench.run(enter=enter)
    assert (rung(ask), entered, len(small.calls)) == (lands, ["large", "small"], 0 if busy else 1)


async def test_the_wait_for_a_slot_is_part_of_the_rungs_time(tmp_path: Path) -> None:
    """A forecast that was too short costs the full answer its share, not the user an answer."""
    manifest = MANIFEST.replace("total_s = 30.0", "total_s = 1.0\nfull_share = 0.2")

    async def enter(model: str) -> None:
        if model == "large":
            await asyncio.Event().wait()

    bench = Bench(write(tmp_path, manifest), FakeEngine("large", ["Nine."]), FakeEngine("small", ["Small."]))
    assert rung(await bench.run(enter=enter)) == "small_model"


async def test_broken_output_is_422_at_the_end(tmp_path: Path) -> None:
    """What the model says wrongly it would say wrongly again: not 503."""
    manifest = 'stages = ["prompt", "generate", "contract"]\nmodel = "large"\n[[ladder]]\nrung = "small_model"\nmodel = "small"\n' + MESSAGE
    bench = Bench(write(tmp_path, manifest), FakeEngine("large", ["no json"]), FakeEngine("small", fails=down()))
    with pytest.raises(NoAnswer) as error:
        await bench.run()
    assert (error.value.http_status, error.value.cause) == (422, "output_invalid")
    assert bench.ask.text == []


async def test_a_rung_answers_in_json_without_a_sentence_of_ours(tmp_path: Path) -> None:
    """Where a contract judges the whole, tokens of the broken answer are counted and nothing else is left of it."""
    manifest = 'stages = ["prompt", "generate", "contract"]\nmodel = "large"\n[[ladder]]\nrung = "small_model"\nmodel = "small"\n' + MESSAGE
    good = json.dumps({"answer": "a", "citations": []})
    bench = Bench(write(tmp_path, manifest), FakeEngine("large", ["no", "json"]), FakeEngine("small", [good]))
    ask = await bench.run(stream=True)
    assert (rung(ask), ask.answer) == ("small_model", {"answer": "a", "citations": []})
    assert ask.flight.usage == Usage(20, 3)
    assert len(ask.flight.token_ns) == 1


async def test_once_text_was_told_nobody_steps_down(tmp_path: Path) -> None:
    """The client has read half an answer: it gets the error, not another answer behind it."""
    bench = Bench(write(tmp_path), FakeEngine("large", ["Nine"], breaks=EngineCut("Cut.")), FakeEngine("small", ["Small."]))
    with pytest.raises(EngineCut):
        await bench.run(stream=True)
    assert (bench.seen, bench.steps()) == (["Nine"], [])


async def test_a_cut_that_nobody_saw_steps_down(tmp_path: Path) -> None:
    """The same where the answer is not streamed: the small model's is whole, and nothing of the first is in it."""
    bench = Bench(write(tmp_path), FakeEngine("large", ["Nine"], breaks=EngineCut("Cut.")), FakeEngine("small", ["Small."]))
    ask = await bench.run()
    assert ask.answer is not None
    assert (rung(ask), ask.answer["answer"], ask.text) == ("small_model", "Small.", ["Small."])


async def test_each_rung_has_its_share_of_the_time(tmp_path: Path) -> None:
    """An engine that hangs takes its share, not the time of the rungs below it."""
    manifest = MANIFEST.replace("total_s = 30.0", "total_s = 1.0\nfull_share = 0.3")
    small = FakeEngine("small", ["Small."])
    small.takes_s = 0.05  # which would be gone
    bench = Bench(write(tmp_path, manifest), FakeEngine("large", hangs=True), small)
    ask = await bench.run()
    assert rung(ask) == "small_model"
    assert ask.landing is not None
    assert ask.landing.cause == "deadline_exceeded"
    assert ask.flight.last_ns - ask.flight.began_ns >= 0.3e9


async def test_a_stream_that_has_begun_is_given_all_the_time_that_is_left(tmp_path: Path) -> None:
    """The share is the time for the first text: behind it the rung may take what is left of the whole."""
    manifest = MANIFEST.replace("total_s = 30.0", "total_s = 1.0\nfull_share = 0.3")
    bench = Bench(write(tmp_path, manifest), FakeEngine("large", ["Nine"], hangs=True), FakeEngine("small", ["Small."]))
    with pytest.raises(TidegateError, match="did not answer"):
        await bench.run(stream=True)
    assert time.perf_counter_ns() - bench.ask.flight.began_ns >= 0.9e9


async def test_what_a_failed_rung_noted_is_not_told_of_the_next(tmp_path: Path) -> None:
    """A note of the door stays; one that a stage of the full answer made (what was cut of its prompt) goes with that answer."""
    bench = Bench(write(tmp_path), FakeEngine("large"), FakeEngine("small", ["Small."]))
    bench.ask.note("door", ["blob"])

    async def noting_and_down(call: EngineCall, flight: Flight) -> Stream:
        bench.ask.note("length", {"cut": 3})
        raise down()

    bench.large.start = noting_and_down  # type: ignore[method-assign]
    ask = await bench.run()
    assert (rung(ask), ask.notes) == ("small_model", {"door": ["blob"]})


async def test_a_client_that_leaves_ends_the_walk(tmp_path: Path) -> None:
    """A cancel is no failure of a rung."""
    bench = Bench(write(tmp_path), FakeEngine("large", hangs=True), FakeEngine("small", ["Small."]))
    task = asyncio.create_task(bench.run())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.steps() == []


async def test_a_fault_of_ours_ends_in_a_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A bug in a stage: the log has its traceback, and the user no bare 500."""
    bench = Bench(write(tmp_path), FakeEngine("large", fails=RuntimeError("bug")), FakeEngine("small", ["Small."]))
    with pytest.raises(NoAnswer) as error:
        await bench.run("What does it cost?")
    assert (error.value.cause, error.value.http_status) == ("internal", 503)
    assert "RuntimeError" in caplog.text


@given(
    large=st.sampled_from([None, down(), OOM, ContextTooLong("Too long."), EngineStalled("Silent.")]),
    small=st.sampled_from([None, down(), EngineRefused("No.", engine_status=400), ContextTooLong("Too long.")]),
    search=st.sampled_from([None, StoreDown("Gone.")]),
    known=st.booleans(), stream=st.booleans(),
)
def test_whatever_fails_there_is_one_landing(
    ladder_folder: Path, large: TidegateError | None, small: TidegateError | None, search: TidegateError | None, known: bool, stream: bool
) -> None:
    """Any failures together: an answer that keeps the contract, or the message with a ticket; each rung at most once, and in their order."""
    capability = load(ladder_folder / "group" / "name")
    bench = Bench(
        capability, FakeEngine("large", ["Large."], fails=large), FakeEngine("small", ["Small."], fails=small), Searcher(fails=search)
    )
    try:
        ask = asyncio.run(bench.run("Your hours?" if known else "The price?", stream=stream))
    except NoAnswer:
        assert not known
        assert bench.ask.ticket
        assert not bench.seen
    else:
        capability.check_output(ask.answer)
        assert ask.answer is not None
        assert not bench.seen or "".join(bench.seen) == ask.answer["answer"]
    order = ["full", "no_retrieval", "small_model", "faq", "message"]
    walked = [to for _, to in bench.steps()]
    assert walked == sorted(set(walked), key=order.index)


@pytest.fixture(scope="module")
def ladder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ladder")
    write(folder)
    return folder


# -- what is refused


STRICT = {**ANSWER, "properties": {**ANSWER["properties"], "citations": {"type": "array", "minItems": 1}}}  # type: ignore[dict-item]
JSON_ONLY = 'stages = ["prompt", "generate", "contract"]\nmodel = "large"\n'


@pytest.mark.parametrize(
    ("manifest", "output", "says"),
    [
        (MANIFEST, STRICT, "rung 1 of the ladder, 'no_retrieval', cannot be: without passages the stage 'cite' cannot keep the output contract"),
        (MANIFEST.replace(NO_RETRIEVAL, ""), STRICT, "'faq', cannot be: entry 1 of the FAQ breaks"),
        (JSON_ONLY + '[[ladder]]\nrung = "no_retrieval"\n' + MESSAGE, ANSWER, "does not retrieve"),
        (JSON_ONLY + '[[ladder]]\nrung = "faq"\n' + MESSAGE, ANSWER, "faq.file names no file"),
        (JSON_ONLY + '[[ladder]]\nrung = "small_model"\n' + MESSAGE, ANSWER, "it names no model"),
        (JSON_ONLY + '[[ladder]]\nrung = "small_model"\nmodel = "large"\n' + MESSAGE, ANSWER, "is the model of the full answer"),
        (JSON_ONLY + '[[ladder]]\nrung = "small_model"\nmodel = "s"\n', ANSWER, "does not end with the rung 'message'"),
        (JSON_ONLY + MESSAGE + MESSAGE, ANSWER, "rung 1 of the ladder, 'message', cannot be: nothing comes after a message"),
        (JSON_ONLY + MESSAGE.replace("support_unavailable", "Support!"), ANSWER, "is not one of small letters"),
        (JSON_ONLY + MESSAGE.replace("Nobody can answer just now.", " "), ANSWER, "it has no message"),
        (JSON_ONLY + 'ladder = [{rung = "rerank"}]', ANSWER, "ladder.0.rung"),
        (JSON_ONLY + '[[ladder]]\nrung = "small_model"\nmodel = "s"\ncode = "x"\n' + MESSAGE, ANSWER, "it has no code"),
    ],
)
def test_a_rung_that_cannot_be_is_refused_by_name(tmp_path: Path, manifest: str, output: object, says: str) -> None:
    """At load, with the rung and the reason: a request never meets it."""
    with pytest.raises(SettingsError, match=says):
        write(tmp_path, manifest, output)


def test_a_model_that_nobody_serves_stops_the_start_unless_the_rung_is_optional(tmp_path: Path) -> None:
    """A typo is not a rung that is silently missing; one that says so may be."""
    with pytest.raises(SettingsError, match="no engine serves 'small'"):
        Bench(write(tmp_path), FakeEngine("large"))
    optional = Bench(write(tmp_path, MANIFEST.replace('model = "small"', 'model = "small"\noptional = true')), FakeEngine("large"))
    assert optional.ladder.left_out == ["small"]
