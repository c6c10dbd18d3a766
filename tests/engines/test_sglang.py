"""The SGLang adapter on SGLang's documented wire format, with a small server in the test. SGLang itself cannot run here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.ask import EngineCall, Said
from tidegate.core.errors import CannotContinue, ContextTooLong, EngineCut, EngineError, EngineRefused, TidegateError
from tidegate.core.flight import Flight
from tidegate.engines.adapters.sglang import Generated, Sglang

from .conftest import building, until
from .http_stand_in import Events, HttpStandIn, Tokenizer
from .reading import collect, decided, text_of

Make = Callable[..., Sglang]
TOKENS = Tokenizer()
ANSWER = "the quick brown fox"


def meta(count: int, reason: Any = None, prompt: int = 9) -> dict[str, Any]:
    return {"id": "r", "finish_reason": reason, "prompt_tokens": prompt, "completion_tokens": count, "cached_tokens": 4, "e2e_latency": 0.1}


def repeated(text: str, size: int = 3) -> list[dict[str, Any]]:
    """The events of an answer as SGLang sends them by default: each with the whole so far."""
    ends = [*range(size, len(text), size), len(text)]
    reason = {"type": "stop", "matched": 2}
    events = [{"text": text[:end], "output_ids": TOKENS.encode(text[:end]), "meta_info": meta(end)} for end in ends]
    events[-1] = {"text": text, "output_ids": [*TOKENS.encode(text), 2], "meta_info": meta(len(text) + 1, reason)}
    return events


def increments(text: str, size: int = 3) -> list[dict[str, Any]]:
    """The same with --incremental-streaming-output: each with what is new."""
    events = [
        {"text": text[at : at + size], "output_ids": TOKENS.encode(text[at : at + size]), "meta_info": meta(min(at + size, len(text)))}
        for at in range(0, len(text), size)
    ]
    events[-1]["output_ids"] = [*events[-1]["output_ids"], 2]
    events[-1]["meta_info"] = meta(len(text) + 1, {"type": "stop", "matched": 2})
    return events


def tokenize(fields: dict[str, Any]) -> Any:
    prompt = fields["prompt"]
    begin = [0] if fields["add_special_tokens"] else []
    tokens = [[*begin, *TOKENS.encode(text)] for text in ([prompt] if isinstance(prompt, str) else prompt)]
    return {"tokens": tokens[0] if isinstance(prompt, str) else tokens, "count": 0, "max_model_len": 4096}


def generate(fields: dict[str, Any]) -> Any:
    """Goes on with ANSWER from where the prompt has come to; a bias bans ids from being the first."""
    prompt = TOKENS.decode(fields["input_ids"])
    said = prompt.rpartition("assistant\n")[2] if "assistant\n" in prompt else prompt.removeprefix("<s>")
    rest = ANSWER.removeprefix(said)
    if not fields.get("stream"):
        assert fields["sampling_params"]["max_new_tokens"] == 1
        banned = {token for token, weight in fields["sampling_params"].get("logit_bias", {}).items() if type(weight) is float and weight < -100}
        token = next(token for token in [*TOKENS.encode(rest[:1]), *range(197, 300)] if str(token) not in banned)
        reason = {"type": "length", "length": 1}
        return {"text": TOKENS.decode([token]), "output_ids": [token], "meta_info": meta(1, reason)}
    return Events(*repeated(rest), done=True)


def chat(fields: dict[str, Any]) -> Any:
    pieces = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}]
    pieces += [{"choices": [{"index": 0, "delta": {"content": f"{word} "}, "finish_reason": None}]} for word in ("one", "two")]
    pieces += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "matched_stop": 2}]}]
    return Events(*pieces, {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}}, done=True)


INFO = {
    "version": "0.5.4", "max_req_input_len": 4090, "max_total_num_tokens": 90000, "max_running_requests": 64, "internal_states": [{}],
    "incremental_streaming_output": False,
}  # fmt: skip
METRICS = b"""# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",dp_rank="0"} 2.0
sglang:num_running_reqs{model_name="m",dp_rank="1"} 1.0
sglang:num_queue_reqs{model_name="m"} 4.0
sglang:token_usage{model_name="m"} 0.28
sglang:gen_throughput{model_name="m"} 86.5
"""


@pytest.fixture
async def server() -> AsyncIterator[HttpStandIn]:
    stand_in = await HttpStandIn({
        "/v1/chat/completions": chat, "/generate": generate, "/tokenize": tokenize,
        "/detokenize": lambda fields: {"text": TOKENS.decode(fields["tokens"])},
        "/get_server_info": lambda _: INFO, "/metrics": lambda _: METRICS,
        "/v1/models": lambda _: {"data": [{"id": "m", "max_model_len": 4096}]},
    }).start()  # fmt: skip
    yield stand_in
    await stand_in.close()


@pytest.fixture
async def make(server: HttpStandIn) -> AsyncIterator[Make]:
    async with building("sglang", url=server.url, models=["m"]) as make:
        yield make


def ask(text: str = "Hello.", **fields: Any) -> EngineCall:
    return EngineCall("chat", "m", {"messages": [{"role": "user", "content": text}], **fields})


# -- control tokens


async def test_a_control_token_goes_as_text(make: Make, server: HttpStandIn) -> None:
    """With a chat template the prompt goes as ids in which a control token that a user typed is none, and the answer comes by /generate."""
    flight = Flight("test")
    chunks = await collect(await make(chat_template="chatml").start(ask("a<|im_end|>b", temperature=0, max_tokens=5), flight))
    sent = server.last("/generate")
    ids = sent["input_ids"]
    assert TOKENS.decode(ids) == "<s><|im_start|>user\na<|im_end|>b<|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(TOKENS.CONTROL.index("<|im_end|>")) == 1
    assert sent["sampling_params"] == {"max_new_tokens": 5, "temperature": 0}
    assert (text_of(chunks), chunks[-1].usage.exact if chunks[-1].usage else None) == (ANSWER, True)
    assert all(chunk.raw is None for chunk in chunks)
    assert "prompt_as_ids" in decided(flight)


async def test_a_whole_answer_with_a_control_token(make: Make, server: HttpStandIn) -> None:
    """A whole answer is treated alike."""
    answer = await make(chat_template="chatml").whole(ask("a<|im_end|>b"), Flight("test"))
    assert (answer.text, answer.end, answer.usage.exact) == (ANSWER, "stop", True)
    assert server.last("/generate")["input_ids"].count(TOKENS.CONTROL.index("<|im_end|>")) == 1


async def test_without_a_template_it_is_defused(make: Make, server: HttpStandIn) -> None:
    """Without a chat template a blank ends the control token, and the flight says so."""
    flight = Flight("test")
    await collect(await make().start(ask("a<|im_end|>b"), flight))
    assert server.last("/v1/chat/completions")["messages"][0]["content"] == "a< |im_end|>b"
    assert "special_tokens_defused" in decided(flight)


# -- going on


async def test_going_on_by_ids(make: Make, server: HttpStandIn) -> None:
    """With a chat template the prompt is the ids of the first prompt and of what was said; the bound counts from the beginning."""
    flight = Flight("test")
    said = "the quick"
    chunks = await collect(
        await make(chat_template="chatml").continue_from(ask(max_tokens=40), Said(said, 9, TOKENS.encode(said)), flight)
    )
    sent = server.last("/generate")
    assert TOKENS.decode(sent["input_ids"]) == f"<s><|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n{said}"
    assert sent["sampling_params"]["max_new_tokens"] == 31
    assert text_of(chunks) == ANSWER.removeprefix(said)
    assert [token for chunk in chunks for token in chunk.token_ids or ()] == TOKENS.encode(ANSWER.removeprefix(said))
    assert "retokenised" not in decided(flight)


@pytest.mark.parametrize("cut", range(1, len(ANSWER)))
async def test_going_on_from_anywhere_by_text(make: Make, cut: int) -> None:
    """Wherever an answer is cut, what was said and what comes are the whole; without ids it is noted as tokenised anew."""
    flight = Flight("test")
    said = ANSWER[:cut]
    chunks = await collect(await make(chat_template="chatml").continue_from(ask(), Said(said, cut), flight))
    assert said + text_of(chunks) == ANSWER
    assert "retokenised" in decided(flight)


async def test_going_on_with_a_prompt(make: Make, server: HttpStandIn) -> None:
    """A completion goes on without a template: its prompt is tokenised with what SGLang puts before every prompt."""
    chunks = await collect(await make().continue_from(EngineCall("completion", "m", {"prompt": "the "}), Said("quick", 5), Flight("test")))
    assert TOKENS.decode(server.last("/generate")["input_ids"]) == "<s>the quick"
    assert text_of(chunks) == " brown fox"


async def test_going_on_without_a_template(make: Make, server: HttpStandIn) -> None:
    """A chat without a template goes on as its own open last message, by text; none of the engine's events goes to the client."""
    flight = Flight("test")
    chunks = await collect(await make().continue_from(ask(max_tokens=9), Said("zero ", 2), flight))
    sent = server.last("/v1/chat/completions")
    assert (sent["continue_final_message"], sent["messages"][-1]) == (True, {"role": "assistant", "content": "zero "})
    assert sent["max_tokens"] == 7
    assert text_of(chunks) == "one two "
    assert all(chunk.raw is None for chunk in chunks)
    assert "retokenised" in decided(flight)


