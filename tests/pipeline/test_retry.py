"""New plans and hedges, by real fleets of scripted engines: who is asked after what failed, how often at most, and never twice what was told."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.waiting import until

from tidegate.admission.gate import Gate, Place
from tidegate.admission.settings import AdmissionSettings
from tidegate.bench.behaviour import Behaviour, Curve
from tidegate.bench.script import Request
from tidegate.bench.scripted import Scripted
from tidegate.core.ask import Ask, Caller, Deadline, EngineCall
from tidegate.core.chunk import Chunk
from tidegate.core.errors import ContextTooLong, EngineCut, EngineDown, EngineRefused, EngineStalled
from tidegate.core.flight import Flight
from tidegate.core.memory import Shared
from tidegate.engines.fleet import Fleet
from tidegate.engines.member import Run
from tidegate.engines.settings import EngineSettings, FleetSettings
from tidegate.pipeline.hedge import Lost, Race, first_of
from tidegate.pipeline.retry import WORDS, Budget, Retries
from tidegate.pipeline.settings import GenerationSettings
from tidegate.pipeline.stages.generate import GenerateStage


@dataclass(slots=True)
class Faulty(Behaviour):
    """Has this fault whatever the prompt says, at token `at`, and this time to the first token."""

    fault: str = "none"
    at: int = 0

    def apply(self, request: Request, body: dict[str, Any]) -> Request:
        if request.prompt_ids is None:  # not again where an answer goes on
            request.orders.fault, request.orders.at = self.fault, self.at
        return super(Faulty, self).apply(request, body)


class Servers:
    """Engines a, b, c ... that serve the model m, and the fleet of them."""

    def __init__(self) -> None:
        self.all: dict[str, Scripted] = {}
        self.fleet: Fleet

    def requests(self) -> dict[str, int]:
        return {name: server.requests for name, server in self.all.items()}


@asynccontextmanager
async def serving(*behaviours: Behaviour, engines: dict[str, dict[str, Any]] | None = None, **fleet: Any) -> AsyncIterator[Servers]:
    servers = Servers()
    async with AsyncExitStack() as stack:
        sections = {}
        for name, behaviour in zip("abcdefgh", behaviours, strict=False):
            server = servers.all[name] = Scripted(behaviour=behaviour)
            await server.listen("127.0.0.1", 0)
            stack.push_async_callback(server.close)
            fields = {"adapter": "scripted", "url": server.url, "models": {"m": "scripted"}, "conformance": "off", **(engines or {}).get(name, {})}
            sections[name] = EngineSettings.model_validate(fields)
        servers.fleet = Fleet(sections, FleetSettings.model_validate(fleet))
        stack.push_async_callback(servers.fleet.close)
        yield servers


def retries(**fields: Any) -> Retries:
    return Retries(GenerationSettings.model_validate(fields))


def new_ask(streamed: bool, prompt: str = "##n=4,w=word##", deadline_s: float = 30.0) -> Ask:
    said: list[str] = []

    def emit(batch: list[Chunk]) -> None:
        said.extend(chunk.text for chunk in batch if chunk.kind == "text")

    ask = Ask(Flight("/test"), Caller("key", "tenant"), Deadline(deadline_s), emit=emit if streamed else None)
    ask.call = EngineCall("chat", "m", {"messages": [{"role": "user", "content": prompt}]})
    return ask


def decisions(ask: Ask, what: str) -> list[dict[str, Any]]:
    return [facts for _, name, facts in ask.flight.decisions if name == what]


async def generate(servers: Servers, streamed: bool, *, ask: Ask | None = None, budget: Retries | None = None, **more: Any) -> Ask:
    ask = ask if ask is not None else new_ask(streamed)
    await GenerateStage(servers.fleet, retries=budget, resume_wait_s=0, **more)(ask)
    return ask


def idle(servers: Servers) -> bool:
    return all(server.active == 0 for server in servers.all.values()) and all(
        (member.requests, member.tokens) == (0, 0) for member in servers.fleet.members.values()
    )


both = pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])


# -- the budget


@settings(deadline=None)
@given(st.floats(0, 1), st.floats(0, 20), st.lists(st.booleans(), max_size=300))
def test_retries_are_a_share_of_the_requests(ratio: float, burst: float, events: list[bool]) -> None:
    """In any stretch of requests (True) and tries to retry, no more are let through than the burst and the share."""
    budget = Budget(ratio, burst)
    taken = [0]
    requests = [0]
    for is_request in events:
        if is_request:
            budget.request()
        took = not is_request and budget.take()
        taken.append(taken[-1] + took)
        requests.append(requests[-1] + is_request)
    for begin in range(0, len(taken), 17):
        for end in range(begin, len(taken), 13):
            assert taken[end] - taken[begin] <= burst + ratio * (requests[end] - requests[begin]) + 1e-6


def test_a_budget_fills_again() -> None:
    """At a fifth, five requests pay for one retry."""
    budget = Budget(0.2, 2)
    assert [budget.take() for _ in range(3)] == [True, True, False]
    for _ in range(5):
        assert not budget.take()
        budget.request()
    assert [budget.take() for _ in range(2)] == [True, False]


def test_workers_have_one_budget() -> None:
    """What one takes is missing for the others, and what the requests of all fill is there for each."""
    memory = Shared(WORDS, 3)
    one, other, third = (Budget(0.25, 3, memory) for _ in range(3))
    assert [budget.take() for budget in (one, other, one, third, other)] == [True, True, True, False, False]
    for _ in range(4):
        one.request()
    assert (other.has_one, other.take(), third.take()) == (True, True, False)
    for budget in (one, other, third):  # nobody's part is lost
        budget.request()
        budget.request()
    for budget in (one, other, third):
        budget.request()
        budget.request()
    assert [third.take() for _ in range(4)] == [True, True, True, False]


class Slow(Budget):
    """Lets others run between what it sees and what it does."""

    def _missing(self) -> int:
        seen = super()._missing()
        os.sched_yield()
        return seen


def test_workers_that_race_take_no_more_than_there_is() -> None:
    """Four processes, each with a thousand requests and twice as many tries: all of the share, and no more than the burst beside it."""
    memory, forks = Shared(WORDS, 4), multiprocessing.get_context("fork")
    taken = forks.Queue()

    def race() -> None:
        budget, took = Slow(0.5, 10, memory), 0
        for _ in range(1000):
            budget.request()
            took += budget.take() + budget.take()
        taken.put(took)

    processes = [forks.Process(target=race) for _ in range(4)]
    for process in processes:
        process.start()
    told = [taken.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(30)
    assert 2000 <= sum(told) <= 2010


@pytest.mark.parametrize(
    "fields",
    [
        {"max_retries": -1}, {"max_retries": 99}, {"retry_ratio": -0.1}, {"retry_ratio": 1.5}, {"retry_ratio": float("nan")}, {"retry_burst": -1},
        {"retry_burst": float("inf")}, {"try_share": 0}, {"try_share": 2}, {"hedge_after_s": -1}, {"hedge_after_s": float("inf")},
        {"hedge_ratio": 7},
    ],
)  # fmt: skip
def test_settings_that_are_refused(fields: dict[str, Any]) -> None:
    """Negative, infinite and absurd ones."""
    with pytest.raises(ValidationError):
        retries(**fields)


# -- new plans


@both
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("rate_limit", "queue"), ("overloaded", "queue"), ("server_error", "error"), ("oom", "memory"),
        ("die", "died"), ("cut_bytes", "died"), ("gzip", "error"),
        ("redirect", "error"),
    ],
)  # fmt: skip
async def test_what_failed_before_it_spoke_is_planned_anew(fault: str, cause: str, streamed: bool) -> None:
    """Another instance answers, and the flight says why; who failed is remembered with the cause."""
    async with serving(Faulty(fault=fault), Behaviour()) as servers:
        ask = await generate(servers, streamed)
        assert ("".join(ask.text), ask.flight.engine) == ("wordwordwordword", "b")
        planned = decisions(ask, "replanned")
        assert [(one["engine"], one["next"]) for one in planned] == [("a", "b")]
        assert planned[0]["cause"] == cause
        assert servers.fleet.figures()["a"]["fleet"]["last_failure"]["cause"] == planned[0]["cause"]
        assert servers.requests() == {"a": 1, "b": 1}
        await until(lambda: idle(servers))


@both
async def test_the_caller_s_own_mistake_is_not_sent_twice(streamed: bool) -> None:
    """A 400 is the answer, whoever is asked."""
    async with serving(Faulty(fault="image_llama"), Behaviour()) as servers:
        with pytest.raises(EngineRefused):
            await generate(servers, streamed)
        assert servers.requests() == {"a": 1, "b": 0}


@both
async def test_what_is_too_long_goes_to_a_longer_context_alone(streamed: bool) -> None:
    """Not to one that is no longer, where it would fail again."""
    same = {"a": {"context_tokens": 2048}, "b": {"context_tokens": 2048}, "c": {"context_tokens": 8192}}
    async with serving(Faulty(fault="context"), Behaviour(), Behaviour(), engines=same) as servers:
        ask = await generate(servers, streamed)
        assert ask.flight.engine == "c"
        assert servers.requests() == {"a": 1, "b": 0, "c": 1}
    del same["c"]
    async with serving(Faulty(fault="context"), Behaviour(), engines=same) as servers:
        with pytest.raises(ContextTooLong):
            await generate(servers, streamed)
        assert servers.requests() == {"a": 1, "b": 0}


@both
async def test_a_request_that_kills_does_not_kill_the_whole_fleet(streamed: bool) -> None:
    """Two new plans at most, however many instances there are."""
    async with serving(*[Faulty(fault="die") for _ in range(5)]) as servers:
        with pytest.raises(EngineDown):
            await generate(servers, streamed)
        assert sorted(servers.requests().values()) == [0, 0, 1, 1, 1]
    async with serving(*[Faulty(fault="die") for _ in range(3)]) as servers:
        with pytest.raises(EngineDown):
            await generate(servers, streamed, budget=retries(max_retries=0))
        assert servers.requests() == {"a": 1, "b": 0, "c": 0}


@both
async def test_instances_that_are_down_are_passed_over_at_no_cost(streamed: bool) -> None:
    """Nothing was sent to them: five are passed over though no retry is allowed, and the next request begins with the one that is there."""
    async with serving(*[Behaviour() for _ in range(6)]) as servers:
        for name in "abcde":
            await servers.all[name].close()
        budget = retries(max_retries=0, retry_burst=0, retry_ratio=0)
        ask = await generate(servers, streamed, budget=budget)
        assert ask.flight.engine == "f"
        assert [one["cause"] for one in decisions(ask, "replanned")] == ["down"] * 5
        ask = await generate(servers, streamed, budget=budget)
        assert (ask.flight.engine, decisions(ask, "replanned")) == ("f", [])


@both
async def test_an_instance_that_flaps_costs_nobody_an_answer(streamed: bool) -> None:
    """It goes and comes back on its port, again and again, while requests run: each of them is answered, once."""
    async with serving(Behaviour(), Behaviour()) as servers:
        flapping = servers.all["b"]
        host, port = flapping.host, flapping.port
        stage = GenerateStage(servers.fleet)
        for number in range(40):
            if number % 5 == 0:
                await flapping.close()
            elif number % 5 == 2:
                flapping = Scripted()
                await flapping.listen(host, port)
                servers.fleet.members["b"].suspect = False  # a look found it there
                servers.fleet.members["b"].changed()
            ask = new_ask(streamed, f"{number} ##n=4,w=word##")
            await stage(ask)
            assert "".join(ask.text) == "wordwordwordword"
        await flapping.close()


async def test_no_storm() -> None:
    """Where every instance fails, 200 requests make 200 calls, a fifth more, and the burst: not 600."""
    async with serving(*[Faulty(fault="server_error") for _ in range(3)]) as servers:
        budget = retries(retry_ratio=0.2, retry_burst=10)
        stage = GenerateStage(servers.fleet, retries=budget)
        refused = 0
        for number in range(200):
            ask = new_ask(number % 2 == 0)
            with pytest.raises(EngineRefused):
                await stage(ask)
            refused += len(decisions(ask, "retry_refused"))
        calls = sum(servers.requests().values())
        assert 200 + 40 <= calls <= 200 + 40 + 10
        assert refused >= 150


@both
async def test_nobody_asks_before_an_engine_s_retry_after(streamed: bool) -> None:
    """It said 7 seconds: 50 requests go elsewhere; where there is no other they are refused with the time that is left, and it hears of none."""
    async with serving(Faulty(fault="rate_limit"), Behaviour()) as servers:
        for _ in range(50):
            ask = await generate(servers, streamed)
            assert ask.flight.engine == "b"
        assert servers.requests() == {"a": 1, "b": 50}
    async with serving(Faulty(fault="rate_limit")) as servers:
        for number in range(20):
            with pytest.raises(EngineRefused) as caught:
                await generate(servers, streamed)
            assert caught.value.http_status == 429
            assert caught.value.retry_after_s is not None
            assert 0 < caught.value.retry_after_s <= 7
            assert number == 0 or caught.value.retry_after_s < 7
        assert servers.requests() == {"a": 1}


async def test_an_error_in_the_stream_s_beginning_is_planned_anew_and_obeyed() -> None:
    """A stream that begins with "busy, come back in 7 s" said nothing yet."""
    async with serving(Faulty(fault="busy_event"), Behaviour()) as servers:
        stage = GenerateStage(servers.fleet, first_token_s=10, holds=True)
        ask = new_ask(True)
        try:
            await stage(ask)
        except EngineRefused:  # its first event told a role, so the answer had begun
            assert decisions(ask, "replanned") == []
        else:
            assert ask.flight.engine == "b"
        assert servers.fleet.members["a"].held_until_ns > 0


# -- shares of one deadline


async def test_a_try_that_says_nothing_is_given_up_in_time_for_another() -> None:
    """An engine hangs: a part of the first token's time is its share, then another answers within the rest; the hanging call is cancelled and
    blamed.
    """
    async with serving(Faulty(fault="hang"), Behaviour()) as servers:
        ask = await generate(servers, True, first_token_s=10.0, budget=retries(try_share=0.03))
        assert ask.flight.engine == "b"
        assert decisions(ask, "replanned") == [{"cause": "stalled", "engine": "a", "next": "b"}]
        assert servers.fleet.members["a"].breaker.failures == 1
        await until(lambda: idle(servers))


async def test_one_that_is_alone_has_all_of_the_time() -> None:
    """A slow engine that nobody can stand in for is not given up before the budget is over; and its breaker keeps nobody away from it."""
    async with serving(Behaviour(first=Curve(700.0)), breaker_min_calls=1) as servers:
        ask = await generate(servers, True, first_token_s=30.0, budget=retries(try_share=0.01))
        assert "".join(ask.text) == "wordwordwordword"
        for _ in range(3):
            with pytest.raises(EngineStalled):
                await generate(servers, True, first_token_s=0.05)
        assert str(servers.fleet.members["a"].breaker.state) == "open"
        ask = await generate(servers, True, first_token_s=30.0)
        assert ask.flight.engine == "a"


async def test_all_that_hang_together_take_no_longer_than_the_budget() -> None:
    """Shares of one time: three hanging engines are not three times the wait."""
    async with serving(*[Faulty(fault="hang") for _ in range(3)]) as servers:
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(EngineStalled):
            await generate(servers, True, first_token_s=0.6)
        assert asyncio.get_running_loop().time() - began_s >= 0.55
        assert sum(servers.requests().values()) == 3
        await until(lambda: idle(servers))


@both
async def test_a_deadline_in_the_past_ends_the_planning(streamed: bool) -> None:
    """Nobody waits for the answer any more."""
    async with serving(Faulty(fault="server_error"), Behaviour()) as servers:
        with pytest.raises(EngineRefused):
            await generate(servers, streamed, ask=new_ask(streamed, deadline_s=-1.0))
        assert servers.requests() == {"a": 1, "b": 0}


# -- what was told


async def test_what_was_told_is_gone_on_with_and_not_begun_anew() -> None:
    """A stream that broke off in its middle is resumed: one answer, no word twice, and no retry is booked."""
    async with serving(Faulty(fault="cut", at=2), Faulty()) as servers:
        ask = await generate(servers, True, ask=new_ask(True, "##n=6##"))
        whole = await generate(servers, True, ask=new_ask(True, "##n=6##"))
        assert "".join(ask.text) == "".join(whole.text)
        assert decisions(ask, "replanned") == []
        assert len(decisions(ask, "resumed")) == 1


async def test_what_was_told_and_cannot_go_on_is_an_error() -> None:
    """Two words were told and nothing may be resumed: nobody is asked to begin anew behind them."""
    async with serving(Faulty(fault="cut", at=2), Behaviour()) as servers:
        ask = new_ask(True)
        with pytest.raises(EngineCut):
            await generate(servers, True, ask=ask, max_resumes=0)
        assert "".join(ask.text) == "wordword"
        assert servers.requests() == {"a": 1, "b": 0}
        assert decisions(ask, "replanned") == []


# -- hedges

HEDGED = {"hedge_after_s": 0.05, "hedge_ratio": 1.0}


@both
async def test_who_speaks_first_is_heard(streamed: bool) -> None:
    """The first is slow: the second answers, the first is let go, and the whole text comes once."""
    async with serving(Behaviour(first=Curve(20_000.0)), Behaviour()) as servers:
        ask = await generate(servers, streamed, budget=retries(**HEDGED))
        assert ("".join(ask.text), ask.flight.engine) == ("wordwordwordword", "b")
        assert decisions(ask, "hedged") == [{"engine": "a", "next": "b"}]
        assert decisions(ask, "hedge_won") == [{"engine": "b"}]
        await until(lambda: idle(servers))
        assert servers.all["a"].aborted == 1
        assert servers.fleet.members["a"].breaker.failures == 0, "to be slower once is no failure"


def test_only_who_spoke_first_is_heard() -> None:
    """A batch of the other one, that was on its way already, is dropped."""
    race = Race()
    heard: list[list[Any]] = []
    won: list[str] = []
    one = race.runner("one", heard.append, lambda: won.append("one"))
    two = race.runner("two", heard.append, lambda: won.append("two"))
    assert not race.won()
    two(["b"])
    with pytest.raises(Lost):
        one(["a"])
    two(["c"])
    assert (heard, won, race.won()) == ([["b"], ["c"]], ["two"], True)


@both
async def test_the_first_may_still_win(streamed: bool) -> None:
    """It speaks after the second was asked, and before it: the second is let go."""
    async with serving(Behaviour(first=Curve(800.0)), Behaviour(first=Curve(30_000.0))) as servers:
        ask = await generate(servers, streamed, budget=retries(**HEDGED))
        assert ("".join(ask.text), ask.flight.engine) == ("wordwordwordword", "a")
        assert len(decisions(ask, "hedged")) == 1
        await until(lambda: idle(servers))


@both
async def test_hedging_is_off_by_default_and_bounded(streamed: bool) -> None:
    """Nobody is asked twice where nobody said so; and no more than the share."""
    async with serving(Behaviour(first=Curve(150.0)), Behaviour(first=Curve(150.0))) as servers:
        await generate(servers, streamed)
        assert sum(servers.requests().values()) == 1
    async with serving(Behaviour(first=Curve(60.0)), Behaviour(first=Curve(60.0))) as servers:
        stage = GenerateStage(servers.fleet, retries=retries(hedge_after_s=0.001, hedge_ratio=0.25))
        for _ in range(8):
            await stage(new_ask(streamed))
        assert 8 + 1 <= sum(servers.requests().values()) <= 8 + 3


async def test_no_hedge_after_the_first_token() -> None:
    """An answer that has begun is nobody else's, however slowly it goes on."""
    async with serving(Behaviour(between=Curve(80.0)), Behaviour()) as servers:
        ask = await generate(servers, True, ask=new_ask(True, "##n=10##"), budget=retries(hedge_after_s=0.5, hedge_ratio=1.0))
        assert ask.flight.engine == "a"
        assert servers.requests() == {"a": 1, "b": 0}


