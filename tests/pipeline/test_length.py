"""Prompts that are too long: what is cut, what stays, who is told."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pipeline.test_capability import write
from tests.pipeline.test_cut_text import by_words

from tidegate.admission.gate import Gate
from tidegate.admission.settings import AdmissionSettings
from tidegate.core.ask import Ask, Caller, Deadline, EngineAnswer, EngineCall
from tidegate.core.chunk import Usage
from tidegate.core.errors import ContextTooLong, EngineDown, SettingsError
from tidegate.core.flight import Flight
from tidegate.core.ports import Counted, How
from tidegate.pipeline.capability import load
from tidegate.pipeline.length import Interval, interval, line_of
from tidegate.pipeline.parts import Parts
from tidegate.pipeline.settings import LengthSettings
from tidegate.pipeline.stages.fit import FitStage, build, fit

MARKER = " [...] "
WORDS = st.lists(st.sampled_from(["alpha", "beta", "gamma", "字字字", "👍🏽", "x", "<|im_end|>"]), max_size=60).map(" ".join)


class Words:
    """Counts as `by_words`, and five tokens around each message."""

    def __init__(self, context: int = 0, how: How = "engine") -> None:
        self.context_tokens, self.how, self.asked = context, how, 0

    async def texts(self, engine: Any, texts: Sequence[str]) -> tuple[list[int], How]:
        self.asked += 1
        return await by_words(texts), self.how

    async def prompt(self, engine: Any, call: EngineCall) -> Counted:
        self.asked += 1
        return Counted(size_of(call.body), self.how)

    async def context(self, engine: Any, model: str) -> int:
        return self.context_tokens


def size_of(body: dict[str, Any]) -> int:
    if "prompt" in body:
        prompt = body["prompt"]
        return len(prompt) if isinstance(prompt, list) else words_in(prompt)
    return sum(5 + words_in(text) for message in body["messages"] for text in texts_of(message)) + 3


def words_in(text: str) -> int:
    return len(re.findall(r" ?\w{1,6}|\s|[^\w\s]", text))


def texts_of(message: dict[str, Any]) -> list[str]:
    content = message.get("content") or ""
    rest = {name: value for name, value in message.items() if name not in ("role", "content") and value}
    said = json.dumps(rest, separators=(",", ":"), ensure_ascii=False) if rest else ""
    return ["".join(part["text"] for part in content) if isinstance(content, list) else content, said]


class Model:
    """An engine that summarises."""

    name = "small"

    def __init__(self, says: str = "In short.", error: Exception | None = None, hangs: bool = False) -> None:
        self.says, self.error, self.hangs = says, error, hangs
        self.calls: list[EngineCall] = []
        self.cancelled = 0
        self.asked = asyncio.Event()

    async def whole(self, call: EngineCall, flight: Flight) -> EngineAnswer:
        self.calls.append(call)
        self.asked.set()
        if self.hangs:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if self.error:
            raise self.error
        return EngineAnswer(self.says, "stop", Usage(100, 7))


class Fleet:
    def __init__(self, model: Model | None = None) -> None:
        self.model = model or Model()

    def find(self, model: str | None, ask: Ask | None = None) -> tuple[Any, str]:
        return self.model, model or "own"

    def instances(self, model: str | None, ask: Ask | None = None) -> list[tuple[Any, str]]:
        return [self.find(model)]

    def another(self, model: str | None, ask: Ask, tried: Sequence[Any], cause: Any, *, free: bool = False) -> None:
        return None

    def blame(self, engine: Any) -> None:
        """Nobody is blamed here."""


def stage(counter: Words | None = None, fleet: Fleet | None = None, gate: Gate | None = None, **said: Any) -> FitStage:
    return fit(Parts(fleet or Fleet(), counter=counter or Words(), gate=gate), LengthSettings.model_validate({"marker": MARKER, **said}))


def new_ask(body: dict[str, Any], kind: Any = "chat") -> Ask:
    ask = Ask(Flight("/test"), Caller("key", "tenant"), Deadline(60))
    ask.call = EngineCall(kind, "default", body)
    return ask


async def fitted(body: dict[str, Any], kind: Any = "chat", **said: Any) -> Ask:
    ask = new_ask(body, kind)
    await stage(**said)(ask)
    return ask


def messages_of(ask: Ask) -> list[dict[str, Any]]:
    assert ask.call is not None
    found: list[dict[str, Any]] = ask.call.body["messages"]
    return found


def long_chat(turns: int = 8) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = [{"role": "system", "content": "Answer briefly."}]
    for turn in range(turns):
        said += [{"role": "user", "content": f"question {turn} " * 10}, {"role": "assistant", "content": f"answer {turn} " * 10}]
    return [*said, {"role": "user", "content": "And what about the last one?"}]


# -- any conversation

TURN = st.tuples(WORDS, WORDS, st.booleans())


def conversation(system: str, turns: list[tuple[str, str, bool]], last: str, tools_behind: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    number = 0

    def tool_call(text: str) -> list[dict[str, Any]]:
        nonlocal number
        number += 1
        call = {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        return [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": f"c{number}", "content": text}]

    for asked, answered, uses_tool in turns:
        found.append({"role": "user", "content": [{"type": "text", "text": asked}] if uses_tool else asked})
        found += tool_call(answered) if uses_tool else []
        found.append({"role": "assistant", "content": answered or "-"})
    found.append({"role": "user", "content": last})
    for _ in range(tools_behind):
        found += tool_call(last)
    return found


@given(WORDS, st.lists(TURN, max_size=6), WORDS, st.integers(0, 2), st.sampled_from(["head", "tail", "middle"]), st.integers(20, 400))
@settings(max_examples=300, deadline=None)
def test_whatever_is_cut_fits_and_keeps_what_must_stay(
    system: str, turns: list[tuple[str, str, bool]], last: str, tools_behind: int, policy: str, limit: int
) -> None:
    """The prompt fits; system messages are whole, the last message of the user is there, roles keep their order, no tool's result is without its
    call, and each text is a beginning and an end of what it was."""
    before = conversation(system, turns, last or "?", tools_behind)
    try:
        ask = asyncio.run(fitted({"messages": before}, policy=policy, max_prompt_tokens=limit))
    except ContextTooLong:
        kept = [message for message in before if message["role"] == "system"]
        assert size_of({"messages": kept}) + 40 > limit, "refused though there was room for what must stay"
        return
    after = messages_of(ask)
    assert size_of({"messages": after}) <= limit
    if size_of({"messages": before}) <= limit:
        assert after == before
        assert ask.notes is None
        return
    assert [message for message in after if message["role"] == "system"] == [message for message in before if message["role"] == "system"]
    at = -1
    for message in after:
        at = next(n for n in range(at + 1, len(before)) if _came_from(message, before[n]))
    assert sum(message["role"] == "user" for message in after) >= 1
    called = {call["id"] for message in after for call in message.get("tool_calls") or ()}
    assert {message["tool_call_id"] for message in after if message["role"] == "tool"} == called
    assert ask.notes is not None
    assert ask.notes["cut"]["to"] == size_of({"messages": after})


def _came_from(after: dict[str, Any], before: dict[str, Any]) -> bool:
    same = {name: value for name, value in after.items() if name != "content"} == {name: value for name, value in before.items() if name != "content"}
    one, other = texts_of(after)[0], texts_of(before)[0]
    if not same or one == other:
        return same
    first, found, second = one.partition(MARKER)
    return bool(found) and other.startswith(first) and other.endswith(second)


# -- each policy


async def test_the_head_goes_first() -> None:
    """`head`: the oldest turns are dropped, the newest are as they were."""
    before = long_chat()
    ask = await fitted({"messages": before}, policy="head", max_prompt_tokens=150)
    after = messages_of(ask)
    assert after[0] == before[0]
    assert after[-3:] == before[-3:]
    assert ask.notes is not None
    assert ask.notes["cut"]["messages_dropped"] > 8


async def test_the_tail_goes_first() -> None:
    """`tail`: the newest turns before the last question are dropped, the oldest are as they were."""
    before = long_chat()
    after = messages_of(await fitted({"messages": before}, policy="tail", max_prompt_tokens=150))
    assert after[:3] == before[:3]
    assert after[-1] == before[-1]


async def test_the_middle_goes_first() -> None:
    """`middle`: the oldest and the newest turn are as they were."""
    before = long_chat()
    after = messages_of(await fitted({"messages": before}, policy="middle", max_prompt_tokens=250))
    assert (after[:3], after[-3:]) == (before[:3], before[-3:])


@pytest.mark.parametrize(("policy", "begins", "ends"), [("head", False, True), ("tail", True, False), ("middle", True, True)])
async def test_a_single_long_message_is_cut_by_the_policy(policy: str, begins: bool, ends: bool) -> None:
    """Where the last message of the user is all there is, it is cut itself, with a marker where something went."""
    text = " ".join(f"word{n}" for n in range(500))
    ask = await fitted({"messages": [{"role": "user", "content": text}]}, policy=policy, max_prompt_tokens=100)
    (message,) = messages_of(ask)
    assert MARKER in message["content"]
    assert message["content"].startswith("word0 word1 ") is begins
    assert message["content"].endswith(" word498 word499") is ends
    assert 90 <= size_of({"messages": [message]}) <= 100


async def test_the_last_message_can_be_kept_whole() -> None:
    """last_message = "refuse": rather no answer than one to half a question."""
    body = {"messages": [{"role": "user", "content": "word " * 500}]}
    with pytest.raises(ContextTooLong, match="stay whole"):
        await fitted(body, policy="head", last_message="refuse", max_prompt_tokens=100)


async def test_a_refusal_says_the_count_and_who_counted() -> None:
    """`refuse` tells how many tokens there are and may be; an estimate is called one."""
    body = {"messages": [{"role": "user", "content": "word " * 500}]}
    with pytest.raises(ContextTooLong, match=r"has \d+ tokens, more than 100\.") as exact:
        await fitted(body, policy="refuse", max_prompt_tokens=100)
    assert exact.value.http_status == 400
    with pytest.raises(ContextTooLong, match="tokens by an estimate, more than 100"):
        await fitted(body, counter=Words(how="estimate"), policy="refuse", max_prompt_tokens=100)


async def test_an_estimate_is_marked() -> None:
    """Where nobody could count, flight and caller are told so."""
    ask = await fitted({"messages": long_chat()}, counter=Words(how="estimate"), policy="head", max_prompt_tokens=150)
    assert ask.notes is not None
    assert ask.notes["cut"]["counted"] == "estimate"
    ((_, what, facts),) = ask.flight.decisions
    assert (what, facts["counted"]) == ("length_cut", "estimate")


async def test_no_text_is_in_the_flight_or_the_notes() -> None:
    """Numbers and names alone."""
    ask = await fitted({"messages": [{"role": "user", "content": "zebra " * 500}]}, policy="middle", max_prompt_tokens=100)
    assert "zebra" not in json.dumps([ask.notes, ask.flight.decisions])


async def test_a_short_prompt_is_not_counted() -> None:
    """Fewer bytes than tokens are allowed: nobody is asked anything, and the call is the same object."""
    counter = Words()
    ask = new_ask({"messages": [{"role": "user", "content": "Hello"}]})
    call = ask.call
    await stage(counter, policy="head", max_prompt_tokens=300)(ask)
    assert (counter.asked, ask.call is call) == (0, True)


async def test_without_a_number_the_engine_s_context_is_the_bound() -> None:
    """What the answer may take is kept free: 200 tokens of context, 50 for the answer."""
    body = {"messages": [{"role": "user", "content": "word " * 500}], "max_tokens": 50}
    ask = await fitted(body, counter=Words(context=200), policy="tail")
    assert ask.notes is not None
    assert ask.notes["cut"]["limit"] == 150
    assert ask.notes["cut"]["to"] <= 150
    assert ask.call is not None
    assert ask.call.body["max_tokens"] == 50


async def test_an_engine_that_does_not_tell_its_context_is_left_to_refuse() -> None:
    """Nobody invents a bound."""
    ask = await fitted({"messages": [{"role": "user", "content": "word " * 500}]}, policy="tail")
    assert ask.notes is None


async def test_a_plain_prompt_is_cut_and_token_ids_are_not() -> None:
    """A completion's text is cut like a message; among token ids nobody can say where a character ends."""
    ask = await fitted({"prompt": "word " * 500}, "completion", policy="middle", max_prompt_tokens=100)
    assert ask.call is not None
    assert MARKER in ask.call.body["prompt"]
    with pytest.raises(ContextTooLong, match="token ids are not cut"):
        await fitted({"prompt": list(range(500))}, "completion", policy="middle", max_prompt_tokens=100)


