"""Tenants apart, as callers see it: a real gateway, an engine of everybody, and one (or a slot) that is a tenant's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.api.conftest import House, add_keys, start_gateway, start_scripted, stop, until, url_of
from tests.api.test_ladder import TEXT, write
from tests.api.test_queueing import Streams

from tidegate.app.common import Common
from tidegate.core.errors import SettingsError
from tidegate.settings import Settings
from tidegate.stores.migrate import migrate

LADDER = """
stages = ["prompt", "generate", "cite"]
model = "scripted"
[[ladder]]
rung = "small_model"
model = "reserve"
[[ladder]]
rung = "message"
code = "nobody_answers"
message = "Nobody can answer just now."
"""


class Own(House):
    """`other` is the tenant that has the engine `second`."""

    second: str

    def asked(self) -> tuple[int, int]:
        """Requests of the engine of all, and of the tenant's."""
        return self.stats()["requests"], httpx.get(self.second + "/stats").json()["requests"]


@pytest.fixture(scope="module")
def own(postgres_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Own]:
    """Whoever fails is asked again elsewhere, whoever is slow is asked twice, and the ladder's second model is the tenant's alone."""
    migrate(postgres_dsn)
    keys = asyncio.run(add_keys(postgres_dsn))
    data = tmp_path_factory.mktemp("own")
    write(data / "capabilities", "down", LADDER, TEXT)
    (one, one_url), (two, two_url) = start_scripted(), start_scripted()
    process = start_gateway(
        data, postgres_dsn, one_url, TIDEGATE_ENGINES__SECOND__ADAPTER="scripted", TIDEGATE_ENGINES__SECOND__URL=two_url,
        TIDEGATE_ENGINES__SECOND__MODELS='["scripted", "reserve"]', TIDEGATE_ENGINES__SECOND__CONFORMANCE="off",
        TIDEGATE_TENANTS__OTHER__ISOLATION="instance", TIDEGATE_TENANTS__OTHER__INSTANCES='["second"]',
        TIDEGATE_GENERATION__MAX_RESUMES="2", TIDEGATE_GENERATION__HEDGE_AFTER_S="0.05", TIDEGATE_GENERATION__HEDGE_RATIO="1",
        TIDEGATE_FLEET__BREAKER_MIN_CALLS="1000000", TIDEGATE_CAPABILITIES__FOLDERS=json.dumps([str(data / "capabilities")]),
    )
    try:
        house = Own(url_of(data, process), one_url, keys, data, process)
        house.second = two_url
        yield house
    finally:
        stop(process)
        stop(one)
        stop(two)


@pytest.mark.parametrize("stream", [False, True])
def test_each_is_answered_by_its_own(own: Own, stream: bool) -> None:
    """The tenant by its engine, also by the default model; everybody else by that of all."""
    before = own.asked()
    assert own.chat("##n=2##", key="other", stream=stream).status_code == 200
    assert own.asked() == (before[0], before[1] + 1)
    assert own.chat("##n=2##", key="data", stream=stream).status_code == 200
    assert own.asked() == (before[0] + 1, before[1] + 1)


@pytest.mark.parametrize(
    "order", ["##m=server_error##", "##m=rate_limit##", "##m=cut,k=2,n=5##", "##t=300,n=2##"], ids=["error", "busy", "cut", "slow"]
)
@pytest.mark.parametrize("stream", [False, True])
def test_nobody_else_gets_there_by_failing(own: Own, order: str, stream: bool) -> None:
    """A retry, an answer that goes on and a hedge look for another engine, and there is none."""
    before = own.asked()[1]
    own.chat(order, key="data", stream=stream)
    assert own.asked()[1] == before


