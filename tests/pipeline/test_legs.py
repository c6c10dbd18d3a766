"""Answers of several runs: broken off and resumed, stepped back, triggered, injected; what the client saw is always one whole."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.core.ask import Ask, Caller, Deadline, EngineAnswer, EngineCall, Said
from tidegate.core.chunk import Chunk, ToolDelta, Usage
from tidegate.core.errors import CannotContinue, EngineCut, EngineDown, EngineError, EngineRefused, EngineStalled
from tidegate.core.flight import Flight
from tidegate.core.ports import Engine
from tidegate.engines.cause import Cause
from tidegate.guard.terms import TermList, Terms
from tidegate.pipeline import legs as legs_module
from tidegate.pipeline.control import Control, Trigger
from tidegate.pipeline.legs import MOST_TRIGGERS
from tidegate.pipeline.stages.generate import GenerateStage

BAD = Terms([TermList(["bad", "very evil"], whole_words=False)])
PROMPT_TOKENS = 7
TRIGGER = "<T>"


class Script:
    """What the model would say, in tokens; where an answer goes on it finds its place again by what was said of it. After a forbidden piece it says
    `~` and goes on behind that piece; after a trigger it goes on behind the trigger."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = list(tokens)
        self.ids = list(range(100, 100 + len(tokens)))
        self.said = ""
        self.next = [0]  # for each character said, and before the first: the place in the script that follows it
        self.forbidden: list[str] = []
        self.continued: list[Said] = []

    @property
    def text(self) -> str:
        return "".join(self.tokens)

    def go_on(self, said: Said, forbid: str) -> list[tuple[str, list[int] | None]]:
        """The pieces from `said` on."""
        self.continued.append(said)
        same = len([0 for a, b in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(said.text, self.said, strict=False))])
        added = said.text[same:]
        at = self.next[same]
        rest = self.text[at:]
        self.said, self.next = said.text, [*self.next[: same + 1], *[at] * len(added)]
        pieces: list[tuple[str, list[int] | None]] = []
        if forbid:
            assert rest.startswith(forbid), "what is forbidden is what the model was about to say"
            self.forbidden.append(forbid)
            pieces.append((forbid[: len(forbid) - len(forbid.lstrip())] + "~", None))
            at += len(forbid)
        elif added and rest.startswith(TRIGGER):
            at += len(TRIGGER)
            self.next[-1] = at
        elif added:
            assert said.token_ids is None, "text that no engine made has no ids"
        if said.token_ids is not None:
            assert "".join(self.tokens[one - 100] for one in said.token_ids) == said.text
            assert said.tokens == len(said.token_ids)
        place = 0
        for token, one in zip(self.tokens, self.ids, strict=True):
            begin, place = place, place + len(token)
            if place > at:
                pieces.append((token[max(0, at - begin) :], [one] if begin >= at else None))
        self.begin = at
        return pieces


class FakeStream:
    def __init__(self, engine: FakeEngine, pieces: list[tuple[str, list[int] | None]], prompt: int, cut: int | None) -> None:
        self.engine, self.pieces, self.prompt, self.cut = engine, pieces, prompt, cut
        self.told = 0
        self.ended = self.aborted = False

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt, self.told, exact=self.ended)

    def abort(self) -> None:
        self.aborted = True

    async def relay(self, take: Callable[[list[Chunk]], Awaitable[None] | None]) -> None:
        engine, script = self.engine, self.engine.script
        batch: list[Chunk] = []
        for n, (text, ids) in enumerate(self.pieces):
            if self.cut is not None and n >= self.cut:
                await self._give(take, batch)
                raise engine.breaks
            begin = script.next[-1]
            script.said += text
            script.next += [begin + i + 1 for i in range(len(text))] if not text.endswith("~") else [script.begin] * len(text)
            self.told += 1
            batch.append(Chunk(1, "text", text, b"{}", token_ids=ids if engine.tells_ids else None))
            if len(batch) >= engine.batch:
                await self._give(take, batch)
                batch = []
        self.ended = True
        batch += [Chunk(1, "notice", finish="stop", raw=b"{}"), Chunk(1, "usage", usage=self.usage, raw=b"{}")]
        await self._give(take, batch)

    async def _give(self, take: Callable[[list[Chunk]], Awaitable[None] | None], batch: list[Chunk]) -> None:
        assert not self.aborted, "an aborted stream gives nothing"
        if batch and (rest := take(batch)) is not None:
            await rest
        await asyncio.sleep(0)


