"""What is vLLM's own: token ids taken out of its events, prompts as ids, figures by old and new names, what goes over the wire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.bench.scripted import Scripted
from tidegate.bench.tokens import encode
from tidegate.core.ask import EngineCall, Said
from tidegate.core.chunk import Chunk
from tidegate.core.errors import CannotContinue
from tidegate.core.flight import Flight
from tidegate.engines.adapters.vllm import Vllm
from tidegate.engines.dialect import Dialect
from tidegate.engines.settings import EngineSettings
from tidegate.engines.vllm_stream import VllmDialect

from .conftest import BOUND_S, Build, ask, complete
from .http_stand_in import Events, HttpStandIn
from .reading import decided, read, text_of

IM_END = encode("<|im_end|>", special=True)[0]


# -- events with ids


def event(text: str, ids: list[int] | None = None, *, finish: str | None = None, more: str = "", logprobs: Any = None) -> bytes:
    choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": finish}
    if ids is not None:
        choice["token_ids"] = ids
    said = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return json.dumps(said, separators=(",", ":"), ensure_ascii=False).encode()[:-1] + more.encode() + b"}"


TEXTS = st.lists(
    st.one_of(
        st.sampled_from([" the", " word", 'a"b', "\\", "token_ids", ',"token_ids":[1]', "é", "你好", "\n", "x" * 40, "]}]}", " [1]", "\ufffd"]),
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8),
    ),
    min_size=1, max_size=40,
)  # fmt: skip


@given(TEXTS, st.lists(st.lists(st.integers(0, 200_000), min_size=1, max_size=3), min_size=40, max_size=40))
def test_an_event_with_ids_is_the_event_without(texts: list[str], ids: list[list[int]]) -> None:
    """Whatever the text: the chunk is that of the same event without ids, which is also what the client gets; and the ids are its own."""
    with_ids, without = VllmDialect("e"), Dialect("e")
    for text, own in zip(texts, ids, strict=False):
        found, expected = with_ids.chunk(event(text, own), 1), without.chunk(event(text), 1)
        assert found is not None
        assert expected is not None
        assert (found.kind, found.text, found.raw, found.token_ids) == (expected.kind, text, event(text), own)
    count = sum(len(own) for _, own in zip(texts, ids, strict=False))
    with_ids.count_prompt(7)
    assert (with_ids.best_usage(0).prompt_tokens, with_ids.best_usage(0).completion_tokens, with_ids.best_usage(0).exact) == (7, count, True)


def test_ids_wait_for_their_character() -> None:
    """Events without text carry ids of half characters: they come with the chunk that brings the character, and are no event for the client."""
    dialect = VllmDialect("e")
    for _ in range(20):  # the frame of usual events is known
        assert dialect.chunk(event("a", [9]), 1)
    halves = [dialect.chunk(event("", [n]), 1) for n in (1, 2)]
    assert [(half.text, half.raw, half.token_ids) for half in halves if half] == [("", None, None)] * 2
    whole = dialect.chunk(event("😀", [3]), 1)
    assert whole is not None
    assert whole.token_ids == [1, 2, 3]
    after = dialect.chunk(event("a", [4]), 1)
    assert after is not None
    assert after.token_ids == [4]


def test_an_empty_event_with_log_probabilities_is_passed_on() -> None:
    """What the caller asked for is never swallowed."""
    chunk = VllmDialect("e").chunk(event("", [1], logprobs={"content": []}), 1)
    assert chunk is not None
    assert chunk.raw == event("", logprobs={"content": []})


def test_the_prompts_ids_are_counted_and_taken_out() -> None:
    """The first event tells the prompt's ids: they are counted, not read, and do not go to the client."""
    dialect = VllmDialect("e")
    chunk = dialect.chunk(event("", more=',"prompt_token_ids":[5,6,7],"prompt_text":null'), 1)
    assert chunk is not None
    assert chunk.raw == event("")
    assert dialect.best_usage(1000).prompt_tokens == 3


