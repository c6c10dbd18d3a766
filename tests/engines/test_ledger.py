"""What workers know of an instance together: one breaker, one Retry-After, one count of slots, whoever dies when."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.dying import Dying, in_child
from tests.engines.clock import Clock, S
from tests.engines.test_breaker import fleet_settings
from tests.engines.test_fleet_choice import ask_for, fail, run_on, state

from tidegate.core.errors import EngineCut, EngineRefused
from tidegate.core.isolation import Isolation
from tidegate.core.memory import Shared
from tidegate.engines.breaker import CLAIM_S, Breaker
from tidegate.engines.fleet import Fleet
from tidegate.engines.homes import PLACES
from tidegate.engines.ledger import Ledger, clear, words_for
from tidegate.engines.member import Run
from tidegate.engines.settings import EngineSettings, FleetSettings

_forks = multiprocessing.get_context("fork")


def joined(memory: Shared, worker: int) -> Shared:
    """The memory as this worker has it."""
    mine = copy.copy(memory)
    mine.join(worker)
    return mine


def fleets(members: dict[str, dict[str, Any]], workers: int = 2, **fleet: Any) -> list[Fleet]:
    """The fleet as each of the workers has it."""
    memory, homes = Shared(words_for(len(members), workers), workers), Shared(PLACES, workers)
    sections = {
        name: EngineSettings.model_validate({"url": "http://127.0.0.1:1", "models": ["m"], "conformance": "off", **fields})
        for name, fields in members.items()
    }
    settings = FleetSettings.model_validate({"breaker_min_calls": 4, "breaker_share": 0.5, "slow_start_s": 0, **fleet})
    return [Fleet(sections, settings, memory=joined(memory, worker), homes=homes) for worker in range(workers)]


# -- rules


def test_failures_of_all_workers_open_one_breaker(clock: Clock) -> None:
    """Four are enough, whoever had them, and the next request of any worker goes elsewhere."""
    one, other = fleets({"a": {}, "b": {}})
    fail(one.members["a"], EngineCut("x"), 2)
    assert state(other.members["a"]) == "closed"
    fail(other.members["a"], EngineCut("x"), 2)
    assert (state(one.members["a"]), state(other.members["a"])) == ("open", "open")
    assert [run_on(fleet, ask_for(f"{n}"))[0] for n in range(3) for fleet in (one, other)] == ["b"] * 6


def test_probes_are_few_among_all(clock: Clock) -> None:
    """Of an instance that may be tried again one request at a time is let through, by whichever worker; its good end is good for all."""
    one, other, third = fleets({"a": {}, "b": {}}, 3, breaker_probes=1)
    fail(one.members["a"], EngineCut("x"), 4)
    clock.pass_s(5)
    name, probe = run_on(other, ask_for("probe"))
    assert name == "a"
    assert [run_on(fleet, ask_for("others"))[0] for fleet in (one, third, other)] == ["b"] * 3
    probe.end(None)
    assert {state(fleet.members["a"]) for fleet in (one, other, third)} == {"closed"}
    assert run_on(third, ask_for("back", tokens=1))[0] == "a"


def test_a_probe_that_is_claimed_and_never_sent_comes_back(clock: Clock) -> None:
    """Its request was cancelled in between: after a second another may try."""
    one, other = fleets({"a": {}, "b": {}}, breaker_probes=1)
    fail(one.members["a"], EngineCut("x"), 4)
    clock.pass_s(5)
    assert one.find("m", ask_for("cancelled"))[0].name == "a"
    assert run_on(other, ask_for("probe"))[0] == "b"
    clock.pass_s(CLAIM_S + 0.1)
    one._refresh(one._routes.values())  # its look at what time brings
    assert run_on(other, ask_for("probe"))[0] == "a"


def test_a_killed_workers_probe_comes_back(clock: Clock) -> None:
    """Else nobody would ever try the instance again."""
    one, other = fleets({"a": {}, "b": {}}, breaker_probes=1)
    fail(one.members["a"], EngineCut("x"), 4)
    clock.pass_s(5)
    assert run_on(one, ask_for("probe"))[0] == "a"
    assert run_on(other, ask_for("probe"))[0] == "b"
    clear(other.members["a"].ledger.memory, 2, 0)
    assert run_on(other, ask_for("probe"))[0] == "a"


def test_a_retry_after_holds_for_all_workers(clock: Clock) -> None:
    """"Come back in 7 s" that one worker was told: none asks before, and each tells its callers the engine's status and code, and the time left."""
    one, other = fleets({"a": {}})
    busy = EngineRefused("busy", engine_status=429, engine_code="rate_limit_exceeded", retry_after_s=7.0)
    fail(one.members["a"], busy)
    clock.pass_s(2)
    for fleet in (one, other):
        with pytest.raises(EngineRefused) as refused:
            fleet.find("m", ask_for())
        assert (refused.value.http_status, refused.value.public_code, refused.value.retry_after_s) == (429, "rate_limit_exceeded", 5.0)
        assert fleet.slots("m") == 0
    clock.pass_s(5)
    assert run_on(other, ask_for())[0] == "a"


