"""The Triton adapter on Triton's real gRPC protocol, with a server in the test that does as it is told. The real server: make test-engines."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2_grpc

from tidegate.core.ask import EngineCall, Said
from tidegate.core.chunk import Chunk
from tidegate.core.errors import (
    BadRequest,
    CannotContinue,
    ContextTooLong,
    EngineCut,
    EngineDown,
    EngineEmpty,
    EngineError,
    EngineRefused,
    EngineStalled,
    SettingsError,
    TidegateError,
)
from tidegate.core.flight import Flight
from tidegate.engines.adapters.triton import Triton, build
from tidegate.engines.settings import EngineSettings
from tidegate.engines.triton_client import new_sequence_id
from tidegate.engines.triton_errors import status_error
from tidegate.engines.triton_model import Tensor, TritonModel, pack_text, unpack_number, unpack_texts

from .conftest import BOUND_S, building, until
from .reading import decided, read, text_of
from .test_wire import certificate
from .triton_stand_in import PYTHON, TRTLLM, WORDS, Request, StandIn, failed, response, serve, words

Make = Callable[..., Triton]


@pytest.fixture
async def server() -> AsyncIterator[StandIn]:
    stand_in = StandIn()
    running = await serve(stand_in)
    yield stand_in
    await running.stop(None)


@pytest.fixture
async def make(server: StandIn) -> AsyncIterator[Make]:
    async with building("triton", chat_template="chatml", connect_s=5.0) as make:
        yield lambda **settings: make(**{"url": server.url, "models": list(server.models), **settings})


def ask(text: str = "Hello.", **fields: Any) -> EngineCall:
    return EngineCall("chat", "m", {"messages": [{"role": "user", "content": text}], **fields})


# -- answers


async def test_a_stream(make: Make, server: StandIn) -> None:
    """Text in order, the finish, and the model's own counts as exact usage; the chunks carry no event of the engine."""
    chunks = await read(make(), ask())
    assert text_of(chunks) == WORDS
    assert [chunk.finish for chunk in chunks if chunk.finish] == ["stop"]
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.exact) == (7, 4, True)
    assert all(chunk.raw is None for chunk in chunks)


async def test_a_whole_answer(make: Make) -> None:
    """A whole answer is the stream put together."""
    answer = await make().whole(ask(), Flight("test"))
    assert (answer.text, answer.end, answer.usage.completion_tokens, answer.usage.exact, answer.raw) == (WORDS, "stop", 4, True, None)


async def test_messages_become_a_prompt(make: Make, server: StandIn) -> None:
    """The chat template of the settings renders the messages, up to where the answer begins."""
    await read(make(), EngineCall("chat", "m", {"messages": [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}]},
    ]}))  # fmt: skip
    assert server.requests[0].text("text_input") == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_prompt_is_sent_as_it_is(make: Make, server: StandIn) -> None:
    """Whoever sends a prompt writes the template; token ids cannot be sent."""
    engine = make(chat_template=None)
    await read(engine, EngineCall("completion", "m", {"prompt": ["<|im_start|>Once"]}))
    assert server.requests[0].text("text_input") == "<|im_start|>Once"
    with pytest.raises(BadRequest, match="not as token ids"):
        await engine.start(EngineCall("completion", "m", {"prompt": [1, 2]}), Flight("test"))


async def test_messages_without_a_template(make: Make) -> None:
    """Without a template a chat is refused, and the error says which setting is missing."""
    with pytest.raises(EngineError) as caught:
        await make(chat_template=None).start(ask(), Flight("test"))
    assert "chat_template of [engines.test]" in str(caught.value.hint)


async def test_control_tokens_in_messages(make: Make, server: StandIn) -> None:
    """What reads as a control token is defused and noted, refused, or passed, as control_tokens says."""
    flight = Flight("test")
    await read(make(), ask("a<|im_end|>b"), flight)
    assert "a< |im_end|>b" in server.requests[0].text("text_input")
    assert "special_tokens_defused" in decided(flight)
    with pytest.raises(BadRequest, match="1 piece"):
        await make(control_tokens="refuse").start(ask("a<|im_end|>b"), Flight("test"))
    passed = Flight("test")
    await read(make(control_tokens="pass"), ask("a<|im_end|>b"), passed)
    assert "a<|im_end|>b" in server.requests[-1].text("text_input")
    assert "special_tokens_passed" in decided(passed)


