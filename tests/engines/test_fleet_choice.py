"""Which instance a request is given: the rules, one by one. tests/engines/test_fleet_property.py has all of them at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError
from tests.engines.clock import Clock, S

from tidegate.core.ask import Ask, Caller, Deadline, EngineCall
from tidegate.core.chunk import Usage
from tidegate.core.errors import (
    ContextTooLong,
    EngineCut,
    EngineDown,
    EngineError,
    EngineNotAdmitted,
    EngineRefused,
    EngineStalled,
    NotFound,
    TidegateError,
)
from tidegate.core.flight import Flight
from tidegate.engines import routing as routing_module
from tidegate.engines.fleet import Fleet
from tidegate.engines.load import Load
from tidegate.engines.member import Member, Run
from tidegate.engines.settings import EngineSettings, FleetSettings


def fleet_of(members: dict[str, dict[str, Any]], **fleet: Any) -> Fleet:
    sections = {
        name: EngineSettings.model_validate({"url": "http://127.0.0.1:1", "models": ["m"], "conformance": "off", **fields})
        for name, fields in members.items()
    }
    return Fleet(sections, FleetSettings.model_validate({"breaker_min_calls": 2, "breaker_share": 0.5, **fleet}))


def ask_for(text: str = "", *, tokens: int = 8, capability: str = "", tenant: str = "t", system: str = "", max_tokens: int = 1) -> Ask:
    """A request of about so many tokens."""
    ask = Ask(Flight("/test"), Caller("k", tenant), Deadline(60))
    ask.capability = capability
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text + "x" * max(0, 4 * tokens - len(text) - len(system))})
    ask.call = EngineCall("chat", "m", {"messages": messages, "max_tokens": max_tokens})
    return ask


def run_on(fleet: Fleet, ask: Ask) -> tuple[str, Run]:
    member, _ = fleet.find("m", ask)
    assert ask.call is not None
    return member.name, Run(member, ask.call)


def state(member: Member) -> str:
    return str(member.breaker.state)


def fail(member: Member, error: BaseException, times: int = 1, ask: Ask | None = None) -> None:
    call = (ask or ask_for()).call
    assert call is not None
    for _ in range(times):
        Run(member, call).end(error)


# -- load


def test_least_tokens_in_flight_not_requests(clock: Clock) -> None:
    """One request of 3,000 tokens outweighs ten small ones."""
    fleet = fleet_of({"a": {}, "b": {}})
    name, _ = run_on(fleet, ask_for("big", tokens=3000))
    assert name == "a"
    assert [run_on(fleet, ask_for(f"small {n}"))[0] for n in range(10)] == ["b"] * 10


def test_equals_take_turns(clock: Clock) -> None:
    """Idle instances are asked in turn, so that several workers do not all begin with the first."""
    fleet = fleet_of({"a": {}, "b": {}, "c": {}})
    names = []
    for number in range(6):
        clock.pass_s(0.001)
        name, run = run_on(fleet, ask_for(f"{number}"))
        names.append(name)
        run.end(None)
    assert names == ["a", "b", "c", "a", "b", "c"]


def test_weight_is_a_share(clock: Clock) -> None:
    """One of weight 3 carries three times as much."""
    fleet = fleet_of({"a": {}, "b": {"weight": 3}})
    names = [run_on(fleet, ask_for(f"{number}", tokens=100))[0] for number in range(40)]
    assert names.count("b") == 30


def test_an_engine_that_is_alone_is_asked_whatever_its_state(clock: Clock) -> None:
    """Its breaker may say what it likes: a slow engine is no dead service. Only its own Retry-After keeps requests away."""
    fleet = fleet_of({"a": {}})
    member = fleet.members["a"]
    fail(member, EngineStalled("silent"), 50)
    assert state(member) == "open"
    assert fleet.find("m", ask_for())[0] is member
    fail(member, EngineRefused("busy", engine_status=429, retry_after_s=7))
    with pytest.raises(EngineRefused):
        fleet.find("m", ask_for())


def test_slots_and_tokens_bound_what_an_instance_is_given(clock: Clock) -> None:
    """Full instances are passed over; where all are, slots give way to whom the gate let pass, memory does not."""
    fleet = fleet_of({"a": {"slots": 1}, "b": {"slots": 2}})
    assert sorted(run_on(fleet, ask_for(f"{n}"))[0] for n in range(3)) == ["a", "b", "b"]
    assert run_on(fleet, ask_for("more"))[0] == "a", "the least busy one"
    fleet = fleet_of({"a": {"max_tokens_in_flight": 1000}, "b": {"max_tokens_in_flight": 3000}})
    assert [run_on(fleet, ask_for(f"{n}", tokens=900))[0] for n in range(4)] == ["a", "b", "b", "b"]
    with pytest.raises(EngineRefused) as caught:
        fleet.find("m", ask_for("one more", tokens=900))
    assert (caught.value.http_status, caught.value.public_code, caught.value.retry_after_s) == (429, "engine_full", 1.0)
    fleet = fleet_of({"a": {"max_tokens_in_flight": 1000}})
    name, run = run_on(fleet, ask_for(tokens=5000))
    assert name == "a", "an idle one takes whatever comes"
    with pytest.raises(EngineRefused):
        fleet.find("m", ask_for())
    run.end(None)
    assert fleet.find("m", ask_for())[0].tokens == 0


def test_answers_expected_are_those_seen_lately(clock: Clock) -> None:
    """A caller's bound above what answers take does not count as if it were used."""
    fleet = fleet_of({"a": {}, "b": {}})
    member = fleet.members["a"]
    call = ask_for(max_tokens=100_000).call
    assert call is not None
    before = Run(member, call)
    for _ in range(200):
        Run(member, call).end(None, Usage(8, 40))
    after = Run(member, call)
    assert (before.tokens, after.tokens) == (8 + 1 + 256, 8 + 1 + 40)
    before.end(None)
    after.end(None)
    assert member.tokens == 0


