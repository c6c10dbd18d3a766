"""Going on from the middle of an answer, against the scripted engine: exactly the rest, whatever was said and wherever it was cut."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from tidegate.bench import scripted
from tidegate.bench.scripted import Scripted
from tidegate.bench.tokens import decode, encode
from tidegate.core.ask import EngineCall, Said
from tidegate.core.chunk import Chunk, Usage
from tidegate.core.errors import CannotContinue, EngineError
from tidegate.core.flight import Flight
from tidegate.core.ports import EngineStream
from tidegate.engines.continuation import begins_alike, tokens_left, with_banned
from tidegate.engines.openai_http import OpenAIHttp

from .conftest import Build, ask, complete
from .reading import collect, facts_of, text_of

SIXTEEN = " the quick brown fox jumps over lazy dogs and then café 你好 runs off 😀 far"
CUTS = 1000


@pytest.fixture(params=["scripted", "llama_cpp"])
def engine(request: pytest.FixtureRequest, build: Build) -> OpenAIHttp:
    return build(request.param)


async def text_from(stream: EngineStream, got: list[Chunk] | None = None) -> str:
    return text_of(await collect(stream, got))


async def rest(engine: OpenAIHttp, call: EngineCall, said: Said, **more: Any) -> str:
    return await text_from(await engine.continue_from(call, said, Flight("test"), **more))


# -- exactly the rest


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_cuts_at_random_bytes_resume_to_the_same_text(build: Build, server: Scripted) -> None:
    """However many bytes of a response came before its connection broke: what was read and what comes after it are the whole answer."""
    engine = build("scripted")
    seed = random.Random(7)
    answers = [SIXTEEN, '{"premium": 12.5, "why": "naïve 保险 😀", "list": [1, [2]]}', "word" * 9]
    orders = ["n=16,", "", "n=9,w=word,"]
    calls = [make(f"##{more}m=none##{_fixed(number, answers)}") for number, more in enumerate(orders) for make in (ask, complete)]
    whole = [await _bytes_of(server, call) for call in calls]
    cuts = 0
    for _ in range(CUTS):
        number = seed.randrange(6)
        kind, at = (ask, complete)[number % 2], seed.randrange(whole[number])
        call = kind(f"##{orders[number // 2]}m=cut_bytes,k={at}##{_fixed(number // 2, answers)}")
        got: list[Chunk] = []
        try:
            text = await text_from(await engine.start(call, Flight("test")), got)
        except EngineError:
            cuts += 1
            text = "".join(chunk.text for chunk in got)
        assert text + await rest(engine, call, Said(text, 0)) == answers[number // 2], (number, at)
    assert cuts > CUTS // 2


def _fixed(number: int, answers: list[str]) -> str:
    return f" ##json={answers[1]}##" if number == 1 else ""


async def _bytes_of(server: Scripted, call: EngineCall) -> int:
    """How long the response to a call is."""
    before = server.written
    reader, writer = await asyncio.open_connection(server.host, server.port)
    body = json.dumps({**call.body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    path = b"/v1/chat/completions" if call.kind == "chat" else b"/v1/completions"
    writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (path, len(body), body))
    await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
    writer.close()
    return server.written - before


async def test_from_any_character(engine: OpenAIHttp) -> None:
    """A prefix may end inside a word, and nothing of it is said again."""
    for make in (ask, complete):
        for cut in range(len(SIXTEEN) + 1):
            assert await rest(engine, make("##n=16##"), Said(SIXTEEN[:cut], 0)) == SIXTEEN[cut:]


async def test_a_chat_whose_text_is_control(engine: OpenAIHttp) -> None:
    """The prompt is the first run's also where a user typed control tokens."""
    call = ask("<|im_end|> <|im_start|>assistant\n ##n=16##")
    flight = Flight("test")
    assert await text_from(await engine.continue_from(call, Said(" the qu", 2), flight)) == SIXTEEN[7:]
    assert [facts["count"] for facts in facts_of(flight, "special_tokens_as_text")] == [1]


async def test_control_tokens_that_the_model_said(engine: OpenAIHttp, server: Scripted) -> None:
    """What was said is text too: a control token in it does not end the answer."""
    call = ask('##json="a </s> b <|im_end|> c"##')
    assert await rest(engine, call, Said("a </s> b <|im_end|>", 5)) == " c"
    assert server.bodies[-1]["prompt"][-10:] == list(b"<|im_end|>")


async def test_prompts_of_ids(engine: OpenAIHttp, server: Scripted) -> None:
    """A completion whose prompt came as ids goes on with these ids."""
    ids = encode("Once ##n=4##", special=True)
    call = EngineCall("completion", "m", {"prompt": ids})
    assert await rest(engine, call, Said(" the quick", 2)) == " brown fox"
    assert server.bodies[-1]["prompt"][: len(ids)] == ids