def test_one_that_is_busy_comes_last_in_all_workers(clock: Clock) -> None:
    """A 503 without a time, for a second."""
    one, other = fleets({"a": {}, "b": {}})
    fail(one.members["a"], EngineRefused("busy", engine_status=503))
    assert [run_on(other, ask_for(f"{n}"))[0] for n in range(3)] == ["b"] * 3
    clock.pass_s(1.1)
    assert run_on(other, ask_for("x"))[0] == "a"


def test_slots_of_an_instance_are_counted_over_all_workers(clock: Clock) -> None:
    """What one worker has under way takes slots in the other's choice, and a worker that dies gives them back."""
    one, other = fleets({"a": {"slots": 2}, "b": {"slots": 2}})
    runs = [run_on(one, ask_for(f"{n}", tokens=100)) for n in range(2)]
    assert sorted(name for name, _ in runs) == ["a", "b"]
    more = [run_on(other, ask_for(f"more {n}", tokens=100)) for n in range(2)]
    assert sorted(name for name, _ in more) == ["a", "b"]
    runs[0][1].end(None)
    more[0][1].end(None)
    free = [name for name, fleet in (("a", one), ("b", one)) if not _full(fleet, name)]
    assert free
    assert run_on(one, ask_for("last", tokens=100))[0] in free
    clear(one.members["a"].ledger.memory, 2, 1)
    assert {name: _busy(one, name) for name in ("a", "b")} == {name: one.members[name].requests for name in ("a", "b")}


def test_a_prefix_goes_where_any_worker_sent_it(clock: Clock) -> None:
    """Its KV cache is there. When the instance was away, its cache is empty, and no worker sends it there for that any more."""
    one, other = fleets({"a": {}, "b": {}, "c": {}})
    prefixes = [f"prefix {number}" for number in range(24)]
    sent = {}
    for prefix in prefixes:
        clock.pass_s(1)
        sent[prefix], run = run_on(one, ask_for(prefix))
        run.end(None)
    assert set(sent.values()) == {"a", "b", "c"}
    for prefix in reversed(prefixes):
        clock.pass_s(1)
        name, run = run_on(other, ask_for(prefix))
        run.end(None)
        assert name == sent[prefix]
    other._came_back(other.members["a"])
    for fleet in (one, other):
        homes = fleet._routes["m"]._homes
        known = [homes.get(hash(prefix + "x" * (32 - len(prefix)))) for prefix in prefixes]
        assert {entry[0].name for entry in known if entry is not None} == {"b", "c"}


#: Keys as a table tells them apart: by 60 bits.
_STEPS = st.tuples(st.integers(0, 2**60 - 1), st.sampled_from(["put", "default", "came back"]), st.integers(0, 2))


@hypothesis_settings(deadline=None)
@given(st.lists(_STEPS, max_size=60), st.integers(0, 9))
def test_homes_are_those_of_a_dict(steps: list[tuple[int, str, int]], near: int) -> None:
    """Whatever is put where: a prefix has the home that it was given last, unless another took its place or the instance was away, and never
    another's."""
    fleet = fleets({"a": {}, "b": {}, "c": {}})[0]
    route = fleet._routes["m"]
    homes, model = route._homes, {}
    for key, what, which in steps:
        at = key % near if near else key  # many that fall together, and none
        entry = route.entries[which]
        if what == "put":
            homes[at] = entry
            model[at % PLACES] = (at, entry)
        elif what == "default":
            homes.setdefault(at, entry)
            if model.get(at % PLACES, (None,))[0] != at:
                model[at % PLACES] = (at, entry)
        else:
            route.forget(entry[0])
            model = {place: kept for place, kept in model.items() if kept[1] is not entry}
        for one, _, _ in steps:
            one = one % near if near else one
            kept = model.get(one % PLACES)
            assert homes.get(one) is (kept[1] if kept is not None and kept[0] == one else None)


