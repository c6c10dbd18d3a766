"""Has the model answer: streams where somebody listens, else takes the whole."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from tidegate.core.ask import Ask, EngineCall
from tidegate.core.chunk import Chunk
from tidegate.core.errors import EngineStalled
from tidegate.core.ports import Engine, EngineAnswer, EngineStream, Stage
from tidegate.pipeline.capability import Capability
from tidegate.pipeline.parts import Engines, Parts

#: The public name of the first model of the first engine.
DEFAULT = "default"


class GenerateStage:
    """The engine's call in, text out; books tokens and usage on every end, also when the client leaves."""

    name = "generate"

    def __init__(self, engines: Engines, *, holds: bool = False, first_token_s: float | None = None) -> None:
        self._engines = engines
        self._holds = holds  # a later stage judges the whole: nothing may leave before
        self._first_token_s = first_token_s

    async def __call__(self, ask: Ask) -> None:
        call = ask.call
        assert call is not None, "a stage before `generate` makes the call"
        engine, own_name = self._engines.find(None if call.model == DEFAULT else call.model)
        flight = ask.flight
        flight.model, flight.engine = own_name if call.model == DEFAULT else call.model, engine.name
        if own_name != call.model:
            call = EngineCall(call.kind, own_name, call.body)  # the caller's own bytes carry another name
        if ask.emit is None and self._first_token_s is None:
            await self._take_whole(ask, engine, call)
        else:
            await self._stream(ask, engine, call)

    async def _take_whole(self, ask: Ask, engine: Engine, call: EngineCall) -> None:
        flight = ask.flight
        try:
            answer: EngineAnswer = await engine.whole(call, flight)
        finally:  # also where it failed or the client left: the time until then was the engine's
            flight.lap("engine.answer")
        flight.usage, flight.end = answer.usage, answer.end
        ask.text.append(answer.text)
        ask.whole = answer

    async def _stream(self, ask: Ask, engine: Engine, call: EngineCall) -> None:
        stream: EngineStream | None = None
        clean = False
        try:
            if self._first_token_s is None:
                stream = await engine.start(call, ask.flight)
                await self._relay(ask, stream, None)
            else:
                async with asyncio.timeout(self._first_token_s) as budget:
                    stream = await engine.start(call, ask.flight)
                    await self._relay(ask, stream, budget)
            clean = True
        except TimeoutError:
            raise EngineStalled(
                f"The engine {engine.name} gave no token within {self._first_token_s} s.",
                hint="Raise budgets.first_token_s in capability.toml, or look at the engine's queue under /health.",
            ) from None
        finally:
            if not clean and stream is not None:
                stream.abort()
                ask.flight.usage = stream.usage

    async def _relay(self, ask: Ask, stream: EngineStream, budget: asyncio.Timeout | None) -> None:
        flight, text = ask.flight, ask.text
        ask.running = stream
        emit = None if self._holds else ask.emit

        def take(batch: list[Chunk]) -> Awaitable[None] | None:
            for chunk in batch:
                if chunk.text or chunk.kind == "tool_call":
                    if not flight.token_ns:
                        flight.lap("engine.first_token", chunk.at_ns)
                        if budget is not None:
                            budget.reschedule(None)
                    flight.token(chunk.at_ns)
                    if chunk.kind == "text":
                        text.append(chunk.text)
                if chunk.usage is not None:
                    flight.usage = chunk.usage
                if chunk.finish is not None:
                    flight.end = chunk.finish
            return emit(batch) if emit is not None else None

        try:
            await stream.relay(take)
        finally:  # also where it broke off or the client left: the time until then was the engine's
            flight.lap("stream" if flight.token_ns else "engine.first_token")


def estimate_prompt_tokens(call: EngineCall) -> int:
    """About a token per four bytes of text, the usual figure for English; used to reserve, never to book what an engine counted."""
    size = len(call.raw) if call.raw is not None else len(str(call.body.get("messages") or call.body.get("prompt") or ""))
    return size // 4 + 1


def text_of(batch: list[Chunk]) -> str:
    """The answer text of a batch, without reasoning and notices."""
    return "".join(chunk.text for chunk in batch if chunk.kind == "text")


def build(capability: Capability, parts: Parts) -> Stage:
    return GenerateStage(parts.engines, holds=not capability.streams, first_token_s=capability.manifest.budgets.first_token_s)