class FakeEngine:
    models: tuple[str, ...] = ("default",)

    def __init__(
        self, script: Script, *, cuts: Sequence[int | None] = (), tells_ids: bool = True, batch: int = 1, can: bool = True, name: str = "one"
    ) -> None:
        self.script, self.cuts, self.tells_ids, self.batch, self.can, self.name = script, list(cuts), tells_ids, batch, can, name
        self.breaks: EngineError = EngineCut("cut")
        self.streams: list[FakeStream] = []
        self.others: list[Engine] = []

    def _stream(self, said: Said, forbid: str) -> FakeStream:
        cut = self.cuts.pop(0) if self.cuts else None
        stream = FakeStream(self, self.script.go_on(said, forbid), PROMPT_TOKENS + (said.tokens if said.token_ids is not None else 99), cut)
        self.streams.append(stream)
        return stream

    async def start(self, call: EngineCall, flight: Flight) -> FakeStream:
        return self._stream(Said("", 0, []), "")

    async def whole(self, call: EngineCall, flight: Flight) -> EngineAnswer:
        self.script.said, self.script.next = self.script.text, list(range(len(self.script.text) + 1))
        return EngineAnswer(self.script.text, "stop", Usage(PROMPT_TOKENS, len(self.script.tokens)), b"{}")

    async def continue_from(self, call: EngineCall, said: Said, flight: Flight, *, forbid: str = "") -> FakeStream:
        if not self.can:
            raise CannotContinue("not this one")
        return self._stream(said, forbid)

    async def figures(self) -> dict[str, Any]:
        return {"up": True}

    async def close(self) -> None: ...

    def find(self, model: str | None, ask: Ask | None = None) -> tuple[Engine, str]:
        return self, "own"

    def instances(self, model: str | None, ask: Ask | None = None) -> list[tuple[Engine, str]]:
        return [(self, "own"), *((other, "own") for other in self.others)]

    def another(self, model: str | None, ask: Ask, tried: Sequence[Engine], cause: Cause, *, free: bool = False) -> tuple[Engine, str] | None:
        return next(((other, "own") for other in self.others if other not in tried), None)

    def blame(self, engine: Engine) -> None: ...


class Ticket:
    name = "ticket"

    async def give(self, ask: Ask) -> str:
        return "t1"


class Client:
    """What the client saw."""

    def __init__(self) -> None:
        self.text = ""
        self.chunks: list[Chunk] = []

    def emit(self, batch: list[Chunk]) -> None:
        assert batch
        for chunk in batch:
            if chunk.kind == "text":
                self.text += chunk.text
            self.chunks.append(chunk)
            assert "bad" not in self.text
            assert "very evil" not in self.text
            assert TRIGGER not in self.text


def new_ask(client: Client | None) -> Ask:
    ask = Ask(Flight("/test"), Caller("key", "tenant"), Deadline(60), emit=client.emit if client else None)
    ask.call = EngineCall("chat", "default", {"messages": []})
    return ask


async def run(engine: FakeEngine, control: Control | None = None, **more: Any) -> tuple[Client, Ask]:
    client = Client()
    ask = new_ask(client)
    await GenerateStage(engine, control=control, **more)(ask)
    assert "".join(ask.text) == client.text
    assert [chunk.finish for chunk in client.chunks if chunk.finish is not None] == [ask.flight.end], "one end"
    assert client.chunks[-1].kind == "usage"
    assert client.chunks[-1].usage == ask.flight.usage
    assert all(stream.ended or stream.aborted for stream in engine.streams)
    return client, ask


def decisions(ask: Ask, what: str) -> list[dict[str, Any]]:
    return [facts for _, name, facts in ask.flight.decisions if name == what]