@both
async def test_hedges_that_both_fail_are_one_failure(streamed: bool) -> None:
    """The first one's error counts, and a third is planned."""
    async with serving(*[Faulty(fault="server_error", first=Curve(200.0)) for _ in range(2)], Behaviour(first=Curve(100.0))) as servers:
        ask = await generate(servers, streamed, budget=retries(**HEDGED))
        assert ask.flight.engine == "c"
        await until(lambda: idle(servers))
    async with serving(Faulty(fault="server_error", first=Curve(200.0)), Behaviour(first=Curve(500.0))) as servers:
        ask = await generate(servers, streamed, budget=retries(**HEDGED))
        assert ask.flight.engine == "b"
        assert decisions(ask, "replanned") == [], "the second was on its way already"
        await until(lambda: idle(servers))


@both
async def test_a_client_that_leaves_frees_both(streamed: bool) -> None:
    """Both calls are cancelled."""
    async with serving(Behaviour(first=Curve(30_000.0)), Behaviour(first=Curve(30_000.0))) as servers:
        task = asyncio.get_running_loop().create_task(generate(servers, streamed, budget=retries(**HEDGED)))
        await until(lambda: sum(server.active for server in servers.all.values()) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: idle(servers))


@pytest.mark.parametrize("fault", ["early_head", "none"])
@pytest.mark.parametrize("wins", ["a", "b"])
async def test_who_is_let_go_takes_the_winner_nothing(wins: str, fault: str) -> None:
    """Whether an engine answers with its head at once or with its first token: the one that is let go is let go when the other speaks, and that one's
    answer goes on to its own end."""
    slow, quick = Faulty(fault=fault, first=Curve(20_000.0)), Faulty(fault=fault, first=Curve(300.0), between=Curve(30.0))
    async with serving(*([quick, slow] if wins == "a" else [slow, quick])) as servers:
        ask = new_ask(True, "##n=30,w=word##")
        loser = servers.all["b" if wins == "a" else "a"]
        emit, busy = ask.emit, []
        assert emit is not None

        def notes(batch: list[Chunk]) -> Awaitable[None] | None:
            busy.append(loser.active)
            return emit(batch)

        ask.emit = notes
        await generate(servers, True, ask=ask, budget=retries(**HEDGED))
        assert (ask.flight.engine, len(decisions(ask, "hedged"))) == (wins, 1)
        assert ("".join(ask.text), ask.flight.end, len(ask.flight.token_ns)) == ("word" * 30, "stop", 30)
        assert busy[-1] == 0
        await until(lambda: idle(servers))
        assert (loser.aborted, servers.all[wins].aborted) == (1, 0)


