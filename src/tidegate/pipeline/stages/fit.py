"""Makes a prompt fit: refuses it, cuts it or has it summarised where it has more tokens than the model may read."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from tidegate.admission.gate import Gate
from tidegate.core.ask import DEFAULT, Ask, EngineCall
from tidegate.core.chunk import Usage
from tidegate.core.errors import ContextTooLong, SettingsError, TidegateError
from tidegate.core.ports import Counted, Engine, Stage, TokenCounter
from tidegate.pipeline.aside import Summariser
from tidegate.pipeline.capability import Capability
from tidegate.pipeline.cut_text import head, tail
from tidegate.pipeline.length import Cut, Line, Part, cut, interval, line_of, put_in
from tidegate.pipeline.parts import Engines, Parts
from tidegate.pipeline.settings import LengthSettings

#: What the caller is told under this name, and in the header x-tidegate-cut.
CUT = "cut"
#: An answer whose length nobody bounds has this much of the context kept free, or a quarter of it.
_ANSWER_TOKENS = 256
#: Times that a cut prompt is counted and cut again, because pieces of a text count a little differently than the whole.
_ROUNDS = 6
_STEPS = (0, 0, 0.1, 0.5, 1, 1)
#: Bytes that a template puts around a message at most; no token is made of less than a byte.
_BYTES_AROUND = 64


class FitStage:
    """Counts where a prompt may be too long, and does what the settings say. Notes `length_cut`, and tells the caller what was cut."""

    name = "fit"

    def __init__(self, engines: Engines, counter: TokenCounter, settings: LengthSettings, gate: Gate | None = None) -> None:
        self._engines = engines
        self._counter = counter
        self._settings = settings
        self._summariser = Summariser(engines, counter, settings.compress_model, gate)

    async def __call__(self, ask: Ask) -> None:
        call = ask.call
        assert call is not None, "a stage before `fit` makes the call"
        try:
            await self._fit(ask, call)
        finally:
            ask.flight.lap("fit")

    async def _fit(self, ask: Ask, call: EngineCall) -> None:
        engine, own = self._engines.find(None if call.model == DEFAULT else call.model, ask.beside("/fit"))
        asked = EngineCall(call.kind, own, call.body)
        limit = self._settings.max_prompt_tokens or await self._room(engine, asked)
        if not limit or _most_tokens(call) <= limit:
            return
        counted = await self._counter.prompt(engine, asked)
        if counted.tokens <= limit:
            return
        if self._settings.policy == "refuse":
            raise _too_long(counted, limit)
        await _Fitting(self._settings, self._counter, self._summariser, ask, engine, asked, counted, limit).run(call.model)

    async def _room(self, engine: Engine, call: EngineCall) -> int:
        context = await self._counter.context(engine, call.model)
        answer = int(call.body.get("max_completion_tokens") or call.body.get("max_tokens") or 0)
        return max(1, context - (answer if answer > 0 else min(_ANSWER_TOKENS, context // 4))) if context else 0


class _Fitting:
    """One prompt that is too long."""

    def __init__(
        self, settings: LengthSettings, counter: TokenCounter, summariser: Summariser, ask: Ask, engine: Engine, call: EngineCall, counted: Counted,
        limit: int,
    ) -> None:
        self._settings = settings
        self._counter = counter
        self._summariser = summariser
        self._ask = ask
        self._engine = engine
        self._call = call
        self._counted = counted
        self._limit = limit
        self._marker_tokens = 0

    async def run(self, model: str) -> None:
        """Put the call that fits in place of the one that does not. Raises ContextTooLong where what must stay is too long."""
        policy = self._settings.policy
        facts: dict[str, Any] = {"policy": policy}
        if self._settings.marker:
            self._marker_tokens = (await self._count([self._settings.marker]))[0] + 1
        if policy == "compress":
            found = await self._compressed(facts)
            if found is None:
                policy = facts["policy"] = self._settings.compress_else
                if policy == "refuse":
                    raise _too_long(self._counted, self._limit, ", and no summary of it came")
        if policy != "compress":
            assert policy in ("head", "tail", "middle")
            found = await self._cut(policy, facts, self._limit)
        assert found is not None
        body, tokens = found
        facts |= {"from": self._counted.tokens, "to": tokens, "limit": self._limit, "counted": self._counted.how}
        self._ask.call = EngineCall(self._call.kind, model, body)
        self._ask.flight.decide("length_cut", **facts)
        self._ask.note(CUT, facts)

    # -- cutting

    async def _count(self, texts: Any) -> list[int]:
        counts, _ = await self._counter.texts(self._engine, texts)
        return counts

    async def _cut(self, part: Part, facts: dict[str, Any], limit: int) -> tuple[dict[str, Any], int]:
        """The body cut to `limit` tokens, and how many it has."""
        body = self._call.body
        remove = self._counted.tokens - limit
        if self._call.kind == "completion":
            return await self._cut_prompt(body, part, facts, limit)
        line = line_of(body["messages"])
        await line.count(self._count, self._counted.tokens)
        for again in range(_ROUNDS):
            made = await self._cut_line(line, part, remove, self._settings.marker)
            fits, tokens = await self._fits({**body, "messages": made.messages}, limit)
            if fits:
                facts |= {"messages_dropped": made.dropped, "texts_cut": made.texts_cut}
                return {**body, "messages": made.messages}, tokens
            # The first times by what is too much; then in large steps over what is in the way: markers, what cannot be cut.
            more = remove + max(tokens - limit + 1, int(line.tokens * _STEPS[again]))
            remove = line.tokens if remove < line.tokens < more else more  # all of them before anything of the last message
        raise _too_long(self._counted, limit, " even where all that may go is cut")

    async def _cut_line(self, line: Line, part: Part, remove: int, marker: str) -> Cut:
        total = line.tokens
        own = sum(piece.tokens for piece in line.last.pieces) if line.last is not None else 0
        extra = remove + self._marker_tokens
        if remove <= total:
            return await cut(line, interval(part, total, extra), None, marker, self._count)
        if self._settings.last_message == "refuse":
            raise _too_long(self._counted, self._limit, ", and the system message and the last message of the user stay whole")
        more = extra - total
        if more >= own:
            raise _too_long(self._counted, self._limit, ", and the system messages alone leave no room")
        return await cut(line, interval("head", total, total), interval(part, own, more), marker, self._count)

    async def _cut_prompt(self, body: dict[str, Any], part: Part, facts: dict[str, Any], limit: int) -> tuple[dict[str, Any], int]:
        """A completion's text. Token ids are not cut: nobody can say where a character ends among them."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if not isinstance(prompt, str):
            raise _too_long(self._counted, limit, ", and token ids are not cut")
        (total,) = await self._count([prompt])
        remove = self._counted.tokens - limit
        for _ in range(_ROUNDS):
            gone = interval(part, total, remove + self._marker_tokens)
            first, second = await head(prompt, gone.begin, self._count), await tail(prompt, total - gone.end, self._count)
            made = {**body, "prompt": f"{prompt[:first]}{self._settings.marker}{prompt[max(first, second) :]}"}
            fits, tokens = await self._fits(made, limit)
            if fits:
                facts["texts_cut"] = 1
                return made, tokens
            remove += tokens - limit + 1
        raise _too_long(self._counted, limit, " even where it is cut")

    async def _fits(self, body: dict[str, Any], limit: int) -> tuple[bool, int]:
        counted = await self._counter.prompt(self._engine, EngineCall(self._call.kind, self._call.model, body))
        return counted.tokens <= limit, counted.tokens

    # -- compressing

    async def _compressed(self, facts: dict[str, Any]) -> tuple[dict[str, Any], int] | None:
        """The body with a summary in place of its middle; None where none came in time, or it is too long."""
        if self._call.kind == "completion":
            facts["why"] = "a plain prompt has no message that a summary could stand in"
            return None
        settings, body = self._settings, self._call.body
        aim = min(settings.compress_to_tokens or self._limit * 3 // 4, self._limit)
        summary_tokens = max(32, aim // 4)
        here = secrets.token_hex(12)  # stands where something is cut: the caller's own text may hold the marker
        try:
            async with asyncio.timeout(min(settings.compress_s, self._ask.deadline.left_s())) as scope:
                line = line_of(body["messages"])
                await line.count(self._count, self._counted.tokens)
                made = await self._cut_line(line, "middle", self._counted.tokens - aim + summary_tokens, here)
                said = await self._summariser_says("\n\n".join(made.gone), summary_tokens, facts)
                for _ in range(_ROUNDS):
                    messages = put_in(made, f"[Summary of what was left out here: {said}]", here, settings.marker)
                    fits, tokens = await self._fits({**body, "messages": messages}, self._limit)
                    if fits:
                        facts |= {"messages_dropped": made.dropped, "texts_cut": made.texts_cut}
                        return {**body, "messages": messages}, tokens
                    said = said[: await head(said, (await self._count([said]))[0] - (tokens - self._limit) - 1, self._count)]
        except TimeoutError:
            if not scope.expired():
                raise
            facts["why"] = f"no summary within {settings.compress_s:g} s"
        except ContextTooLong:
            raise
        except TidegateError as error:
            facts["why"] = error.public_code
        return None

    async def _summariser_says(self, text: str, tokens: int, facts: dict[str, Any]) -> str:
        summary = await self._summariser.of(text, tokens, self._ask)
        self._ask.spend_aside(Usage(summary.prompt_tokens, summary.completion_tokens))
        facts |= {"summary_model": summary.model, "summary_prompt_tokens": summary.prompt_tokens, "summary_tokens": summary.completion_tokens}
        return summary.text


def _too_long(counted: Counted, limit: int, why: str = "") -> ContextTooLong:
    return ContextTooLong(
        f"The prompt has {counted.tokens} tokens{_ABOUT[counted.how]}, more than {limit}{why}.",
        hint="Send less; [length] says what may be cut.", param="messages",
    )  # fmt: skip


_ABOUT = {"engine": "", "vocabulary": " by the vocabulary of its file", "estimate": " by an estimate"}


def _most_tokens(call: EngineCall) -> int:
    """More tokens than the prompt can have: every token is at least a byte of it."""
    if call.raw is not None:
        return len(call.raw) + _BYTES_AROUND * call.raw.count(b'"role"') + _BYTES_AROUND
    return _bytes_of(call.body.get("messages") or call.body.get("prompt")) + _bytes_of(call.body.get("tools"))


def _bytes_of(value: Any) -> int:
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "replace"))
    if isinstance(value, dict):
        return _BYTES_AROUND + sum(_bytes_of(one) + len(str(name)) for name, one in value.items())
    if isinstance(value, list):
        return 4 + sum(8 if isinstance(one, int) else _bytes_of(one) for one in value)
    return 8


def build(capability: Capability, parts: Parts) -> Stage:
    """Raises SettingsError where [length] says nothing."""
    if capability.manifest.length.policy == "off":
        raise SettingsError(
            f"The capability {capability.path} has the stage `fit`, but its [length] has no policy.",
            hint="Set length.policy to refuse, head, tail, middle or compress.",
        )
    return fit(parts, capability.manifest.length)


def fit(parts: Parts, settings: LengthSettings) -> FitStage:
    """Raises SettingsError where nobody counts."""
    if parts.counter is None:
        raise SettingsError("Nobody counts tokens here, so no prompt can be fitted.", hint="Set length.policy to off.")
    return FitStage(parts.engines, parts.counter, settings, parts.gate)