def trigger(**more: Any) -> Trigger:
    return Trigger(Ticket(), "ticket", **{"text": TRIGGER, "insert": "[{given}]", **more})


# -- breaking off


async def test_an_answer_that_broke_off_goes_on_where_it_was() -> None:
    """The client sees one whole answer; the flight says that it was resumed, and all tokens are counted once."""
    engine = FakeEngine(Script(["The ", "answer ", "is ", "42."]), cuts=[2])
    client, ask = await run(engine)
    assert client.text == "The answer is 42."
    assert decisions(ask, "resumed") == [{"cause": "engine_cut", "engine": "one", "tokens": 2, "by_ids": True, "waited_s": 0.0}]
    assert ask.flight.usage == Usage(PROMPT_TOKENS, 4), "the later run tells the prompt's true count"


@pytest.mark.parametrize("error", [EngineCut("c"), EngineDown("d"), EngineStalled("s")])
async def test_it_goes_on_elsewhere_where_its_engine_cannot(error: EngineError) -> None:
    """Another instance that serves the model takes over."""
    script = Script(["a", "b", "c"])
    other = FakeEngine(script, name="two")
    engine = FakeEngine(script, cuts=[1], can=False)
    engine.breaks, engine.others = error, [other]
    client, ask = await run(engine)
    assert (client.text, ask.flight.engine) == ("abc", "two")


class Refuses(FakeEngine):
    """Raises what is listed, one at each call, before it answers."""

    def __init__(self, script: Script, errors: Sequence[EngineError], *, after: int = 0, **more: Any) -> None:
        super().__init__(script, **more)
        self.errors, self.after, self.asked = list(errors), after, 0
        self.refused = asyncio.Event()

    def _refuse(self) -> None:
        self.asked += 1
        if self.asked > self.after and self.errors:
            self.refused.set()
            raise self.errors.pop(0)

    async def start(self, call: EngineCall, flight: Flight) -> FakeStream:
        self._refuse()
        return await super().start(call, flight)

    async def whole(self, call: EngineCall, flight: Flight) -> EngineAnswer:
        self._refuse()
        return await super().whole(call, flight)

    async def continue_from(self, call: EngineCall, said: Said, flight: Flight, *, forbid: str = "") -> FakeStream:
        self._refuse()
        return await super().continue_from(call, said, flight, forbid=forbid)


async def generate(engine: FakeEngine, streamed: bool) -> Ask:
    ask = new_ask(Client() if streamed else None)
    await GenerateStage(engine)(ask)
    return ask


@pytest.mark.parametrize("streamed", [True, False])
async def test_where_an_engine_is_down_the_next_is_asked(streamed: bool) -> None:
    """Each is asked once, in order; the flight names the one that answers."""
    script = Script(["a", "b"])
    one, two = (Refuses(script, [EngineDown("d")] * 9, name=name) for name in ("one", "two"))
    one.others = [two, FakeEngine(script, name="three")]
    ask = await generate(one, streamed)
    assert ("".join(ask.text), ask.flight.engine) == ("ab", "three")
    assert decisions(ask, "replanned") == [
        {"cause": "down", "engine": "one", "next": "two"}, {"cause": "down", "engine": "two", "next": "three"},
    ]  # fmt: skip
    assert (one.asked, two.asked) == (1, 1)