async def test_the_time_is_on_the_flight(make: Make, server: StandIn) -> None:
    """Connect, send and first byte are laps; the request carries the flight's id."""
    flight = Flight("test")
    chunks = await read(make(), ask(), flight)
    assert [part for part, _ in flight.laps] == ["engine.connect", "engine.send", "engine.first_byte"]
    assert (flight.engine, server.requests[0].message.id) == ("test", flight.id)
    assert flight.last_ns <= chunks[0].at_ns


async def test_a_key_is_sent(make: Make, server: StandIn) -> None:
    """api_key goes along as a bearer token, and errors are asked for as statuses."""
    await read(make(api_key="k1"), ask())
    assert server.requests[0].metadata["authorization"] == "Bearer k1"
    assert server.requests[0].metadata["triton_grpc_error"] == "true"


# -- models


async def test_a_vllm_model(make: Make, server: StandIn) -> None:
    """vLLM's backend gets its sampling as JSON, is asked to stream, and for its counts."""
    await read(make(), ask(temperature=0, max_completion_tokens=9, stop=["x"], top_k=3))
    request = server.requests[0]
    assert json.loads(request.text("sampling_parameters")) == {"temperature": 0, "max_tokens": 9, "stop": ["x"], "top_k": 3}
    assert request.inputs["stream"] == ("BOOL", (1,), b"\x01")
    assert request.inputs["return_num_output_tokens"][2] == b"\x01"
    assert request.message.parameters["triton_enable_empty_final_response"].bool_param


async def test_a_tensorrt_llm_ensemble(make: Make, server: StandIn) -> None:
    """TensorRT-LLM's ensemble gets a tensor for each field, in its own types and with its batch dimension."""
    server.models = {"m": TRTLLM}
    server.script = lambda request: once(response(True, text_output="ok"))
    await read(make(), ask(max_tokens=9, temperature=0.5, seed=2**63, stop=["x"]))
    inputs = server.requests[0].inputs
    assert inputs["max_tokens"] == ("INT32", (1, 1), struct.pack("<i", 9))
    assert inputs["temperature"] == ("FP32", (1, 1), struct.pack("<f", 0.5))
    assert inputs["random_seed"] == ("UINT64", (1, 1), struct.pack("<Q", 2**63))
    assert inputs["stop_words"] == ("BYTES", (1, 1), pack_text("x"))
    assert "bad_words" not in inputs
    server.models = {"older": {**TRTLLM, "inputs": [(name, kind, False) for name, kind, _ in TRTLLM["inputs"][:4]]}}
    await read(make(), EngineCall("completion", "older", {"prompt": "x", "max_tokens": 9}))
    assert server.requests[-1].inputs["bad_words"][2] == server.requests[-1].inputs["stop_words"][2] == pack_text("")


async def test_a_model_in_python(make: Make, server: StandIn) -> None:
    """A model that keeps to none of the names is understood where it has one text in and one out."""
    server.models = {"m": {"inputs": [("say", "BYTES", False)], "outputs": [("heard", "BYTES")]}}

    async def script(request: Request) -> AsyncIterator[Any]:
        yield response(True, heard=request.text("say")[::-1])

    server.script = script
    assert text_of(await read(make(), EngineCall("completion", "m", {"prompt": "abc"}))) == "cba"


@pytest.mark.parametrize(
    ("fields", "named"), [({"top_k": 3}, "top_k"), ({"tools": [{"type": "function"}]}, "tools"), ({"logit_bias": {"5": 1}}, "logit_bias")]
)
async def test_a_field_that_the_model_does_not_take(make: Make, server: StandIn, fields: dict[str, Any], named: str) -> None:
    """It is refused by name, and nothing is sent: what is silently dropped is believed to work."""
    server.models = {"m": PYTHON}
    with pytest.raises(BadRequest) as caught:
        await make().start(ask(**fields), Flight("test"))
    assert caught.value.param == named
    assert server.requests == []


async def test_fields_that_ask_for_nothing(make: Make, server: StandIn) -> None:
    """A field with the value that it has anyway, or one for the caller's own books, needs no tensor."""
    server.models = {"m": PYTHON}
    server.script = lambda request: once(response(True, completion="ok"))
    fields = {"top_p": 1, "tools": [], "response_format": {"type": "text"}, "user": "u", "metadata": {"a": "b"}, "presence_penalty": 0}
    assert text_of(await read(make(), ask(**fields))) == "ok"


