"""The TGI adapter on TGI's documented wire format (its OpenAPI page), with a small server in the test. TGI itself cannot run here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tidegate.core.ask import EngineCall, Said
from tidegate.core.chunk import Chunk
from tidegate.core.errors import BadRequest, CannotContinue, ContextTooLong, EngineCut, EngineError, EngineRefused, TidegateError
from tidegate.core.flight import Flight
from tidegate.engines.adapters.tgi import Tgi

from .conftest import building, until
from .http_stand_in import Events, HttpStandIn, Tokenizer
from .reading import collect, decided, text_of

Make = Callable[..., Tgi]
TOKENS = Tokenizer()
ANSWER = "the quick brown fox"


def token(index: int, text: str, *, special: bool = False, **more: Any) -> dict[str, Any]:
    made = {"id": 100 + index, "text": text, "logprob": -0.5, "special": special}
    return {"index": index, "token": made, "generated_text": None, "details": None, **more}


def details(reason: str, count: int, prompt: int | None = 8) -> dict[str, Any]:
    return {"finish_reason": reason, "generated_tokens": count, "seed": None, **({} if prompt is None else {"input_length": prompt})}


def generate(fields: dict[str, Any]) -> Any:
    """Goes on with ANSWER from where the prompt has come to, a character a token, and ends with a control token."""
    prompt = fields["inputs"]
    said = prompt.rpartition("assistant\n")[2] if "assistant\n" in prompt else prompt
    rest = ANSWER.removeprefix(said)[: fields["parameters"]["max_new_tokens"]]
    events = [token(index, character) for index, character in enumerate(rest)]
    end = token(len(rest), "</s>", special=True, generated_text=rest, details=details("eos_token", len(rest) + 1))
    return Events(*events, end)


def chat_tokenize(fields: dict[str, Any]) -> Any:
    text = "<s>" + "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in fields["messages"]) + "<|im_start|>assistant\n"
    return {"tokenize_response": [], "templated_text": text}


def tokenize(fields: dict[str, Any]) -> Any:
    """With what is put before every prompt, as /generate does."""
    ids = TOKENS.encode(fields["inputs"])
    return [{"id": 0, "text": "<s>", "start": 0, "stop": 0}, *({"id": one, "text": TOKENS.decode([one]), "start": 0, "stop": 1} for one in ids)]


INFO = {
    "model_id": "org/model", "max_concurrent_requests": 128, "max_input_tokens": 1024, "max_total_tokens": 2048, "version": "3.3.6",
    "validation_workers": 2, "router": "text-generation-router",
}  # fmt: skip


@pytest.fixture
async def server() -> AsyncIterator[HttpStandIn]:
    stand_in = await HttpStandIn({
        "/v1/chat/completions": lambda _: Events({"choices": [{"index": 0, "delta": {"content": "ok"}, "finish_reason": "stop"}]}, done=True),
        "/generate_stream": generate, "/chat_tokenize": chat_tokenize, "/tokenize": tokenize, "/info": lambda _: INFO, "/health": lambda _: b"",
        "/metrics": lambda _: b"# TYPE tgi_queue_size gauge\ntgi_queue_size 3\ntgi_batch_current_size 2\n",
    }).start()  # fmt: skip
    yield stand_in
    await stand_in.close()


@pytest.fixture
async def make(server: HttpStandIn) -> AsyncIterator[Make]:
    async with building("tgi", url=server.url, models=["m"]) as make:
        yield make


def ask(text: str = "Hello.", **fields: Any) -> EngineCall:
    return EngineCall("chat", "m", {"messages": [{"role": "user", "content": text}], **fields})


async def go_on(engine: Tgi, said: str = "", flight: Flight | None = None, **fields: Any) -> list[Chunk]:
    return await collect(await engine.continue_from(ask(**fields), Said(said, len(said)), flight or Flight("test")))


# -- control tokens


async def test_control_tokens_in_messages(make: Make, server: HttpStandIn) -> None:
    """TGI would read them: they are defused and noted, or refused, as control_tokens says."""
    flight = Flight("test")
    await collect(await make().start(ask("a<|im_end|>b</s>"), flight))
    assert server.last("/v1/chat/completions")["messages"][0]["content"] == "a< |im_end|>b< /s>"
    assert "special_tokens_defused" in decided(flight)
    with pytest.raises(BadRequest):
        await make(control_tokens="refuse").whole(ask("a<|im_end|>b"), Flight("test"))


# -- going on


@pytest.mark.parametrize("cut", range(1, len(ANSWER)))
async def test_going_on_from_anywhere(make: Make, cut: int) -> None:
    """Wherever an answer is cut, what was said and what comes are the whole; the flight says that it was tokenised anew."""
    flight = Flight("test")
    chunks = await go_on(make(), ANSWER[:cut], flight)
    assert ANSWER[:cut] + text_of(chunks) == ANSWER
    assert [chunk.finish for chunk in chunks if chunk.finish] == ["stop"]
    assert "retokenised" in decided(flight)
    assert all(chunk.raw is None for chunk in chunks)


async def test_the_prompt_is_the_engines_own(make: Make, server: HttpStandIn) -> None:
    """TGI's own template makes the prompt; the beginning that /generate_stream adds itself is taken off, or the model would see it twice."""
    usage = (await go_on(make(), "the", max_tokens=9, temperature=0, stop="x"))[-1].usage
    sent = server.last("/generate_stream")
    assert sent["inputs"] == "<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\nthe"
    assert sent["parameters"] == {
        "do_sample": False, "stop": ["x"], "max_new_tokens": 6, "details": True, "return_full_text": False
    }  # fmt: skip
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.exact) == (8, 7, True)