@pytest.mark.parametrize("streamed", [True, False])
async def test_where_all_are_down_the_last_error_counts(streamed: bool) -> None:
    """It is raised once each was asked once."""
    one, two = (Refuses(Script(["a"]), [EngineDown(f"down: {name}")] * 9, name=name) for name in ("one", "two"))
    one.others = [two]
    with pytest.raises(EngineDown, match="down: two"):
        await generate(one, streamed)
    assert (one.asked, two.asked) == (1, 1)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits are short."""
    monkeypatch.setattr(legs_module, "WAIT_S", 0.001)
    monkeypatch.setattr(legs_module, "LONGEST_WAIT_S", 0.002)


@pytest.mark.usefixtures("soon")
async def test_an_answer_waits_for_its_engine_to_come_back() -> None:
    """Refused connections, and an engine that is there but still loads, use up no resume; the flight tells the time waited."""
    loads = EngineRefused("Loading model", engine_status=503)
    engine = Refuses(Script(["a", "b", "c"]), [EngineDown("d")] * 3 + [loads] * 2, after=1, cuts=[1])
    client, ask = await run(engine, max_resumes=1)
    assert client.text == "abc"
    assert [facts["waited_s"] > 0 for facts in decisions(ask, "resumed")] == [True]
    assert engine.asked == 7


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("change", ["no waiting", "too long", "deadline", "refused", "another refused"])
async def test_waiting_comes_to_an_end(change: str) -> None:
    """The break is the error that it was: at once where nobody is waited for, or an engine says something else; else when the time is over."""
    down = [EngineDown("d")] * 100_000
    engine = Refuses(Script(["a", "b"]), [EngineRefused("busy", engine_status=429)] if change == "refused" else down, after=1, cuts=[1])
    if change == "another refused":
        engine.others = [Refuses(Script(["a"]), [EngineRefused("busy", engine_status=429)], name="two")]
    ask = new_ask(Client())
    if change == "deadline":
        ask.deadline = Deadline(0.05)
    with pytest.raises(EngineCut):
        await GenerateStage(engine, resume_wait_s={"no waiting": 0.0, "too long": 0.02}.get(change, 600.0))(ask)
    assert (engine.asked == 2) == (change not in ("too long", "deadline"))
    assert [facts["cause"] for facts in decisions(ask, "resume_failed")] == ["engine_cut"]


async def test_who_leaves_ends_the_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled request asks nobody any more."""
    monkeypatch.setattr(legs_module, "WAIT_S", 600.0)
    monkeypatch.setattr(legs_module, "LONGEST_WAIT_S", 600.0)
    engine = Refuses(Script(["a", "b"]), [EngineDown("d")] * 9, after=1, cuts=[1])
    ask = new_ask(Client())
    task = asyncio.get_running_loop().create_task(GenerateStage(engine, resume_wait_s=600.0)(ask))
    await engine.refused.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 15)
    assert engine.asked == 2
    assert ask.flight.usage.completion_tokens == 1


@pytest.mark.parametrize("change", ["nothing said", "cannot", "too often", "logprobs", "none allowed"])
async def test_what_cannot_be_resumed_is_an_error_as_it_was(change: str) -> None:
    """The first error reaches the client; nothing is made up."""
    engine = FakeEngine(Script(["a", "b", "c", "d"]), cuts=[0 if change == "nothing said" else 1, 1, 1], can=change != "cannot")
    client = Client()
    ask = new_ask(client)
    assert ask.call is not None
    if change == "logprobs":
        ask.call.body["logprobs"] = True
    with pytest.raises(EngineCut):
        await GenerateStage(engine, max_resumes=0 if change == "none allowed" else 2)(ask)
    assert "abcd".startswith(client.text)
    assert not [chunk for chunk in client.chunks if chunk.finish]
    assert ask.flight.usage.completion_tokens == len(client.text)


@pytest.mark.parametrize("kind", ["reasoning", "tool_call"])
async def test_behind_reasoning_or_a_tool_call_nobody_goes_on(kind: Any) -> None:
    """Of those only the engine knows what it said."""
    engine = FakeEngine(Script(["a", "b"]), cuts=[1])
    inner = engine._stream

    def with_aside(said: Said, forbid: str) -> FakeStream:
        stream = inner(said, forbid)
        relay = stream.relay

        async def first(take: Any) -> None:
            take([Chunk(1, kind, "hm" if kind == "reasoning" else "", b"{}", tools=[ToolDelta(0, arguments="{")])])
            await relay(take)

        stream.relay = first  # type: ignore[method-assign]
        return stream

    engine._stream = with_aside  # type: ignore[method-assign]
    with pytest.raises(EngineCut):
        await GenerateStage(engine)(new_ask(Client()))