async def test_a_field_that_the_model_must_have(make: Make, server: StandIn) -> None:
    """A required tensor that a field fills is asked of the caller by the field's name."""
    server.models = {"m": TRTLLM}
    with pytest.raises(BadRequest, match="wants `max_tokens`"):
        await make().start(ask(), Flight("test"))


@pytest.mark.parametrize(
    "tensors",
    [
        {"inputs": [("pixels", "FP32", False)], "outputs": [("label", "INT32")]},
        {"inputs": [("text_input", "BYTES", False), ("image", "BYTES", False)], "outputs": [("text_output", "BYTES")]},
    ],
    ids=["no text", "an input that nothing fills"],
)
async def test_a_model_that_is_not_understood(make: Make, server: StandIn, tensors: dict[str, Any]) -> None:
    """It is refused by name, with what was found."""
    server.models = {"m": tensors}
    with pytest.raises(EngineError, match="is not understood") as caught:
        await make().start(ask(), Flight("test"))
    assert all(name in caught.value.message for name, _, _ in tensors["inputs"])


async def test_a_configuration_is_read_once_and_again_after_a_refusal(make: Make, server: StandIn) -> None:
    """A model that was loaded anew with other tensors is understood at the next request."""
    engine = make()
    await read(engine, ask())
    await read(engine, ask())
    assert server.configs_read == 1
    server.script = lambda request: aborted(request, grpc.StatusCode.INVALID_ARGUMENT, "unexpected inference input 'stream'")
    with pytest.raises(EngineRefused):
        await read(engine, ask())
    server.models = {"m": PYTHON}
    server.script = lambda request: once(response(True, completion="ok"))
    assert text_of(await read(engine, ask())) == "ok"


async def test_sequence_ids(make: Make, server: StandIn) -> None:
    """A model with state gets a sequence of its own for each request; one without gets none."""
    server.models = {"m": {**PYTHON, "sequences": True}, "plain": PYTHON}
    server.script = lambda request: once(response(True, completion="ok"))
    engine = make()
    for _ in range(2):
        await read(engine, ask())
    await read(engine, EngineCall("completion", "plain", {"prompt": "x"}))
    first, second, plain = (request.message.parameters for request in server.requests)
    assert first["sequence_id"].int64_param != second["sequence_id"].int64_param
    assert (first["sequence_start"].bool_param, first["sequence_end"].bool_param) == (True, True)
    assert "sequence_id" not in plain


def test_sequence_ids_are_unique() -> None:
    """They are random, positive and fit Triton's 64 bits, so that workers need not agree on them."""
    drawn = [new_sequence_id() for _ in range(10_000)]
    assert len(set(drawn)) == len(drawn)
    assert all(0 < one < 1 << 63 for one in drawn)
    assert max(drawn) > 1 << 60


# -- ends


async def once(*messages: Any) -> AsyncIterator[Any]:
    for message in messages:
        yield message


async def aborted(request: Request, code: grpc.StatusCode, details: str, *before: Any) -> AsyncIterator[Any]:
    for message in before:
        yield message
    await request.context.abort(code, details)


@pytest.mark.parametrize(
    ("messages", "end"),
    [
        ([response(False, text_output="a"), response(True, text_output="b")], "stop"),
        ([response(False, text_output="ab"), response(True, finish_reason="length")], "length"),
        ([response(False, text_output="a"), response(True, text_output="b", finish_reason="eos_token")], "stop"),
        ([response(False, text_output="a", num_output_tokens=2), response(True, text_output="b", num_output_tokens=3)], "length"),
        ([response(False, text_output="你".encode()[:2]), response(True, text_output="你".encode()[2:])], "stop"),
    ],
    ids=["no reason told", "length", "another word for stop", "as many tokens as were asked for", "a character in two"],
)
async def test_good_ends(make: Make, server: StandIn, messages: list[Any], end: str) -> None:
    """The final response ends the answer; how, is the model's finish_reason, or its count against max_tokens."""
    server.script = lambda request: once(*messages)
    chunks = await read(make(), ask(max_tokens=5))
    assert text_of(chunks) in ("ab", "你")
    assert [chunk.finish for chunk in chunks if chunk.finish] == [end]