class Slots:
    """A gate with so many slots for the model, and a request's own place in it."""

    def __init__(self, slots: int) -> None:
        self.gate = Gate(AdmissionSettings())
        self.lane = self.gate.open(["m"], slots)

    def enter(self) -> Place:
        return self.gate.enter("m", Caller("k", "t"), prompt_tokens=8, answer_tokens=8)


@both
async def test_a_hedge_takes_a_slot(streamed: bool) -> None:
    """It counts as any request, until one of the two is over; then the one that runs has the request's own."""
    async with serving(Behaviour(first=Curve(20_000.0)), Behaviour(first=Curve(200.0))) as servers:
        slots = Slots(2)
        own, seen = slots.enter(), []
        stage = GenerateStage(servers.fleet, retries=retries(**HEDGED), gate=slots.gate)
        ask = new_ask(streamed)
        running = asyncio.create_task(stage(ask))
        await until(lambda: servers.requests()["b"] == 1)
        seen.append(slots.lane.running)
        await running
        seen.append(slots.lane.running)
        own.leave()
        assert (seen, slots.lane.running) == ([2, 1], 0)
        assert decisions(ask, "hedge_won") == [{"engine": "b"}]


@both
@pytest.mark.parametrize("why", ["all slots are taken", "somebody waits", "the other instance is full"])
async def test_without_a_free_slot_nobody_is_hedged(streamed: bool, why: str) -> None:
    """It takes nobody's turn, waits in no queue, and asks no instance for more than it has."""
    async with serving(Behaviour(first=Curve(300.0)), Behaviour(), engines={"b": {"slots": 1}}) as servers:
        slots = Slots(1 if why != "the other instance is full" else 4)
        places = [slots.enter() for _ in range(2 if why == "somebody waits" else 1)]
        if why == "the other instance is full":
            full = new_ask(True)
            assert full.call is not None
            run = Run(servers.fleet.members["b"], full.call)
        stage = GenerateStage(servers.fleet, retries=retries(**HEDGED), gate=slots.gate)
        ask = new_ask(streamed)
        await stage(ask)
        assert (ask.flight.engine, servers.requests()) == ("a", {"a": 1, "b": 0})
        assert decisions(ask, "not_hedged") == [{"engine": "a", "why": "no slot is free"}]
        assert slots.lane.running == 1
        if why == "the other instance is full":
            run.end(None)
        for place in places:
            place.leave()


