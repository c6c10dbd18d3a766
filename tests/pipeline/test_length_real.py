"""Counting and cutting with the tokenizer of the real llama.cpp and its packaged model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.embedded_engine import needs_engine

from tidegate.core.ask import Ask, Caller, Deadline, EngineCall
from tidegate.core.flight import Flight
from tidegate.engines.counting import Counter
from tidegate.engines.fleet import Fleet
from tidegate.engines.settings import EngineSettings
from tidegate.pipeline.parts import Parts
from tidegate.pipeline.settings import LengthSettings
from tidegate.pipeline.stages.fit import fit
from tidegate.pipeline.stages.generate import GenerateStage

pytestmark = [
    pytest.mark.local,
    needs_engine,
]

TEXTS = {
    "english": "The claim was reported on the {n}th day, with a list of what was lost and all receipts. ",
    "chinese": "第{n}条 保单承保因水、火灾和风暴造成的损失，但重大过失除外。",
    "signs": "👩\u200d🏫 {n} e\u0301 <|im_end|> [INST] 🇩🇪 ",
}


@pytest.fixture
async def fleet(llama_url: str, llama_key: str) -> AsyncIterator[tuple[Fleet, Counter]]:
    settings = EngineSettings(adapter="llama_cpp", url=llama_url, models={"small": "smollm2"}, api_key=llama_key, conformance="off")
    fleet = Fleet({"local": settings})
    yield fleet, Counter({"local": settings})
    await fleet.close()


def new_ask(messages: list[dict[str, Any]]) -> Ask:
    ask = Ask(Flight("/test"), Caller("key", "tenant"), Deadline(200))
    ask.call = EngineCall("chat", "small", {"messages": messages, "max_tokens": 4, "temperature": 0})
    return ask


async def told(fleet: tuple[Fleet, Counter], messages: list[dict[str, Any]], **said: Any) -> Ask:
    ask = new_ask(messages)
    await fit(Parts(fleet[0], counter=fleet[1]), LengthSettings.model_validate(said))(ask)
    await GenerateStage(fleet[0])(ask)
    return ask


def chat(text: str, size: int) -> list[dict[str, Any]]:
    turns = [{"role": role, "content": text.replace("{n}", str(n))} for n in range(size) for role in ("user", "assistant")]
    return [{"role": "system", "content": "Answer in one word."}, *turns, {"role": "user", "content": "Which number came last?"}]


@pytest.mark.parametrize("kind", TEXTS)
async def test_a_prompt_is_counted_to_the_token(fleet: tuple[Fleet, Counter], kind: str) -> None:
    """What the counter says before is what the engine says that it read."""
    messages = chat(TEXTS[kind], 2)
    engine, own = fleet[0].find("small")
    counted = await fleet[1].prompt(engine, EngineCall("chat", own, {"messages": messages}))
    ask = await told(fleet, messages, policy="refuse", max_prompt_tokens=2000)
    if kind == "signs":  # text that reads as a control token takes more tokens as text than as one
        assert ask.flight.usage.prompt_tokens >= counted.tokens
    else:
        assert (counted.tokens, counted.how) == (ask.flight.usage.prompt_tokens, "engine")


@pytest.mark.parametrize(("policy", "kind"), [("head", "chinese"), ("middle", "english")])
async def test_what_is_cut_fits_to_the_token(fleet: tuple[Fleet, Counter], policy: str, kind: str) -> None:
    """The engine reads exactly as many tokens as the caller is told, and those are the bound or little less."""
    ask = await told(fleet, chat(TEXTS[kind], 30), policy=policy, max_prompt_tokens=200)
    assert ask.notes is not None
    facts = ask.notes["cut"]
    assert ask.flight.usage.prompt_tokens == facts["to"]
    assert 120 <= facts["to"] <= 200 < facts["from"]
    assert ask.call is not None
    assert ask.call.body["messages"][0]["content"] == "Answer in one word."
    assert ask.call.body["messages"][-1]["content"] == "Which number came last?"


async def test_the_context_of_the_engine_is_the_bound(fleet: tuple[Fleet, Counter]) -> None:
    """A document larger than the slot's 2,048 tokens is cut to what they leave beside the answer."""
    ask = new_ask([{"role": "user", "content": "".join(f"word{n} " for n in range(3000))}])
    await fit(Parts(fleet[0], counter=fleet[1]), LengthSettings.model_validate({"policy": "middle"}))(ask)
    assert ask.notes is not None
    assert ask.call is not None
    assert ask.notes["cut"]["limit"] == 2048 - 4
    engine, own = fleet[0].find("small")
    counted = await fleet[1].prompt(engine, EngineCall("chat", own, ask.call.body))
    assert 1950 <= counted.tokens == ask.notes["cut"]["to"] <= 2044


async def test_the_real_model_summarises(fleet: tuple[Fleet, Counter]) -> None:
    """With `compress` a summary made by a model of the fleet stands in the prompt, which fits."""
    ask = await told(
        fleet, chat(TEXTS["english"], 10), policy="compress", max_prompt_tokens=300, compress_to_tokens=160, compress_model="small", compress_s=120
    )
    assert ask.notes is not None
    facts = ask.notes["cut"]
    assert (facts["policy"], facts["summary_model"]) == ("compress", "smollm2")
    assert 0 < facts["summary_tokens"] <= 40
    assert ask.flight.usage.prompt_tokens == facts["to"] <= 300
    assert ask.call is not None
    assert sum("[Summary of what was left out here: " in message["content"] for message in ask.call.body["messages"]) == 1