async def test_an_answer_whose_end_was_told_is_whole() -> None:
    """A connection that breaks between the end and `[DONE]` takes nothing from the answer: one end, and the usage as it was counted."""
    engine = FakeEngine(Script(["a", "b"]))
    client = Client()
    ask = new_ask(client)
    stream = engine._stream(Said("", 0, []), "")
    relay = stream.relay

    async def breaks(take: Any) -> None:
        await relay(lambda batch: take([chunk for chunk in batch if chunk.kind != "usage"]))
        raise EngineCut("after the end")

    stream.relay = breaks  # type: ignore[method-assign]
    engine._stream = lambda said, forbid: stream  # type: ignore[method-assign]
    await GenerateStage(engine)(ask)
    assert [chunk.finish for chunk in client.chunks if chunk.finish] == ["stop"]
    assert client.chunks[-1].usage == ask.flight.usage == stream.usage


# -- terms


async def test_a_term_never_arrives_and_the_answer_goes_on() -> None:
    """Nothing of it leaves, the model goes on from before it with its beginning forbidden, and the flight tells its number, not its text."""
    engine = FakeEngine(Script(["It ", "is", " b", "ad", " indeed."]))
    client, ask = await run(engine, Control(BAD))
    assert client.text == "It is ~ indeed."
    assert engine.script.forbidden == [" bad"], "from before the blank of its token, where ids are known"
    assert engine.script.continued[1].token_ids == [100, 101]
    (noted,) = decisions(ask, "term_banned")
    assert noted["term"] == 0
    assert "bad" not in str(ask.flight.decisions)


async def test_chunks_that_need_no_change_leave_as_they_came() -> None:
    """The engine's own events are passed on untouched, held or not."""
    client, _ = await run(FakeEngine(Script(["a ", "b", "ed", " c"])), Control(BAD))
    assert [chunk.text for chunk in client.chunks] == ["a ", "b", "ed", " c", "", ""]
    assert all(chunk.raw == b"{}" for chunk in client.chunks)


async def test_after_too_many_steps_back_the_answer_ends_as_filtered() -> None:
    """content_filter, cleanly, with what stood before the term."""
    engine = FakeEngine(Script(["1 ", "bad", " 2 ", "bad", " 3 ", "bad", " 4"]))
    client, ask = await run(engine, Control(BAD, max_step_backs=2))
    assert (client.text, ask.flight.end) == ("1 ~ 2 ~ 3 ", "content_filter")
    assert len(decisions(ask, "term_banned")) == 3


@pytest.mark.parametrize("control", [Control(BAD, on_term="stop"), Control(BAD, max_step_backs=0)])
async def test_stop_means_stop(control: Control) -> None:
    """The first term ends the answer."""
    client, ask = await run(FakeEngine(Script(["so ", "very ", "evil", " x"])), control)
    assert (client.text, ask.flight.end) == ("so ", "content_filter")


async def test_an_engine_that_cannot_go_on_ends_the_answer_as_filtered() -> None:
    """The client is told that something was filtered, not that something broke."""
    client, ask = await run(FakeEngine(Script(["a ", "bad"]), can=False), Control(BAD))
    assert (client.text, ask.flight.end) == ("a ", "content_filter")
    assert decisions(ask, "step_back_impossible")


async def test_a_term_at_the_very_end_is_found() -> None:
    """The end of the answer is the end of the word."""
    words = Terms([TermList(["bad"])])
    client, _ = await run(FakeEngine(Script(["a", " bad"])), Control(words))
    assert client.text == "a ~"


async def test_a_long_piece_is_held_only_where_it_must() -> None:
    """Of a long piece whose end may begin a term only that end waits."""
    long = "x" * 100 + " b"
    client, _ = await run(FakeEngine(Script([long, "y"])), Control(BAD))
    assert [chunk.text for chunk in client.chunks[:3]] == [long[:-1], "b", "y"]
    assert client.chunks[0].raw is None