# -- roles


def test_long_and_short_requests_have_their_instances(clock: Clock) -> None:
    """Each goes to those sized for it and those for any; where these are gone, to the others."""
    fleet = fleet_of({"s": {"role": "short"}, "l": {"role": "long"}}, long_tokens=1000)
    assert [run_on(fleet, ask_for(f"{n}", tokens=50))[0] for n in range(5)] == ["s"] * 5
    assert [run_on(fleet, ask_for(f"{n}", tokens=2000))[0] for n in range(3)] == ["l"] * 3
    fleet.drain("s", True)
    assert run_on(fleet, ask_for("now"))[0] == "l"
    fleet.drain("s", False)
    fleet.drain("l", True)
    assert run_on(fleet, ask_for("long", tokens=2000))[0] == "s"


def test_a_fallback_helps_only_where_nobody_else_can(clock: Clock) -> None:
    """However busy the others are; but before an instance whose breaker is open."""
    fleet = fleet_of({"slow": {"role": "fallback"}, "a": {}})
    assert [run_on(fleet, ask_for(f"{n}", tokens=2000))[0] for n in range(5)] == ["a"] * 5
    fail(fleet.members["a"], EngineCut("cut"), 5)
    assert run_on(fleet, ask_for("now"))[0] == "slow"
    fleet.drain("slow", True)
    assert run_on(fleet, ask_for("then"))[0] == "a", "an open breaker is no wall"


def test_high_value_is_kept_for_its_own(clock: Clock) -> None:
    """Others never get there, not even where nobody else is left; its own get there first, and elsewhere where it is away."""
    fleet = fleet_of({"a": {}, "vip": {"role": "high_value", "high_value_for": ["contract/review", "tenant:acme"]}})
    assert run_on(fleet, ask_for("1", capability="contract/review"))[0] == "vip"
    assert run_on(fleet, ask_for("2", tenant="acme"))[0] == "vip"
    assert run_on(fleet, ask_for("3", capability="contract/other"))[0] == "a"
    assert fleet.find("m")[0].name == "a"
    fail(fleet.members["vip"], EngineCut("cut"), 5)
    assert run_on(fleet, ask_for("4", tenant="acme"))[0] == "a"
    fleet.drain("a", True)
    assert run_on(fleet, ask_for("5", tenant="acme"))[0] == "vip"
    with pytest.raises(EngineDown, match="drained"):
        fleet.find("m", ask_for("6"))
    alone = fleet_of({"vip": {"role": "high_value", "high_value_for": ["tenant:acme"]}})
    with pytest.raises(EngineNotAdmitted, match="kept for others"):
        alone.find("m", ask_for())
    assert alone.find("m")[0].name == "vip", "who only looks whom there is sees it"