def test_ids_that_the_caller_asked_for_stay() -> None:
    """With return_token_ids the caller gets the events as vLLM sent them."""
    dialect = VllmDialect("e", shows_ids=True)
    for _ in range(12):  # also once the frame of the events is known
        chunk = dialect.chunk(event(" a", [1]), 1)
        assert chunk is not None
        assert (chunk.raw, chunk.token_ids) == (event(" a", [1]), [1])


def test_several_tokens_in_one_event() -> None:
    """vLLM puts what it made in one step into one event: all ids are its text's."""
    chunk = VllmDialect("e").chunk(event(" the quick", [1, 2]), 1)
    assert chunk is not None
    assert (chunk.text, chunk.token_ids) == (" the quick", [1, 2])


def test_tokens_of_a_tool_call_are_an_estimate() -> None:
    """vLLM's parser keeps tokens of a tool call to itself: counted ids are exact no more, until the engine tells its own figures."""
    dialect = VllmDialect("e")
    dialect.count_prompt(3)
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    said = {"choices": [{"index": 0, "delta": {"tool_calls": [call]}, "logprobs": None, "finish_reason": None, "token_ids": [1, 2]}]}
    chunk = dialect.chunk(msgspec.json.encode(said), 1)
    assert chunk is not None
    assert (chunk.kind, chunk.token_ids) == ("tool_call", None)
    assert (dialect.best_usage(0).completion_tokens, dialect.best_usage(0).exact) == (2, False)
    dialect.chunk(b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":9}}', 2)
    assert (dialect.best_usage(0).completion_tokens, dialect.best_usage(0).exact) == (9, True)


# -- what is sent


async def test_the_callers_bytes_are_forwarded(build: Build, server: Scripted) -> None:
    """A body that may be forwarded is, with nothing added but that ids are told; a whole answer is asked for as it came."""
    raw = b'  {"model": "m", "stream": true, "stream_options": {"include_usage": true}, "messages": [{"role": "user", "content": "a"}], "odd": 1}'
    call = EngineCall("chat", "m", msgspec.json.decode(raw), raw)
    chunks = await read(build("vllm"), call)
    assert server.bodies[-1] == {**msgspec.json.decode(raw), "return_token_ids": True}
    assert next(chunk.token_ids for chunk in chunks if chunk.text) == encode(" the", special=False)
    assert not any(b"token_ids" in chunk.raw for chunk in chunks if chunk.raw)
    whole = b'{"model":"m","messages":[{"role":"user","content":"a"}]}'
    await build("vllm").whole(EngineCall("chat", "m", msgspec.json.decode(whole), whole), Flight("test"))
    assert server.bodies[-1] == msgspec.json.decode(whole)


async def test_usage_as_it_runs(build: Build, server: Scripted) -> None:
    """stream_options.continuous_usage goes by vLLM's name for it, also where the caller's bytes could have been forwarded."""
    raw = b'{"model":"m","stream":true,"stream_options":{"include_usage":true,"continuous_usage":true},"messages":[{"role":"user","content":"a"}]}'
    await read(build("vllm"), EngineCall("chat", "m", msgspec.json.decode(raw), raw))
    assert server.bodies[-1]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


async def test_control_tokens_go_as_ids(build: Build, server: Scripted) -> None:
    """A chat that holds one becomes a completion whose prompt is ids without it, with the call's own fields and as long as a chat may be. The
    second time as the first."""
    engine, flight = build("vllm"), Flight("test")
    call = ask("<|im_end|> ##n=3##", temperature=0.5, stop=["x"], response_format={"type": "json_object"})
    await read(engine, call)
    chunks = await read(engine, call, flight)
    sent = server.bodies[-1]
    assert text_of(chunks) == " the quick brown"
    assert all(chunk.raw is None for chunk in chunks)
    assert sent["prompt"].count(IM_END) == 1
    assert (sent["temperature"], sent["stop"], sent["response_format"]) == (0.5, ["x"], {"type": "json_object"})
    assert sent["max_tokens"] == 8192 - len(sent["prompt"])
    assert "messages" not in sent
    assert "special_tokens_as_text" in decided(flight)


@pytest.mark.parametrize("fields", [{"tools": [{"type": "function", "function": {"name": "f"}}]}, {"logprobs": True}])
async def test_what_only_the_chat_route_does(build: Build, server: Scripted, fields: dict[str, Any]) -> None:
    """With tools or log-probabilities it stays a chat, the token is broken up, and the flight says why."""
    flight = Flight("test")
    await read(build("vllm"), ask("<|im_end|>", **fields), flight)
    assert "< |im_end|>" in server.bodies[-1]["messages"][0]["content"]
    assert decided(flight) == ["special_tokens_not_as_text", "special_tokens_defused"]


async def test_a_control_token_in_a_name(build: Build, server: Scripted) -> None:
    """Where the template writes a caller's text that is no content, it is broken up there."""
    messages = [{"role": "user", "name": "a<|im_end|>", "content": "hi"}]
    await read(build("vllm"), EngineCall("chat", "m", {"messages": messages}))
    assert server.bodies[-1]["messages"][0]["name"] == "a< |im_end|>"


async def test_each_suspect_is_asked_about_once(server: Scripted, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets in a prompt cost one question the first time and none afterwards."""
    engine = build("vllm")
    asked: list[str] = []
    post = engine.post_json

    async def counting(path: str, fields: dict[str, Any]) -> dict[str, Any]:
        asked.append(path)
        return await post(path, fields)

    monkeypatch.setattr(engine, "post_json", counting)
    for _ in range(3):
        await read(engine, ask("is a[0] < b[1] in <b>?"))
    assert asked == ["/tokenize"]
    await read(engine, ask("no bracket at all"))
    assert asked == ["/tokenize"]


async def test_an_engine_that_thinks(stand_in: HttpStandIn) -> None:
    """Once its chat told reasoning apart from text, a completion would not be the same answer: going on is refused, control tokens are broken up."""
    engine = vllm(stand_in)
    delta = {"choices": [{"index": 0, "delta": {"reasoning": "hm"}, "finish_reason": None}]}
    done = {"choices": [{"index": 0, "delta": {"content": "yes"}, "finish_reason": "stop"}]}
    stand_in.routes["/v1/chat/completions"] = lambda _: Events(delta, done, done=True)
    await read(engine, ask())
    with pytest.raises(CannotContinue, match="reasoning"):
        await engine.continue_from(ask(), Said("y", 1), Flight("test"))
    await engine.close()


# -- going on


async def test_ids_are_those_of_the_text_that_was_seen(build: Build, server: Scripted) -> None:
    """Ids of what nobody saw (held back for a stop string, half a character) are left out; ids of another text are not used at all."""
    engine = build("vllm")
    ids = encode(" the quick brown", special=False)
    flight = Flight("test")
    await collect(engine, ask("##n=4##"), Said(" the quick", 2, ids), flight)
    assert server.bodies[-1]["prompt"][-2:] == ids[:2]
    assert "retokenised" not in decided(flight)
    await collect(engine, ask("##n=4##"), Said(" the qui", 2, ids), flight)
    assert "retokenised" in decided(flight)
    assert server.bodies[-1]["prompt"][-5:] == encode(" the qui", special=False)


async def test_a_completion_without_a_bound_ends_where_it_would_have(build: Build, server: Scripted) -> None:
    """vLLM ends a completion after sixteen tokens where nobody says another number: also one that was cut."""
    await collect(build("vllm"), complete("##n=40##"), Said(" the quick", 2), Flight("test"))
    assert server.bodies[-1]["max_tokens"] == 14


async def test_min_tokens_counts_from_the_beginning(build: Build, server: Scripted) -> None:
    """A least length is that of the whole answer."""
    await collect(build("vllm"), ask("##n=4##", min_tokens=3), Said(" the quick", 2), Flight("test"))
    assert server.bodies[-1]["min_tokens"] == 1


async def test_a_ban_holds_for_one_token(build: Build, server: Scripted) -> None:
    """The bias stands in the first call alone, as a number that vLLM takes."""
    text = await collect(build("vllm"), ask("##n=4##"), Said(" the", 1), Flight("test"), forbid=" quick")
    assert text == " other brown fox"
    first, rest = list(server.bodies)[-2:]
    assert set(first["logit_bias"].values()) == {-100}
    assert "logit_bias" not in rest


async def collect(engine: Any, call: EngineCall, said: Said, flight: Flight, **more: Any) -> str:
    got: list[Chunk] = []
    async with asyncio.timeout(BOUND_S):
        await (await engine.continue_from(call, said, flight, **more)).relay(got.extend)
    return text_of(got)


# -- figures


@pytest.fixture
async def stand_in() -> AsyncIterator[HttpStandIn]:
    server = await HttpStandIn({"/v1/models": lambda _: {"data": [{"id": "m", "max_model_len": 2048}]}}).start()
    yield server
    await server.close()


def vllm(server: HttpStandIn) -> Vllm:
    return Vllm("test", EngineSettings(adapter="vllm", url=server.url, models=["m"]))


@pytest.mark.parametrize("share", ["kv_cache_usage_perc", "gpu_cache_usage_perc"])
async def test_figures_by_old_and_new_names(stand_in: HttpStandIn, share: str) -> None:
    """Running, waiting and tokens of several engine processes are added up; of the caches the fullest counts."""
    lines = [
        "# TYPE vllm:num_requests_running gauge",
        'vllm:num_requests_running{engine="0",model_name="m"} 2.0', 'vllm:num_requests_running{engine="1",model_name="m"} 1.0',
        'vllm:num_requests_waiting{engine="0",model_name="m"} 4.0',
        'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0',
        'vllm:generation_tokens_total{engine="0",model_name="m"} 1.5e+03',
        f'vllm:{share}{{engine="0",model_name="m"}} 0.25', f'vllm:{share}{{engine="1",model_name="m"}} 0.5',
    ]  # fmt: skip
    stand_in.routes["/metrics"] = lambda _: "\n".join(lines).encode()
    engine = vllm(stand_in)
    assert await engine.figures() == {
        "up": True, "models": ["m"], "context": {"m": 2048}, "requests_running": 3.0, "requests_waiting": 4.0, "tokens_generated": 1500.0,
        "kv_cache_usage": 0.5,
    }  # fmt: skip
    await engine.close()


async def test_figures_without_metrics(stand_in: HttpStandIn) -> None:
    """A vLLM that keeps its metrics to itself is up all the same."""
    engine = vllm(stand_in)
    assert await engine.figures() == {"up": True, "models": ["m"], "context": {"m": 2048}}
    await engine.close()


async def test_counting_tokens(build: Build, stand_in: HttpStandIn) -> None:
    """Control tokens are counted as the text that they are; an engine without /tokenize cannot say."""
    assert await build("vllm").count_tokens(" the<|im_end|>") == 1 + len("<|im_end|>")
    engine = vllm(stand_in)
    assert await engine.count_tokens("a") is None
    await engine.close()


async def test_without_tokenize_everything_suspect_is_broken_up(stand_in: HttpStandIn) -> None:
    """Nobody can say what is a control token: what looks like one is changed, and the flight says why."""
    done = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}
    stand_in.routes["/v1/chat/completions"] = lambda _: Events(done, done=True)
    engine = vllm(stand_in)
    flight = Flight("test")
    await read(engine, ask("<|im_end|>"), flight)
    assert "< |im_end|>" in stand_in.last("/v1/chat/completions")["messages"][0]["content"]
    assert "special_tokens_not_as_text" in decided(flight)
    await engine.close()
