"""One answer, told in one or more runs of engines (legs): what was said stays, and the next leg goes on from exactly there.

A leg ends well, or breaks off, or is stopped: before a term that must not be said, by a trigger, or because somebody puts text in. Then the answer
so far is cut to what is to stand, and an engine goes on from it.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from tidegate.core.ask import Ask, Emit, EngineAnswer, EngineCall, Said
from tidegate.core.chunk import Chunk, End, Usage
from tidegate.core.errors import CannotContinue, EngineCut, EngineDown, EngineError, EngineStalled
from tidegate.core.ports import Engine, EngineStream
from tidegate.pipeline.bare import says_only
from tidegate.pipeline.control import Control
from tidegate.pipeline.hedge import Lost, Race, Second, first_of
from tidegate.pipeline.parts import Engines
from tidegate.pipeline.told import Told
from tidegate.pipeline.watch import Stop, Watch
from tidegate.pipeline.whole import parts_of

#: Seconds after which another engine is asked too, and who; None where nobody can be.
Hedge = tuple[float, Callable[[], Second | None]]

#: Triggers that may fire in one answer: a model that says the same one over and over must come to an end.
MOST_TRIGGERS = 8
#: Seconds between two tries to go on while every engine of the model refuses connections: the first, and the longest (each is twice the last).
WAIT_S, LONGEST_WAIT_S = 0.25, 2.0
#: Characters behind an insertion that are nothing said yet: a blank, a line's end.
BLANKS = 2


def _away(error: EngineError) -> bool:
    """Whether an engine that says this is expected back: it refuses connections, it is there and still loads (503), or it says when to come back."""
    return error.http_status == EngineDown.status or (error.http_status == 429 and error.retry_after_s is not None)


class _Stopped(Exception):
    """Raised by `take` to end a leg."""


class Legs:
    """Walks the legs of one answer. `usage` is good at any time, over all legs: the first one's prompt, and the tokens that stand."""

    def __init__(
        self, ask: Ask, engines: Engines, model: str | None, engine: Engine, call: EngineCall, emit: Emit | None, control: Control | None, *,
        max_resumes: int, resume_wait_s: float,
    ) -> None:
        """`model`: the public name, None for the default; `engine` and `call`: who is asked first, and what; `resume_wait_s`: seconds that an
        answer which broke off waits for an engine to come back.
        """
        self._ask = ask
        self._engines = engines
        self._model = model
        self._engine = engine
        self._call = call
        self._emit = emit
        self._max_resumes = max_resumes
        self._resume_wait_s = resume_wait_s
        self._control = control if control else None
        self._told = Told(None if self._control else ask.text)
        self._watch = Watch(self._control, self._told) if self._control else None
        self._take = self._take_watched if self._watch else self._take_plain
        self._stream: EngineStream | None = None
        self._budget: asyncio.Timeout | None = None
        self._leg = 0
        self._waits_first = True
        self._finished = self._usage_told = False  # the answer's end, its count
        self._took = False  # anything came of the running leg
        self._asides = False  # reasoning or a tool call was said: nobody can go on behind that
        self._stop: Stop | None = None
        self._rest: Awaitable[None] | None = None
        self._insertions: list[str] = []
        self._all_down = False  # the last try to go on met nobody that could be reached
        self._behind = -1  # where the last insertion ended
        self._forbidden = (-1, "")  # where the last step back went to, and what was forbidden there
        self._resumes = self._step_backs = self._fired = 0
        self._prompt, self._cached, self._prompt_exact = 0, 0, False  # as the first leg told it
        self._base, self._base_exact, self._by_ids = 0, True, False  # tokens that stood when the running leg began

    @property
    def usage(self) -> Usage:
        """Tokens so far, over all legs."""
        if self._stream is None:
            return Usage(self._prompt, self._told.tokens, self._cached, self._prompt_exact and self._told.exact)
        return self._sum(self._stream.usage) if self._leg else self._stream.usage

    @property
    def engine(self) -> Engine:
        """Who tells the running leg, or is asked to."""
        return self._engine

    @property
    def call(self) -> EngineCall:
        """What the engine is asked, by its own name for the model."""
        return self._call

    @property
    def begun(self) -> bool:
        """Whether anything of the answer came: then it can go on, but not begin anew elsewhere."""
        return self._took or self._leg > 0

    def turn_to(self, engine: Engine, call: EngineCall) -> None:
        """Ask this engine from the beginning. Only where nothing has `begun`."""
        self._engine, self._call, self._stream = engine, call, None

    async def run(self, budget: asyncio.Timeout | None = None, hedge: Hedge | None = None) -> None:
        """Tell the answer to its end. `budget`: the time for the first token, lifted when that is there. Raises as an engine and its streams do; then
        it may run once more where nothing has `begun`.
        """
        ask, flight = self._ask, self._ask.flight
        self._budget = budget
        ask.running = self
        clean = False
        try:
            if hedge is None:
                self._stream = await self._engine.start(self._call, flight)
                more = await self._leg_ends()
            else:
                more = await self._leg_ends(hedge)
            while more and await self._leg_ends():
                pass
            clean = True
        finally:
            if self._stream is not None and not clean:
                self._stream.abort()
            if self._leg or (self._stream is not None and not clean):
                flight.usage = self.usage

    async def judge(self, answer: EngineAnswer) -> EngineAnswer:
        """Look through a whole answer. Without a hit it is given back as it came; with one, the answer that came of it."""
        ask, watch, told = self._ask, self._watch, self._told
        assert watch is not None
        ask.running = self
        self._stream = _Whole(answer)
        out: list[Chunk] = []
        stop = None
        for chunk in parts_of(answer):
            if chunk.kind == "text":
                told.add(chunk.text, None)
            elif chunk.kind != "notice":
                self._asides = True
            stop = watch.take(chunk, out)
            if stop is not None:
                break
        if stop is None:
            ask.text.append(answer.text)
            if answer.raw is not None and not says_only(answer.raw, answer.text) and watch.holds_term_beside(answer.raw):
                answer.raw = None  # what is not the answer does not leave: it is made anew
            return answer
        self._stop = stop
        self._leave(out)
        # how many tokens of the whole stand before the cut is an estimate, in proportion to its letters
        told.spread(answer.usage.completion_tokens)
        self._close_leg()
        try:
            if await self._go_on():
                while await self._leg_ends():
                    pass
        finally:
            if self._stream is not None:
                self._stream.abort()
        return EngineAnswer("".join(ask.text), ask.flight.end, self.usage)

    def inject(self, text: str) -> None:
        """Put text into the answer at the next token, and have the model go on behind it. May be called while `run` runs, by whoever has the Ask
        (`ask.running`). The text counts as said by the model; it is not counted as tokens. Terms that must not be said end the answer there too.
        No-op once the answer's end was told.
        """
        self._insertions.append(text)

    # -- a leg

    async def _leg_ends(self, hedge: Hedge | None = None) -> bool:
        """Relay the running leg to its end, and begin the next. False: the answer is whole."""
        flight = self._ask.flight
        try:
            try:
                if hedge is None:
                    assert self._stream is not None
                    await self._stream.relay(self._take)
                else:
                    await self._race(*hedge)
            finally:  # also where it broke off or the client left: the time until then was the engine's
                flight.lap("stream" if flight.token_ns and not self._waits_first else "engine.first_token")
        except _Stopped:
            if self._stream is not None:
                self._stream.abort()
            self._close_leg()
            if self._rest is not None:
                rest, self._rest = self._rest, None
                await rest
            return await self._go_on()
        except (EngineCut, EngineDown, EngineStalled) as error:
            return await self._resume(error)
        return False

    async def _race(self, after_s: float, other: Callable[[], Second | None]) -> None:
        """The first leg, of whoever speaks first."""
        race = Race()
        tasks: list[asyncio.Task[Any] | None] = []

        async def runs(engine: Engine, call: EngineCall) -> None:
            task = asyncio.current_task()
            tasks.append(task)
            stream = await engine.start(call, self._ask.flight)

            def wins() -> None:
                if engine is not self._engine:
                    self._ask.flight.decide("hedge_won", engine=engine.name)
                self._engine, self._call, self._stream = engine, call, stream
                self._ask.flight.engine = engine.name
                for one in tasks:
                    if one is not None and one is not task:
                        one.cancel()  # wherever it is, also where its engine has not answered yet

            try:
                await stream.relay(race.runner(stream, self._take, wins))
                if race.won() and race.winner is not stream:
                    raise Lost
            finally:
                if race.winner is not stream:
                    stream.abort()

        def second() -> tuple[Coroutine[Any, Any, None], Callable[[], None]] | None:
            found = other()
            return (runs(found.engine, found.call), found.over) if found is not None else None

        await first_of(runs(self._engine, self._call), second, after_s, race.won)

    # Two of one kind, on purpose: every token of every stream passes one of them, and a question for each chunk is measured here.

    def _take_plain(self, batch: list[Chunk]) -> Awaitable[None] | None:
        flight, told = self._ask.flight, self._told
        self._took = True
        if self._insertions:
            batch = self._without_end(batch)
        for chunk in batch:
            kind = chunk.kind
            if chunk.text or kind == "tool_call":
                if self._waits_first:
                    self._first(chunk)
                flight.token(chunk.at_ns)
                if kind == "text":
                    told.add(chunk.text, chunk.token_ids)
                else:
                    self._asides = True
            elif chunk.token_ids:
                told.add("", chunk.token_ids)
            if chunk.usage is not None:
                self._count(chunk)
            if chunk.finish is not None:
                flight.end = chunk.finish
                self._finished = True
        rest = self._emit(batch) if self._emit is not None and batch else None
        if self._insertions and not self._finished:
            self._rest = rest
            raise _Stopped
        return rest

    def _take_watched(self, batch: list[Chunk]) -> Awaitable[None] | None:
        flight, told, watch = self._ask.flight, self._told, self._watch
        assert watch is not None
        out: list[Chunk] = []
        stop = None
        self._took = True
        if self._insertions:
            batch = self._without_end(batch)
        for chunk in batch:
            kind = chunk.kind
            if chunk.text or kind == "tool_call":
                if self._waits_first:
                    self._first(chunk)
                flight.token(chunk.at_ns)
                if kind == "text":
                    told.add(chunk.text, chunk.token_ids)
                else:
                    self._asides = True
            elif chunk.token_ids:
                told.add("", chunk.token_ids)
            if chunk.usage is not None:
                self._count(chunk)
            stop = watch.take(chunk, out)
            if stop is not None:
                break
            if chunk.finish is not None:
                flight.end = chunk.finish
                self._finished = True
        rest = self._leave(out)
        if stop is not None or (self._insertions and not self._finished):
            self._stop = stop
            self._rest = rest
            raise _Stopped
        return rest

    def _without_end(self, batch: list[Chunk]) -> list[Chunk]:
        """Text is to be put in behind this batch: that the engine is through holds only where the client was told so before."""
        if self._finished:
            return batch
        return [
            chunk if chunk.finish is None else Chunk(chunk.at_ns, "text", chunk.text, token_ids=chunk.token_ids)
            for chunk in batch
            if chunk.kind != "usage" and (chunk.finish is None or (chunk.kind == "text" and chunk.text))
        ]

    def _first(self, chunk: Chunk) -> None:
        self._waits_first = False
        ask = self._ask
        ask.flight.lap("engine.first_token", chunk.at_ns)
        if ask.on_first_token is not None:
            ask.on_first_token()
        if self._budget is not None:
            self._budget.reschedule(None)
            self._budget = None

    def _leave(self, out: list[Chunk]) -> Awaitable[None] | None:
        """What was looked at leaves."""
        if not out:
            return None
        if self._watch is not None:  # else what is told is the answer
            text = self._ask.text
            for chunk in out:
                if chunk.kind == "text" and chunk.text:
                    text.append(chunk.text)
        return self._emit(out) if self._emit is not None else None

    async def _let(self, out: list[Chunk]) -> None:
        rest = self._leave(out)
        if rest is not None:
            await rest

    # -- counting

    def _count(self, chunk: Chunk) -> None:
        usage = chunk.usage
        assert usage is not None
        if self._leg:  # the engine tells of its own leg only
            usage = chunk.usage = self._sum(usage)
            chunk.raw = None
        self._ask.flight.usage = usage
        self._usage_told = self._usage_told or chunk.kind == "usage"

    def _sum(self, usage: Usage) -> Usage:
        """Of the running leg's own count, the count over all."""
        if not self._prompt_exact and usage.exact and self._by_ids:  # its prompt was the first prompt and what was said
            self._prompt, self._prompt_exact = max(0, usage.prompt_tokens - self._base), True
        exact = self._prompt_exact and self._base_exact and usage.exact
        return Usage(self._prompt, self._base + usage.completion_tokens, self._cached, exact, usage.reasoning_tokens)

    def _close_leg(self) -> None:
        stream = self._stream
        assert stream is not None
        usage = stream.usage
        if not self._leg:
            self._prompt, self._cached, self._prompt_exact = usage.prompt_tokens, usage.cached_tokens, usage.exact
        else:
            self._sum(usage)
        self._leg += 1
        self._stream = None
        self._waits_first = True

    def _begin_leg(self, stream: EngineStream, said: Said) -> None:
        self._stream = stream
        self._base, self._base_exact, self._by_ids = said.tokens, self._told.exact, said.token_ids is not None

    # -- what comes after a leg

    async def _resume(self, error: EngineError) -> bool:
        told, flight = self._told, self._ask.flight
        if self._finished and self._stream is not None:  # it had said all but goodbye
            flight.decide("engine_done_missing", finish=flight.end)
            self._stream.abort()
            flight.usage = self.usage
            if not self._usage_told:
                await self._let([Chunk(time.perf_counter_ns(), "usage", usage=flight.usage)])
            return False
        if not told.chars or self._asides or self._resumes >= self._max_resumes or self._ask.deadline.passed() or self._asks_logprobs():
            raise error
        self._resumes += 1
        if self._stream is not None:
            self._stream.abort()
        self._close_leg()
        said = told.cut(told.chars)
        try:
            # a leg that broke off before its first token: what was forbidden there still is
            # One that went silent would be waited for once more.
            waited_s = await self._continue_waiting(
                said, self._forbidden[1] if self._forbidden[0] == told.chars else "", others_first=isinstance(error, EngineStalled)
            )
        except EngineError as second:
            flight.decide("resume_failed", cause=error.public_code, why=second.public_code)
            raise error from second
        flight.decide(
            "resumed", cause=error.public_code, engine=self._engine.name, tokens=said.tokens, by_ids=said.token_ids is not None,
            waited_s=round(waited_s, 3),
        )
        return True

    async def _continue_waiting(self, said: Said, forbid: str, *, others_first: bool) -> float:
        """Begin the next leg; while nobody can be reached, wait for an engine to come back. Gives the seconds waited; raises as `_continue` does."""
        deadline, flight = self._ask.deadline, self._ask.flight
        began_ns, pause_s = 0, WAIT_S
        while True:
            try:
                await self._continue(said, forbid, others_first=others_first)
                return (time.perf_counter_ns() - began_ns) / 1e9 if began_ns else 0.0
            except EngineError as error:
                now_ns = time.perf_counter_ns()
                began_ns = began_ns or now_ns
                left_s = min(began_ns + self._resume_wait_s * 1e9, deadline.at_ns) / 1e9 - now_ns / 1e9
                told_s = error.retry_after_s or 0.0
                if not self._all_down or left_s <= 0 or told_s > left_s:
                    raise
                pause_s = max(pause_s, told_s)
            try:
                await asyncio.sleep(min(pause_s, left_s))
            finally:  # also where the client left meanwhile
                flight.lap("engine.wait")
            pause_s = min(2 * pause_s, LONGEST_WAIT_S)  # from here on ours again, whatever an engine had asked for

    async def _go_on(self) -> bool:
        stop, self._stop = self._stop, None
        if stop is None:
            return await self._insert("".join(self._insertions))
        if stop.trigger is not None:
            return await self._run_trigger(stop)
        return await self._step_back(stop)

    async def _step_back(self, stop: Stop) -> bool:
        flight, control = self._ask.flight, self._control
        assert control is not None
        self._note_term(stop)
        said = self._cut(stop.chars)
        if stop.aside or self._asides or control.on_term == "stop" or self._step_backs >= control.max_step_backs:
            return await self._end("content_filter")
        self._step_backs += 1
        self._forbidden = (self._told.chars, stop.forbid)
        try:
            await self._continue(said, stop.forbid)
        except CannotContinue as error:
            flight.decide("step_back_impossible", why=error.public_code, engine=self._engine.name)
            return await self._end("content_filter")
        return True

    async def _run_trigger(self, stop: Stop) -> bool:
        trigger = stop.trigger
        assert trigger is not None
        assert self._control is not None
        flight = self._ask.flight
        self._fired += 1
        flight.decide("triggered", trigger=self._control.triggers.index(trigger), stage=trigger.name)
        self._cut(stop.chars)
        # A model that says the mark again right behind what was put in would get the same once more, and so on.
        if self._behind >= 0 and self._told.chars - self._behind <= BLANKS:
            flight.decide("trigger_repeated")
            return await self._end("stop")
        if self._fired > MOST_TRIGGERS:
            return await self._end("stop")
        given = await trigger.stage.give(self._ask)
        flight.lap(trigger.name)
        text = trigger.insert.replace("{given}", given)
        if not trigger.goes_on:
            return await self._say(text) and await self._end("stop")
        return await self._insert(text)

    async def _insert(self, text: str) -> bool:
        """Text of ours, and the model goes on behind it."""
        self._insertions.clear()
        if not await self._say(text):
            return False
        self._ask.flight.decide("inserted", chars=len(text))
        self._behind = self._told.chars
        await self._continue(self._told.cut(self._told.chars), "")
        return True

    async def _say(self, text: str) -> bool:
        """Put text into the answer. False where a term that must not be said came of it, and the answer has ended."""
        if not text:
            return True
        self._told.insert(text)
        chunk = Chunk(time.perf_counter_ns(), "text", text)
        out = [chunk]
        if self._watch is not None:
            out = []
            stop = self._watch.take(chunk, out, own=True)
            if stop is not None:
                await self._let(out)
                self._note_term(stop)
                self._cut(stop.chars)
                return await self._end("content_filter")
        await self._let(out)
        return True

    async def _end(self, end: End) -> bool:
        """The answer ends here, by us. Always False."""
        flight = self._ask.flight
        last = Chunk(time.perf_counter_ns(), "notice", finish=end)
        out: list[Chunk] = []
        if self._watch is None:
            out.append(last)
        else:
            while (stop := self._watch.take(last, out)) is not None:  # a term that was whole only because the text ends
                end = "content_filter"
                last = Chunk(last.at_ns, "notice", finish=end)
                self._note_term(stop)
                self._cut(stop.chars)
        flight.end = end
        out.append(Chunk(last.at_ns, "usage", usage=self.usage))
        await self._let(out)
        return False

    def _cut(self, chars: int) -> Said:
        said = self._told.cut(chars)
        if self._watch is not None:
            self._watch.resume()
        return said

    async def _continue(self, said: Said, forbid: str, *, others_first: bool = False) -> None:
        """Begin the next leg: on the same engine, whose KV cache has it, else on another that serves the model. Raises what the first one said."""
        flight = self._ask.flight
        first: EngineError | None = None
        self._all_down = False
        all_down = True
        try:
            listed = self._engines.instances(self._model, self._ask)
        except EngineError as error:
            self._all_down = _away(error)
            raise
        same = [one for one in listed if one[0] is self._engine]
        others = [one for one in listed if one[0] is not self._engine]
        for engine, own_name in [*others, *same] if others_first else [*same, *others]:
            call = self._call if own_name == self._call.model else EngineCall(self._call.kind, own_name, self._call.body)
            try:
                stream = await engine.continue_from(call, said, flight, forbid=forbid)
            except EngineError as error:
                flight.lap("engine.continue")
                all_down = all_down and (_away(error) or isinstance(error, CannotContinue))
                if first is None or isinstance(first, CannotContinue):
                    first = error
                continue
            self._engine, self._call = engine, call
            flight.engine = engine.name
            self._begin_leg(stream, said)
            return
        assert first is not None
        self._all_down = all_down and _away(first)  # one that cannot go on at all is nothing to wait for
        raise first

    def _asks_logprobs(self) -> bool:
        body = self._call.body
        return bool(body.get("logprobs") or body.get("top_logprobs")) or (body.get("n") or 1) != 1

    def _note_term(self, stop: Stop) -> None:
        """The number and digest of the term, never the term."""
        control = self._control
        assert control is not None
        assert control.terms is not None
        self._ask.flight.decide(
            "term_banned", term=stop.term, list=control.terms.sha256[:12], at=stop.chars, beside_the_answer=stop.aside,
            said_sha256=hashlib.sha256(stop.forbid.casefold().strip().encode("utf-8", "surrogatepass")).hexdigest()[:12] if stop.forbid else None,
        )


class _Whole:
    """A whole answer in the place of a stream."""

    def __init__(self, answer: EngineAnswer) -> None:
        self.usage = answer.usage

    async def relay(self, take: Callable[[list[Chunk]], Awaitable[None] | None]) -> None:
        raise AssertionError("a whole answer was taken already")

    def abort(self) -> None: ...