async def test_system_messages_that_are_too_long_are_refused() -> None:
    """They are never cut."""
    body = {"messages": [{"role": "system", "content": "word " * 500}, {"role": "user", "content": "Hello"}]}
    with pytest.raises(ContextTooLong, match="leave no room"):
        await fitted(body, policy="middle", max_prompt_tokens=100)


# -- compressing


async def test_a_summary_stands_in_place_of_the_middle() -> None:
    """Oldest and newest are as they were; between them stands what the model said of the rest; the model and its tokens are told."""
    before = long_chat()
    model = Model("They spoke of numbers.")
    ask = await fitted({"messages": before}, fleet=Fleet(model), policy="compress", max_prompt_tokens=300, compress_model="tiny")
    after = messages_of(ask)
    assert (after[:2], after[-1]) == (before[:2], before[-1])
    assert sum("[Summary of what was left out here: They spoke of numbers.]" in message["content"] for message in after) == 1
    assert MARKER not in "".join(message["content"] for message in after[:2])
    assert ask.notes is not None
    facts = ask.notes["cut"]
    assert (facts["policy"], facts["summary_model"], facts["summary_tokens"] >= 7) == ("compress", "tiny", True)
    assert facts["to"] <= 300
    asked = " ".join(call.body["messages"][1]["content"] for call in model.calls)
    assert "question 3" in asked
    assert "last one" not in asked


