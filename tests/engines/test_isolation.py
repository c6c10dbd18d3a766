"""Engines and slots of a tenant's own: nobody else is sent there, whatever is chosen anew, and what contradicts itself is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.engines.clock import Clock
from tests.engines.test_fleet_choice import ask_for

from tidegate.core.errors import EngineCut, EngineDown, EngineError, EngineNotAdmitted, EngineRefused, NotFound, SettingsError
from tidegate.core.isolation import Isolation
from tidegate.engines.fleet import Fleet
from tidegate.engines.member import Member, Run
from tidegate.engines.settings import EngineSettings, FleetSettings


def fleet_of(engines: dict[str, dict[str, Any]], **tenants: Isolation) -> Fleet:
    sections = {
        name: EngineSettings.model_validate({"url": "http://127.0.0.1:1", "models": ["m"], "conformance": "off", **fields})
        for name, fields in engines.items()
    }
    return Fleet(sections, FleetSettings.model_validate({"breaker_min_calls": 2, "slow_start_s": 0}), tenants=tenants)


ACME = Isolation(instances=("a",))


# -- instances


def test_a_tenant_is_served_by_its_own_instances_alone() -> None:
    """The choice, all that may be asked, and another one in a new plan; for the default model too."""
    fleet = fleet_of({"a": {}, "b": {}, "a2": {}, "c": {}}, acme=Isolation(instances=("a", "a2")))
    own, other = ask_for(tenant="acme"), ask_for(tenant="else")
    assert {fleet.find("m", own)[0].name, fleet.find(None, own)[0].name} <= {"a", "a2"}
    assert {member.name for member, _ in fleet.instances("m", own)} == {"a", "a2"}
    assert {member.name for member, _ in fleet.instances(None, other)} == {"b", "c"}
    assert {member.name for member, _ in fleet.instances("m")} == {"b", "c"}
    another = fleet.another("m", other, [fleet.members["b"]], "died")
    assert another is not None
    assert another[0].name == "c"
    assert fleet.another("m", other, [fleet.members["b"], fleet.members["c"]], "died") is None


@pytest.mark.parametrize("role", ["any", "fallback", "short", "long"])
def test_nobody_falls_back_on_an_owned_instance(role: str) -> None:
    """Not where all others are down, drained, ill or full, and whatever its role."""
    fleet = fleet_of({"a": {"role": role}, "b": {"slots": 1}}, acme=ACME)
    other = ask_for(tenant="else")
    assert other.call is not None
    run = Run(fleet.members["b"], other.call)
    assert fleet.find("m", other)[0].name == "b", "its slots are taken, and the least busy is asked all the same"
    run.end(EngineDown("gone"))
    for _ in range(4):
        Run(fleet.members["b"], other.call).end(EngineCut("ill"))
    assert [member.name for member, _ in fleet.instances("m", other)] == ["b"]
    fleet.drain("b", True)
    with pytest.raises(EngineDown, match="'b' is being drained"):
        fleet.find("m", other)
    fleet.drain("b", False)
    fleet.drain("a", True)
    with pytest.raises(EngineDown, match="'a' is being drained"):
        fleet.find("m", ask_for(tenant="acme"))


def test_a_model_that_only_others_have_is_not_there() -> None:
    """The error says so and names what may be asked; no tenant's name is in it. An unknown model is unknown to all."""
    fleet = fleet_of({"a": {"models": ["m", "large"]}, "b": {"models": ["m", "small"]}}, acme=ACME)
    with pytest.raises(EngineNotAdmitted, match="'large'") as refused:
        fleet.find("large", ask_for(tenant="else"))
    assert "'m', 'small'" in (refused.value.hint or "")
    assert "acme" not in f"{refused.value.message}{refused.value.hint}"
    with pytest.raises(EngineNotAdmitted, match="'small'"):
        fleet.find("small", ask_for(tenant="acme"))
    with pytest.raises(NotFound):
        fleet.find("none", ask_for(tenant="acme"))
    assert fleet.another("large", ask_for(tenant="else"), [], "died") is None
    assert (fleet.models("acme"), fleet.models("else"), fleet.models()) == (["m", "large"], ["m", "small"], ["m", "small", "large"])


