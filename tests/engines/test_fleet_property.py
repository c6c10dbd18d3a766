"""The choice of an instance under any interleaving of requests, failures, orders, looks and time: what holds in every state of a fleet."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.engines.clock import READERS, Clock
from tests.engines.test_fleet_choice import ask_for, fleet_of

from tidegate.core.errors import ContextTooLong, EngineCut, EngineDown, EngineError, EngineRefused, EngineStalled
from tidegate.engines.load import Load
from tidegate.engines.member import Member, Run

NAMES = ["a", "b", "c", "d"]
ERRORS: list[BaseException | None] = [
    None, None, EngineCut("cut"), EngineDown("down"), EngineStalled("silent"), EngineRefused("no", engine_status=400),
    EngineRefused("busy", engine_status=429), EngineRefused("busy", engine_status=429, retry_after_s=7.0),
    EngineRefused("busy", engine_status=503, retry_after_s=1e9), EngineRefused("out of memory", engine_status=500), ContextTooLong("long"),
    asyncio.CancelledError(),
]  # fmt: skip


class Choice(RuleBasedStateMachine):
    """A fleet of up to four instances of any settings, through anything that can happen to it."""

    @initialize(
        roles=st.lists(st.sampled_from(["any", "any", "short", "long", "fallback", "high_value"]), min_size=1, max_size=4),
        slots=st.lists(st.sampled_from([0, 1, 3]), min_size=4, max_size=4),
        bounds=st.lists(st.sampled_from([0, 0, 2000]), min_size=4, max_size=4),
        contexts=st.lists(st.sampled_from([0, 0, 1500]), min_size=4, max_size=4),
        weights=st.lists(st.sampled_from([1.0, 0.5, 3.0]), min_size=4, max_size=4),
    )
    def build(self, roles: list[str], slots: list[int], bounds: list[int], contexts: list[int], weights: list[float]) -> None:
        self.clock = Clock()
        self.kept: list[tuple[Any, Any]] = [(module, module.time) for module in READERS]
        for module, _ in self.kept:
            module.time = self.clock
        self.fleet = fleet_of(
            {
                name: {
                    "role": role, "slots": slots[n], "max_tokens_in_flight": bounds[n], "context_tokens": contexts[n], "weight": weights[n],
                    **({"high_value_for": ["tenant:acme"]} if role == "high_value" else {}),
                }
                for n, (name, role) in enumerate(zip(NAMES, roles, strict=False))
            },
            long_tokens=1000, affinity_tokens=200,
        )  # fmt: skip
        self.members = list(self.fleet.members.values())
        self.told = {"m": self.fleet.slots("m")}
        self.fleet.on_change = lambda model, slots, _: self.told.__setitem__(model, slots)
        self.running: list[tuple[Member, Run]] = []

    def teardown(self) -> None:
        for _, run in getattr(self, "running", []):
            run.end(None)
            run.end(EngineCut("once is enough"))
        for member in getattr(self, "members", []):
            assert (member.requests, member.tokens) == (0, 0)
        for module, kept in getattr(self, "kept", []):
            module.time = kept

    @rule(tokens=st.sampled_from([1, 300, 900, 1600, 5000]), tenant=st.sampled_from(["t", "acme"]), prefix=st.integers(0, 3))
    def request(self, tokens: int, tenant: str, prefix: int) -> None:
        ask = ask_for(f"prefix {prefix} ", tokens=tokens, tenant=tenant)
        assert ask.call is not None
        now_ns = self.clock.now_ns
        size = tokens + 2
        may = [
            one for one in self.members
            if one.admitted and not one.drained and one.held_until_ns <= now_ns and (not one.high_value_for or tenant == "acme")
        ]  # fmt: skip
        with_room = [one for one in may if not one.requests or not one.section.max_tokens_in_flight
                     or one.tokens + size <= one.section.max_tokens_in_flight]  # fmt: skip
        if not with_room:
            with pytest.raises(EngineRefused if may else EngineError) as caught:
                self.fleet.find("m", ask)
            assert caught.value.hint
            return
        to_be_probed = [one for one in may if one.breaker.look(now_ns) == "half_open" and one.breaker.probing]
        member, own = self.fleet.find("m", ask)
        assert own == "m"
        assert member in with_room
        healthy = [
            one for one in with_room
            if one.breaker.look(now_ns) == "closed" and not one.suspect and one.up is not False and one.busy_until_ns <= now_ns
        ]  # fmt: skip
        probe = member in to_be_probed  # the choice takes the probe's place
        if member not in healthy and not probe:
            assert not any(size <= one.longest for one in healthy), "nobody ill is asked while a healthy one can take it"
        listed = [one for one, _ in self.fleet.instances("m", ask)]
        assert set(listed) == set(with_room)
        mine = [one for one in healthy if one.high_value_for]
        if member in healthy and not member.high_value_for and not probe:
            roles = {"any", "long" if size >= 1000 else "short"}
            fit = [one for one in healthy if one.section.role in roles and one.requests < one.slots_now and size <= one.longest]
            mine = [one for one in mine if one.requests < one.slots_now and size <= one.longest]
            assert not mine or tenant != "acme"
            if fit:
                assert member in fit, "the role fits where one of the role can take it"
                least = min((one.load + size) * one.slowness for one in fit)
                assert member.load * member.slowness <= least + 200 * member.slowness, "never the busier by more than the bound"
        self.running.append((member, Run(member, ask.call)))

    @rule(which=st.integers(0, 1000), error=st.sampled_from(ERRORS))
    def end(self, which: int, error: BaseException | None) -> None:
        if self.running:
            _, run = self.running.pop(which % len(self.running))
            run.end(error)

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 10.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.clock.pass_s(seconds)

    @rule(which=st.integers(0, 3), on=st.booleans())
    def drain(self, which: int, on: bool) -> None:
        self.fleet.drain(self.members[which % len(self.members)].name, on)

    @rule(which=st.integers(0, 3), up=st.booleans())
    def look(self, which: int, up: bool) -> None:
        member = self.members[which % len(self.members)]
        back = up and member.up is False
        member.up, member.suspect = up, member.suspect and not up
        if back:
            self.fleet._came_back(member)
        else:
            member.changed()

    @rule(which=st.integers(0, 3), requests=st.sampled_from([0, 3, 1e5]))
    def load(self, which: int, requests: float) -> None:
        member = self.members[which % len(self.members)]
        member.watch._take(Load(requests, 0), member.requests, 2.0)
        member.look_at_load()

    @rule(which=st.integers(0, 3))
    def blame(self, which: int) -> None:
        self.fleet.blame(self.members[which % len(self.members)])

    @invariant()
    def adds_up(self) -> None:
        for member in getattr(self, "members", []):
            mine = [run for one, run in self.running if one is member]
            assert member.requests == len(mine)
            assert member.tokens == sum(run.tokens for run in mine)

    @invariant()
    def slots_are_bounded(self) -> None:
        if hasattr(self, "fleet"):
            slots = self.fleet.slots("m")
            assert 0 <= slots <= 3 * len(self.members)


TestChoice = Choice.TestCase
TestChoice.settings = hypothesis_settings(
    max_examples=120, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
