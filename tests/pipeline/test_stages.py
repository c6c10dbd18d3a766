"""The stages one by one, on fakes that say exactly what the test needs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.pipeline.test_capability import write

from tidegate.core.ask import Ask, Caller, Deadline, EngineAnswer, EngineCall, Passage, Said
from tidegate.core.chunk import Chunk, Usage
from tidegate.core.document import Box
from tidegate.core.errors import CannotContinue, DeadlineExceeded, EngineCut, EngineStalled, OutputInvalid, SettingsError
from tidegate.core.flight import Flight
from tidegate.core.ports import Engine, EngineStream
from tidegate.core.search import Filter, Ranking
from tidegate.engines.cause import Cause
from tidegate.pipeline.capability import load
from tidegate.pipeline.parts import Parts
from tidegate.pipeline.runner import Step, run
from tidegate.pipeline.stages import cite, contract, create_ticket, generate, prompt, retrieve
from tidegate.retrieval.search import Searched, Steps


def new_ask(deadline_s: float = 60) -> Ask:
    return Ask(Flight("/test"), Caller("key", "tenant"), Deadline(deadline_s))


class FakeStream:
    def __init__(self, batches: list[list[Chunk]], end: Exception | None = None, stalls: bool = False) -> None:
        self.batches, self.end, self.stalls, self.aborted = batches, end, stalls, False

    async def relay(self, take: Callable[[list[Chunk]], Awaitable[None] | None]) -> None:
        for batch in self.batches:
            if rest := take(batch):
                await rest
        if self.stalls:
            await asyncio.Event().wait()
        if self.end:
            raise self.end

    @property
    def usage(self) -> Usage:
        return Usage(7, 2, exact=False)

    def abort(self) -> None:
        self.aborted = True


class FakeEngine:
    name = "fake"
    models: tuple[str, ...] = ("default",)

    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream
        self.calls: list[EngineCall] = []

    async def start(self, call: EngineCall, flight: Flight) -> FakeStream:
        self.calls.append(call)
        return self.stream

    async def whole(self, call: EngineCall, flight: Flight) -> EngineAnswer:
        self.calls.append(call)
        return EngineAnswer("whole", "stop", Usage(1, 2))

    async def figures(self) -> dict[str, Any]:
        return {"up": True}

    async def close(self) -> None: ...

    async def continue_from(self, call: EngineCall, said: Said, flight: Flight, *, forbid: str = "") -> EngineStream:
        raise CannotContinue("This engine cannot go on.")

    def find(self, model: str | None, ask: Ask | None = None) -> tuple[Engine, str]:
        return self, model or "default"

    def instances(self, model: str | None, ask: Ask | None = None) -> list[tuple[Engine, str]]:
        return [(self, model or "default")]

    def another(self, model: str | None, ask: Ask, tried: Sequence[Engine], cause: Cause, *, free: bool = False) -> tuple[Engine, str] | None:
        return None

    def blame(self, engine: Engine) -> None: ...


def text(*pieces: str) -> list[list[Chunk]]:
    batches = [[Chunk(time.perf_counter_ns(), text=piece, raw=b"{}")] for piece in pieces]
    return [*batches, [Chunk(time.perf_counter_ns(), kind="usage", finish="stop", usage=Usage(5, len(pieces)))]]


async def test_generate_relays_and_books() -> None:
    """Every batch reaches the client's side, and text, tokens, usage and end are on the flight."""
    engine = FakeEngine(FakeStream(text("a", "b")))
    seen: list[str] = []

    def emit(batch: list[Chunk]) -> None:
        seen.extend(chunk.text for chunk in batch)

    ask = new_ask()
    ask.call, ask.emit = EngineCall("chat", "default", {}), emit
    await generate.GenerateStage(engine)(ask)
    assert seen == ["a", "b", ""]
    assert (ask.text, len(ask.flight.token_ns), ask.flight.usage, ask.flight.end) == (["a", "b"], 2, Usage(5, 2), "stop")