def test_lanes_are_by_tenant_and_by_who_serves() -> None:
    """What the gate opens, and how many slots each has."""
    fleet = fleet_of({"a": {"slots": 2}, "b": {"slots": 4, "models": ["m", "twin"]}, "c": {"slots": 8}}, acme=ACME, bolt=Isolation(slots=3))
    assert list(fleet.lanes()) == [("", ["m"]), ("", ["twin"]), ("acme", ["m"]), ("bolt", ["m"]), ("bolt", ["twin"])]
    told: list[tuple[str, int, str]] = []
    fleet.on_change = lambda *said: told.append(said)
    assert [fleet.slots("m", tenant) for tenant in ("", "acme", "bolt")] == [12 - 6, 2, 6]
    fleet.drain("c", True)
    assert told == [("m", 1, ""), ("m", 3, "bolt")]
    fleet.drain("a", True)
    assert told[2:] == [("m", 0, "acme")]


# -- slots


def test_the_last_kept_slot_is_nobody_elses() -> None:
    """Of each instance: where only kept slots are free the request is refused, and the tenant's passes."""
    fleet = fleet_of({"a": {"slots": 3}, "b": {"slots": 3}}, bolt=Isolation(slots=1))
    other, bolt = ask_for(tenant="else"), ask_for(tenant="bolt")
    assert other.call is not None
    runs = []
    for _ in range(4):
        member, _ = fleet.find("m", other)
        runs.append(Run(member, other.call, "else"))
    assert {name: member.requests for name, member in fleet.members.items()} == {"a": 2, "b": 2}
    with pytest.raises(EngineRefused, match="kept for others") as full:
        fleet.find("m", other)
    assert full.value.retry_after_s is not None
    with pytest.raises(EngineRefused):
        fleet.instances("m", other)
    for _ in range(2):
        member, _ = fleet.find("m", bolt)
        runs.append(Run(member, other.call, "bolt"))
    assert {name: member.used for name, member in fleet.members.items()} == {"a": {"bolt": 1}, "b": {"bolt": 1}}
    with pytest.raises(EngineRefused):
        fleet.find("m", bolt)
    for run in runs:
        run.end(None)
    assert all((member.requests, member.used) == (0, {"bolt": 0}) for member in fleet.members.values())


def test_a_probe_takes_no_kept_slot(clock: Clock) -> None:
    """An instance whose breaker may be probed is full for others all the same."""
    fleet = fleet_of({"a": {"slots": 3}, "b": {"slots": 3}}, bolt=Isolation(slots=1))
    other = ask_for(tenant="else")
    assert other.call is not None
    ill = fleet.members["a"]
    runs = [Run(ill, other.call, "else") for _ in range(2)]
    for _ in range(2):
        Run(ill, other.call, "else").end(EngineCut("ill"))
    clock.pass_s(6.0)
    assert fleet.find("m", other)[0].name == "b"
    runs[0].end(None)
    assert fleet.find("m", other)[0].name == "a", "now there is room for a probe"


def test_slots_that_are_lent_are_the_gates_to_give() -> None:
    """The choice keeps none back then."""
    fleet = fleet_of({"a": {"slots": 3}}, bolt=Isolation(slots=2, lend=True))
    assert fleet.members["a"].kept == {}
    assert (fleet.slots("m"), fleet.slots("m", "bolt")) == (1, 2)


# -- what contradicts itself


@pytest.mark.parametrize(
    ("engines", "tenants", "says"),
    [
        ({"a": {}}, {"acme": Isolation(instances=("aa",))}, r"tenants\.acme\.instances names 'aa'"),
        ({"a": {}, "b": {}}, {"acme": ACME, "bolt": ACME}, "'a' is owned by two tenants, 'acme' and 'bolt'"),
        ({"a": {"role": "high_value", "high_value_for": ["tenant:bolt"]}, "b": {}}, {"acme": ACME}, "keeps it from nobody"),
        ({"a": {"models": ["x"]}, "b": {"models": ["m"]}}, {"acme": ACME}, r"'acme' \(a\) do not serve 'm'"),
        ({"a": {"slots": 4}, "b": {}}, {"bolt": Isolation(slots=1)}, "'b' has no number of slots"),
        ({"a": {"slots": 4}}, {"bolt": Isolation(slots=3), "acme": Isolation(slots=2)}, "5 slots of each engine are kept .* but 'a' has 4"),
        ({"a": {"slots": 4}}, {"bolt": Isolation(slots=4, lend=True)}, "nobody else could ever use it"),
    ],
    ids=["unknown", "two owners", "high value", "model", "no slots", "more than there are", "all"],
)
def test_what_cannot_be_is_refused_by_name(engines: dict[str, dict[str, Any]], tenants: dict[str, Isolation], says: str) -> None:
    """At the start, with the way out."""
    with pytest.raises(SettingsError, match=says) as refused:
        fleet_of(engines, **tenants)
    assert refused.value.hint


