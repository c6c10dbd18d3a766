"""Whoever leaves frees the engine, and the engine's own counters say so; whoever reads slowly is not overrun."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from tidegate.core.chunk import Chunk
from tidegate.core.errors import EngineDown
from tidegate.core.flight import Flight
from tidegate.core.ports import Engine
from tidegate.engines.traits import ABILITIES

from ..reading import text_of
from .target import BOUND_S, Target, cannot, collect, end_of, generated, read, running, until

pytestmark = [pytest.mark.asyncio(loop_factories=["uvloop"]), pytest.mark.timeout(300)]

#: Tokens that an engine may still make after its client left: the one that it is making, and the next before it notices.
TWO_STEPS = 2


async def test_leaving_a_stream_frees_the_engine(target: Target, engine: Engine) -> None:
    """After abort() the engine stops within two decode steps: its own count of tokens says so, and that nothing is running."""
    before = await generated(engine)
    stream = await engine.start(target.call("long"), Flight("test"))
    pieces = 0

    def take(batch: list[Chunk]) -> None:
        nonlocal pieces
        pieces += sum(chunk.kind == "text" for chunk in batch)
        if pieces >= 8:
            stream.abort()

    await stream.relay(take)
    seen = stream.usage.completion_tokens
    await free(target, engine)
    after = await generated(engine)
    if before is not None and after is not None:
        assert after - before <= seen + TWO_STEPS


@pytest.mark.parametrize("how", ["streamed", "whole"])
async def test_a_cancelled_task_frees_the_engine(target: Target, engine: Engine, how: str) -> None:
    """Cancelling whoever waits for an answer, streamed or whole, ends the engine's work on it long before its end."""
    call = target.call("long")
    before = await generated(engine)
    work = asyncio.create_task(read(engine, call) if how == "streamed" else engine.whole(call, Flight("test")))  # type: ignore[arg-type]
    await busy(target, engine)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    await free(target, engine)
    after = await generated(engine)
    if before is not None and after is not None:
        assert after - before < call.body["max_tokens"] / 2
    assert text_of(await read(engine, target.call("short")))


async def test_leaving_before_the_first_token(target: Target, engine: Engine) -> None:
    """Who leaves while the prompt is read is counted until the engine says that it is done with it; then the engine answers again."""
    work = asyncio.create_task(read(engine, target.call("prefill")))
    await busy(target, engine)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    told = await free(target, engine)
    if target.real and running_is_told(engine) and "cancel_prefill" in cannot(engine):
        assert len(told) > 1  # it went on reading, and was not called free meanwhile
    assert text_of(await read(engine, target.call("short")))


async def test_eight_at_once(target: Target, engine: Engine) -> None:
    """Eight answers at once are all whole, with their ends and usage, and nothing is left running."""
    calls = [target.call("short", seed=number) for number in range(8)]
    for chunks in await asyncio.gather(*(read(engine, call) for call in calls)):
        assert text_of(chunks)
        assert end_of(chunks) in ("stop", "length")
        usage = next(chunk.usage for chunk in reversed(chunks) if chunk.usage)
        assert usage.exact == ("usage" not in cannot(engine))
    await free(target, engine)


async def test_a_slow_reader_is_not_overrun(target: Target, engine: Engine) -> None:
    """As long as a taker asks to wait it is given nothing; afterwards it gets the rest, and nothing is lost."""
    whole = text_of(await read(engine, target.call("short")))
    ready = asyncio.Event()
    calls = 0
    text: list[str] = []

    def take(batch: list[Chunk]) -> Awaitable[object] | None:
        nonlocal calls
        calls += 1
        text.extend(chunk.text for chunk in batch if chunk.kind == "text")
        return ready.wait() if calls == 1 else None

    stream = await engine.start(target.call("short"), Flight("test"))
    reading = asyncio.create_task(relay(stream, take))
    await free(target, engine)  # the engine is done, and all of its answer is on the way or here
    assert calls <= 1
    ready.set()
    async with asyncio.timeout(BOUND_S):
        await reading
    assert "".join(text) == whole


async def relay(stream: object, take: object) -> None:
    await stream.relay(take)  # type: ignore[attr-defined]


async def test_abort_after_the_end(target: Target, engine: Engine) -> None:
    """abort() after the end, also twice, does no harm."""
    stream = await engine.start(target.call("short"), Flight("test"))
    assert text_of(await collect(stream))
    stream.abort()
    stream.abort()
    assert text_of(await read(engine, target.call("short")))


async def test_figures(target: Target, engine: Engine) -> None:
    """A living engine's figures say that it is up, and how many answers it works on where it can say that."""
    figures = await engine.figures()
    assert figures["up"] is True
    if target.real or target.adapter == "scripted":  # the scripted engine has counters of its own kind only
        assert (await running(engine) is None) == ("running" in cannot(engine))


async def test_figures_of_an_engine_that_is_gone(target: Target) -> None:
    """Figures never raise: up is False, and why; an answer is EngineDown."""
    engine = target.build(url="http://127.0.0.1:9")
    try:
        figures = await engine.figures()
        assert figures["up"] is False
        assert figures["why"]
        with pytest.raises(EngineDown):
            await engine.whole(target.call("short"), Flight("test"))
        with pytest.raises(EngineDown):
            await engine.start(target.call("short"), Flight("test"))
    finally:
        await engine.close()


async def test_what_it_cannot_do_is_said(target: Target, engine: Engine) -> None:
    """An adapter names what its engine cannot do by the words of engines/traits.py, with a sentence each."""
    for name, reason in cannot(engine).items():
        assert name in ABILITIES
        assert reason.endswith(".")
        assert len(reason) > 20


# --


def running_is_told(engine: Engine) -> bool:
    return "running" not in cannot(engine)


async def busy(target: Target, engine: Engine) -> None:
    """Wait until the engine works on one answer. One that reads a prompt may be too busy to say so: that is at work, too."""
    if target.server is None and not running_is_told(engine):
        await asyncio.sleep(0.1)  # nobody tells whether the request has arrived by then: leaving must do no harm in either case
        return
    await until(lambda: _active(target, engine), lambda count: count != 0)


async def free(target: Target, engine: Engine) -> list[int | None]:
    """Wait until the engine works on nothing any more; what it told on the way."""
    return await until(lambda: _active(target, engine), lambda count: count == 0)


async def _active(target: Target, engine: Engine) -> int | None:
    if target.server is not None:
        return target.server.active
    return await running(engine) if running_is_told(engine) else 0