def test_a_tenants_slots_are_its_own_over_all_workers(clock: Clock) -> None:
    """Two of three are kept for it: whatever worker is asked, others get one and it gets two."""
    memory = Shared(words_for(1, 2, 1), 2)
    section = EngineSettings.model_validate({"url": "http://127.0.0.1:1", "models": ["m"], "conformance": "off", "slots": 3})
    tenants = {"acme": Isolation(slots=2)}
    workers = [Fleet({"a": section}, tenants=tenants, memory=joined(memory, worker)) for worker in range(2)]
    members = [fleet.members["a"] for fleet in workers]
    call = ask_for().call
    assert call is not None

    def free() -> list[tuple[bool, bool]]:
        for member in members:
            member.see_others()
        return [(member.has_slot("acme"), member.has_slot("t")) for member in members]

    Run(members[0], call, "t")
    assert free() == [(True, False)] * 2
    Run(members[1], call, "acme")
    assert free() == [(True, False)] * 2
    Run(members[0], call, "acme")
    assert free() == [(False, False)] * 2
    clear(memory, 1, 0, 1)
    members[0] = Fleet({"a": section}, tenants=tenants, memory=joined(memory, 0)).members["a"]
    assert free() == [(True, True)] * 2


def _busy(fleet: Fleet, name: str) -> int:
    member = fleet.members[name]
    member.see_others()
    return member.requests + member.other_requests


def _full(fleet: Fleet, name: str) -> bool:
    fleet.members[name].see_others()
    return fleet.members[name].full


def test_tokens_in_flight_are_those_of_all_workers(clock: Clock) -> None:
    """The least loaded is the least loaded of the machine, and its bound is common."""
    one, other = fleets({"a": {"max_tokens_in_flight": 4000}, "b": {"max_tokens_in_flight": 4000}})
    name, _ = run_on(one, ask_for("big", tokens=3000))
    assert [run_on(other, ask_for(f"{n}", tokens=300))[0] for n in range(3)] == ["b" if name == "a" else "a"] * 3
    with pytest.raises(EngineRefused, match="No engine"):
        other.find("m", ask_for("too much", tokens=3500))


# -- as one breaker, in any order


class AsOne(RuleBasedStateMachine):
    """Three workers' breakers over one ledger, beside one breaker that had all their outcomes."""

    @initialize()
    def build(self) -> None:
        memory = Shared(words_for(1, 3), 3)
        self.memory = memory
        settings = fleet_settings()
        self.workers = [Breaker(settings, Ledger(joined(memory, worker))) for worker in range(3)]
        self.model = Breaker(settings)
        self.now_ns = 0
        self.running: list[tuple[int, int, int]] = []

    @rule(by_ms=st.one_of(st.integers(0, 12_000), st.just(40_000)), worker=st.integers(0, 2))
    def wait(self, by_ms: int, worker: int) -> None:
        self.now_ns += by_ms * 1_000_000
        self.workers[worker].look(self.now_ns)
        self.model.look(self.now_ns)

    @rule(worker=st.integers(0, 2), claims=st.booleans())
    def begin(self, worker: int, claims: bool) -> None:
        breaker = self.workers[worker]
        if claims:
            breaker.look(self.now_ns)
            self.model.look(self.now_ns)
            assert breaker.claim(self.now_ns) == self.model.claim(self.now_ns)
        self.running.append((worker, breaker.begin(self.now_ns), self.model.begin(self.now_ns)))

    @rule(which=st.integers(0, 100), good=st.sampled_from([True, False, False, None]))
    def end(self, which: int, good: bool | None) -> None:
        if self.running:
            worker, era, of_model = self.running.pop(which % len(self.running))
            self.workers[worker].end(era, good, self.now_ns)
            self.model.end(of_model, good, self.now_ns)

    @rule(worker=st.integers(0, 2))
    def kill(self, worker: int) -> None:
        """Its probes are over without an outcome; what it had counted stays."""
        clear(self.memory, 1, worker)
        for one, era, of_model in self.running:
            if one == worker and self.model.state == "half_open":
                self.model.end(of_model, None, self.now_ns)
            del era
        self.running = [run for run in self.running if run[0] != worker]
        self.workers[worker] = Breaker(fleet_settings(), Ledger(joined(self.memory, worker)))

    @invariant()
    def agrees(self) -> None:
        for breaker in getattr(self, "workers", ()):
            assert (breaker.state, breaker.era, breaker.until_ns) == (self.model.state, self.model.era, self.model.until_ns)
            assert breaker.probing == self.model.probing
            assert breaker.failures == self.model.failures