async def test_a_missing_usage_is_estimated(make: Make, server: StandIn) -> None:
    """Where the model counts no tokens, an estimate comes last, marked, and the flight says so."""
    server.script = lambda request: once(response(False, text_output="eight888"), response(True))
    flight = Flight("test")
    usage = (await read(make(), ask(), flight))[-1].usage
    assert usage is not None
    assert (usage.completion_tokens, usage.exact) == (2, False)
    assert {"usage_estimated", "engine_finish_missing"} <= set(decided(flight))


async def test_an_answer_in_one_piece(make: Make, server: StandIn) -> None:
    """A model that does not stream ends with its one response, also where the server leaves the final flag out."""
    server.models = {"m": {**PYTHON, "decoupled": False}}
    server.script = lambda request: once(response(None, completion="all of it"))
    assert text_of(await read(make(), ask())) == "all of it"


S = grpc.StatusCode


@pytest.mark.parametrize(
    ("script", "error", "before"),
    [
        (lambda r: once(response(True)), EngineEmpty, ""),
        (lambda r: once(response(False, text_output="a")), EngineCut, "a"),
        (lambda r: once(), EngineCut, ""),
        (lambda r: once(response(False, text_output="a"), response(False, finish_reason="abort")), EngineCut, "a"),
        (lambda r: once(response(False, text_output="a"), failed("out of blocks")), EngineRefused, "a"),
        (lambda r: once(failed("This model's maximum context length is 8 tokens")), ContextTooLong, ""),
        (lambda r: once(response(False, text_output="a"), response(False, other="b")), EngineError, "a"),
        (lambda r: once(response(False, text_output="a"), response(True, text_output=b"\xff")), EngineError, "a"),
        (lambda r: once(response(False, text_output="a"), response(True, text_output=b"\xe4\xbd")), EngineError, "a"),
        (lambda r: aborted(r, S.UNAVAILABLE, "loading"), EngineDown, ""),
        (lambda r: aborted(r, S.UNAVAILABLE, "going", response(False, text_output="a")), EngineCut, "a"),
        (lambda r: aborted(r, S.RESOURCE_EXHAUSTED, "too many"), EngineRefused, ""),
        (lambda r: aborted(r, S.INVALID_ARGUMENT, "no"), EngineRefused, ""),
        (lambda r: aborted(r, S.DEADLINE_EXCEEDED, "slow"), EngineStalled, ""),
        (lambda r: aborted(r, S.CANCELLED, "stopped", response(False, text_output="a")), EngineCut, "a"),
        (lambda r: aborted(r, S.UNAUTHENTICATED, "who"), EngineError, ""),
        (lambda r: aborted(r, S.INTERNAL, "oh", response(False, text_output="a")), EngineRefused, "a"),
    ],
)  # fmt: skip
async def test_bad_ends(make: Make, server: StandIn, script: Any, error: type[TidegateError], before: str) -> None:
    """Whatever goes wrong is one of our errors, after the text that came before it, and never a success."""
    server.script = script
    got: list[Chunk] = []
    with pytest.raises(TidegateError) as caught:
        await read(make(), ask(), got=got)
    assert type(caught.value) is error
    assert text_of(got) == before
    assert not any(chunk.finish for chunk in got)


@pytest.mark.parametrize(
    ("status", "details", "http_status", "code"),
    [
        ("RESOURCE_EXHAUSTED", "x", 429, "resource_exhausted"),
        ("UNAVAILABLE", "Exceeds maximum queue size", 429, "queue_full"),
        ("INVALID_ARGUMENT", "x", 400, "invalid_argument"),
        ("INVALID_ARGUMENT", "Prompt length exceeds maximum input length (8)", 400, "context_length_exceeded"),
        ("NOT_FOUND", "x", 404, "not_found"),
        ("INTERNAL", "x", 502, "internal"),
        ("UNAVAILABLE", "x", 503, "engine_down"),
        ("DEADLINE_EXCEEDED", "x", 504, "engine_stalled"),
        ("CANCELLED", "x", 502, "engine_cut"),
        ("PERMISSION_DENIED", "x", 502, "engine_error"),
        ("RESOURCE_EXHAUSTED", "Received message larger than max (9 vs. 8)", 502, "engine_error"),
        ("UNAVAILABLE", "This protocol is restricted, expecting header 'a'", 502, "engine_error"),
    ],
)
def test_what_a_status_means(status: str, details: str, http_status: int, code: str) -> None:
    """gRPC's statuses become HTTP's, with a code of their own and a way out."""
    error = status_error("The engine 'x'", status, details, began=False)
    assert (error.http_status, error.public_code) == (http_status, code)
    assert error.hint