async def test_generate_holds_where_a_contract_follows() -> None:
    """Nothing leaves before the whole was judged."""
    engine = FakeEngine(FakeStream(text("a")))

    def emit(batch: list[Chunk]) -> None:
        raise AssertionError("nothing may leave")

    ask = new_ask()
    ask.call, ask.emit = EngineCall("chat", "default", {}), emit
    await generate.GenerateStage(engine, holds=True)(ask)
    assert ask.text == ["a"]


async def test_a_cut_aborts_the_engine_and_books_an_estimate() -> None:
    """After a cut the connection is gone and the usage is there, marked as an estimate."""
    stream = FakeStream(text("a", "b")[:2], EngineCut("cut"))
    ask = new_ask()
    ask.call = EngineCall("chat", "default", {"messages": [{"role": "user", "content": "x" * 400}]})
    with pytest.raises(EngineCut):
        await generate.GenerateStage(FakeEngine(stream), first_token_s=5)(ask)
    assert stream.aborted
    assert ask.flight.usage == Usage(7, 2, exact=False)
    laps = [part for part, _ in ask.flight.laps]
    assert laps == ["engine.first_token", "stream", "engine.continue"], "the stream owns the time until it broke"


async def test_a_cancel_aborts_the_engine_and_books() -> None:
    """A client that leaves frees the engine, and what it got is booked."""
    stream = FakeStream(text("a")[:1], stalls=True)
    got = asyncio.Event()

    def emit(batch: list[Chunk]) -> None:
        got.set()

    ask = new_ask()
    ask.call, ask.emit = EngineCall("chat", "default", {}), emit
    running = asyncio.ensure_future(generate.GenerateStage(FakeEngine(stream))(ask))
    await got.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert stream.aborted
    assert ask.flight.usage == stream.usage
    assert [part for part, _ in ask.flight.laps] == ["engine.first_token", "stream"], "the stream owns the time until the client left"


async def test_no_first_token_in_time_is_a_stall() -> None:
    """The first-token budget is enforced and named."""
    ask = new_ask()
    ask.call = EngineCall("chat", "default", {})
    with pytest.raises(EngineStalled, match="no token within"):
        await generate.GenerateStage(FakeEngine(FakeStream([], stalls=True)), first_token_s=0.01)(ask)
    assert [part for part, _ in ask.flight.laps] == ["engine.first_token"], "the wait has an owner"


async def test_a_budget_that_runs_out_names_its_stage() -> None:
    """The walk says which stage took too long."""

    class Sleeper:
        name = "sleeper"

        async def __call__(self, ask: Ask) -> None:
            await asyncio.Event().wait()

    with pytest.raises(DeadlineExceeded, match="'sleeper'"):
        await run(new_ask(), [Step(Sleeper(), 0.01)])
    with pytest.raises(DeadlineExceeded, match="'sleeper'"):
        await run(new_ask(deadline_s=0.01), [Step(Sleeper(), 5)])


async def test_a_stages_own_timeout_is_not_renamed() -> None:
    """A TimeoutError that is not the budget's stays what it is."""

    class Failing:
        name = "failing"

        async def __call__(self, ask: Ask) -> None:
            raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await run(new_ask(), [Step(Failing(), 5)])


async def test_prompt_renders_fields_and_passages(tmp_path: Path) -> None:
    """Blocks become messages; the version and its hash are on the flight."""
    user = "{{ input.age }}{% for p in passages %} [{{ p.n }}] {{ p.text }}{% endfor %}"
    template = "{% block system %}S{% endblock %}{% block user %}" + user + "{% endblock %}"
    capability = load(write(tmp_path, template=template))
    ask = new_ask()
    ask.input = {"age": 40}
    ask.passages = [Passage("id", "doc", "Title", "text", 0.9)]
    await prompt.build(capability, Parts(FakeEngine(FakeStream([]))))(ask)
    assert ask.call is not None
    assert ask.call.body["messages"] == [{"role": "system", "content": "S"}, {"role": "user", "content": "40 [1] text"}]
    assert ask.flight.prompt_sha256 == capability.prompt_sha256


