"""What an answer is, whoever gives it: text, tokens, usage, ends, limits."""

from __future__ import annotations

import pytest

from tidegate.core.errors import ContextTooLong
from tidegate.core.flight import Flight
from tidegate.core.ports import Engine

from ..reading import text_of
from .target import Target, body_of, cannot, collect, end_of, ids_of, read

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])


async def test_whole_and_streamed_are_the_same(target: Target, engine: Engine) -> None:
    """The same call alone, streamed and whole, gives the same text, end and usage."""
    chunks = await read(engine, target.call("short"))
    answer = await engine.whole(target.call("short"), Flight("test"))
    assert answer.text == text_of(chunks) != ""
    assert answer.end == end_of(chunks)
    told = next(chunk.usage for chunk in reversed(chunks) if chunk.usage)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (told.prompt_tokens, told.completion_tokens)


async def test_a_whole_answer_is_openais(target: Target, engine: Engine) -> None:
    """What is passed on as it came is OpenAI's shape and says the same; None is allowed: then the door makes it."""
    answer = await engine.whole(target.call("short"), Flight("test"))
    if answer.raw is not None:
        body = body_of(answer.raw)
        assert body["object"] == "chat.completion"
        assert body["choices"][0]["message"]["content"] == answer.text
        assert body["usage"]["completion_tokens"] == answer.usage.completion_tokens


async def test_what_is_passed_on_says_what_was_said(target: Target, engine: Engine) -> None:
    """The events that go to the client as they came are chat events, whose text is the chunk's; our own wishes (token ids) do not show."""
    for chunk in await read(engine, target.call("short")):
        if chunk.raw is not None:
            event = body_of(chunk.raw)
            assert event["object"] == "chat.completion.chunk"
            assert "token_ids" not in str(event)
            if chunk.kind == "text":
                assert event["choices"][0]["delta"]["content"] == chunk.text


async def test_the_older_api(target: Target, engine: Engine) -> None:
    """A completion streams and comes whole, with the same text."""
    text = text_of(await read(engine, target.call("completion")))
    assert text
    assert (await engine.whole(target.call("completion"), Flight("test"))).text == text


async def test_usage(target: Target, engine: Engine) -> None:
    """A stream's last word on usage is exact, the stream itself says the same; where the engine does not count, it is marked as an estimate."""
    flight = Flight("test")
    stream = await engine.start(target.call("short"), flight)
    chunks = await collect(stream)
    told = next(chunk.usage for chunk in reversed(chunks) if chunk.usage)
    assert told == stream.usage
    assert told.exact == ("usage" not in cannot(engine))
    assert told.prompt_tokens > 0
    assert told.completion_tokens > 0


async def test_usage_of_an_answer_that_was_left(target: Target, engine: Engine) -> None:
    """An answer that is left in the middle has its tokens so far booked: each piece that came counts, and exact is only what was told."""
    stream = await engine.start(target.call("long"), Flight("test"))
    pieces = 0

    def take(batch: list[object]) -> None:
        nonlocal pieces
        pieces += sum(bool(getattr(chunk, "text", "")) for chunk in batch)
        if pieces >= 5:
            stream.abort()

    await stream.relay(take)
    usage = stream.usage
    assert usage.prompt_tokens > 0
    if usage.exact:
        assert usage.completion_tokens >= pieces
    else:
        assert usage.completion_tokens > 0


async def test_token_ids(target: Target, engine: Engine) -> None:
    """Where the engine tells ids, each piece of text carries its own, as many as were counted; where not, none does."""
    chunks = await read(engine, target.call("short"))
    ids = ids_of(chunks)
    if "token_ids" in cannot(engine):
        assert ids is None
    else:
        assert ids is not None
        told = next(chunk.usage for chunk in reversed(chunks) if chunk.usage)
        assert told.completion_tokens - 1 <= len(ids) <= told.completion_tokens  # the token that ends the answer is no text


async def test_max_tokens(target: Target, engine: Engine) -> None:
    """A bounded answer ends in `length`, with as many tokens as were asked for and the beginning of the longer one."""
    whole = text_of(await read(engine, target.call("short")))
    chunks = await read(engine, target.call("short", max_tokens=5))
    assert end_of(chunks) == "length"
    assert whole.startswith(text_of(chunks))
    usage = next(chunk.usage for chunk in reversed(chunks) if chunk.usage)
    if usage.exact:
        assert usage.completion_tokens == 5


async def test_stop_strings(target: Target, engine: Engine) -> None:
    """A stop string ends the answer in `stop`, and neither it nor what follows is said."""
    if "stop" in cannot(engine) or not target.real:
        assert target.server is not None or cannot(engine)["stop"]  # the scripted engine has no words of its own to stop at
        await read(engine, target.call("short", stop=["never said"]))
        return
    whole = text_of(await read(engine, target.call("short")))
    stop = whole[len(whole) // 2 :][:4]
    chunks = await read(engine, target.call("short", stop=[stop]))
    assert text_of(chunks) == whole[: whole.index(stop)]
    assert end_of(chunks) == "stop"


async def test_characters_are_whole(target: Target, engine: Engine) -> None:
    """Characters of several tokens or bytes arrive whole, however the engine cut them; whole and streamed are the same."""
    chunks = await read(engine, target.call("unicode"))
    text = text_of(chunks)
    assert not text.isascii()
    assert "\ufffd" not in "".join(chunk.text for chunk in chunks)
    assert (await engine.whole(target.call("unicode"), Flight("test"))).text == text


@pytest.mark.parametrize("how", ["streamed", "whole"])
async def test_a_prompt_too_long(target: Target, engine: Engine, how: str) -> None:
    """A prompt that does not fit is ContextTooLong; where the engine does not say so, its adapter says that."""
    call = target.call("overflow")
    if "context" in cannot(engine):
        return
    with pytest.raises(ContextTooLong):
        await (read(engine, call) if how == "streamed" else engine.whole(call, Flight("test")))


async def test_the_time_is_on_the_flight(target: Target, engine: Engine) -> None:
    """Connecting, sending and the first byte are laps of the flight, in this order, and the flight names the engine."""
    flight = Flight("test")
    chunks = await read(engine, target.call("short"), flight)
    assert [part for part, _ in flight.laps][-3:] == ["engine.connect", "engine.send", "engine.first_byte"]
    stamps = [chunk.at_ns for chunk in chunks]
    assert stamps == sorted(stamps)
    assert flight.engine == "test"