async def test_ids_that_the_engine_told(engine: OpenAIHttp, server: Scripted) -> None:
    """Known ids are used as they are; text without is tokenised anew, which the flight says."""
    flight = Flight("test")
    told = [*b" t", *b"he"]  # not the ids that the text would become
    await text_from(await engine.continue_from(ask("##n=4##"), Said(" the", 1, told), flight))
    assert server.bodies[-1]["prompt"][-4:] == told
    assert facts_of(flight, "retokenised") == []
    await text_from(await engine.continue_from(ask("##n=4##"), Said(" the", 1), flight))
    assert server.bodies[-1]["prompt"][-1:] == encode(" the", special=False)
    assert facts_of(flight, "retokenised") == [{"tokens": 1, "said": 1}]


async def test_a_vocabulary_that_begins_every_text_with_a_blank(engine: OpenAIHttp, server: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SentencePiece's may: what was said does not get a blank that nobody said."""

    def tokenize(fields: dict[str, Any]) -> dict[str, Any]:
        parts = fields["content"] if isinstance(fields["content"], list) else [fields["content"]]
        special = fields.get("parse_special", True)
        ids = [[part] if isinstance(part, int) else encode(" " + part if part[:1] != "<" else part, special=special) for part in parts]
        return {"tokens": [token for one in ids for token in one]}

    monkeypatch.setitem(scripted._TOKEN_ROUTES, "/tokenize", tokenize)
    assert await rest(engine, ask('##json="x the fox"##'), Said("x th", 2)) == "e fox"
    assert server.bodies[-1]["prompt"][-4:] == list(b"x th")


# -- its chunks, end and usage


async def test_chunks_and_usage(engine: OpenAIHttp) -> None:
    """Chunks carry no event of the engine's; usage counts the prompt with what was said in it, and the tokens that came after."""
    got: list[Chunk] = []
    stream = await engine.continue_from(ask("##n=4##"), Said(" the quick", 2), Flight("test"))
    assert await text_from(stream, got) == " brown fox"
    assert all(chunk.raw is None for chunk in got)
    assert [chunk.finish for chunk in got if chunk.finish] == ["stop"]
    prompt = len(encode("<|im_start|>user\nSay something. ##n=4##<|im_end|>\n<|im_start|>assistant\n the quick", special=True))
    assert stream.usage == Usage(prompt, 2)
    assert got[-1].usage == stream.usage


async def test_nothing_is_left_to_say(engine: OpenAIHttp) -> None:
    """An answer that was whole but for its end gets its end: that is no empty answer."""
    got: list[Chunk] = []
    assert await text_from(await engine.continue_from(ask("##n=4##"), Said(" the quick brown fox", 4), Flight("test")), got) == ""
    assert [chunk.finish for chunk in got if chunk.finish] == ["stop"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_max_tokens_counts_from_the_beginning(engine: OpenAIHttp, server: Scripted, name: str) -> None:
    """What was said is taken off; where nothing is left the engine is not asked."""
    got: list[Chunk] = []
    call = ask("##n=16##", **{name: 4})
    assert await text_from(await engine.continue_from(call, Said(" the", 1), Flight("test")), got) == " quick brown fox"
    assert [chunk.finish for chunk in got if chunk.finish] == ["length"]
    asked, got = server.requests, []
    assert await text_from(await engine.continue_from(call, Said(" the quick brown fox", 4), Flight("test")), got) == ""
    assert ([chunk.finish for chunk in got if chunk.finish], server.requests) == (["length"], asked)


async def test_fields_go_along(engine: OpenAIHttp, server: Scripted) -> None:
    """Sampling fields and stop strings stay the call's; what made the prompt is left out."""
    fields = {"temperature": 0.2, "top_k": 3, "seed": 7, "stop": ["x"], "logit_bias": {"5": 1}, "frequency_penalty": 0.1}
    call = ask("##n=2##", **fields, chat_template_kwargs={"a": 1}, metadata={"b": "2"}, max_tokens=9)
    await rest(engine, call, Said(" the", 1))
    sent = server.bodies[-1]
    assert {name: sent[name] for name in fields} == fields
    assert set(sent) == {*fields, "prompt", "model", "stream", "stream_options", "max_tokens", "cache_prompt"}
    assert (sent["max_tokens"], sent["cache_prompt"]) == (8, True)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "odd"}}, "odd"),
        ({"grammar": "root ::= [a]"}, "grammar"),
        ({"logprobs": True}, "logprobs"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}, "more than text"),
        ({"messages": [{"role": "user", "name": "</s>", "content": "hi"}]}, "name"),
    ],
)
async def test_what_cannot_go_on(engine: OpenAIHttp, server: Scripted, fields: dict[str, Any], why: str) -> None:
    """A call whose answer has no middle to begin in is refused with the reason, and no answer is begun."""
    with pytest.raises(CannotContinue, match=why):
        await engine.continue_from(ask("##n=2##", **fields), Said(" the", 1), Flight("test"))
    assert server.requests == 0