def aside(*chunks: Chunk) -> FakeEngine:
    """An engine whose answer is these chunks."""
    engine = FakeEngine(Script(["unused"]))

    class Given(FakeStream):
        async def relay(self, take: Callable[[list[Chunk]], Awaitable[None] | None]) -> None:
            self.told = 1
            for chunk in chunks:
                await self._give(take, [chunk])
            self.ended = True
            await self._give(take, [Chunk(1, "notice", finish="stop"), Chunk(1, "usage", usage=self.usage)])

    def made(said: Said, forbid: str) -> FakeStream:
        stream = Given(engine, [], PROMPT_TOKENS, None)
        engine.streams.append(stream)
        return stream

    engine._stream = made  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize(
    "chunks",
    [
        [Chunk(1, "reasoning", "so b"), Chunk(1, "reasoning", "ad it is")],
        [Chunk(1, "tool_call", tools=[ToolDelta(0, "i", "f", '{"x": "b')]), Chunk(1, "tool_call", tools=[ToolDelta(0, arguments='ad"}')])],
        [Chunk(1, "tool_call", tools=[ToolDelta(0, "i", "f", '"\\u00')]), Chunk(1, "tool_call", tools=[ToolDelta(0, arguments='62\\u0061d"')])],
        [Chunk(1, "tool_call", tools=[ToolDelta(0, "i", "bad", "{}")])],
        [Chunk(1, "reasoning", "ba"), Chunk(1, "text", "fine"), Chunk(1, "reasoning", "bad")],
    ],
)
async def test_in_reasoning_and_tool_calls_a_term_ends_the_answer(chunks: list[Chunk]) -> None:
    """There nobody can step back: nothing of it leaves, and the answer ends as filtered."""
    client, ask = await run(aside(*chunks), Control(BAD))
    assert ask.flight.end == "content_filter"
    told = "".join(chunk.text + "".join(tool.name + tool.arguments for tool in chunk.tools or ()) for chunk in client.chunks)
    assert "bad" not in told
    assert "\\u0061" not in told


async def test_reasoning_does_not_hold_the_answer() -> None:
    """Where reasoning ends with the beginning of a term, the answer behind it still leaves at once."""
    engine = aside(Chunk(1, "reasoning", "b"), Chunk(1, "text", "ad"), Chunk(1, "tool_call", tools=[ToolDelta(0, "i", "b", "a")]))
    client, ask = await run(engine, Control(BAD))
    assert ask.flight.end == "stop"
    assert [chunk.kind for chunk in client.chunks] == ["reasoning", "text", "tool_call", "notice", "usage"]


async def test_what_is_forbidden_stays_so_where_the_next_run_breaks_off_at_once() -> None:
    """A step back whose run says nothing is resumed with the same beginning forbidden."""
    engine = FakeEngine(Script(["a ", "bad", " b"]), cuts=[None, 0])
    client, _ = await run(engine, Control(BAD))
    assert (client.text, engine.script.forbidden) == ("a ~ b", ["bad", "bad"])


# -- triggers and injections


async def test_a_trigger_hands_over_and_the_answer_goes_on() -> None:
    """Its text does not leave, what the stage gives stands in its place, and the model goes on behind it."""
    engine = FakeEngine(Script(["Wait: ", "<", "T", ">", " done."]))
    client, ask = await run(engine, Control(triggers=(trigger(),)))
    assert client.text == "Wait: [t1] done."
    assert engine.script.continued[1].text == "Wait: [t1]"
    assert decisions(ask, "triggered") == [{"trigger": 0, "stage": "ticket"}]
    assert ask.flight.usage.completion_tokens == 2, "only what the model said and the client saw"


async def test_a_trigger_may_end_the_answer() -> None:
    """then = stop."""
    client, ask = await run(FakeEngine(Script(["a ", "<T>", " b"])), Control(triggers=(trigger(goes_on=False),)))
    assert (client.text, ask.flight.end) == ("a [t1]", "stop")