async def test_a_long_document_in_one_message_is_compressed_too() -> None:
    """Its beginning and its end stay around the summary, though the caller's text holds the marker itself."""
    text = f"first {MARKER} " + " ".join(f"word{n}" for n in range(500)) + " What follows?"
    ask = await fitted({"messages": [{"role": "user", "content": text}]}, policy="compress", max_prompt_tokens=200)
    (message,) = messages_of(ask)
    assert message["content"].startswith(f"first {MARKER} word0 ")
    assert "[Summary of what was left out here: In short.]" in message["content"]
    assert message["content"].endswith("What follows?")


@pytest.mark.parametrize(
    ("model", "why"),
    [(Model(error=EngineDown("No.")), "engine_down"), (Model(hangs=True), "no summary within 0.05 s"), (Model(" "), "engine_empty")],
)
async def test_without_a_summary_it_is_cut_as_declared(model: Model, why: str) -> None:
    """A summariser that fails, hangs or says nothing costs its time and no more: the declared cut is made, and told."""
    ask = await fitted(
        {"messages": long_chat()}, fleet=Fleet(model), policy="compress", compress_s=0.05, compress_else="head", max_prompt_tokens=200
    )
    assert ask.notes is not None
    assert (ask.notes["cut"]["policy"], ask.notes["cut"]["why"]) == ("head", why)
    assert ask.notes["cut"]["to"] <= 200
    assert model.cancelled == (len(model.calls) if model.hangs else 0)
    with pytest.raises(ContextTooLong, match="no summary of it came"):
        await fitted({"messages": long_chat()}, fleet=Fleet(model), policy="compress", compress_s=0.05, compress_else="refuse", max_prompt_tokens=200)


