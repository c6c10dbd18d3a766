"""The scripted engine: it does as it is told, counts, and says what it does not understand."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.waiting import until

from tidegate.bench.directives import FAULTS, Directives, parse
from tidegate.bench.scripted import Scripted, start
from tidegate.bench.tokens import WORDS
from tidegate.core.errors import BadRequest


@pytest.fixture
async def server() -> AsyncIterator[Scripted]:
    server = await start()
    yield server
    await server.close()


@pytest.fixture
async def client(server: Scripted) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
        yield client


def chat(orders: str, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": f"hi {orders}"}], **fields}


# -- orders


def test_orders_are_read() -> None:
    """Every order of a block is obeyed; the fault's place is the middle unless it is named."""
    assert parse("a ##t=20,i=5.5,n=32,m=cut,w= x## b") == Directives(20.0, 5.5, 32, "cut", 16, " x")
    assert parse("##k=3##").at == 3
    assert parse("no orders") == Directives(at=8)


def test_the_last_block_counts() -> None:
    """A conversation repeats old orders; the last ones are meant."""
    assert parse("##n=1## and ##n=2##").tokens == 2


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ('##json={"a": [1, "##"]}##', '{"a": [1, "##"]}'),
        ('##json="not {json"##', "not {json"),
        ('##n=3## ##json={"b":2}## text', '{"b":2}'),
        ('##json={"a":1}## ##json=[2]##', "[2]"),
    ],
)
def test_fixed_answers(prompt: str, answer: str) -> None:
    """A JSON value is answered as it stands, a JSON string as what it says."""
    assert parse(prompt).answer == answer


@pytest.mark.parametrize(
    ("prompt", "hint"),
    [("##m=cutt##", "Did you mean 'cut'"), ("##z=1##", "Known: t, i"), ("##n=many##", "Example"), ("##json={##", "Example")],
)
def test_orders_that_are_not_understood(prompt: str, hint: str) -> None:
    """An unknown order is refused with what is known."""
    with pytest.raises(BadRequest) as caught:
        parse(prompt)
    assert hint in (caught.value.hint or "")


def test_every_fault_is_documented() -> None:
    """docs/engines.md lists every fault with the sentence that the code has for it."""
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")
    assert [name for name, what in FAULTS.items() if f"| `{name}` | {what} |" not in page] == []


# -- answers


async def test_a_whole_answer(client: httpx.AsyncClient) -> None:
    """Words in order, usage, and the shape of OpenAI's answer."""
    answer = (await client.post("/v1/chat/completions", json=chat("##n=18##"))).json()
    assert answer["choices"][0]["message"]["content"] == "".join(WORDS + WORDS[:2])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 18, "total_tokens": 21}