def test_a_tensor_parallel_engine_waits_for_load(clock: Clock) -> None:
    """It is used from so many requests on, and where nobody else is left."""
    fleet = fleet_of({"tp": {"from_requests": 2}, "a": {}})
    assert [run_on(fleet, ask_for(f"{n}", tokens=100))[0] for n in range(4)] == ["a", "a", "tp", "tp"]
    fleet = fleet_of({"tp": {"from_requests": 2}, "a": {}})
    fleet.drain("a", True)
    assert run_on(fleet, ask_for())[0] == "tp"


@pytest.mark.parametrize(
    "fields",
    [
        {"role": "big"}, {"role": "high_value"}, {"high_value_for": ["a/b"]}, {"weight": 0}, {"weight": -1}, {"weight": float("inf")},
        {"weight": float("nan")}, {"max_tokens_in_flight": -1}, {"context_tokens": -5}, {"from_requests": -1}, {"metrics_url": "ftp://x"},
    ],
)  # fmt: skip
def test_settings_that_are_refused(fields: dict[str, Any]) -> None:
    """Negative, zero, infinite and unknown ones, and a reserved instance that is for nobody."""
    with pytest.raises(ValidationError):
        fleet_of({"a": fields})


# -- affinity


def test_a_prefix_stays_with_its_instance(clock: Clock) -> None:
    """A conversation goes where it was, also while that instance is a little busier."""
    fleet = fleet_of({"a": {}, "b": {}, "c": {}}, affinity_tokens=1000)
    home, _ = run_on(fleet, ask_for("Tell me of Nepal.", system="You are kind."))
    other, _ = run_on(fleet, ask_for("Something else altogether.", tokens=2))
    assert home != other
    conversation = ask_for("Tell me of Nepal.", system="You are kind.")
    assert conversation.call is not None
    for turn in range(3):
        conversation.call.body["messages"] += [{"role": "assistant", "content": "..."}, {"role": "user", "content": f"and {turn}?"}]
        clock.pass_s(0.001)
        assert run_on(fleet, conversation)[0] == home


def test_a_home_that_is_too_busy_is_left(clock: Clock) -> None:
    """Above the bound the least busy one takes it, and is its home from then on."""
    fleet = fleet_of({"a": {}, "b": {}}, affinity_tokens=1000)
    names = [run_on(fleet, ask_for("same prefix " * 200, tokens=700))[0] for _ in range(8)]
    assert names[:2] == ["a", "a"]
    busy = {name: fleet.members[name].tokens for name in "ab"}
    assert abs(busy["a"] - busy["b"]) <= 1000 + 701
    assert "b" in names


def test_a_capability_stays_with_its_instance(clock: Clock) -> None:
    """Its prompts begin alike, whatever is asked."""
    fleet = fleet_of({"a": {}, "b": {}, "c": {}})
    names = set()
    for number in range(6):
        clock.pass_s(0.001)
        name, run = run_on(fleet, ask_for(f"question {number}", capability="support/answer"))
        run.end(None)
        names.add(name)
    assert len(names) == 1


def test_a_system_prompt_that_all_share_brings_new_conversations_to_it(clock: Clock) -> None:
    """Within the bound; each conversation then stays where it began."""
    fleet = fleet_of({"a": {}, "b": {}}, affinity_tokens=500)
    first, run = run_on(fleet, ask_for("one", system="You are a pirate. " * 10))
    run.end(None)
    clock.pass_s(0.001)
    assert run_on(fleet, ask_for("two", system="You are a pirate. " * 10))[0] == first


def test_an_instance_that_came_back_is_nobody_s_home(clock: Clock) -> None:
    """Its KV cache is empty: requests are dealt out anew."""
    fleet = fleet_of({"a": {}, "b": {}}, affinity_tokens=100_000)
    ask = ask_for("a prefix", tokens=100)
    assert run_on(fleet, ask)[0] == "a"
    fleet.drain("a", True)
    fleet.drain("a", False)
    assert run_on(fleet, ask)[0] == "b"


