"""One instance of the fleet: an engine that counts what is asked of it, and remembers how that went.

It is an `Engine` like the one that it stands before; whoever uses it notices nothing. What it remembers is what the choice rests on: tokens in
flight, its breaker, until when it asked to be left alone, what was too big for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Literal

from tidegate.core.ask import EngineCall, Said
from tidegate.core.chunk import Chunk, Usage
from tidegate.core.errors import EngineError, TidegateError
from tidegate.core.flight import Flight
from tidegate.core.ports import Engine, EngineAnswer, EngineStream
from tidegate.engines.breaker import Breaker
from tidegate.engines.cause import ILL, Cause, cause_of
from tidegate.engines.conformance import Report
from tidegate.engines.ledger import BUSY, HELD, TOKEN_BITS, TOKENS, Ledger
from tidegate.engines.load import Watch
from tidegate.engines.settings import EngineSettings, FleetSettings
from tidegate.engines.size import FIRST_ANSWER, NEWEST, answer_tokens, prompt_tokens

log = logging.getLogger(__name__)

#: A bound that is none.
UNBOUNDED = 1 << 62
#: Seconds for which a busy instance comes last that did not say when to come back.
BUSY_S = 1.0
#: Seconds for which is remembered how much did not fit into an instance's memory, and into its context.
MEMORY_S, LENGTH_S = 60.0, 600.0
#: A request below this many tokens fits anywhere: where it does not, the instance is ill.
SMALL = 256
#: An instance that comes back takes this share at once, and all after slow_start_s.
FIRST_SHARE = 0.1
#: Requests of others that count at most, and the tokens of one, until ours tell.
MOST_FOREIGN = 64.0

State = Literal["unknown", "passed", "failed", "off"]


class Member:
    """An instance. `up` is None before the first look; `suspect`: a request could not reach it, and nobody has looked since."""

    __slots__ = (
        "_changed", "_state", "_too_big", "_too_big_until_ns", "back_ns", "breaker", "checked_ns", "checked_unix_s", "counts", "engine",
        "foreign", "from_requests", "high_value_for", "kept", "last_cause", "last_failed_unix_s", "last_ns", "ledger", "longest",
        "mean_answer", "models", "most_tokens", "name", "ordered_out", "other_requests", "other_tokens", "other_used", "owner", "report",
        "requests", "section", "settings", "slots", "slots_now", "slowness", "state", "suspect", "tokens", "up", "used", "wake", "watch",
    )  # fmt: skip

    def __init__(
        self, engine: Engine, section: EngineSettings, settings: FleetSettings | None = None, changed: Callable[[Member], None] = lambda member: None,
        ledger: Ledger | None = None,
    ) -> None:
        """`changed` is told when the choice may have to change; `ledger`: what all workers know of it."""
        self.engine = engine
        self.name = engine.name
        self.models = engine.models
        self.section = section
        self.state: State = "off" if section.conformance == "off" else "unknown"
        self.report: Report | None = None
        self.up: bool | None = None
        self.checked_ns = 0
        self.checked_unix_s = 0.0
        self.settings = settings if settings is not None else FleetSettings.model_validate({})
        self.ledger = ledger if ledger is not None else Ledger()
        self.breaker = Breaker(self.settings, self.ledger)
        self._state = self.breaker.state  # at the last refresh
        self.watch = Watch(engine.name, section)
        self.wake = asyncio.Event()
        self.suspect = False
        self.ordered_out = False
        self._changed = changed
        #: Whether tokens are counted: only where somebody chooses by them.
        self.counts = section.max_tokens_in_flight > 0
        # what the choice reads
        self.requests = 0
        self.tokens = 0
        self.other_requests = self.other_tokens = 0  # of other workers, as of the last `see_others`
        self.foreign = 0.0
        self.last_ns = 0
        self.slots = section.slots or UNBOUNDED
        self.slots_now = self.slots
        self.most_tokens = section.max_tokens_in_flight or UNBOUNDED
        self.longest = section.context_tokens or UNBOUNDED  # tokens of a request that may fit
        self.slowness = 1.0 / section.weight
        self.from_requests = section.from_requests
        self.high_value_for = frozenset(section.high_value_for)
        self.owner = ""  # the tenant that owns it
        self.kept: dict[str, int] = {}  # slots that are kept for a tenant, whatever the others want
        self.used: dict[str, int] = {}  # and how many of them it uses
        self.other_used: dict[str, int] = {}  # and in other workers
        # what it remembers
        self.mean_answer = FIRST_ANSWER
        self.back_ns = 0  # while it takes less than its share: since when it is back
        self.last_cause: Cause = "none"
        self.last_failed_unix_s = 0.0
        self._too_big = UNBOUNDED  # tokens that did not fit
        self._too_big_until_ns = 0

    # -- an Engine

    async def start(self, call: EngineCall, flight: Flight) -> EngineStream:
        """See `core.ports.Engine.start`."""
        run = Run(self, call, flight.tenant)
        try:
            run.stream = await self.engine.start(call, flight)
        except BaseException as error:
            run.end(error)
            raise
        return run

    async def whole(self, call: EngineCall, flight: Flight) -> EngineAnswer:
        """See `core.ports.Engine.whole`."""
        run = Run(self, call, flight.tenant)
        try:
            answer = await self.engine.whole(call, flight)
        except BaseException as error:
            run.end(error)
            raise
        run.end(None, answer.usage)
        return answer

    async def continue_from(self, call: EngineCall, said: Said, flight: Flight, *, forbid: str = "") -> EngineStream:
        """See `core.ports.Engine.continue_from`."""
        run = Run(self, call, flight.tenant)
        try:
            run.stream = await self.engine.continue_from(call, said, flight, forbid=forbid)
        except BaseException as error:
            run.end(error)
            raise
        return run

    async def figures(self) -> dict[str, Any]:
        """See `core.ports.Engine.figures`."""
        return await self.engine.figures()

    async def count_tokens(self, text: str) -> int | None:
        """Tokens of a text by the engine's own tokenizer; None where it does not offer it."""
        count = getattr(self.engine, "count_tokens", None)
        return await count(text) if count is not None else None

    async def close(self) -> None:
        """Close the engine's connections."""
        await asyncio.gather(self.engine.close(), self.watch.close())

    # -- what the choice asks

    @property
    def admitted(self) -> bool:
        """Whether its checks let requests be sent to it."""
        return self.state != "failed" or self.section.conformance == "warn"

    @property
    def drained(self) -> bool:
        """Whether its operator wants no new requests sent to it."""
        return self.ordered_out or self.section.drain

    @property
    def load(self) -> float:
        """Tokens in flight, of ours and of others."""
        return self.tokens + self.other_tokens + self.foreign

    @property
    def full(self) -> bool:
        """Whether all its slots are taken, by whichever worker."""
        return self.requests + self.other_requests >= self.slots_now

    def has_room(self, tokens: int) -> bool:
        """Whether its memory holds so many tokens more. One that is idle takes whatever comes: else a big request would never run."""
        return self.tokens + self.other_tokens + tokens <= self.most_tokens or not (self.requests or self.other_requests)

    @property
    def held_until_ns(self) -> int:
        """Until when it asked not to be asked."""
        return self.ledger.words[self.ledger.at + HELD]

    @property
    def busy_until_ns(self) -> int:
        """Until when it comes last: it was busy and did not say for how long."""
        return self.ledger.words[self.ledger.at + BUSY]

    def see_others(self) -> None:
        """Take in what other workers have under way on it."""
        loads = self.ledger.loads
        others = sum(loads) - loads[self.ledger.worker]
        self.other_requests, self.other_tokens = others >> TOKEN_BITS, others & TOKENS
        if self.kept:
            for tenant, used in zip(self.kept, self.ledger.used, strict=False):
                self.other_used[tenant] = sum(used) - used[self.ledger.worker]

    def under_way(self) -> tuple[int, int]:
        """Requests and tokens of all workers."""
        self.see_others()
        return self.requests + self.other_requests, self.tokens + self.other_tokens

    def tell_others(self) -> None:
        """Let other workers see what this one has under way on it."""
        self.ledger.loads[self.ledger.worker] = self.requests << TOKEN_BITS | self.tokens
        if self.kept:
            for tenant, used in zip(self.kept, self.ledger.used, strict=False):
                used[self.ledger.worker] = self.used[tenant]

    def keep(self, kept: dict[str, int]) -> None:
        """Keep so many slots for each of these tenants: their requests have no others, and no other request has theirs."""
        self.kept = kept
        self.used, self.other_used = dict.fromkeys(kept, 0), dict.fromkeys(kept, 0)

    def has_slot(self, tenant: str) -> bool:
        """Whether a slot is free for a request of this tenant."""
        kept = self.kept
        if not kept:
            return not self.full
        if tenant in kept:
            return self.used[tenant] + self.other_used[tenant] < min(kept[tenant], self.slots_now)
        used = sum(self.used.values()) + sum(self.other_used.values())
        return self.requests + self.other_requests - used < self.slots_now - sum(kept.values())

    def serves(self, capability: str, tenant: str) -> bool:
        """Whether a request of theirs is one that it is kept for."""
        return capability in self.high_value_for or f"tenant:{tenant}" in self.high_value_for

    def refresh(self, now_ns: int) -> int:
        """Bring to the present what depends on time alone; gives when to do so again."""
        before, self._state = self._state, self.breaker.look(now_ns)
        if self._state == "closed" != before:  # it proved itself, here or in another worker: it takes its share again little by little
            self.back_ns = now_ns
        due_ns = self.breaker.until_ns if self._state == "open" else self.breaker.give_back(now_ns)
        for until_ns in (self.held_until_ns, self.busy_until_ns, self._too_big_until_ns):
            if until_ns > now_ns:
                due_ns = min(due_ns, until_ns)
        self.longest = self.section.context_tokens or UNBOUNDED
        if self._too_big_until_ns > now_ns:
            self.longest = min(self.longest, self._too_big - 1)
        share = 1.0
        if self.back_ns:
            slow_ns = self.settings.slow_start_s * 1e9
            share = max(FIRST_SHARE, min(1.0, (now_ns - self.back_ns) / slow_ns)) if slow_ns else 1.0
            if share < 1.0:
                due_ns = min(due_ns, now_ns + int(slow_ns / 20) + 1)
            else:
                self.back_ns = 0
        self.slowness = 1.0 / (self.section.weight * share)
        self.slots_now = self.slots if self.slots == UNBOUNDED else max(1, math.ceil(self.slots * share))
        return due_ns

    # -- what it is told

    def changed(self) -> None:
        """Something that the choice rests on changed."""
        self._changed(self)

    def came_back(self) -> None:
        """It was away, and takes its share again little by little."""
        self.back_ns = time.perf_counter_ns()
        self.changed()

    def note(self, cause: Cause, error: BaseException | None, tokens: int) -> None:
        """A call of `tokens` failed: keep what the next plan should know."""
        now_ns = time.perf_counter_ns()
        self.last_cause, self.last_failed_unix_s = cause, time.time_ns() / 1e9
        if cause == "queue" and isinstance(error, EngineError):
            wait_s = error.retry_after_s
            until_ns = now_ns + int(min(BUSY_S if wait_s is None else max(0.0, wait_s), self.settings.max_retry_after_s) * 1e9)
            ledger = self.ledger
            with suppress(OSError), ledger.memory:
                if wait_s is not None:
                    ledger.hold(until_ns, error.engine_status, error.public_code)
                elif until_ns > self.busy_until_ns:
                    ledger.words[ledger.at + BUSY] = until_ns
                    ledger.changed()
            self.changed()
        elif cause in ("memory", "length") and tokens >= SMALL:
            until_ns = now_ns + int((MEMORY_S if cause == "memory" else LENGTH_S) * 1e9)
            self._too_big = min(tokens, self._too_big) if now_ns < self._too_big_until_ns else tokens
            self._too_big_until_ns = max(until_ns, self._too_big_until_ns)
            self.changed()
        elif cause == "down" and not self.suspect:
            self.suspect = True
            self.wake.set()
            self.changed()

    def blame(self) -> None:
        """Its caller gave it up because it took too long. That says nothing of one that is loaded, but is a failure where it is not alone."""
        self.last_cause, self.last_failed_unix_s = "stalled", time.time_ns() / 1e9
        now_ns = time.perf_counter_ns()
        self.judge(self.breaker.begin(now_ns), False, now_ns)

    def judge(self, era: int, good: bool | None, now_ns: int) -> None:
        """The outcome of a call, for the breaker."""
        breaker = self.breaker
        before = breaker.state
        breaker.end(era, good, now_ns)
        if breaker.state != before:
            if breaker.state == "closed":
                log.info("engine %r proved itself: its circuit breaker is closed", self.name)
            else:
                log.warning("the circuit breaker of engine %r is open: it failed too often (last: %s)", self.name, self.last_cause)
            self.changed()

    def look_at_load(self) -> None:
        """Take the requests of others, as its metrics tell them, for tokens of ours."""
        mean = self.tokens / self.requests if self.requests else 2 * self.mean_answer
        self.foreign = min(MOST_FOREIGN, self.watch.requests) * mean

    # -- what is said of it

    @property
    def why(self) -> str:
        """The first check that it failed, and how; empty where it failed none."""
        failed = self.report.failed_musts if self.report is not None and self.state == "failed" else []
        return f"{failed[0].name}: {failed[0].evidence}" if failed else ""

    def figures_beside(self) -> dict[str, Any]:
        """What /health says of it beside the engine's own figures."""
        said: dict[str, Any] = {"admitted": self.admitted, "conformance": self.state}
        if self.report is not None:
            said["checked_unix_s"] = round(self.checked_unix_s, 3)
            failed = [one for one in self.report.findings if one.verdict == "fail"]
            if failed:
                said["checks_failed"] = {one.name: one.evidence for one in failed}
        now_ns = time.perf_counter_ns()
        requests, tokens = self.under_way()
        fleet: dict[str, Any] = {"requests": requests, "breaker": self.breaker.look(now_ns)}
        if self.counts:
            fleet["tokens_in_flight"] = tokens
        if self.section.role != "any":
            fleet["role"] = self.section.role
        if self.owner:
            fleet["owned"] = True
        if self.kept:
            fleet["slots_kept"] = sum(self.kept.values())
        if self.drained:
            fleet["drained"] = True
        if self.held_until_ns > now_ns:
            fleet["asked_not_before_s"] = round((self.held_until_ns - now_ns) / 1e9, 1)
        if self.back_ns:
            fleet["share"] = round(min(1.0, 1.0 / (self.slowness * self.section.weight)), 2)
        if self._too_big_until_ns > now_ns:
            fleet["too_big_tokens"] = self._too_big
        if self.last_cause != "none":
            fleet["last_failure"] = {"cause": self.last_cause, "unix_s": round(self.last_failed_unix_s, 3)}
        metrics = self.watch.figures()
        return said | {"fleet": fleet} | ({"metrics": metrics} if metrics else {})