async def test_a_template_of_the_settings(make: Make, server: HttpStandIn) -> None:
    """A TGI without /chat_tokenize is helped by chat_template; without one it is said which setting is missing."""
    del server.routes["/chat_tokenize"]
    await go_on(make(chat_template="chatml"))
    assert server.last("/generate_stream")["inputs"] == "<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n"
    server.routes["/chat_tokenize"] = lambda _: {"tokenize_response": []}
    with pytest.raises(CannotContinue) as caught:
        await go_on(make())
    assert "chat_template of [engines.test]" in str(caught.value.hint)


async def test_an_answer_without_a_bound(make: Make, server: HttpStandIn) -> None:
    """Where the caller set no bound the model's context does: /generate_stream would stop after a hundred tokens."""
    await go_on(make(), "the", temperature=0.5, top_p=1)
    sent = server.last("/generate_stream")
    prompt = len(TOKENS.encode(sent["inputs"])) + 1
    assert sent["parameters"]["max_new_tokens"] == 2048 - prompt
    assert (sent["parameters"]["do_sample"], sent["parameters"]["temperature"], "top_p" in sent["parameters"]) == (True, 0.5, False)


async def test_a_completion_goes_on(make: Make, server: HttpStandIn) -> None:
    """A prompt is sent with what was said behind it."""
    stream = await make().continue_from(EngineCall("completion", "m", {"prompt": "the "}), Said("quick", 1), Flight("test"))
    assert text_of(await collect(stream)) == " brown fox"


@pytest.mark.parametrize(
    ("fields", "forbid"),
    [({}, "x"), ({"max_tokens": 2}, ""), ({"tools": [{"type": "function"}]}, ""), ({"logit_bias": {"1": 2}}, ""), ({"min_p": 0.5}, "")],
)
async def test_what_cannot_go_on(make: Make, fields: dict[str, Any], forbid: str) -> None:
    """What /generate_stream has no word for is refused, not dropped."""
    with pytest.raises(CannotContinue):
        await make().continue_from(ask(**fields), Said("ab", 2), Flight("test"), forbid=forbid)