def test_no_rung_leads_there(own: Own) -> None:
    """The ladder's second model is served by the tenant's engine alone: the tenant's requests step down to it, those of others pass it by."""
    before = own.asked()[1]
    with own.client("data") as client:
        answer = client.post("/api/v1/ladder/down", json={"order": "##m=server_error##"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "nobody_answers")
    assert own.asked()[1] == before
    with own.client("other") as client:
        assert client.post("/api/v1/ladder/down", json={"order": "##m=server_error##"}).status_code == 503
    assert own.asked()[1] >= before + 2, "the full answer and the rung"


def test_each_sees_the_models_that_it_may_ask(own: Own) -> None:
    """/v1/models, and the error for another one's; no other tenant is named."""
    for key, seen in (("data", ["scripted", "nowhere"]), ("other", ["scripted", "reserve"])):
        with own.client(key) as client:
            assert [row["id"] for row in client.get("/v1/models").json()["data"]] == seen
            assert {name: client.get(f"/v1/models/{name}").status_code for name in ("scripted", "nowhere", "reserve")} == {
                "scripted": 200, "nowhere": 200 if "nowhere" in seen else 404, "reserve": 200 if "reserve" in seen else 404,
            }  # fmt: skip
    refused = own.chat("##n=1##", model="reserve")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_not_admitted")
    assert "'other'" not in refused.text
    assert httpx.get(own.url + "/health").json()["engines"]["second"]["fleet"]["owned"] is True


@pytest.fixture(scope="module")
def kept(postgres_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """An engine with three slots, one of which is the tenant `other`'s; nobody may wait."""
    migrate(postgres_dsn)
    keys = asyncio.run(add_keys(postgres_dsn))
    data = tmp_path_factory.mktemp("kept")
    engine, engine_url = start_scripted()
    process = start_gateway(
        data, postgres_dsn, engine_url, TIDEGATE_ENGINES__SCRIPTED__SLOTS="3", TIDEGATE_ENGINES__NOWHERE__SLOTS="3",
        TIDEGATE_TENANTS__OTHER__ISOLATION="slots", TIDEGATE_TENANTS__OTHER__SLOTS="1", TIDEGATE_ADMISSION__FORECAST_S="0.001",
    )
    try:
        yield House(url_of(data, process), engine_url, keys, data, process)
    finally:
        stop(process)
        stop(engine)


def test_a_slot_is_free_for_its_tenant_in_a_flood(kept: House) -> None:
    """All others have two of the three slots; the tenant has the third, and no second one. /health shows both lanes."""
    streams = Streams(kept)
    try:
        for _ in range(2):
            streams.start("data")
        until(lambda: lanes(kept)["scripted"] == (2, 2), "two that run")
        assert kept.chat("##n=1##", key="data").status_code == 429
        assert kept.chat("##n=1##", key="other").status_code == 200
        streams.start("other")
        until(lambda: lanes(kept)["scripted@other"] == (1, 1), "the tenant's")
        assert kept.chat("##n=1##", key="other").status_code == 429
        assert kept.stats()["active"] == 3
    finally:
        streams.close()


def lanes(house: House) -> dict[str, tuple[int, int]]:
    """Slots and running by lane."""
    told = httpx.get(house.url + "/health").json()["admission"]
    return {name: (lane["slots"], lane["running"]) for name, lane in told.items()}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"ISOLATION": "device", "CORES": "[0]"}, "[tenants.other] is to have an engine on a device of its own, but the gateway alone"),
        ({"ISOLATION": "slots", "SLOTS": "1"}, "1 slots for 'scripted' are those of the tenant 'other', fewer than the 2 workers"),
    ],
    ids=["device", "workers"],
)
def test_what_this_gateway_cannot_keep_apart_stops_its_start(postgres_dsn: str, tmp_path: Path, more: dict[str, str], says: str) -> None:
    """Rather than serve the tenant among all others."""
    process = start_gateway(
        tmp_path, postgres_dsn, "http://127.0.0.1:9", TIDEGATE_SERVER__WORKERS="2", TIDEGATE_ENGINES__SCRIPTED__SLOTS="4",
        TIDEGATE_ENGINES__NOWHERE__SLOTS="4", **{f"TIDEGATE_TENANTS__OTHER__{name}": value for name, value in more.items()},
    )
    assert process.wait(30) != 0
    assert says in (tmp_path / "gateway.log").read_text()


def test_a_start_while_an_engine_is_drained_keeps_what_the_settings_give(postgres_dsn: str, tmp_path: Path) -> None:
    """A slot of each of two engines is enough for two workers, also while only one of the two takes requests; nobody is turned away at the start."""
    migrate(postgres_dsn)
    keys = asyncio.run(add_keys(postgres_dsn))
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / "drained.json").write_text('["second"]')
    engine, engine_url = start_scripted()
    process = start_gateway(
        tmp_path, postgres_dsn, engine_url, TIDEGATE_SERVER__WORKERS="2", TIDEGATE_ENGINES__SCRIPTED__SLOTS="4", TIDEGATE_ENGINES__NOWHERE__SLOTS="4",
        TIDEGATE_ENGINES__SECOND__ADAPTER="scripted", TIDEGATE_ENGINES__SECOND__URL=engine_url, TIDEGATE_ENGINES__SECOND__SLOTS="4",
        TIDEGATE_ENGINES__SECOND__MODELS='["scripted", "nowhere"]', TIDEGATE_TENANTS__OTHER__ISOLATION="slots", TIDEGATE_TENANTS__OTHER__SLOTS="1",
    )
    try:
        assert House(url_of(tmp_path, process), engine_url, keys, tmp_path, process).chat("##n=1##", key="other").status_code == 200
    finally:
        stop(process)
        stop(engine)


def test_each_lane_has_a_slot_for_each_worker() -> None:
    """That of a tenant's engines, and that of all others where tenants have slots of their own. One that only helps out does not count."""
    engine = {"url": "http://127.0.0.1:1", "models": ["m"]}

    def settings(tenant: dict[str, object], *slots: int, **more: dict[str, object]) -> Settings:
        engines = {f"e{number}": {**engine, "slots": one, **more.get(f"e{number}", {})} for number, one in enumerate(slots)}
        return Settings.model_validate({"server": {"workers": 2}, "engines": engines, "tenants": {"acme": tenant}, "limits": {"most_subjects": 16}})

    few = [
        (settings({"isolation": "instance", "instances": ["e1"]}, 2, 1), "engines of the tenant 'acme' that serve 'm' have 1 slots"),
        (settings({"isolation": "slots", "slots": 2}, 3), "have 1 slots for all other tenants"),
        (settings({"isolation": "slots", "slots": 1}, 4), "1 slots for 'm' are those of the tenant 'acme'"),
        (settings({}, 1, 4, e1={"role": "fallback"}), "have 1 slots"),
    ]
    for one, says in few:
        with pytest.raises(SettingsError, match=says):
            Common.of(one)
    for enough in (
        settings({"isolation": "instance", "instances": ["e1"]}, 2, 2), settings({"isolation": "slots", "slots": 2}, 4),
        settings({"isolation": "slots", "slots": 1}, 2, 2), settings({}, 1, 1),
    ):
        Common.of(enough)