class Run:
    """One call at work, and an `EngineStream` once it streams. It ends once, whatever happens."""

    __slots__ = ("_era", "_member", "_open", "_own", "stream", "tokens")

    stream: EngineStream

    def __init__(self, member: Member, call: EngineCall, tenant: str = "") -> None:
        self._member = member
        self._open = True
        self._own = tenant if tenant in member.kept else ""
        if self._own:
            member.used[tenant] += 1
        now_ns = time.perf_counter_ns()
        member.last_ns = now_ns
        member.requests += 1
        self.tokens = tokens = prompt_tokens(call) + answer_tokens(call.body, member.mean_answer) if member.counts else 0
        member.tokens += tokens
        if member.ledger.workers > 1:
            member.tell_others()
        self._era = member.breaker.begin(now_ns)

    @property
    def usage(self) -> Usage:
        """See `core.ports.EngineStream.usage`."""
        return self.stream.usage

    async def relay(self, take: Callable[[list[Chunk]], Awaitable[None] | None]) -> None:
        """See `core.ports.EngineStream.relay`."""
        try:
            await self.stream.relay(take)
        except BaseException as error:
            self.end(error)
            raise
        self.end(None, self.stream.usage if self._member.counts else None)

    def abort(self) -> None:
        """See `core.ports.EngineStream.abort`."""
        self.end(asyncio.CancelledError())
        self.stream.abort()

    def end(self, error: BaseException | None, usage: Usage | None = None) -> None:
        """The call is over: well, or by this error. A second end is none."""
        if not self._open:
            return
        self._open = False
        member = self._member
        member.requests -= 1
        member.tokens -= self.tokens
        if self._own:
            member.used[self._own] -= 1
        if member.ledger.workers > 1:
            member.tell_others()
        now_ns = time.perf_counter_ns()
        if error is None or (isinstance(error, Exception) and not isinstance(error, TidegateError)):
            # The second is of whoever took the answer: it was stopped at a term or a mark, which speaks for the engine.
            if usage is not None and usage.completion_tokens:
                member.mean_answer += NEWEST * (usage.completion_tokens - member.mean_answer)
            if member.suspect:
                member.suspect = False
                member.changed()
            member.judge(self._era, True, now_ns)
            return
        cause = cause_of(error)
        if cause != "none":
            member.note(cause, error, self.tokens)
        ill = cause in ILL or (cause == "memory" and 0 < self.tokens < SMALL)
        member.judge(self._era, False if ill else None, now_ns)