async def test_a_trigger_of_token_ids() -> None:
    """Where the engine tells ids, a sequence of them fires; a part of it does not."""
    engine = FakeEngine(Script(["a", "b", "c", "d", "e"]))
    client, _ = await run(engine, Control(triggers=(trigger(text="", token_ids=(102, 103), goes_on=False),)))
    assert client.text == "ab[t1]"
    client, _ = await run(FakeEngine(Script(["a", "b", "c", "d", "e"])), Control(triggers=(trigger(text="", token_ids=(102, 104)),)))
    assert client.text == "abcde"


async def test_a_model_that_never_stops_triggering_comes_to_an_end() -> None:
    """After a number of triggers the answer ends."""
    client, ask = await run(FakeEngine(Script(["<T>", " and "] * 30)), Control(triggers=(trigger(),)))
    assert (client.text, ask.flight.end) == ("[t1] and " * MOST_TRIGGERS, "stop")


async def test_a_mark_right_behind_its_insertion_ends_the_answer() -> None:
    """A model that says the mark again at once would get the same text again and again."""
    client, ask = await run(FakeEngine(Script(["a ", "<T>", " ", "<T>", " b"])), Control(triggers=(trigger(),)))
    assert (client.text, ask.flight.end) == ("a [t1] ", "stop")
    assert decisions(ask, "trigger_repeated") == [{}]


async def test_an_insertion_is_looked_at_too() -> None:
    """What a stage gives may complete no term: the answer ends as filtered."""
    client, ask = await run(FakeEngine(Script(["b", "<T>"])), Control(BAD, triggers=(trigger(insert="ad."),)))
    assert (client.text, ask.flight.end) == ("", "content_filter")


@pytest.mark.parametrize("control", [None, Control(BAD)])
async def test_text_put_in_from_outside(control: Control | None) -> None:
    """Whoever has the Ask puts text in; the model goes on behind it."""
    engine = FakeEngine(Script(["a ", "b ", "c"]))
    ask = new_ask(None)
    seen: list[str] = []

    def emit(batch: list[Chunk]) -> None:
        seen.extend(chunk.text for chunk in batch)
        if seen == ["a "]:
            ask.running.inject("(look) ")  # type: ignore[union-attr]

    ask.emit = emit
    await GenerateStage(engine, control=control)(ask)
    assert "".join(seen) == "a (look) b c"
    assert engine.script.continued[1].token_ids is None


@pytest.mark.parametrize("control", [None, Control(BAD)])
@pytest.mark.parametrize(("batch", "whole"), [(1, "one two (look) "), (2, "one two (look) "), (3, "one two ")])
@pytest.mark.parametrize("later", [False, True])
async def test_text_put_in_at_the_end(control: Control | None, batch: int, whole: str, later: bool) -> None:
    """Where all that still comes is the engine's end, the text goes in before it; where that end was told already (`batch` 3: with the last token)
    none goes in. The client is told of one end, and nothing behind it. `later`: it is asked for between two batches."""
    engine = FakeEngine(Script(["one ", "two "]), batch=batch)
    client = Client()
    ask = new_ask(client)

    def emit(given: list[Chunk]) -> None:
        client.emit(given)
        if client.text == "one two " and not asked:
            asked.append(True)
            running: Any = ask.running
            if later:
                asyncio.get_running_loop().call_soon(running.inject, "(look) ")
            else:
                running.inject("(look) ")

    asked: list[bool] = []
    ask.emit = emit
    await GenerateStage(engine, control=control)(ask)
    assert client.text == "".join(ask.text) == whole
    assert [chunk.finish for chunk in client.chunks if chunk.finish is not None] == ["stop"]
    assert (client.chunks[-1].kind, client.chunks[-1].usage) == ("usage", ask.flight.usage)


# -- whole answers


async def test_a_whole_answer_without_a_hit_is_the_engines_own() -> None:
    """Nothing is taken apart that need not be."""
    ask = new_ask(None)
    await GenerateStage(FakeEngine(Script(["all ", "fine"])), control=Control(BAD))(ask)
    assert ask.whole == EngineAnswer("all fine", "stop", Usage(PROMPT_TOKENS, 2), b"{}")
    assert ask.text == ["all fine"]