# -- any order


class Choice(RuleBasedStateMachine):
    """Four instances: `a` is acme's; of the others bolt has two slots each, and everybody asks for whatever may be asked."""

    @initialize(roles=st.lists(st.sampled_from(["any", "short", "long", "fallback"]), min_size=4, max_size=4), bound=st.sampled_from([0, 3000]))
    def build(self, roles: list[str], bound: int) -> None:
        self.fleet = fleet_of(
            {name: {"slots": 4, "role": role, "max_tokens_in_flight": bound} for name, role in zip("abcd", roles, strict=True)},
            acme=ACME, bolt=Isolation(slots=2),
        )
        self.running: list[tuple[str, Member, Run]] = []

    def start(self, tenant: str, member: Member, tokens: int) -> None:
        assert (member.name == "a") == (tenant == "acme"), "an owned instance serves its owner alone, and its owner nobody else's"
        call = ask_for(tokens=tokens).call
        assert call is not None
        self.running.append((tenant, member, Run(member, call, tenant)))

    @rule(tenant=st.sampled_from(["acme", "bolt", "flood", "other"]), tokens=st.sampled_from([8, 1500, 5000]), default=st.booleans())
    def find(self, tenant: str, tokens: int, default: bool) -> None:
        try:
            member, _ = self.fleet.find(None if default else "m", ask_for(str(tokens), tokens=tokens, tenant=tenant))
        except EngineError:
            return
        self.start(tenant, member, tokens)

    @rule(tenant=st.sampled_from(["acme", "bolt", "flood"]), at=st.integers(0, 3), data=st.data())
    def go_on(self, tenant: str, at: int, data: st.DataObject) -> None:
        """An answer goes on, a new plan is made, or another is asked too: from the list of all, or from what is left of it."""
        ask = ask_for(tenant=tenant)
        tried = data.draw(st.lists(st.sampled_from(list(self.fleet.members.values())), max_size=3))
        another = self.fleet.another("m", ask, tried, data.draw(st.sampled_from(["died", "stalled", "queue", "memory", "down"]))) if tried else None
        try:
            listed = self.fleet.instances("m", ask)
        except EngineError:
            assert another is None
            return
        self.start(tenant, *(another or listed[at % len(listed)])[:1], 8)

    @rule(at=st.integers(0, 99), error=st.sampled_from([None, None, EngineCut("cut"), EngineDown("down"), EngineRefused("busy", engine_status=429)]))
    def end(self, at: int, error: BaseException | None) -> None:
        if self.running:
            _, _, run = self.running.pop(at % len(self.running))
            run.end(error)

    @rule(name=st.sampled_from("abcd"), on=st.booleans())
    def drain(self, name: str, on: bool) -> None:
        self.fleet.drain(name, on)

    @invariant()
    def slots_that_are_kept_are_free_or_their_tenants(self) -> None:
        if not hasattr(self, "fleet"):
            return
        for member in self.fleet.members.values():
            mine = [tenant for tenant, where, _ in self.running if where is member]
            assert (member.requests, member.used.get("bolt", 0)) == (len(mine), mine.count("bolt") if member.name != "a" else 0)
            if member.name != "a":
                assert mine.count("bolt") <= 2
                assert len(mine) - mine.count("bolt") <= 2


Choice.TestCase.settings = hypothesis_settings(max_examples=150, stateful_step_count=50, deadline=None)
TestChoice = Choice.TestCase
