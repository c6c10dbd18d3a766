"""Reads a long document in parts at the same time: each part is asked for what helps, and the best of what was found goes into the prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidegate.admission.gate import Gate
from tidegate.core.ask import DEFAULT, Ask, EngineCall, Passage
from tidegate.core.chunk import Usage
from tidegate.core.errors import ContextTooLong, DeadlineExceeded, SettingsError, TidegateError
from tidegate.core.ports import How, Stage, TokenCounter
from tidegate.pipeline.capability import Capability
from tidegate.pipeline.cut_text import shards
from tidegate.pipeline.parts import Engines, Parts
from tidegate.pipeline.relevance import relevance
from tidegate.pipeline.settings import ShardSettings
from tidegate.pipeline.spread import Spread

#: What the caller is told under this name, and in the header x-tidegate-shards.
SHARDS = "shards"
#: Tokens that a template puts around the two messages of a part, at most about.
_AROUND = 64
#: How much a part's own words count for its relevance; the rest is what the model found in it.
_OWN = 0.75
#: What a model says that found nothing, without its punctuation.
_NOTHING = frozenset({"", "none", "nothing", "n/a", "no", "无", "没有"})


@dataclass(slots=True)
class _Part:
    """One part of the document, and what was found in it (None: nobody answered)."""

    text: str
    tokens: int
    found: str | None = None


class ShardStage:
    """A field's text in parts, what was found in them as passages: the most relevant, in the order of the document.

    One part at a time is read in the request's own place; those beside it wait for a slot of their own as any request does, so that a long document
    takes nobody's turn. Notes `sharded`. Cancelling it cancels all calls.
    """

    name = "shard"

    def __init__(self, engines: Engines, counter: TokenCounter, settings: ShardSettings, model: str, gate: Gate | None = None) -> None:
        self._engines = engines
        self._counter = counter
        self._settings = settings
        self._model = model
        self._public = None if model == DEFAULT else model
        self._gate = gate

    async def __call__(self, ask: Ask) -> None:
        try:
            await self._shard(ask)
        finally:
            ask.flight.lap("shard")

    async def _shard(self, ask: Ask) -> None:
        settings = self._settings
        text = str(ask.input.get(settings.field) or "")
        question = str(ask.input.get(settings.question) or "") if settings.question else ""
        engine, own = self._engines.find(self._public, ask.beside("/shard"))
        how: list[How] = ["engine"]

        async def count(texts: Sequence[str]) -> list[int]:
            counts, how[0] = await self._counter.texts(engine, texts)
            return counts

        around = sum(await count([settings.ask, question])) + _AROUND + settings.answer_tokens
        context = await self._counter.context(engine, own)
        size = min(settings.tokens, context - around) if context else settings.tokens
        if size < 1:
            raise ContextTooLong(f"The question leaves no room for the document in the model's {context} tokens.", hint="Ask a shorter one.")
        texts = await shards(text, size, count)
        if len(texts) > settings.most:
            raise ContextTooLong(
                f"`{settings.field}` has {len(texts)} parts of {size} tokens, more than {settings.most}.", hint="Send less.", param=settings.field
            )
        parts = [_Part(one, tokens) for one, tokens in zip(texts, await count(texts) if texts else [], strict=True)]
        reading = _Reading(self, ask, question, parts)
        if len(parts) == 1:
            parts[0].found = parts[0].text  # it fits: the prompt has the document itself
        elif parts:
            await reading.run()
        self._merge(ask, question, parts, reading.usage, how[0])

    def _merge(self, ask: Ask, question: str, parts: list[_Part], usage: Usage, how: How) -> None:
        found = [(number, part) for number, part in enumerate(parts, 1) if part.found is not None and _says_something(part.found)]
        scores = [1.0] * len(found)
        if question:  # the part's own words count most: a weak model finds the question's words anywhere
            own, said = relevance(question, [part.text for _, part in found]), relevance(question, [part.found or "" for _, part in found])
            scores = [_OWN * one + (1 - _OWN) * other for one, other in zip(own, said, strict=True)]
        best = sorted(range(len(found)), key=lambda at: (-scores[at], at))[: self._settings.keep]
        ask.passages = [
            Passage(
                f"{self._settings.field}-{found[at][0]}", self._settings.field, f"part {found[at][0]} of {len(parts)}", found[at][1].found or "",
                round(scores[at], 4),
            )
            for at in sorted(best)
        ]
        ask.flight.passage_ids = [passage.id for passage in ask.passages]
        unanswered = sum(part.found is None for part in parts)
        facts: dict[str, Any] = {
            "parts": len(parts), "kept": len(ask.passages), "unanswered": unanswered, "tokens": sum(part.tokens for part in parts), "counted": how,
        }
        ask.flight.decide(
            "sharded", **facts, scores=[passage.score for passage in ask.passages], prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
        )
        if usage.total_tokens:
            ask.spend_aside(usage)
        ask.note(SHARDS, facts)


class _Reading:
    """The parts of one document on their way through engines."""

    def __init__(self, stage: ShardStage, ask: Ask, question: str, parts: list[_Part]) -> None:
        self._settings = stage._settings
        self._gate = stage._gate
        self._lane = stage._model
        self._ask = ask
        self._engines = stage._engines
        self._public = stage._public
        self._question = question
        self._parts = parts
        self._error: TidegateError | None = None
        self.usage = Usage()

    async def run(self) -> None:
        """Returns when all parts are read or the time is up. Raises what the engine raised where no part was answered at all."""
        seconds = self._settings.budget_s
        try:
            async with asyncio.timeout(min(seconds, self._ask.deadline.left_s())) as scope:
                spread = Spread(self._parts, self._read, lambda part: part.tokens)
                await spread.run(self._settings.parallel, self._ask, self._gate, self._lane, self._settings.answer_tokens)
        except TimeoutError:
            if not scope.expired():
                raise
        if all(part.found is None for part in self._parts):
            raise self._error or DeadlineExceeded(
                f"No part of `{self._settings.field}` was read within {seconds:g} s.", hint="Raise shard.budget_s.", stage="shard"
            )

    async def _read(self, part: _Part) -> None:
        settings = self._settings
        asked = f"{part.text}\n\n{self._question}".strip()
        body = {
            "messages": [{"role": "system", "content": settings.ask}, {"role": "user", "content": asked}],
            "max_tokens": settings.answer_tokens, "temperature": 0,
        }  # fmt: skip
        try:
            aside = self._ask.beside("/shard", EngineCall("chat", self._lane, body))
            engine, own = self._engines.find(self._public, aside)
            answer = await engine.whole(EngineCall("chat", own, body), aside.flight)
        except TidegateError as error:
            self._error = error
            return
        part.found = answer.text.strip()
        self.usage = self.usage.plus(answer.usage)


def _says_something(found: str) -> bool:
    return found.strip(" .!。:-*\"'\n").casefold() not in _NOTHING


def build(capability: Capability, parts: Parts) -> Stage:
    """Raises SettingsError where nobody counts tokens."""
    if parts.counter is None:
        raise SettingsError(f"The capability {capability.path} reads in parts, but nobody counts tokens.", hint="Remove the stage `shard`.")
    settings = capability.manifest.shard
    return ShardStage(parts.engines, parts.counter, settings, settings.model or capability.manifest.model, parts.gate)
