"""The control plane: flights, keys, health, metrics; who may see what."""

from __future__ import annotations

import re
import time

import httpx
from tests.api.conftest import House, until

WORDS = "##n=2##"


def test_a_tenant_sees_its_own_flights_only(house: House) -> None:
    """Another tenant's flight is not there, not forbidden: its id tells nothing."""
    mine = house.chat(WORDS).headers["x-request-id"]
    with house.client("data") as client:
        assert client.get(f"/api/v1/flights/{mine}").status_code == 200
    with house.client("other") as client:
        assert client.get(f"/api/v1/flights/{mine}").status_code == 404
        assert all(flight["tenant"] == "other" for flight in client.get("/api/v1/flights").json()["flights"])


def test_a_flight_reaches_the_database(house: House, postgres_dsn: str) -> None:
    """What was answered is in PostgreSQL within moments."""
    import psycopg

    flight_id = house.chat(WORDS).headers["x-request-id"]

    def stored() -> bool:
        with psycopg.connect(postgres_dsn) as link:
            return link.execute("select count(*) from flights where id = %s", [flight_id]).fetchone() == (1,)

    until(stored, "the flight's arrival")


def test_flights_page_on(house: House) -> None:
    """`before` continues where the page ended; nothing is shown twice."""
    for _ in range(3):
        house.chat(WORDS)
    with house.client("admin") as client:
        first = [flight["id"] for flight in client.get("/api/v1/flights", params={"limit": 2}).json()["flights"]]
        second = [flight["id"] for flight in client.get("/api/v1/flights", params={"limit": 2, "before": first[-1]}).json()["flights"]]
        ends = {flight["end"] for flight in client.get("/api/v1/flights", params={"end": "stop"}).json()["flights"]}
        assert client.get("/api/v1/flights", params={"limit": 0}).status_code == 400
    assert sorted(first + second, reverse=True) == first + second
    assert len(set(first + second)) == 4
    assert ends == {"stop"}