def test_a_traceback_is_not_passed_on() -> None:
    """Of a traceback of the model only the reason reaches the caller, no paths."""
    said = 'Traceback (most recent call last):\n  File "/secret/path.py", line 1, in f\nValueError: too hot\n'
    error = status_error("The engine 'x'", "INTERNAL", said, began=False)
    assert "ValueError: too hot" in error.message
    assert "/secret" not in error.message


# -- time and leaving


async def hang(*before: Any) -> AsyncIterator[Any]:
    for message in before:
        yield message
    await asyncio.Event().wait()


async def test_no_answer_at_all(make: Make, server: StandIn) -> None:
    """Silence before the first token is a stall after first_token_s, and the call is cancelled."""
    server.script = lambda request: hang()
    with pytest.raises(EngineStalled, match="first_token_s"):
        await make(first_token_s=0.1).start(ask(), Flight("test"))
    await until(lambda: server.active == 0)


async def test_silence_between_tokens(make: Make, server: StandIn) -> None:
    """Silence between two tokens is a stall after inter_token_s, and the call is cancelled."""
    server.script = lambda request: hang(response(False, text_output="a"), response(False, text_output="b"))
    got: list[Chunk] = []
    with pytest.raises(EngineStalled, match="inter_token_s"):
        await read(make(inter_token_s=0.15), ask(), got=got)
    assert text_of(got) == "ab"
    await until(lambda: server.active == 0)


async def test_the_whole_takes_too_long(make: Make, server: StandIn) -> None:
    """An answer that goes on and on ends at total_s."""

    async def endless(request: Request) -> AsyncIterator[Any]:
        while True:
            yield response(False, text_output="a")
            await asyncio.sleep(0.01)

    server.script = endless
    with pytest.raises(EngineStalled):
        await read(make(total_s=0.3), ask())
    await until(lambda: server.active == 0)


async def test_nobody_listens(make: Make, server: StandIn) -> None:
    """A port where nobody listens is an engine that is down, with the reason."""
    gone = StandIn()
    await (await serve(gone)).stop(None)
    engine = make(url=gone.url)
    with pytest.raises(EngineDown, match="refused"):
        await engine.start(ask(), Flight("test"))
    assert (await engine.figures())["up"] is False


async def test_the_server_stops_in_the_middle(make: Make) -> None:
    """A server that goes away in the middle of an answer is a cut."""
    stand_in = StandIn()
    stand_in.script = lambda request: hang(response(False, text_output="a"))
    running = await serve(stand_in)
    got: list[Chunk] = []
    stream = await make(url=stand_in.url).start(ask(), Flight("test"))
    reading = asyncio.ensure_future(stream.relay(got.extend))
    await until(lambda: bool(got))
    await running.stop(None)
    with pytest.raises(EngineCut):
        await reading
    assert text_of(got) == "a"


@pytest.mark.parametrize("how", ["cancel", "abort"])
async def test_leaving_cancels_the_call(make: Make, server: StandIn, how: str) -> None:
    """Cancelling the relay, or aborting the stream, cancels the call at once; usage so far stays."""
    server.script = lambda request: hang(response(False, text_output="eight888"))
    got: list[Chunk] = []
    stream = await make().start(ask(), Flight("test"))
    reading = asyncio.ensure_future(stream.relay(got.extend))
    await until(lambda: bool(got))
    if how == "cancel":
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    else:
        stream.abort()
        stream.abort()
        await reading
    await until(lambda: server.active == 0)
    assert stream.usage.completion_tokens == 2


async def test_leaving_before_the_first_token(make: Make, server: StandIn) -> None:
    """A caller who leaves while the engine is silent, streaming or whole, cancels the call."""
    server.script = lambda request: hang()
    engine = make()
    for asking in (engine.start, engine.whole):
        waiting: asyncio.Future[Any] = asyncio.ensure_future(asking(ask(), Flight("test")))
        await until(lambda: server.active == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: server.active == 0)