async def test_a_hedged_answer_that_breaks_off_goes_on() -> None:
    """The winner breaks off in its middle: the answer is resumed as any other."""
    async with serving(Behaviour(first=Curve(20_000.0)), Faulty(fault="cut", at=2)) as servers:
        whole = await generate(servers, True, ask=new_ask(True, "##n=6##"), budget=retries(**HEDGED), max_resumes=4)
        assert len(decisions(whole, "resumed")) >= 1
        assert whole.flight.end == "stop"
        await until(lambda: idle(servers))


@settings(deadline=None)
@given(
    st.sampled_from(["result", "error", "cancelled"]), st.sampled_from(["result", "error", "none"]), st.booleans(), st.booleans()
)
def test_first_of(first: str, second: str, first_is_late: bool, second_is_quick: bool) -> None:
    """Of two, the one that ends well first; the first one's error where none does; nothing is left running."""

    async def scene() -> None:
        gate_one, gate_two = asyncio.Event(), asyncio.Event()
        running: set[str] = set()

        async def runs(name: str, how: str, gate: asyncio.Event) -> str:
            running.add(name)
            try:
                await gate.wait()
                if how == "error":
                    raise EngineCut(name)
                if how == "cancelled":
                    raise asyncio.CancelledError
                return name
            finally:
                running.discard(name)

        asked: list[str] = []
        overs: list[str] = []

        def opens() -> None:
            gate_one.set()
            gate_two.set()

        def other() -> Any:
            asked.append("two")
            (gate_two if second_is_quick else gate_one).set()
            loop.call_later(0.002, opens)
            return (runs("two", second, gate_two), lambda: overs.append("over")) if second != "none" else None

        loop = asyncio.get_running_loop()
        if not first_is_late:
            gate_one.set()
        outcome: str
        try:
            outcome = await first_of(runs("one", first, gate_one), other, 0.002)
        except (EngineCut, asyncio.CancelledError) as error:
            outcome = f"{error}"
        assert not running
        assert bool(asked) == first_is_late
        assert bool(overs) == (first_is_late and second != "none"), "it is told when one of two is over, and only then"
        if first == "result" and (not first_is_late or second != "result"):
            assert outcome == "one"
        elif first_is_late and second == "result" and first != "result":
            assert outcome == "two"
        elif first == "error":
            assert outcome == "one"

    asyncio.run(scene())