def test_the_control_plane_wants_a_key(house: House) -> None:
    """Flights, keys and capabilities are nobody's business without a key."""
    for path in ("/api/v1/flights", "/api/v1/flights/x", "/api/v1/keys", "/api/v1/capabilities"):
        answer = httpx.get(house.url + path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path


def test_keys_are_an_admins_business(house: House) -> None:
    """A data key cannot list, create or revoke."""
    with house.client("data") as client:
        assert client.get("/api/v1/keys").status_code == 403
        assert client.post("/api/v1/keys", json={"tenant": "x"}).status_code == 403
        assert client.delete("/api/v1/keys/x").status_code == 403


def test_a_key_lives_from_its_creation_to_its_revocation(house: House) -> None:
    """A new key works at once, is never shown again, and stops when revoked."""
    with house.client("admin") as admin:
        made = admin.post("/api/v1/keys", json={"tenant": "acme", "name": "till"}).json()
        house.keys["made"] = made["key"]
        assert house.chat(WORDS, key="made").status_code == 200
        listed = admin.get("/api/v1/keys").text
        assert made["id"] in listed
        assert made["key"] not in listed
        assert admin.delete(f"/api/v1/keys/{made['id']}").status_code == 204
        assert house.chat(WORDS, key="made").status_code == 401
        assert admin.delete(f"/api/v1/keys/{made['id']}").status_code == 404


def test_a_key_that_another_process_made_or_revoked_is_noticed(house: House, postgres_dsn: str) -> None:
    """The command line writes to the database; the gateway reads it within moments."""
    import asyncio

    from tidegate.api.control import NewKey, make_key
    from tidegate.stores.settings import StoreSettings
    from tidegate.stores.systems.postgres import Postgres

    key, record = make_key(NewKey(tenant="acme", role="data", name="", requests_per_minute=0, tokens_per_minute=0))
    house.keys["cli"] = key

    async def change(revoke: bool) -> None:
        store = Postgres(StoreSettings(dsn=postgres_dsn))
        await (store.revoke_key(record.id) if revoke else store.add_key(record))
        await store.close()

    assert house.chat(WORDS, key="cli").status_code == 401
    asyncio.run(change(revoke=False))
    until(lambda: house.chat(WORDS, key="cli").status_code == 200, "the new key's first answer")
    asyncio.run(change(revoke=True))
    until(lambda: house.chat(WORDS, key="cli").status_code == 401, "the revoked key's end")


def test_an_invalid_key_request_is_said(house: House) -> None:
    """An unknown field is refused by name with the nearest, a missing one is named, and a body of another type is told the header."""
    with house.client("admin") as client:
        unknown = client.post("/api/v1/keys", json={"tenant": "x", "tokens_per_minit": 1})
        missing = client.post("/api/v1/keys", json={"name": "x"})
        untyped = client.post("/api/v1/keys", content=b'{"tenant": "x"}', headers={"content-type": "application/x-www-form-urlencoded"})
    assert {unknown.status_code, missing.status_code, untyped.status_code} == {422}
    assert "tokens_per_minit" in unknown.json()["error"]["message"]
    assert "'tokens_per_minute'" in unknown.json()["error"]["hint"]
    assert missing.json()["error"]["param"] == "tenant"
    assert "Content-Type: application/json" in untyped.json()["error"]["hint"]


def test_health_tells_figures(house: House) -> None:
    """Not `ok` alone: rates, percentiles, memory, spool, database, engines; and that an engine is down, with what to do."""
    house.chat(WORDS, stream=True)
    body = httpx.get(house.url + "/health").json()
    assert body["status"] == "degraded", "one of the two engines is not there on purpose"
    assert any("nowhere" in why for why in body["why"])
    assert body["traffic"]["first_token_ms"]["p50"] > 0
    assert body["database"]["up"] is True
    assert body["process"]["rss_bytes"] < 150_000_000
    assert body["budgets"] == {"profile": "embedded", "retrieve_s": 2.0, "first_token_s": 30.0, "forecast_s": 60.0}
    assert body["spool"]["max_bytes"] > body["spool"]["bytes"]


def test_metrics_count_flights(house: House) -> None:
    """A request more is one more in the counter of its end, whatever else runs."""

    def count() -> float:
        text = httpx.get(house.url + "/metrics").text
        rows = re.findall(r'^tidegate_requests_total\{[^}]*end="stop"[^}]*model="scripted"[^}]*\} ([0-9.e+]+)$', text, re.M)
        return sum(map(float, rows))

    before = count()
    house.chat(WORDS)
    house.chat(WORDS, stream=True)
    assert count() == before + 2


def test_made_up_names_never_become_labels(house: House) -> None:
    """A caller cannot grow the metrics."""
    for n in range(5):
        house.chat(WORDS, model=f"made-up-{n}")
    assert "made-up" not in httpx.get(house.url + "/metrics").text


def test_capabilities_show_their_contracts(house: House) -> None:
    """What to send, and what comes back."""
    with house.client() as client:
        rows = client.get("/api/v1/capabilities").json()["capabilities"]
    assert {row["path"]: row["streams"] for row in rows} == {"test/contract": False, "test/guarded": True, "test/stream": True}
    assert all(row["input_schema"] and row["output_schema"] for row in rows)


def test_errors_of_the_control_plane_have_the_same_shape(house: House) -> None:
    """404 and 405 carry code, hint and trace_id too."""
    with house.client("admin") as client:
        for method, path, status in (("GET", "/api/v1/nowhere", 404), ("PUT", "/api/v1/keys", 405)):
            answer = client.request(method, path)
            assert answer.status_code == status
            assert {"code", "message", "hint", "trace_id"} <= answer.json()["error"].keys()


def test_the_whole_is_no_longer_than_the_client_waited(house: House) -> None:
    """The record's whole is checked against another clock: what the client measured around the request."""
    began_ns = time.perf_counter_ns()
    flight_id = house.chat("##t=50,n=3##").headers["x-request-id"]
    waited_ns = time.perf_counter_ns() - began_ns
    assert 49_000_000 <= house.flight(flight_id)["whole_ns"] <= waited_ns  # the engine's timer counts whole milliseconds


async def test_an_unexpected_error_has_our_shape() -> None:
    """Whatever breaks inside, the caller gets a code and a trace_id, and nothing of what broke."""
    from fastapi import FastAPI

    from tidegate.api.control import _say_errors

    app = FastAPI()
    _say_errors(app)

    @app.get("/broken")
    async def broken() -> None:
        raise ValueError("a secret")

    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        answer = await client.get("/broken")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
    assert "secret" not in answer.text