TestAsOne = AsOne.TestCase
TestAsOne.settings = hypothesis_settings(max_examples=120, stateful_step_count=50, deadline=None)


# -- at once, and dying


class Slow(Breaker):
    """Lets others run between what it sees and what it does."""

    def _under_way(self) -> int:
        seen = super()._under_way()
        os.sched_yield()
        return seen


def test_of_workers_that_race_one_has_the_probe() -> None:
    """Four processes claim a single place as fast as they can: never do two have it at once, and in the end it is free."""
    memory, inside = Shared(words_for(1, 4), 4), Shared(5, 4)
    settings = fleet_settings(breaker_probes=1)
    breaker = Breaker(settings, Ledger(memory))
    for _ in range(4):
        breaker.end(breaker.begin(0), False, 0)
    breaker.look(60 * S)
    words = inside.words

    def race(worker: int) -> None:
        mine = Slow(settings, Ledger(joined(memory, worker)))
        for _ in range(5_000):
            if mine.claim(60 * S):
                words[worker] = 1
                os.sched_yield()
                words[4] += sum(words[:4]) != 1
                words[worker] = 0
                mine.end(mine.begin(60 * S), None, 60 * S)

    processes = [_forks.Process(target=race, args=(worker,)) for worker in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert words[4] == 0
    assert breaker.claim(60 * S)


@pytest.mark.parametrize("change", ["opens", "half opens", "claims", "closes", "is held"])
def test_a_worker_that_dies_at_any_write_leaves_a_breaker_that_works(change: str) -> None:
    """Killed before each single write of a change: the next worker has the lock at once, and the breaker opens, lets probes through and closes."""
    after = 0
    while True:
        memory = Shared(words_for(1, 2), 2)
        breaker, ledger = Breaker(fleet_settings(), Ledger(joined(memory, 1))), Ledger(joined(memory, 0))
        doomed = Breaker(fleet_settings(), ledger)
        now_ns = S
        if change != "is held":
            for _ in range(3 if change == "opens" else 4):
                breaker.end(breaker.begin(now_ns), False, now_ns)
        if change in ("claims", "closes"):
            now_ns += 60 * S
            breaker.look(now_ns)
        if change == "closes":
            breaker.end(breaker.begin(now_ns), True, now_ns)

        def work(breaker: Breaker = doomed, ledger: Ledger = ledger, now_ns: int = now_ns, after: int = after) -> None:
            breaker._words = ledger.words = Dying(ledger.words, after)  # type: ignore[assignment]
            if change == "is held":
                with ledger.memory:
                    ledger.hold(now_ns + S, 429, "busy")
            elif change == "half opens":
                breaker.look(now_ns + 60 * S)
            elif change == "claims":
                breaker.claim(now_ns)
            else:
                breaker.end(breaker.begin(now_ns), change == "closes", now_ns)

        died = in_child(work) == -signal.SIGKILL
        clear(memory, 1, 0)
        with memory:  # raises where the lock is lost
            pass
        now_ns += 120 * S
        for _ in range(20):
            now_ns += S
            breaker.end(breaker.begin(now_ns), False, now_ns)
        assert breaker.state == "open"
        now_ns += 120 * S
        breaker.look(now_ns)
        assert [breaker.claim(now_ns) for _ in range(3)] == [True, True, False]
        for era in [breaker.begin(now_ns) for _ in range(2)]:
            breaker.end(era, True, now_ns)
        assert breaker.state == "closed"
        if not died:
            assert after > 0
            return
        after += 1


def test_requests_are_told_to_others_and_taken_back(clock: Clock) -> None:
    """Whatever way a run ends."""
    one, other = fleets({"a": {}})
    call = ask_for().call
    assert call is not None
    runs = [Run(one.members["a"], call) for _ in range(3)]
    assert _busy(other, "a") == 3
    runs[0].end(None)
    runs[1].end(EngineCut("x"))
    runs[1].end(None)
    assert _busy(other, "a") == 1