def test_homes_are_bounded_and_hold_no_text(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand prefixes leave a bounded number of numbers."""
    monkeypatch.setattr(routing_module, "MOST_HOMES", 10)
    fleet = fleet_of({"a": {}, "b": {}})
    for number in range(50):
        fleet.find("m", ask_for(f"{number} is secret", system=f"system {number}"))
    homes = fleet._routes["m"]._homes
    assert len(homes) == 10
    assert all(isinstance(key, int) for key in homes)


# -- away and back


def test_slow_start(clock: Clock) -> None:
    """Who comes back takes a tenth at first, then more and more, then all; so do its slots."""
    fleet = fleet_of({"a": {"slots": 20}, "b": {"slots": 20}}, slow_start_s=10)
    seen: list[tuple[str, int]] = []
    fleet.on_change = lambda model, slots, _: seen.append((model, slots))
    assert fleet.slots("m") == 40
    fleet.drain("a", True)
    fleet.drain("a", False)
    assert [slots for _, slots in seen] == [20, 22]
    names = [run_on(fleet, ask_for(f"{n}", tokens=100))[0] for n in range(11)]
    assert names.count("a") == 1
    clock.pass_s(5)
    assert fleet.slots("m") == 30
    clock.pass_s(5)
    assert fleet.slots("m") == 40
    names = [run_on(fleet, ask_for(f"again {n}", tokens=100))[0] for n in range(9)]
    assert names == ["a"] * 9


def test_slots_are_those_of_the_instances_that_can_be_asked(clock: Clock) -> None:
    """Held, drained and ill ones give none; a fallback counts where it is all there is; one without a bound makes all unbounded."""
    fleet = fleet_of({"a": {"slots": 4}, "b": {"slots": 2}, "cpu": {"slots": 1, "role": "fallback"}})
    seen: list[int] = []
    fleet.on_change = lambda _, slots, tenant: seen.append(slots)
    assert fleet.slots("m") == 6
    fail(fleet.members["a"], EngineRefused("busy", engine_status=429, retry_after_s=5))
    assert fleet.slots("m") == 2
    fail(fleet.members["b"], EngineCut("cut"), 5)
    assert fleet.slots("m") == 1
    fleet.drain("cpu", True)
    assert fleet.slots("m") == 2, "an open breaker is asked where nobody else is"
    clock.pass_s(5)
    assert fleet.slots("m") == 4
    assert seen == [2, 1, 2, 4]
    assert fleet.slots("unknown") == 0
    assert fleet_of({"a": {"slots": 4}, "b": {}}).slots("m") == 0


def test_drain_ends_new_requests_and_leaves_running_ones(clock: Clock) -> None:
    """By order or by setting; where all are drained the error says so."""
    fleet = fleet_of({"a": {}, "b": {"drain": True}})
    name, run = run_on(fleet, ask_for())
    assert name == "a"
    fleet.drain("a", True)
    assert fleet.members["a"].requests == 1
    with pytest.raises(EngineDown, match="'a', 'b' is being drained"):
        fleet.find("m", ask_for())
    assert fleet.figures()["a"]["fleet"]["drained"] is True
    run.end(None)
    assert fleet.members["a"].requests == 0
    with pytest.raises(NotFound, match="no engine 'c'"):
        fleet.drain("c", True)


def test_orders_hold_for_all_workers_and_the_next_start(tmp_path: Any) -> None:
    """One worker is told, the others read it; a file that cannot be read changes nothing."""
    orders = tmp_path / "run" / "drained.json"
    section = EngineSettings.model_validate({"url": "http://127.0.0.1:1", "models": ["m"]})
    sections = {"a": section, "b": section}
    one, two = Fleet(sections, orders=orders), Fleet(sections, orders=orders)
    one.drain("a", True)
    two._read_orders()
    assert [two.members[name].drained for name in "ab"] == [True, False]
    assert Fleet(sections, orders=orders).members["a"].drained
    orders.write_bytes(b"{not json")
    two._read_orders()
    assert two.members["a"].drained
    one.drain("a", False)
    two._read_orders()
    assert not two.members["a"].drained


@pytest.mark.parametrize(
    ("said_s", "held_s"), [(7.0, 7.0), (0.0, 0.0), (86_400.0 * 365, 60.0), (1e9, 60.0)], ids=["seconds", "now", "a year", "absurd"]
)
def test_retry_after_is_obeyed_and_bounded(clock: Clock, said_s: float, held_s: float) -> None:
    """Nobody asks before; other instances are asked meanwhile; the refusal says the time that is left."""
    fleet = fleet_of({"a": {}})
    both = fleet_of({"a": {}, "b": {}})
    for one in (fleet, both):
        fail(one.members["a"], EngineRefused("busy", engine_status=429, engine_code="rate_limited", retry_after_s=said_s))
    if held_s:
        assert [run_on(both, ask_for(f"{n}", tokens=1000))[0] for n in range(5)] == ["b"] * 5
        clock.pass_s(held_s - 1)
        with pytest.raises(EngineRefused) as caught:
            fleet.find("m", ask_for())
        assert (caught.value.http_status, caught.value.public_code, caught.value.retry_after_s) == (429, "rate_limited", 1.0)
        with pytest.raises(EngineRefused):
            fleet.instances("m", ask_for())
        clock.pass_s(1)
    assert fleet.find("m", ask_for())[0].name == "a"


def test_busy_without_a_time_comes_last_for_a_moment(clock: Clock) -> None:
    """A 429 or 503 that names no time, or one that nobody understands, is no illness: the others first, itself where it is alone."""
    fleet = fleet_of({"a": {}, "b": {}})
    for status in (429, 503):
        fail(fleet.members["a"], EngineRefused("busy", engine_status=status), 20)
    assert state(fleet.members["a"]) == "closed"
    assert [run_on(fleet, ask_for(f"{n}", tokens=1000))[0] for n in range(3)] == ["b"] * 3
    fleet.drain("b", True)
    assert run_on(fleet, ask_for("alone"))[0] == "a"
    fleet.drain("b", False)
    clock.pass_s(1)
    assert fleet._routes["m"].slots() == 0
    assert run_on(fleet, ask_for("later"))[0] == "a"


@pytest.mark.parametrize(
    "error",
    [
        EngineRefused("no", engine_status=400), EngineRefused("no", engine_status=404), EngineRefused("slow down", engine_status=429),
        EngineRefused("loading", engine_status=503), ContextTooLong("too long"), asyncio.CancelledError(), TidegateError("of the house"),
        ValueError("a term stopped it"),
    ],
    ids=str,
)  # fmt: skip
def test_what_never_counts(clock: Clock, error: BaseException) -> None:
    """4xx, 429, busy, what does not fit, clients that left, and faults of our own leave the breaker closed."""
    fleet = fleet_of({"a": {}, "b": {}})
    fail(fleet.members["a"], error, 100)
    assert (fleet.members["a"].breaker.state, fleet.members["a"].breaker.failures) == ("closed", 0)


@pytest.mark.parametrize(
    "error",
    [EngineDown("down"), EngineCut("cut"), EngineStalled("silent"), EngineError("no HTTP"), EngineRefused("broken", engine_status=500)],
    ids=str,
)
def test_what_counts(clock: Clock, error: BaseException) -> None:
    """An engine that is down, breaks off, goes silent, or answers nonsense; the others are asked until it has proved itself."""
    fleet = fleet_of({"a": {}, "b": {}}, breaker_open_s=5, breaker_probes=1)
    member = fleet.members["a"]
    fail(member, error, 5)
    assert state(member) == "open"
    assert {run_on(fleet, ask_for(f"{n}", tokens=1000))[0] for n in range(5)} == {"b"}
    assert fleet.instances("m", ask_for())[-1][0] is member
    clock.pass_s(5)
    member.suspect = False  # a look found it there
    fleet._changed(member)
    name, probe = run_on(fleet, ask_for("probe"))
    assert name == "a"
    assert {run_on(fleet, ask_for(f"beside {n}", tokens=1000))[0] for n in range(5)} == {"b"}, "one probe at a time"
    probe.end(None)
    assert state(member) == "closed"
    assert member.back_ns, "and it starts slowly"


def test_a_key_that_the_engine_refuses_is_no_illness(clock: Clock) -> None:
    """401 is a 4xx, though callers see a broken gateway."""
    refused = EngineError("refuses Tidegate's key (401)")
    refused.engine_status = 401
    fleet = fleet_of({"a": {}, "b": {}})
    fail(fleet.members["a"], refused, 20)
    assert state(fleet.members["a"]) == "closed"


def test_who_was_given_up_counts_as_silent(clock: Clock) -> None:
    """The call itself only was cancelled, which says nothing; its caller says why."""
    fleet = fleet_of({"a": {}, "b": {}})
    for _ in range(3):
        fail(fleet.members["a"], asyncio.CancelledError())
        fleet.blame(fleet.members["a"])
    assert state(fleet.members["a"]) == "open"
    assert fleet.figures()["a"]["fleet"]["last_failure"]["cause"] == "stalled"


def test_an_instance_that_cannot_be_reached_comes_last_until_somebody_looked(clock: Clock) -> None:
    """One refused connection is enough: the next request does not pay for it too. An answer proves the contrary."""
    fleet = fleet_of({"a": {}, "b": {}})
    member = fleet.members["a"]
    fail(member, EngineDown("refused"))
    assert (member.suspect, member.wake.is_set()) == (True, True)
    assert {run_on(fleet, ask_for(f"{n}", tokens=1000))[0] for n in range(5)} == {"b"}
    call = ask_for().call
    assert call is not None
    Run(member, call).end(None)
    assert run_on(fleet, ask_for("now"))[0] == "a"


def test_a_flapping_instance_is_asked_ever_more_rarely(clock: Clock) -> None:
    """It fails each probe: within half an hour it costs a few requests, and every request is answered by the other."""
    fleet = fleet_of({"flaps": {}, "good": {}}, breaker_open_s=5, breaker_max_open_s=60)
    member = fleet.members["flaps"]
    asked = 0
    for number in range(1800):
        clock.pass_s(1)
        name, run = run_on(fleet, ask_for(f"{number}"))
        if name == "flaps":
            asked += 1
            run.end(EngineCut("cut"))
            assert "good" in [one.name for one, _ in fleet.instances("m", ask_for())]
        else:
            run.end(None)
    assert member.breaker.until_ns - clock.now_ns <= 60 * S
    assert 2 <= asked <= 40


# -- what does not fit


def test_what_was_too_big_goes_elsewhere(clock: Clock) -> None:
    """The size that did not fit an instance's memory is remembered for a while, smaller ones still go there; where nobody else is, it is tried."""
    fleet = fleet_of({"a": {}, "b": {"role": "fallback"}}, long_tokens=100_000)
    big, small = ask_for("big", tokens=5000), ask_for("small", tokens=400)
    fail(fleet.members["a"], EngineRefused("CUDA error: out of memory", engine_status=500), ask=big)
    assert fleet.members["a"].breaker.failures == 0
    assert run_on(fleet, big)[0] == "b"
    assert run_on(fleet, small)[0] == "a"
    assert fleet.figures()["a"]["fleet"]["too_big_tokens"] == 5002
    fleet.drain("b", True)
    assert run_on(fleet, big)[0] == "a"
    fleet.drain("b", False)
    clock.pass_s(60)
    assert run_on(fleet, big)[0] == "a"


def test_an_instance_without_memory_for_anything_is_ill(clock: Clock) -> None:
    """Where small requests do not fit either, its breaker opens."""
    fleet = fleet_of({"a": {}, "b": {}})
    fail(fleet.members["a"], EngineRefused("CUDA error: out of memory", engine_status=500), 5)
    assert state(fleet.members["a"]) == "open"


def test_a_context_that_is_known_is_kept(clock: Clock) -> None:
    """A request longer than an instance's context goes to one with a larger; where there is none, the engine says so itself."""
    fleet = fleet_of({"a": {"context_tokens": 2048}, "b": {"context_tokens": 8192}})
    assert {run_on(fleet, ask_for(f"{n}", tokens=3000))[0] for n in range(3)} == {"b"}
    assert fleet.find("m", ask_for(tokens=20_000))[0].name == "a"


# -- metrics


def test_metrics_that_lie_shift_a_bounded_amount(clock: Clock) -> None:
    """One that claims a crowd gets less, not nothing; one that claims to be idle gets no more than its tokens in flight give it."""
    fleet = fleet_of({"liar": {}, "b": {}})
    liar = fleet.members["liar"]
    liar.watch._take(Load(99_000, 500), 0, 2.0)
    liar.look_at_load()
    assert liar.foreign == 64 * 512
    names = [run_on(fleet, ask_for(f"{n}", tokens=1000))[0] for n in range(80)]
    assert names.count("liar") >= 20
    liar.watch._take(Load(0, 0), liar.requests, 2.0)
    liar.look_at_load()
    assert liar.foreign == 0


def test_requests_of_others_count(clock: Clock) -> None:
    """Another gateway keeps an instance busy: ours go to the other."""
    fleet = fleet_of({"a": {}, "b": {}})
    fleet.members["a"].watch._take(Load(4, 0), 0, 2.0)
    fleet.members["a"].look_at_load()
    assert [run_on(fleet, ask_for(f"{n}", tokens=500))[0] for n in range(4)] == ["b"] * 4