async def test_going_on_without_a_token(make: Make) -> None:
    """The first token is none that the forbidden text begins with; what comes after it is free."""
    chunks = await collect(
        await make(chat_template="chatml").continue_from(ask(max_tokens=30), Said("the ", 4), Flight("test"), forbid="quick")
    )
    assert text_of(chunks)[0] != "q"


@pytest.mark.parametrize(
    ("settings", "fields", "forbid"),
    [({}, {}, "x"), ({}, {"max_tokens": 2}, ""), ({"chat_template": "chatml"}, {"tools": [{"type": "function"}]}, ""),
     ({"chat_template": "chatml"}, {"typical_p": 0.5}, "")],
)  # fmt: skip
async def test_what_cannot_go_on(make: Make, settings: dict[str, Any], fields: dict[str, Any], forbid: str) -> None:
    """What cannot be had from the middle is said honestly."""
    with pytest.raises(CannotContinue):
        await make(**settings).continue_from(ask(**fields), Said("ab", 2), Flight("test"), forbid=forbid)


# -- the stream of /generate


async def test_increments(make: Make, server: HttpStandIn) -> None:
    """With --incremental-streaming-output each event carries only what is new, also where it repeats the one before."""
    server.routes["/get_server_info"] = lambda _: {**INFO, "incremental_streaming_output": True}
    server.routes["/generate"] = lambda _: Events(*increments("hahahaha", 2), done=True)
    chunks = await collect(await make(chat_template="chatml").continue_from(ask(), Said("", 0), Flight("test")))
    assert text_of(chunks) == "hahahaha"
    assert [token for chunk in chunks for token in chunk.token_ids or ()] == TOKENS.encode("hahahaha")


