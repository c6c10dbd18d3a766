"""A long document in parts: who reads them, what is kept of them, and in which order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pipeline.test_length import Words

from tidegate.admission.gate import Gate
from tidegate.admission.settings import AdmissionSettings
from tidegate.core.ask import Ask, Caller, Deadline, EngineAnswer, EngineCall
from tidegate.core.chunk import Usage
from tidegate.core.errors import ContextTooLong, DeadlineExceeded, EngineDown
from tidegate.core.flight import Flight
from tidegate.core.words import words
from tidegate.pipeline.relevance import relevance
from tidegate.pipeline.settings import ShardSettings
from tidegate.pipeline.stages.shard import ShardStage

PARAGRAPHS = [f"Paragraph {n} speaks of {topic}, of nothing else, and at some length. " * 6 for n, topic in enumerate(
    ["water", "fire", "storms", "theft", "glass", "water pipes", "fees", "water again"]
)]  # fmt: skip
DOCUMENT = "\n\n".join(PARAGRAPHS)


class Reader:
    """An engine that reads a part. `says`: what it answers to it, or raises; `holds`: nothing is answered before it is set."""

    name = "reader"

    def __init__(self, says: Callable[[str], str] = lambda part: part[:40], holds: asyncio.Event | None = None) -> None:
        self.says, self.holds = says, holds
        self.calls: list[str] = []
        self.running = self.most = self.cancelled = 0
        self.asked = asyncio.Event()

    async def whole(self, call: EngineCall, flight: Flight) -> EngineAnswer:
        part = call.body["messages"][1]["content"]
        self.calls.append(part)
        self.running += 1
        self.most = max(self.most, self.running)
        self.asked.set()
        try:
            await (self.holds.wait() if self.holds is not None else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        return EngineAnswer(self.says(part), "stop", Usage(100, 10))


class Fleet:
    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def find(self, model: str | None, ask: Ask | None = None) -> tuple[Any, str]:
        return self.reader, model or "own"

    def instances(self, model: str | None, ask: Ask | None = None) -> list[tuple[Any, str]]:
        return [self.find(model)]

    def another(self, model: str | None, ask: Ask, tried: Sequence[Any], cause: Any, *, free: bool = False) -> None:
        return None

    def blame(self, engine: Any) -> None:
        """Nobody is blamed here."""


def new_ask(document: str = DOCUMENT, question: str = "What is said of water?") -> Ask:
    ask = Ask(Flight("/test"), Caller("key", "tenant"), Deadline(60))
    ask.input = {"document": document, "question": question}
    return ask


def stage(reader: Reader, gate: Gate | None = None, context: int = 0, **said: Any) -> ShardStage:
    asked = ShardSettings.model_validate({"tokens": 120, "ask": "Read.", "answer_tokens": 20, **said})
    return ShardStage(Fleet(reader), Words(context=context), asked, "m", gate)


async def until(true: Callable[[], bool]) -> None:
    """Let the others run until it is so."""
    for _ in range(10_000):
        if true():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come to that")


async def test_every_part_is_read_once_and_all_of_it() -> None:
    """The parts that the engine saw are the document, each with the question behind it."""
    reader, ask = Reader(), new_ask()
    await stage(reader)(ask)
    read = [call.removesuffix("\n\nWhat is said of water?") for call in reader.calls]
    assert "".join(sorted(read, key=DOCUMENT.index)) == DOCUMENT
    assert len(read) > 4


async def test_the_most_relevant_are_kept_in_the_order_of_the_document() -> None:
    """The parts that speak of it are the passages, and they stand as in the document: the best of them is not the first."""
    ask = new_ask(question="Of water, and of water again?")
    await stage(Reader(lambda part: part.partition("\n\nOf water")[0]), keep=3)(ask)
    scores = [passage.score for passage in ask.passages]
    assert scores != sorted(scores, reverse=True)
    numbers = [int(passage.id.rpartition("-")[2]) for passage in ask.passages]
    assert numbers == sorted(numbers)
    assert all("water" in passage.text for passage in ask.passages)
    assert max(passage.score for passage in ask.passages) == 1.0
    assert ask.flight.passage_ids == [passage.id for passage in ask.passages]
    assert ask.passages[0].title == f"part {numbers[0]} of {ask.notes['shards']['parts']}" if ask.notes else False


async def test_parts_that_hold_nothing_are_left_out() -> None:
    """A model that says NONE, or nothing, of a part has read it: it is not unanswered, and no passage."""
    ask = new_ask()
    await stage(Reader(lambda part: "Water does harm." if "again" in part else "NONE." if "fire" in part else " "))(ask)
    assert [passage.text for passage in ask.passages] == ["Water does harm."] * len(ask.passages)
    assert len(ask.passages) >= 1
    assert ask.notes is not None
    assert ask.notes["shards"]["unanswered"] == 0


async def test_a_short_document_is_not_read_in_parts() -> None:
    """What fits goes into the prompt as it is; no engine is asked."""
    reader, ask = Reader(), new_ask("A short text about water.")
    await stage(reader)(ask)
    assert (reader.calls, [passage.text for passage in ask.passages]) == ([], ["A short text about water."])


async def test_an_empty_document_has_no_passages() -> None:
    """Nothing is read, nothing is found."""
    reader, ask = Reader(), new_ask("")
    await stage(reader)(ask)
    assert (reader.calls, ask.passages) == ([], [])


async def test_no_more_parts_are_read_at_a_time_than_allowed() -> None:
    """`parallel` is reached and not passed."""
    reader = Reader()
    await stage(reader, parallel=3)(new_ask())
    assert reader.most == 3


async def test_a_small_context_makes_smaller_parts() -> None:
    """A part, the question, the instruction and the answer fit into the model's context; where they cannot the request is refused."""
    reader = Reader()
    await stage(reader, context=170)(new_ask())
    small = len(reader.calls)
    await stage(reader)(new_ask())
    assert small > len(reader.calls) - small
    with pytest.raises(ContextTooLong, match="leaves no room"):
        await stage(reader, context=40)(new_ask())