class FakeSearch:
    def __init__(self, passages: list[Passage]) -> None:
        self.passages = passages
        self.asked: dict[str, Any] = {}
        self.steps = Steps()
        self.legs: list[Ranking] = []
        self.lacks: dict[str, str] = {}

    async def find(self, question: str, *, k: int, wanted: Filter, collection: str, steps: Steps, ask: Ask) -> Searched:
        self.asked = {"question": question, "k": k, "tags": wanted.tags, "collection": collection}
        self.steps = steps
        told = {"index_version": "7", "reranker": "features", "scores": [0.5] * len(self.passages), "repeated": 2, **self.lacks}
        return Searched(self.passages, legs=self.legs, **told)


async def test_retrieve_filters_by_the_fields_that_are_there(tmp_path: Path) -> None:
    """A tag comes from its input field; an absent field filters nothing; the search is told what is too weak; the index version is noted."""
    manifest = (
        'stages = ["retrieve", "prompt", "generate"]\n[retrieve]\nquestion = "age"\ncollection = "c"\nk = 2\nmin_score = 0.5\n'
        'tags_from = { lang = "language", kind = "absent" }\n'
    )
    search = FakeSearch([Passage("a", "d", "t", "x", 0.9), Passage("b", "d", "t", "y", 0.1)])
    ask = new_ask()
    ask.input = {"age": 3, "language": "en"}
    await retrieve.build(load(write(tmp_path, manifest)), Parts(FakeEngine(FakeStream([])), search))(ask)
    assert search.asked == {"question": "3", "k": 2, "tags": {"lang": "en"}, "collection": "c"}
    assert (search.steps.min_score, search.steps.rerank, search.steps.hybrid) == (0.5, None, None)
    assert ask.flight.passage_ids == ["a", "b"]
    assert ask.flight.index_version == "7"
    assert '"en"' not in json.dumps(ask.flight.decisions), "what the caller wrote is no fact of a flight"


async def test_a_flight_says_where_each_leg_had_each_passage(tmp_path: Path) -> None:
    """Place, score and coverage of every passage that was given on, in their order; what one leg did not find it has not; never a text."""
    search = FakeSearch([Passage("a", "d", "t", "alpha beta", 0.9), Passage("b", "d", "t", "gamma", 0.1)])
    search.legs = [Ranking("vector", ["x", "a"], [0.95, 0.9]), Ranking("words", ["b", "a"], [7.25, 3.0], [0.875, 0.25])]
    ask = new_ask()
    ask.input = {"question": "alpha gamma"}
    await retrieve.build(load(write(tmp_path, 'stages = ["retrieve", "prompt", "generate"]\n')), Parts(FakeEngine(FakeStream([])), search))(ask)
    [(_, what, facts)] = ask.flight.decisions
    assert what == "retrieved"
    assert (facts["vector"], facts["words"]) == ([[2, 0.9], None], [[2, 3.0, 0.25], [1, 7.25, 0.875]])
    assert (facts["reranker"], facts["rerank_scores"], facts["repeated"]) == ("features", [0.5, 0.5], 2)
    assert not {"weak", "not_reranked", "characters_left_out"} & set(facts), "what did not happen is not said"
    assert not any(word in json.dumps(facts) for word in ("alpha", "beta", "gamma"))


async def test_a_collection_that_was_never_filled_is_told(tmp_path: Path) -> None:
    """By its name: `no passage found` would sound like what documents say."""
    search = FakeSearch([])
    search.lacks = {"index_version": "0"}
    ask = new_ask()
    ask.input = {"question": "x"}
    manifest = 'stages = ["retrieve", "prompt", "generate"]\n[retrieve]\ncollection = "c"\n'
    await retrieve.build(load(write(tmp_path, manifest)), Parts(FakeEngine(FakeStream([])), search))(ask)
    assert ask.notes == {"search": {"no_documents": "c"}}