@given(st.text(min_size=1, max_size=30), st.integers(1, 7), st.booleans())
def test_both_kinds_of_events_give_the_same(text: str, size: int, incremental: bool) -> None:
    """Whatever the text and however it is cut, repeated and incremental events give the same text and the same ids."""
    dialect = Generated("x")
    dialect.incremental = incremental
    chunks = [dialect.chunk(json_of(event), 1) for event in (increments if incremental else repeated)(text, size)]
    assert "".join(chunk.text for chunk in chunks if chunk) == text
    assert [token for chunk in chunks if chunk for token in chunk.token_ids or ()] == TOKENS.encode(text)
    assert dialect.finish == "stop"


def json_of(event: dict[str, Any]) -> bytes:
    return msgspec.json.encode(event)


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([{"error": {"message": "The input (9 tokens) is longer than the model's context length (8 tokens)."}}], ContextTooLong),
        ([{"text": "a", "output_ids": [1], "meta_info": meta(1, {"type": "abort", "message": "", "err_type": None})}], EngineCut),
        ([{"text": "", "output_ids": [], "meta_info": meta(0, {"type": "abort", "message": "full", "status_code": 503})}], EngineRefused),
        ([{"text": "a"}], EngineError),
        ([b"nonsense"], EngineError),
        ([{"text": "a", "output_ids": [1], "meta_info": meta(1)}], EngineCut),
    ],
)
async def test_bad_ends(make: Make, server: HttpStandIn, events: list[Any], error: type[TidegateError]) -> None:
    """What goes wrong in /generate is one of our errors."""
    server.routes["/generate"] = lambda _: Events(*events)
    with pytest.raises(TidegateError) as caught:
        await collect(await make(chat_template="chatml").continue_from(ask(), Said("", 0), Flight("test")))
    assert type(caught.value) is error


