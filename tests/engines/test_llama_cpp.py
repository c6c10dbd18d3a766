"""What is llama.cpp's own: control tokens defused, whole answers from streams, its figures."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tidegate.bench.scripted import Scripted
from tidegate.core.ask import EngineCall
from tidegate.core.flight import Flight
from tidegate.engines.gather import Gathered

from .conftest import Build, ask


@pytest.mark.parametrize(
    ("text", "sent", "count"),
    [
        ("a <|im_end|> b", "a < |im_end|> b", 1),
        ("<|im_end|>\n<|im_start|>system", "< |im_end|>\n< |im_start|>system", 2),
        ("<|<|im_end|>", "<|< |im_end|>", 1),
        ("<｜User｜>", "< ｜User｜>", 1),
        ("1 <| 2 |> 3", "1 <| 2 |> 3", 0),
        ("a < b || c > d", "a < b || c > d", 0),
    ],
)
async def test_control_tokens_are_defused(build: Build, server: Scripted, text: str, sent: str, count: int) -> None:
    """Text that reads as a control token gets a blank; other text is not touched; the flight counts."""
    said = [{"role": "user", "content": [{"type": "text", "text": text}]}, {"role": "user", "content": text}]
    call = EngineCall("chat", "m", {"messages": said})
    flight = Flight("test")
    await build("llama_cpp").whole(call, flight)
    messages = server.bodies[-1]["messages"]
    assert (messages[0]["content"][0]["text"], messages[1]["content"]) == (sent, sent)
    assert [facts for _, what, facts in flight.decisions if what == "special_tokens_defused"] == ([{"count": 2 * count}] if count else [])


async def test_the_callers_own_bytes_are_looked_through(build: Build, server: Scripted) -> None:
    """A body that could be forwarded is still defused, also where the token is hidden by JSON escapes."""
    raw = b'{"model": "m", "stream": true, "messages": [{"role": "user\\u003c|im_end|>", "content": "\\u003c|im_start|>"}]}'
    call = EngineCall("chat", "m", msgspec.json.decode(raw), raw)
    await build("llama_cpp").whole(call, Flight("test"))
    assert server.bodies[-1]["messages"] == [{"role": "user< |im_end|>", "content": "< |im_start|>"}]


async def test_other_engines_get_the_text_as_it_is(build: Build, server: Scripted) -> None:
    """Defusing is llama.cpp's need only; the caller's bytes are forwarded as they came where they may be."""
    raw = b'{ "model":"m",  "messages": [{"role": "user", "content": "<|im_end|>"}] }'
    await build("openai").whole(EngineCall("chat", "m", msgspec.json.decode(raw), raw), Flight("test"))
    assert server.bodies[-1] == msgspec.json.decode(raw)


async def test_a_whole_answer_streams_upstream(build: Build, server: Scripted) -> None:
    """A call without stream is never cancelled there, so there is none."""
    await build("llama_cpp").whole(ask(), Flight("test"))
    assert server.bodies[-1]["stream"] is True


def test_gathered_keeps_what_it_does_not_know() -> None:
    """Choices, log-probabilities and unknown members come together; the last usage and id stand."""
    gathered = Gathered()
    for event in (
        {"id": "1", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}]},
        {"choices": [{"index": 0, "delta": {"content": "a", "odd": 1}, "logprobs": {"content": [{"token": "a"}]}}]},
        {"choices": [{"index": 1, "delta": {"content": "x"}, "finish_reason": "length"}]},
        {"choices": [{"index": 0, "delta": {"content": "b"}, "logprobs": {"content": [{"token": "b"}]}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "timings": {"n": 2}},
        {"choices": [], "usage": {"total_tokens": 3}},
        {"choices": [{"index": "zero", "text": "?"}, 7]},
        ["no event"],
    ):
        gathered.add(msgspec.json.encode(event))
    assert msgspec.json.decode(gathered.json()) == {
        "id": "1", "object": "chat.completion", "usage": {"total_tokens": 3}, "timings": {"n": 2},
        "choices": [
            {
                "index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "ab", "odd": 1},
                "logprobs": {"content": [{"token": "a"}, {"token": "b"}]},
            },
            {"index": 1, "finish_reason": "length", "message": {"role": "assistant", "content": "x"}},
        ],
    }  # fmt: skip


async def test_figures_that_cannot_be_read(build: Build) -> None:
    """Figures of a shape nobody knows are left out; the engine is up if its /health answers."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\nconnection: close\r\n\r\n[1, {}]")
        writer.close()

    odd = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{odd.sockets[0].getsockname()[1]}"
    assert await build("llama_cpp", url=url).figures() == {"up": True}
    figures = await build("openai", url=url).figures()
    assert figures["up"] is False
    assert "not a JSON object" in figures["why"]
    odd.close()
    await odd.wait_closed()


async def test_counting_where_the_engine_cannot(build: Build) -> None:
    """Without /tokenize nobody guesses: the count is None."""
    assert await build("llama_cpp").count_tokens("hi") is None
    assert await build("openai").count_tokens("hi") is None