async def test_no_room_for_more(make: Make, server: HttpStandIn) -> None:
    """An answer that fills the context cannot go on."""
    server.routes["/info"] = lambda _: {**INFO, "max_total_tokens": 10}
    with pytest.raises(CannotContinue, match="no room"):
        await go_on(make(), "the")


# -- the stream of /generate_stream


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([token(0, "a"), {"error": "Request failed during generation", "error_type": "generation"}], EngineRefused),
        ([{"error": "Input validation error: `inputs` must have less than 8 tokens. Given: 9", "error_type": "validation"}], ContextTooLong),
        ([token(0, "a")], EngineCut),
        ([{"index": 0}], EngineError),
        ([b"nonsense"], EngineError),
    ],
)
async def test_bad_ends(make: Make, server: HttpStandIn, events: list[Any], error: type[TidegateError]) -> None:
    """What goes wrong in /generate_stream is one of our errors."""
    server.routes["/generate_stream"] = lambda _: Events(*events)
    with pytest.raises(TidegateError) as caught:
        await go_on(make())
    assert type(caught.value) is error


async def test_the_last_token_is_text_too(make: Make, server: HttpStandIn) -> None:
    """An answer that ends at its bound ends in a token that is no control token; an older TGI tells no length of the prompt."""
    server.routes["/generate_stream"] = lambda _: Events(token(0, "a"), token(1, "b", details=details("length", 2, None)))
    chunks = await go_on(make(), max_tokens=2)
    assert (text_of(chunks), [chunk.finish for chunk in chunks if chunk.finish]) == ("ab", ["length"])
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.completion_tokens, usage.exact) == (2, False)


async def test_leaving_closes_the_connection(make: Make, server: HttpStandIn) -> None:
    """TGI ends a request whose connection is closed: an aborted stream closes it at once."""
    server.routes["/generate_stream"] = lambda _: Events(token(0, "a"), hangs=True)
    stream = await make().continue_from(ask(), Said("", 0), Flight("test"))
    stream.abort()
    await until(lambda: server.active == 0)


@pytest.mark.parametrize(
    ("said", "error", "code"),
    [
        ((422, {"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 8. Given: 9 `inputs` tokens and 1 `max_new_tokens`",
                "error_type": "validation"}), ContextTooLong, "context_length_exceeded"),
        ((422, {"error": "Input validation error: `top_p` must be > 0.0 and < 1.0", "error_type": "validation"}), EngineRefused, "validation"),
        ((429, {"error": "Model is overloaded", "error_type": "overloaded"}), EngineRefused, "overloaded"),
        ((424, {"error": "Request failed during generation", "error_type": "generation"}), EngineRefused, "generation"),
    ],
)  # fmt: skip
async def test_refusals(make: Make, server: HttpStandIn, said: Any, error: type[TidegateError], code: str) -> None:
    """TGI's errors keep their status and their type as the code; a prompt that is too long is named as such."""
    server.routes["/v1/chat/completions"] = lambda _: said
    with pytest.raises(error) as caught:
        await make().start(ask(), Flight("test"))
    assert caught.value.public_code == code


# -- figures


async def test_figures(make: Make, server: HttpStandIn) -> None:
    """The model, its bounds, requests at work and waiting; only /health must answer."""
    assert await make().figures() == {
        "up": True, "model": "org/model", "version": "3.3.6", "longest_prompt": 1024, "context": 2048, "slots": 128,
        "requests_running": 2.0, "requests_waiting": 3.0,
    }  # fmt: skip
    del server.routes["/metrics"], server.routes["/info"]
    assert await make().figures() == {"up": True}
    server.routes["/health"] = lambda _: (503, {"error": "unhealthy", "error_type": "healthcheck"})
    assert (await make().figures())["up"] is False


async def test_counting(make: Make, server: HttpStandIn) -> None:
    """/tokenize counts, less what is put before every prompt; where it is missing nobody knows."""
    assert await make().count_tokens("abc") == 3
    del server.routes["/tokenize"]
    assert await make().count_tokens("abc") is None