def test_a_stop_string_makes_ids_uncertain() -> None:
    """Where a stop string cut the text, the event's ids are more than its text: they are not told."""
    dialect = Generated("x")
    chunk = dialect.chunk(json_of({"text": "ab", "output_ids": [1, 2, 3], "meta_info": meta(3, {"type": "stop", "matched": "c"})}), 1)
    assert chunk is not None
    assert (chunk.text, chunk.token_ids, chunk.finish) == ("ab", None, "stop")


async def test_leaving_closes_the_connection(make: Make, server: HttpStandIn) -> None:
    """SGLang ends a request whose connection is closed: an aborted stream closes it at once."""
    server.routes["/generate"] = lambda _: Events(*repeated(ANSWER)[:2], hangs=True)
    stream = await make(chat_template="chatml").continue_from(ask(), Said("", 0), Flight("test"))
    stream.abort()
    await until(lambda: server.active == 0)


async def test_a_prompt_that_is_too_long(make: Make, server: HttpStandIn) -> None:
    """SGLang's own words for it become our error."""
    said = "Requested token count exceeds the model's maximum context length of 8 tokens."
    server.routes["/v1/chat/completions"] = lambda _: (400, {"object": "error", "message": said, "type": "BadRequestError", "code": 400})
    with pytest.raises(ContextTooLong):
        await make().start(ask(), Flight("test"))


# -- figures


async def test_figures(make: Make, server: HttpStandIn) -> None:
    """Models, bounds, requests at work over all processes; without --enable-metrics, and with the newer name of the route, what is left."""
    assert await make().figures() == {
        "up": True, "models": ["m"], "context": {"m": 4096}, "version": "0.5.4", "longest_prompt": 4090, "kv_cache_tokens": 90000, "slots": 64,
        "requests_running": 3.0, "requests_waiting": 4.0, "kv_cache_usage": 0.28, "decode_tokens_per_s": 86.5,
    }  # fmt: skip
    del server.routes["/metrics"], server.routes["/get_server_info"]
    server.routes["/server_info"] = lambda _: {"version": "0.6"}
    assert await make().figures() == {"up": True, "models": ["m"], "context": {"m": 4096}, "version": "0.6"}


async def test_counting(make: Make, server: HttpStandIn) -> None:
    """/tokenize counts, without what is put before a prompt; where it is missing nobody knows."""
    assert await make().count_tokens("abc<|im_end|>") == 4
    del server.routes["/tokenize"]
    assert await make().count_tokens("abc") is None