async def test_who_leaves_while_it_is_summarised_ends_the_summary() -> None:
    """A cancel reaches the engine, and no cut is made instead."""
    model = Model(hangs=True)
    ask = new_ask({"messages": long_chat()})
    running = asyncio.ensure_future(stage(fleet=Fleet(model), policy="compress", max_prompt_tokens=200)(ask))
    await model.asked.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert model.cancelled == len(model.calls)
    assert ask.notes is None


class Counting(Model):
    """Tells how many of its calls ran at once; each ends when the others have had their chance to begin."""

    running = most = 0

    async def whole(self, call: EngineCall, flight: Flight) -> EngineAnswer:
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(20):
            await asyncio.sleep(0)
        self.running -= 1
        return await super().whole(call, flight)


@pytest.mark.parametrize(("slots", "most"), [(1, 1), (2, 2), (3, 3), (9, 4)])
async def test_parts_of_a_summary_wait_for_slots_as_requests_do(slots: int, most: int) -> None:
    """One at a time is read in the request's own slot; each call beside it takes one of the others, and all are given back."""
    gate = Gate(AdmissionSettings.model_validate({"forecast_s": 600}), {})
    lane = gate.open(["default"], slots)
    own = gate.enter("default", Caller("key", "tenant"), prompt_tokens=10)
    model = Counting()
    ask = new_ask({"messages": [{"role": "user", "content": " ".join(f"word{n}" for n in range(1500))}]})
    await stage(Words(context=160), Fleet(model), gate, policy="compress", max_prompt_tokens=300)(ask)
    assert len(model.calls) > 4
    assert model.most == most
    assert (lane.running, lane.queue.waiting) == (1, 0)
    own.leave()
    assert lane.running == 0