async def test_too_many_parts_are_refused_by_the_field() -> None:
    """A bound on the work that one request may make, told before any is done."""
    reader = Reader()
    with pytest.raises(ContextTooLong) as caught:
        await stage(reader, most=3)(new_ask())
    assert (caught.value.param, reader.calls) == ("document", [])


async def test_a_part_that_fails_is_left_out_and_told() -> None:
    """One engine error loses one part; what it took is spent, and the flight tells the number."""

    def says(part: str) -> str:
        if "glass" in part:
            raise EngineDown("It is down.")
        return part

    ask = new_ask()
    await stage(Reader(says))(ask)
    assert ask.notes is not None
    facts = ask.notes["shards"]
    assert facts["unanswered"] >= 1
    assert ask.passages
    assert ask.aside == Usage(100 * (facts["parts"] - facts["unanswered"]), 10 * (facts["parts"] - facts["unanswered"]))


async def test_where_no_part_is_answered_the_engine_s_error_stands() -> None:
    """Not a prompt without a document."""

    def fails(part: str) -> str:
        raise EngineDown("It is down.")

    with pytest.raises(EngineDown):
        await stage(Reader(fails))(new_ask())


async def test_what_is_not_read_in_time_is_left_out() -> None:
    """When the budget ends, what was found by then is used; calls that run are cancelled; where nothing was found the error names the stage."""
    holds = asyncio.Event()
    reader = Reader(holds=holds)

    class Sometimes(Reader):
        async def whole(self, call: EngineCall, flight: Flight) -> EngineAnswer:
            if "Paragraph 0" in call.body["messages"][1]["content"]:
                return EngineAnswer("Water.", "stop", Usage(1, 1))
            return await super().whole(call, flight)

    sometimes, ask = Sometimes(holds=holds), new_ask()
    await stage(sometimes, budget_s=0.05)(ask)
    assert [passage.text for passage in ask.passages] == ["Water."] * len(ask.passages)
    assert ask.notes is not None
    assert ask.notes["shards"]["unanswered"] > 0
    assert (sometimes.cancelled, sometimes.running) == (4, 0)
    with pytest.raises(DeadlineExceeded) as caught:
        await stage(reader, budget_s=0.05)(new_ask())
    assert caught.value.stage == "shard"


async def test_who_leaves_ends_all_calls() -> None:
    """A cancel reaches every call that runs."""
    reader = Reader(holds=asyncio.Event())
    running = asyncio.ensure_future(stage(reader)(new_ask()))
    await reader.asked.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert reader.cancelled == len(reader.calls) > 0
    assert reader.running == 0


@pytest.mark.parametrize(("slots", "most"), [(1, 1), (2, 2), (3, 3), (9, 4)])
async def test_parts_wait_for_slots_as_requests_do(slots: int, most: int) -> None:
    """The request has one slot already and reads on in it; each call beside it takes one of the others, and all are given back."""
    gate = Gate(AdmissionSettings.model_validate({"forecast_s": 600}), {})
    lane = gate.open(["m"], slots)
    own = gate.enter("m", Caller("key", "tenant"), prompt_tokens=10)
    reader = Reader()
    async with asyncio.timeout(20):  # only a call that waits for ever reaches it
        await stage(reader, gate, parallel=4)(new_ask())
    assert reader.most == most
    assert (lane.running, lane.queue.waiting) == (1, 0)
    own.leave()
    assert lane.running == 0


async def test_a_slot_that_comes_free_is_used() -> None:
    """A call that waits for a slot runs as soon as somebody leaves; one that waits when all is read leaves the queue."""
    gate = Gate(AdmissionSettings.model_validate({"forecast_s": 600}), {})
    lane = gate.open(["m"], 2)
    own, other = (gate.enter("m", Caller(name, name), prompt_tokens=10) for name in ("a", "b"))
    holds = asyncio.Event()
    reader, ask = Reader(holds=holds), new_ask()
    running = asyncio.ensure_future(stage(reader, gate, parallel=4)(ask))
    await until(lambda: (reader.running, lane.queue.waiting) == (1, 3))
    other.leave()
    await until(lambda: (reader.running, lane.queue.waiting) == (2, 2))
    holds.set()
    async with asyncio.timeout(20):  # only a call that waits for ever reaches it
        await running
    assert reader.most == 2
    own.leave()
    assert (lane.running, lane.queue.waiting) == (0, 0)


@given(st.lists(st.text("abc ", max_size=12), max_size=8), st.text("abcx ", max_size=10))
@settings(deadline=None)
def test_relevance_is_between_0_and_1(texts: list[str], question: str) -> None:
    """The nearest has 1, a text without a word of the question has 0, and what holds one has more than that."""
    scores = relevance(question, texts)
    assert len(scores) == len(texts)
    asked = set(words(question))
    for text, score in zip(texts, scores, strict=True):
        assert (score > 0) is bool(asked & set(words(text)))
        assert 0 <= score <= 1
    assert max(scores, default=0) in (0, 1)


def test_relevance_reads_scripts_without_blanks() -> None:
    """Of two Chinese texts the one that holds the words of the question is nearer."""
    near, far = relevance("水灾赔偿多少？", ["水灾的赔偿上限为五万元。", "投保人应当如实告知健康状况。"])
    assert near > far