async def test_an_end_is_no_cancel(make: Make, server: StandIn) -> None:
    """An answer that ended well ends the call well: the server sees no cancel."""

    async def slow_to_close(request: Request) -> AsyncIterator[Any]:
        yield response(True, text_output="all")
        await asyncio.sleep(0.05)  # a server that has a little more to do before it closes the call

    server.script = slow_to_close
    engine = make()
    for _ in range(5):
        await read(engine, ask())
    await until(lambda: server.active == 0)
    assert server.cancelled == 0


async def test_a_call_that_is_never_closed_is_cancelled_after_a_moment(make: Make, server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that does not close the call of a whole answer keeps nothing of ours."""
    monkeypatch.setattr("tidegate.engines.triton_client.DRAIN_S", 0.05)
    server.script = lambda request: hang(response(True, text_output="all"))
    assert text_of(await read(make(), ask())) == "all"
    await until(lambda: server.active == 0)


async def test_a_taker_that_waits_gets_everything_in_order(make: Make, server: StandIn) -> None:
    """What `take` returns is awaited before it takes more."""

    async def many(request: Request) -> AsyncIterator[Any]:
        for number in range(50):
            yield response(number == 49, text_output=f" {number}")

    server.script = many
    busy = False
    taken: list[Chunk] = []

    async def rest() -> None:
        nonlocal busy
        await asyncio.sleep(0)
        busy = False

    def take(batch: list[Chunk]) -> Awaitable[None] | None:
        nonlocal busy
        assert not busy, "it was given more while it waited"
        taken.extend(batch)
        busy = True
        return rest()

    async with asyncio.timeout(BOUND_S):
        await (await make().start(ask(), Flight("test"))).relay(take)
    assert text_of(taken) == "".join(f" {number}" for number in range(50))


async def test_tls(make: Make, tmp_path: Path) -> None:
    """https works with a CA of one's own; a certificate that nobody vouches for is an engine that is down."""
    cert, key = certificate(tmp_path, "127.0.0.1")
    stand_in = StandIn()
    running = await serve(stand_in, (key.read_bytes(), cert.read_bytes()))
    assert text_of(await read(make(url=stand_in.url, ca_file=str(cert)), ask())) == WORDS
    with pytest.raises(EngineDown):
        await make(url=stand_in.url).start(ask(), Flight("test"))
    await running.stop(None)


async def test_an_engine_that_comes_back(make: Make) -> None:
    """A server that was away is used again as soon as it is back, on the same channel."""
    stand_in = StandIn()
    running = await serve(stand_in)
    engine = make(url=stand_in.url)
    assert text_of(await read(engine, ask())) == WORDS
    await running.stop(None)
    with pytest.raises(EngineDown):
        await read(engine, ask())
    again = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(stand_in, again)
    again.add_insecure_port(stand_in.url.removeprefix("http://"))
    await again.start()
    async with asyncio.timeout(BOUND_S):
        while True:
            try:
                assert text_of(await read(engine, ask())) == WORDS
                break
            except EngineDown:
                await asyncio.sleep(0.05)
    await again.stop(None)


# -- going on


async def test_going_on_from_the_middle(make: Make, server: StandIn) -> None:
    """The prompt ends in what was said, the bound counts from the beginning, and the flight says that it was tokenised anew."""
    flight = Flight("test")
    got: list[Chunk] = []
    stream = await make().continue_from(ask(max_tokens=10), Said(" the quick", 2), flight)
    await stream.relay(got.extend)
    request = server.requests[0]
    assert request.text("text_input").endswith("<|im_start|>assistant\n the quick")
    assert json.loads(request.text("sampling_parameters")) == {"max_tokens": 8}
    assert "retokenised" in decided(flight)
    assert text_of(got) == WORDS


async def test_going_on_behind_the_last_word(make: Make, server: StandIn) -> None:
    """An answer that was whole already ends without a word more; that is no empty answer."""
    server.script = lambda request: once(response(True, finish_reason="stop"))
    got: list[Chunk] = []
    await (await make().continue_from(ask(), Said(WORDS, 4), Flight("test"))).relay(got.extend)
    assert (text_of(got), [chunk.finish for chunk in got if chunk.finish]) == ("", ["stop"])


async def test_a_taker_that_has_enough(make: Make, server: StandIn) -> None:
    """Aborting in the midst of a batch ends the relay without an error."""
    server.script = lambda request: hang(response(False, text_output="a"))
    stream = await make().start(ask(), Flight("test"))
    async with asyncio.timeout(BOUND_S):
        await stream.relay(lambda batch: stream.abort())
    await until(lambda: server.active == 0)


async def test_what_cannot_go_on(make: Make, server: StandIn) -> None:
    """A token cannot be forbidden here, and an answer that is as long as it may be has nothing left: both are said, nothing is sent."""
    engine = make()
    with pytest.raises(CannotContinue):
        await engine.continue_from(ask(), Said("a", 1), Flight("test"), forbid="b")
    with pytest.raises(CannotContinue):
        await engine.continue_from(ask(max_tokens=2), Said("a b", 2), Flight("test"))
    assert server.requests == []


# -- figures, settings


async def test_figures(make: Make, server: StandIn) -> None:
    """Version, readiness of each model and its counts; what a server keeps to itself is left out."""
    engine = make()
    await read(engine, ask())
    assert await engine.figures() == {
        "up": True, "ready": True, "version": "2.51.0", "models": {"m": {"ready": True, "streams": True, "requests": 1, "failed": 0}}
    }  # fmt: skip

    async def keep(request: Any, context: Any) -> Any:
        await context.abort(S.UNAVAILABLE, "This protocol is restricted, expecting header 'x'")

    quiet = StandIn()
    quiet.ServerMetadata = quiet.ModelStatistics = keep  # type: ignore[method-assign]
    running = await serve(quiet)
    figures = await make(url=quiet.url).figures()
    await running.stop(None)
    assert figures == {"up": True, "ready": True, "models": {"m": {"ready": True}}}


def test_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra the adapter is refused at the start, with the command that brings it."""
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("tritonclient"):
            raise ImportError("No module named 'tritonclient'", name="tritonclient")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SettingsError) as caught:
        build("test", EngineSettings(adapter="triton", url="http://127.0.0.1:8001", models=["m"]))
    assert caught.value.hint == "pip install 'tidegate[triton]'"


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"url": "http://127.0.0.1:8001/v1"}, "has a path"), ({"chat_template": "chatmi"}, "no built-in template")],
)
def test_settings_that_are_wrong(settings: dict[str, Any], said: str) -> None:
    """A path in url and an unknown template are refused at the start."""
    with pytest.raises(SettingsError, match=said):
        build("test", EngineSettings(**{"adapter": "triton", "url": "http://127.0.0.1:8001", "models": ["m"], **settings}))


# -- tensors


@given(st.lists(st.text(), max_size=5))
def test_texts_pack_and_unpack(texts: list[str]) -> None:
    """What is packed is unpacked, whatever the texts."""
    packed = b"".join(map(pack_text, texts))
    assert [data.decode("utf-8", "surrogatepass") for data in unpack_texts(packed)] == texts


@given(st.binary(max_size=40))
def test_any_bytes_are_unpacked_or_refused(data: bytes) -> None:
    """A broken tensor is a ValueError, never another error, and never more bytes than there are."""
    with contextlib.suppress(ValueError):
        assert sum(map(len, unpack_texts(data))) <= len(data)
    for kind in ("INT8", "UINT64", "FP32", "BYTES", "nonsense"):
        with contextlib.suppress(ValueError):
            unpack_number(data, kind)


@given(st.one_of(st.integers(), st.floats(allow_nan=True), st.text(max_size=5), st.booleans(), st.lists(st.text(max_size=3), max_size=3)))
def test_any_value_fits_a_tensor_or_is_refused(value: Any) -> None:
    """Whatever a caller sends for a field, it fills the tensor or is refused by the field's name."""
    for kind in ("INT32", "UINT64", "FP32", "BOOL", "BYTES", "BF16"):
        model = TritonModel(
            "m", [Tensor("text_input", "BYTES", (1,)), Tensor("max_tokens", kind, (1,), True)], [Tensor("text_output", "BYTES", (1,))],
            decoupled=True,
        )
        refused = None
        filled: dict[str, Any] = {}
        try:
            filled = {one.tensor.name: one for one in model.given("p", {"max_tokens": value}, "x")}
        except BadRequest as error:
            refused = error.param
        assert refused == "max_tokens" or value == [] or filled["max_tokens"].data


async def test_the_words_of_the_stand_in_are_all_there() -> None:
    """The script that most tests use tells everything that a model can tell."""
    assert len([message async for message in words(None)]) == 5  # type: ignore[arg-type]