async def test_a_whole_answer_with_a_term_goes_the_long_way() -> None:
    """The answer is cut before the term and told on from there."""
    ask = new_ask(None)
    await GenerateStage(FakeEngine(Script(["it is ", "bad", " here and ", "<T>", "."])), control=Control(BAD, triggers=(trigger(),)))(ask)
    assert ask.whole is not None
    assert (ask.whole.text, ask.whole.end, ask.whole.raw) == ("it is ~ here and [t1].", "stop", None)
    assert "".join(ask.text) == ask.whole.text
    assert not ask.whole.usage.exact


@pytest.mark.parametrize(
    "raw",
    [
        b'{"choices":[{"message":{"reasoning_content":"so bad","content":"ok"}}]}',
        b'{"choices":[{"message":{"content":"ok","tool_calls":[{"function":{"name":"f","arguments":"{\\"x\\": \\"\\\\u0062ad\\"}"}}]}}]}',
    ],
)
async def test_a_whole_answer_is_looked_through_beside_its_text(raw: bytes) -> None:
    """Reasoning and tool calls too."""
    engine = FakeEngine(Script(["ok"]))

    async def whole(call: EngineCall, flight: Flight) -> EngineAnswer:
        return EngineAnswer("ok", "stop", Usage(1, 1), raw)

    engine.whole = whole  # type: ignore[method-assign]
    ask = new_ask(None)
    await GenerateStage(engine, control=Control(BAD))(ask)
    assert ask.whole is not None
    assert (ask.whole.end, ask.whole.raw) == ("content_filter", None)


# -- anything goes


@given(
    parts=st.lists(st.sampled_from(["bad", "<T>", " ", "x", "é", "very ", "evi", "b", "ba", "<", "<T", "word", "炸"]), min_size=1, max_size=12),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=8),
    cuts=st.lists(st.none() | st.integers(0, 6), max_size=5),
    tells_ids=st.booleans(), batch=st.integers(1, 4), can=st.booleans(), max_step_backs=st.integers(0, 3), whole=st.booleans(),
)  # fmt: skip
@settings(max_examples=600, deadline=None)
def test_whatever_happens_the_client_sees_one_whole(
    parts: list[str], sizes: list[int], cuts: list[int | None], tells_ids: bool, batch: int, can: bool, max_step_backs: int, whole: bool
) -> None:
    """Any pieces, cuts, terms and triggers: the text that left is what it should be up to where the answer ended, nothing forbidden is in it, and
    the tokens are counted as the pieces that stand."""
    text = "".join(parts)
    tokens, at, turn = [], 0, itertools.cycle(sizes)
    while at < len(text):
        size = next(turn)
        tokens.append(text[at : at + size])
        at += size
    engine = FakeEngine(Script(tokens), cuts=() if whole else cuts, tells_ids=tells_ids, batch=batch, can=can)
    client = Client()
    ask = new_ask(None if whole else client)
    control = Control(BAD, max_step_backs=max_step_backs, triggers=(trigger(),))
    failed = False
    try:
        asyncio.run(GenerateStage(engine, control=control, max_resumes=3)(ask))
    except (EngineCut, CannotContinue):
        failed = True
    seen = "".join(ask.text)
    assert seen == (ask.whole.text if whole and ask.whole is not None else seen if whole else client.text)
    whole_text = text.replace("bad", "~").replace("very evil", "~").replace(TRIGGER, "[t1]")
    assert whole_text.startswith(seen) or (failed and whole)
    assert "bad" not in seen
    assert TRIGGER not in seen
    repeated = bool(decisions(ask, "trigger_repeated"))
    if not failed and not repeated and ask.flight.end == "stop" and len(decisions(ask, "triggered")) <= MOST_TRIGGERS:
        assert seen == whole_text
    if not failed and ask.flight.end == "content_filter":
        assert text.count("bad") > max_step_backs or not can
    usage = ask.flight.usage
    assert usage.completion_tokens <= len(tokens) + 2 * len(parts)
    if usage.exact and not failed:
        assert usage.prompt_tokens == PROMPT_TOKENS
        assert usage.completion_tokens == len(tokens) or seen != text