async def test_what_a_search_had_to_do_without_is_told(tmp_path: Path) -> None:
    """To the caller beside the answer, and in the flight; of a search that lacked nothing, nothing."""
    search = FakeSearch([Passage("a", "d", "t", "x", 0.0)])
    stage = retrieve.build(load(write(tmp_path, 'stages = ["retrieve", "prompt", "generate"]\n')), Parts(FakeEngine(FakeStream([])), search))
    ask = new_ask()
    ask.input = {"question": "x"}
    await stage(ask)
    assert ask.notes is None
    search.lacks = {"words_only": "embedder_down", "not_reranked": "slow"}
    await stage(ask)
    assert ask.notes == {"search": {"words_only": "embedder_down", "not_reranked": "slow"}}
    facts = ask.flight.decisions[-1][2]
    assert (facts["words_only"], facts["not_reranked"]) == ("embedder_down", "slow")


async def test_a_search_has_the_time_of_its_stage_or_what_is_left_of_the_request(tmp_path: Path) -> None:
    """Whatever ends first."""
    manifest = 'stages = ["retrieve", "prompt", "generate"]\n[budgets]\nretrieve_s = 3.5\n'
    search = FakeSearch([])
    ask = new_ask()
    ask.input = {"question": "x"}
    stage = retrieve.build(load(write(tmp_path, manifest)), Parts(FakeEngine(FakeStream([])), search))
    await stage(ask)
    assert search.steps.seconds == 3.5
    ask.deadline = Deadline(1.0)
    await stage(ask)
    assert 0 < search.steps.seconds <= 1.0


async def test_a_capability_says_how_it_is_searched(tmp_path: Path) -> None:
    """What its [retrieve] names goes before tidegate.toml; what it does not name does not."""
    manifest = 'stages = ["retrieve", "prompt", "generate"]\n[retrieve]\nhybrid = false\nrerank = "off"\ncompress = true\n'
    search = FakeSearch([])
    ask = new_ask()
    ask.input = {"question": "x"}
    await retrieve.build(load(write(tmp_path, manifest)), Parts(FakeEngine(FakeStream([])), search))(ask)
    assert (search.steps.hybrid, search.steps.rerank, search.steps.compress) == (False, "off", True)


def test_a_reranker_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    """By name, with the nearest one."""
    with pytest.raises(SettingsError, match="no reranker 'feature'") as caught:
        load(write(tmp_path, 'stages = ["retrieve"]\n[retrieve]\nrerank = "feature"\n'))
    assert "'features'" in str(caught.value.hint)


async def test_the_prompt_shows_what_was_left_of_a_passage_and_the_citation_has_the_whole(tmp_path: Path) -> None:
    """The model reads the shorter text; an answer made of what it did not read does not rest on the passage."""
    user = "{% for p in passages %}{{ p.text }}{% endfor %}"
    capability = load(write(tmp_path, template="{% block system %}S{% endblock %}{% block user %}" + user + "{% endblock %}"))
    ask = new_ask()
    ask.input = {"age": 40}
    ask.passages = [Passage("id", "doc", "Title", "Claims take thirty days. Windows are insured.", 0.9, shown="Claims take thirty days. …")]
    await prompt.build(capability, Parts(FakeEngine(FakeStream([]))))(ask)
    assert ask.call is not None
    assert ask.call.body["messages"][1]["content"] == "Claims take thirty days. …"
    stage = cite.CiteStage(Unchecked())
    quoted = {}
    for said in ("Claims take thirty days", "Windows insured"):
        ask.text = [said]
        await stage(ask)
        assert ask.answer is not None
        [citation] = ask.answer["citations"]
        assert citation["text"] == "Claims take thirty days. Windows are insured."
        quoted[said] = citation["quoted"]
    assert quoted == {"Claims take thirty days": True, "Windows insured": False}


class Unchecked:
    def check_output(self, fields: Any) -> None: ...


def test_a_capability_that_retrieves_without_an_embedder_is_told_so(tmp_path: Path) -> None:
    """What is missing is named, with the setting that brings it."""
    with pytest.raises(SettingsError, match="there is no embedder") as caught:
        retrieve.build(load(write(tmp_path, 'stages = ["retrieve", "prompt", "generate"]\n')), Parts(FakeEngine(FakeStream([]))))
    assert "local.embedder" in str(caught.value.hint)