async def test_a_stream(client: httpx.AsyncClient) -> None:
    """One event a token, a finish, usage where it was asked for, [DONE]."""
    body = chat("##n=3##", stream=True, stream_options={"include_usage": True})
    lines = [line for line in (await client.post("/v1/chat/completions", json=body)).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert [event["choices"][0]["delta"].get("content") for event in events[:-1]] == [" the", " quick", " brown", None]
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["usage"]["completion_tokens"] == 3
    without = (await client.post("/v1/chat/completions", json=chat("##n=3##", stream=True))).text
    assert "usage" not in without


async def test_completions_and_a_fixed_answer(client: httpx.AsyncClient) -> None:
    """Any output can be forced, token by token, on both APIs."""
    body = {"model": "m", "prompt": 'x ##json={"premium": "a lot"}##'}
    assert (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"] == '{"premium": "a lot"}'
    stream = (await client.post("/v1/completions", json={**body, "stream": True})).text
    events = [json.loads(line[6:]) for line in stream.split("\n\n") if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == '{"premium": "a lot"}'


async def test_the_same_order_gives_the_same_bytes(client: httpx.AsyncClient) -> None:
    """Nothing is left to chance."""
    for fault in ("none", "crlf", "tools", "gzip", "junk_json"):
        answers = {(await client.post("/v1/chat/completions", json=chat(f"##n=5,m={fault}##", stream=True))).read() for _ in range(3)}
        assert len(answers) == 1


async def test_it_knows_the_openai_sdk(server: Scripted) -> None:
    """The official SDK reads its answers."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", http_client=httpx.AsyncClient(trust_env=False)) as sdk:
        stream = await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "##n=2##"}], stream=True)
        assert [event.choices[0].delta.content async for event in stream] == [" the", " quick", None]


async def test_unknown_orders_are_400(client: httpx.AsyncClient) -> None:
    """An order that is not understood is told to the caller."""
    response = await client.post("/v1/chat/completions", json=chat("##m=nonsense##"))
    assert response.status_code == 400
    assert "nonsense" in response.json()["error"]["message"]
    assert (await client.post("/v1/chat/completions", content=b"{")).status_code == 400
    assert (await client.get("/nowhere")).status_code == 404


# -- token ids


async def ids_of(client: httpx.AsyncClient, text: str, *, special: bool = True) -> list[int]:
    answer = await client.post("/tokenize", json={"content": text, "parse_special": special})
    ids: list[int] = answer.json()["tokens"]
    return ids


async def test_tokens_of_a_text(client: httpx.AsyncClient) -> None:
    """Bytes, words and, where they are read as such, control tokens; ids in a list stay where they are; ids give back the text."""
    assert await ids_of(client, "é") == list("é".encode())
    assert len(await ids_of(client, " the quick")) == 2
    assert len(await ids_of(client, "<|im_end|>")) == 1
    assert await ids_of(client, "<|im_end|>", special=False) == list(b"<|im_end|>")
    assert (await client.post("/tokenize", json={"content": ["a", -1, "b"]})).json() == {"tokens": [97, -1, 98]}
    ids = await ids_of(client, "a</s> the 你好")
    assert (await client.post("/detokenize", json={"tokens": ids})).json() == {"content": "a</s> the 你好", "prompt": "a</s> the 你好"}
    assert (await client.post("/detokenize", json={"tokens": [99999]})).status_code == 400


async def test_tokens_as_vllm_tells_them(client: httpx.AsyncClient) -> None:
    """A prompt or messages, with the count and the context's length."""
    told = (await client.post("/tokenize", json={"prompt": "a</s>"})).json()
    assert (len(told["tokens"]), told["count"], told["max_model_len"]) == (2, 2, 8192)
    messages = [{"role": "user", "content": "hi"}]
    rendered = (await client.post("/apply-template", json={"messages": messages})).json()["prompt"]
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (await client.post("/tokenize", json={"messages": messages})).json()["tokens"] == await ids_of(client, rendered)


async def test_a_prompt_of_ids(client: httpx.AsyncClient) -> None:
    """The orders in it are obeyed, its usage counts ids, and what stands behind them of the answer is not said again."""
    ids = await ids_of(client, "x ##n=4## the quick")
    answer = (await client.post("/v1/completions", json={"model": "m", "prompt": ids})).json()
    assert (answer["choices"][0]["text"], answer["usage"]["prompt_tokens"]) == (" brown fox", len(ids))
    assert (await client.post("/v1/completions", json={"model": "m", "prompt": [99999]})).status_code == 400


async def test_a_begun_answer_with_words_of_others(client: httpx.AsyncClient) -> None:
    """A replaced word and a text that was put in are no reason to begin anew."""
    start = "<|im_start|>user\n##n=4##<|im_end|>\n<|im_start|>assistant\n"
    for said, rest in ((" the other", " brown fox"), (" the, well, something else", " quick brown fox"), (" the qu", "ick brown fox")):
        answer = await client.post("/v1/completions", json={"model": "m", "prompt": await ids_of(client, start + said)})
        assert answer.json()["choices"][0]["text"] == rest


async def test_a_fault_happens_once(client: httpx.AsyncClient) -> None:
    """A fault whose token was said does not happen again; one that lies ahead does."""
    for said, whole in ((" the quick", True), (" the", False)):
        body = {"model": "m", "prompt": await ids_of(client, f"##n=4,m=end_early,k=2##{said}"), "stream": True}
        assert ("[DONE]" in (await client.post("/v1/completions", json=body)).text) is whole


async def test_banned_tokens(client: httpx.AsyncClient) -> None:
    """A word whose token has a bias of -100, or false, is another one."""
    (quick,) = await ids_of(client, " quick")
    for ban in ({str(quick): -100}, {str(quick): False}, [[quick, False]]):
        answer = (await client.post("/v1/chat/completions", json=chat("##n=3##", logit_bias=ban))).json()
        assert answer["choices"][0]["message"]["content"] == " the other brown"
    free = (await client.post("/v1/chat/completions", json=chat("##n=3##", logit_bias={str(quick): -99}))).json()
    assert free["choices"][0]["message"]["content"] == " the quick brown"


async def test_ids_of_an_answer(client: httpx.AsyncClient) -> None:
    """Ids come with each event where they were asked for, as vLLM's, and not otherwise."""
    body = chat("##n=3##", stream=True, return_token_ids=True)
    stream = (await client.post("/v1/chat/completions", json=body)).text
    events = [json.loads(line[6:])["choices"][0] for line in stream.split("\n\n") if line.startswith("data: {")]
    assert [event.get("token_ids") for event in events] == [[number] for number in await ids_of(client, " the quick brown")] + [None]
    whole = (await client.post("/v1/chat/completions", json=chat("##n=3##", return_token_ids=True))).json()
    assert whole["choices"][0]["token_ids"] == await ids_of(client, " the quick brown")
    assert "token_ids" not in (await client.post("/v1/chat/completions", json=chat("##n=3##", stream=True))).text


async def test_a_cut_at_a_byte(server: Scripted) -> None:
    """The connection closes after exactly so many bytes."""
    body = json.dumps(chat("##n=9,m=cut_bytes,k=301##", stream=True)).encode()
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    async with asyncio.timeout(10):
        assert len(await reader.read(-1)) == 301
    writer.close()


# -- faults


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stream", [True, False])
async def test_every_fault_ends(server: Scripted, fault: str, stream: bool) -> None:
    """Each fault can be ordered both ways, and a client that leaves ends whatever it does."""
    body = json.dumps(chat(f"##n=4,m={fault}##", stream=stream)).encode()
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    async with asyncio.timeout(10):
        await until(lambda: server.requests == 1)
        if fault not in ("hang", "die"):
            assert await reader.read(1)
        writer.transport.abort()
        await until(lambda: not server.active and not server.connections)


# -- counters and the command


async def test_stats(client: httpx.AsyncClient, server: Scripted) -> None:
    """Requests, running and aborted answers, connections; prompts as digests only."""
    async with asyncio.timeout(10):
        async with client.stream("POST", "/v1/chat/completions", json=chat("##n=10000,i=1##", stream=True)) as response:
            await anext(response.aiter_bytes())
            assert server.stats()["active"] == 1
        await until(lambda: not server.active)
    stats = (await client.get("/stats")).json()
    assert (stats["requests"], stats["active"], stats["aborted"]) == (1, 0, 1)
    assert len(stats["prompts"]) == 1
    assert len(stats["prompts"][0]) == 16


async def test_an_api_key(client: httpx.AsyncClient, server: Scripted) -> None:
    """With a key set, others are refused."""
    server.api_key = "k"
    assert (await client.post("/v1/chat/completions", json=chat(""))).status_code == 401
    assert (await client.post("/v1/chat/completions", json=chat(""), headers={"authorization": "Bearer k"})).status_code == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command(number: signal.Signals) -> None:
    """It says where it listens, serves, and ends well on a signal, open streams or not."""
    with subprocess.Popen([sys.executable, "-m", "tidegate.bench.scripted", "--port", "0"], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        word, _, address = child.stdout.readline().strip().partition(" ")
        assert word == "listening"
        with httpx.Client(base_url=f"http://{address}", trust_env=False) as client:
            assert client.get("/health").json() == {"status": "ok"}
            assert client.get("/v1/models").json()["data"][0]["id"] == "scripted"
            with client.stream("POST", "/v1/chat/completions", json=chat("##n=1000,i=50##", stream=True)):
                child.send_signal(number)
                assert child.wait(10) == 0