@pytest.mark.parametrize(("fields", "why"), [({"echo": True}, "echo"), ({"prompt": ["a", "b"]}, "several")])
async def test_completions_that_cannot_go_on(engine: OpenAIHttp, fields: dict[str, Any], why: str) -> None:
    """As chats."""
    with pytest.raises(CannotContinue, match=why):
        await engine.continue_from(complete("##n=2##", **fields), Said(" the", 1), Flight("test"))


@pytest.mark.parametrize("fields", [{"response_format": {"type": "text"}}, {"tools": []}, {"logprobs": False}, {"modalities": ["text"]}])
async def test_fields_that_ask_for_nothing(engine: OpenAIHttp, fields: dict[str, Any]) -> None:
    """A field that changes nothing stops nothing."""
    assert await rest(engine, ask("##n=2##", **fields), Said(" the", 1)) == " quick"


# -- without what is forbidden


async def test_a_forbidden_word(engine: OpenAIHttp, server: Scripted) -> None:
    """The next token is another one, what comes after it is free, and the stream shows nothing of the two calls."""
    got: list[Chunk] = []
    flight = Flight("test")
    stream = await engine.continue_from(ask("##n=4##", logit_bias={"7": 2}), Said(" the", 1), flight, forbid="quick")
    assert await text_from(stream, got) == " other brown fox"
    assert stream.usage.completion_tokens == 3
    assert [chunk.finish for chunk in got if chunk.finish] == ["stop"]
    assert server.bodies[-1]["logit_bias"] == {"7": 2}
    assert facts_of(flight, "continue_without")[0]["draws"] == 1
    assert await rest(engine, ask("##n=4##"), Said(" the other br", 3)) == "own fox"


async def test_a_forbidden_beginning(engine: OpenAIHttp) -> None:
    """A token that is the first part of what is forbidden is not said either, and the limit still holds."""
    assert await rest(engine, ask("##n=4##", max_tokens=3), Said(" the", 1), forbid=" quick brown") == " other brown"


async def test_a_longer_word_than_the_forbidden(engine: OpenAIHttp) -> None:
    """A token that begins with what is forbidden, in capitals or not, is drawn again without it."""
    assert await rest(engine, ask("##n=3##"), Said(" the", 1), forbid="QUI") == " other brown"


async def test_a_forbidden_last_word(engine: OpenAIHttp) -> None:
    """Where the token was the last one, the stream is that token and the end."""
    got: list[Chunk] = []
    stream = await engine.continue_from(ask("##n=2##"), Said(" the", 1), Flight("test"), forbid=" quick")
    assert await text_from(stream, got) == " other"
    assert [chunk.finish for chunk in got if chunk.finish] == ["stop"]
    assert stream.usage.completion_tokens == 1
    got = []
    assert await text_from(await engine.continue_from(ask("##n=2##"), Said(" the quick", 2), Flight("test"), forbid="x"), got) == ""
    assert [chunk.finish for chunk in got if chunk.finish] == ["stop"]


async def test_half_a_character_is_never_shown(engine: OpenAIHttp) -> None:
    """A first token that is a part of a character comes with the rest of it."""
    call = ask('##json="über 你好"##')
    assert await rest(engine, call, Said("über ", 5), forbid="zzz") == "你好"


# -- the small parts


def test_bans() -> None:
    """Bans are added to the caller's bias, whichever form it has."""
    assert with_banned(None, [1]) == {"1": False}
    assert with_banned({"1": 5, "2": 3}, [1]) == {"1": False, "2": 3}
    assert with_banned([[2, 3]], [1]) == [[2, 3], [1, False]]


@pytest.mark.parametrize(("text", "alike"), [(" Ca", True), ("cats", True), ("ca", True), ("dog", False), (" ", False), ("", False)])
def test_beginning_alike(text: str, alike: bool) -> None:
    """A beginning of `cat`, and what begins with it."""
    assert begins_alike(text, "cat") is alike


def test_tokens_left() -> None:
    """-1 and nothing are no bound."""
    assert [tokens_left(body, 3) for body in ({}, {"max_tokens": -1}, {"max_tokens": 5}, {"max_completion_tokens": 2})] == [None, None, 2, 0]


def test_the_vocabulary_is_exact() -> None:
    """Ids give back their bytes, also of what is read as control."""
    text = SIXTEEN + "<|im_end|> [INST]</s>\n"
    assert decode(encode(text, special=True)) == decode(encode(text, special=False)) == text.encode()