@pytest.mark.parametrize("said", ['{"decision": "maybe"}', '{"decision": "accept"', "", "null", '{"decision": "accept", "more": 1}',
                                  '{"decision": "accept", "more": ' + "[" * 400 + "]" * 400 + "}", "[" * 9000])
async def test_a_broken_output_never_passes(tmp_path: Path, said: str) -> None:
    """Whatever is not exactly what the contract says raises."""
    ask = new_ask()
    ask.text = [said]
    with pytest.raises(OutputInvalid):
        await contract.build(load(write(tmp_path)), Parts(FakeEngine(FakeStream([]))))(ask)
    assert ask.answer is None


async def test_a_good_output_passes(tmp_path: Path) -> None:
    """Chunks are put together before they are judged."""
    ask = new_ask()
    ask.text = list(json.dumps({"decision": "accept"}))
    await contract.build(load(write(tmp_path)), Parts(FakeEngine(FakeStream([]))))(ask)
    assert ask.answer == {"decision": "accept"}


@pytest.mark.parametrize(
    ("answer", "quoted"),
    [("It costs 250 euros [2].", [False, True]), ("Claims are settled within fourteen days.", [True, False]), ("Banana.", [False, False])],
)
async def test_citations_say_what_the_answer_rests_on(tmp_path: Path, answer: str, quoted: list[bool]) -> None:
    """A passage is quoted where the model marked it, or where it holds the answer's words; else it was only read."""
    folder = write(tmp_path)
    (folder / "output.schema.json").write_text('{"type": "object"}')
    ask = new_ask()
    ask.text = [answer]
    ask.passages = [Passage("a", "d", "t", "Claims are settled within fourteen days of notice.", 0.9), Passage("b", "d", "t", "Fees.", 0.8)]
    await cite.build(load(folder), Parts(FakeEngine(FakeStream([]))))(ask)
    assert ask.answer is not None
    assert [citation["quoted"] for citation in ask.answer["citations"]] == quoted


async def test_a_citation_names_page_and_place(tmp_path: Path) -> None:
    """The boxes of a passage go with it, in the shape that the shipped capability's contract has."""
    folder = write(tmp_path)
    shipped = Path(__file__).parents[2] / "examples" / "capabilities" / "support" / "answer" / "output.schema.json"
    (folder / "output.schema.json").write_bytes(shipped.read_bytes())
    ask = new_ask()
    ask.text = ["Yes [1]."]
    ask.passages = [Passage("a", "d", "t", "Yes.", 0.9, 3, boxes=[Box(3, 72.0, 90.5, 300.0, 102.0)])]
    await cite.build(load(folder), Parts(FakeEngine(FakeStream([]))))(ask)
    assert ask.answer is not None
    (citation,) = ask.answer["citations"]
    assert (citation["page"], citation["boxes"]) == (3, [[3, 72.0, 90.5, 300.0, 102.0]])


async def test_a_ticket_is_made_once_and_leads_to_the_flight(tmp_path: Path) -> None:
    """However often it is asked for, one number, made of the flight's id and noted in the flight."""
    stage = create_ticket.CreateTicketStage()
    ask = new_ask()
    await stage(ask)
    assert await stage.give(ask) == ask.ticket
    assert ask.flight.id.upper().startswith(ask.ticket.removeprefix("T-").replace("-", ""))
    assert [facts for _, what, facts in ask.flight.decisions if what == "ticket_created"] == [{"ticket": ask.ticket}]


async def test_a_trigger_needs_a_stage_that_gives_something(tmp_path: Path) -> None:
    """A stage that only checks is refused at the start."""
    capability = load(write(tmp_path, 'stages = ["prompt", "generate"]\n[[triggers]]\ntext = "x"\nstage = "contract"\n'))
    with pytest.raises(SettingsError, match="gives nothing"):
        generate.build(capability, Parts(FakeEngine(FakeStream([]))))