async def test_a_summary_that_is_too_long_is_cut() -> None:
    """Models do not always keep to their bound; the prompt does."""
    ask = await fitted({"messages": long_chat()}, fleet=Fleet(Model("much " * 400)), policy="compress", max_prompt_tokens=200)
    assert size_of({"messages": messages_of(ask)}) <= 200


# -- the line and the settings


@pytest.mark.parametrize(("part", "gone"), [("head", (0, 30)), ("tail", (70, 100)), ("middle", (35, 65))])
def test_a_policy_is_an_interval(part: Any, gone: tuple[int, int]) -> None:
    """30 of 100 tokens."""
    assert interval(part, 100, 30) == Interval(*gone)


def test_turns_are_groups_and_tools_stay_with_their_calls() -> None:
    """Before the last question a turn is a group; behind it each message of the model with the results of its tools."""
    line = line_of(conversation("S", [("a", "b", True), ("c", "d", False)], "last", 2))
    assert [group.messages for group in line.groups] == [[1, 2, 3, 4], [5, 6], [8, 9], [10, 11]]
    assert line.last is not None
    assert line.last.messages == [7]


def test_a_policy_without_a_stage_and_a_stage_without_a_policy_are_refused(tmp_path: Path) -> None:
    """What is set must be at work: either alone stops the start."""
    with pytest.raises(SettingsError, match="no stage `fit`"):
        load(write(tmp_path / "a", 'stages = ["prompt", "generate"]\n[length]\npolicy = "head"\n'))
    capability = load(write(tmp_path / "b", 'stages = ["prompt", "fit", "generate"]\n'))
    with pytest.raises(SettingsError, match="has no policy"):
        build(capability, Parts(Fleet(), counter=Words()))
