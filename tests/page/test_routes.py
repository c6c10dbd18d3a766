"""The page's routes, without a browser."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from markupsafe import escape
from stand_in import ADMIN, DATA, SECRET, House, app_of, record

from tidegate.api.page import door, words
from tidegate.api.page.session import COOKIE, new_session
from tidegate.core.ask import Caller

OURS = {"Origin": "http://page.test"}
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>'


def client_of(house: House, caller: Caller | None = None) -> httpx.AsyncClient:
    cookies = {COOKIE: new_session(caller, SECRET)} if caller else {}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app_of(house)), base_url="http://page.test", cookies=cookies)


@pytest.fixture
async def admin(house: House) -> AsyncIterator[httpx.AsyncClient]:
    house.live.records = [record(n) for n in range(120)]
    async with client_of(house, ADMIN) as client:
        yield client


@pytest.fixture
async def acme(house: House) -> AsyncIterator[httpx.AsyncClient]:
    house.live.records = [record(n) for n in range(12)]
    async with client_of(house, DATA) as client:
        yield client


@pytest.fixture
async def nobody(house: House) -> AsyncIterator[httpx.AsyncClient]:
    house.live.records = [record(n) for n in range(12)]
    async with client_of(house) as client:
        yield client


# Who may look.


@pytest.mark.parametrize("path", ["/", f"/flights/{record(1).id}", "/live/flights"])
async def test_without_a_session_nothing_is_shown(nobody: httpx.AsyncClient, path: str) -> None:
    """The login page, status 401, and not one flight."""
    answer = await nobody.get(path)
    assert answer.status_code == 401
    assert record(1).id[:-1] not in answer.text.replace(path, "")
    assert "smollm2" not in answer.text


async def test_a_key_signs_in_and_goes_where_one_wanted(nobody: httpx.AsyncClient) -> None:
    """A deep link shows the login page, and after it the flight."""
    wanted = f"/flights/{record(1).id}"
    assert f'value="{wanted}"' in (await nobody.get(wanted)).text
    answer = await nobody.post("/login", data={"key": " tg_acme ", "then": wanted}, headers=OURS)
    assert (answer.status_code, answer.headers["location"]) == (303, wanted)
    assert "HttpOnly; SameSite=Strict" in answer.headers["set-cookie"]
    assert "tg_acme" not in answer.headers["set-cookie"]
    assert (await nobody.get(wanted)).status_code == 200


@pytest.mark.parametrize("then", ["//evil.example", "https://evil.example", "/\\evil.example", "javascript:alert(1)", "/\r\nX: 1", ""])
async def test_login_never_leads_away(nobody: httpx.AsyncClient, then: str) -> None:
    """Whatever `then` says, the way goes on at `/`."""
    answer = await nobody.post("/login", data={"key": "tg_acme", "then": then}, headers=OURS)
    assert answer.headers["location"] == "/"


async def test_a_wrong_key_is_refused_and_counted(nobody: httpx.AsyncClient) -> None:
    """The eleventh attempt is told when to come back, even with the right key."""
    for _ in range(door.MOST_FAILURES):
        answer = await nobody.post("/login", data={"key": "tg_wrong"}, headers=OURS)
        assert answer.status_code == 401
        assert "This key is not known." in answer.text
        assert "tg_wrong" not in answer.text
    answer = await nobody.post("/login", data={"key": "tg_acme"}, headers=OURS)
    assert answer.status_code == 429
    assert 0 < int(answer.headers["retry-after"]) <= door.WINDOW_S
    assert "set-cookie" not in answer.headers


async def test_keys_that_cannot_be_read_are_not_wrong_keys(house: House, nobody: httpx.AsyncClient) -> None:
    """503 with the way out, and the attempt is not counted."""
    house.keys_down = True
    for _ in range(door.MOST_FAILURES + 1):
        answer = await nobody.post("/login", data={"key": "tg_acme"}, headers=OURS)
        assert answer.status_code == 503
    assert "The database is still starting" in answer.text


@pytest.mark.parametrize("headers", [{}, {"Origin": "http://evil.example"}, {"Origin": "null"}])
@pytest.mark.parametrize("path", ["/login", "/logout"])
async def test_another_sites_forms_do_nothing(nobody: httpx.AsyncClient, path: str, headers: dict[str, str]) -> None:
    """403, and no cookie is set or ended."""
    answer = await nobody.post(path, data={"key": "tg_acme"}, headers=headers)
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("body", [b"\xff\xfe", b"key=%FF", b"a" * 100_000, b"", b"key=" + b"x" * 9000])
async def test_a_broken_form_is_a_wrong_key(nobody: httpx.AsyncClient, body: bytes) -> None:
    """Not a server error."""
    answer = await nobody.post("/login", content=body, headers=OURS)
    assert answer.status_code == 401


@pytest.mark.parametrize("headers", [{"Origin": "https://page.test"}, OURS | {"X-Forwarded-Proto": "https"}])
async def test_over_https_the_cookie_is_secure(nobody: httpx.AsyncClient, headers: dict[str, str]) -> None:
    """Also where a proxy speaks https for us."""
    answer = await nobody.post("/login", data={"key": "tg_acme"}, headers=headers)
    assert answer.headers["set-cookie"].endswith("; Secure")


async def test_an_engine_that_is_not_admitted_is_shown(house: House, admin: httpx.AsyncClient) -> None:
    """Up, but not used: the figure says so, and names it."""
    house.health["engines"] = {"good": {"up": True, "admitted": True}, "odd": {"up": True, "admitted": False}}
    page = (await admin.get("/")).text
    assert "not admitted" in page
    assert ">odd<" in page.replace("\n", "").replace(" ", "")


async def test_the_reasons_of_bad_health_are_told(house: House, admin: httpx.AsyncClient) -> None:
    """A sentence each, with what to do."""
    house.health |= {"status": "degraded", "why": ["The database does not answer: start it, or correct `store.dsn`."]}
    page = (await admin.get("/")).text
    assert "start it, or correct <code>store.dsn</code>." in page


async def test_a_link_signs_in_once(house: House, nobody: httpx.AsyncClient) -> None:
    """The second use says why not; no redirect, so that the strict cookie goes with the next request."""
    assert house.tokens is not None
    token = house.tokens.issue(ADMIN)
    answer = await nobody.get("/login", params={"token": token})
    assert answer.status_code == 200
    assert 'http-equiv="refresh"' in answer.text
    assert (await nobody.get("/")).status_code == 200
    nobody.cookies.clear()
    again = await nobody.get("/login", params={"token": token})
    assert again.status_code == 401
    assert "used before" in again.text


async def test_signing_out_ends_the_session(admin: httpx.AsyncClient) -> None:
    """And shows the login page."""
    answer = await admin.post("/logout", headers=OURS)
    assert answer.headers["location"] == "/login"
    assert "Max-Age=0" in answer.headers["set-cookie"]


async def test_a_revoked_key_ends_its_sessions(house: House, admin: httpx.AsyncClient) -> None:
    """On the next request."""
    house.revoked = True
    assert (await admin.get("/")).status_code == 401


async def test_a_tenant_sees_its_own_flights_alone(acme: httpx.AsyncClient) -> None:
    """In the list and by id: another tenant's flight is as one that does not exist."""
    page = (await acme.get("/")).text
    for n in range(12):
        shown = f'href="/flights/{record(n).id}"' in page
        assert shown == (record(n).tenant == "acme")
    theirs = await acme.get(f"/flights/{record(0).id}")
    never = await acme.get("/flights/" + "0" * 32)
    assert record(0).tenant == "globex"
    assert theirs.status_code == never.status_code == 404
    assert theirs.text == never.text


# What is seen.


async def test_every_answer_is_closed_to_strangers(admin: httpx.AsyncClient) -> None:
    """The policy allows our own files alone, and no page needs more: no inline script, style or handler, no other host."""
    for path in ["/", "/login", f"/flights/{record(5).id}", "/flights/none", "/?before=" + record(3).id]:
        answer = await admin.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert not re.search(r"<script(?![^>]* src=\"/assets/)|<style|\sstyle=|\son\w+=|javascript:", answer.text)
        assert not re.search(r"(?:src|href|action)=\"(?:https?:)?//", answer.text)


async def test_every_linked_file_is_there_and_may_be_kept(admin: httpx.AsyncClient) -> None:
    """By its hash for ever; without it the browser asks again."""
    links = set(re.findall(r'"(/assets/[^"]+)"', (await admin.get("/")).text))
    assert len(links) >= 5
    for link in links:
        answer = await admin.get(link.replace("&amp;", "&"))
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
    plain = await admin.get("/assets/run.js")
    assert plain.headers["cache-control"] == "no-cache"
    again = await admin.get("/assets/run.js", headers={"If-None-Match": plain.headers["etag"]})
    assert again.status_code == 304


@pytest.mark.parametrize("name", ["none.js", "..%2f__init__.py", "%2e%2e/routes.py", "VENDOR.toml"])
async def test_no_other_file_is_served(admin: httpx.AsyncClient, name: str) -> None:
    """Only what the page links to."""
    assert (await admin.get(f"/assets/{name}")).status_code == 404


async def test_the_parts_and_their_sum_are_on_the_flights_page(admin: httpx.AsyncClient) -> None:
    """Every lap by name and with whose time it was, and the sum beside the whole."""
    flight = record(6)
    page = (await admin.get(f"/flights/{flight.id}")).text
    for name, _ in flight.laps:
        said = f' title="{escape(words.PARTS[name])}"' if name in words.PARTS else ""
        assert f'<th scope="row"{said}>{name}</th>' in page
    assert "equals the whole" in page
    differs = (await admin.get(f"/flights/{record(6).id}")).text
    assert "differs from the whole" not in differs


async def test_parts_that_do_not_add_up_are_said_to(house: House, admin: httpx.AsyncClient) -> None:
    """The page does not hide it."""
    house.live.records = [record(6, whole_ns=1)]
    assert "differs from the whole" in (await admin.get(f"/flights/{record(6).id}")).text


@pytest.mark.parametrize("changes", [
    {"laps": [], "whole_ns": 0, "token_ns": []}, {"end": "empty", "error_code": "engine_empty"}, {"token_ns": [], "thinned": True},
    {"decisions": [(1, "odd", {"list": [1, {"a": None}], "text": HOSTILE})]}, {"kept": True, "model": "", "route": ""},
], ids=["nothing", "empty", "thinned", "odd decision", "no names"])
async def test_any_record_can_be_drawn(house: House, admin: httpx.AsyncClient, changes: dict[str, Any]) -> None:
    """In the list and alone."""
    house.live.records = [record(6, **changes)]
    assert (await admin.get(f"/flights/{record(6).id}")).status_code == 200
    assert (await admin.get("/")).status_code == 200


async def test_names_from_outside_are_text(house: House, admin: httpx.AsyncClient) -> None:
    """A model, capability, error code or passage id that looks like HTML is shown, not run."""
    names = dict.fromkeys(("model", "capability", "error_code", "tenant", "engine", "prompt_version"), HOSTILE)
    house.live.records = [record(6, passage_ids=[HOSTILE], **names)]
    house.health["engines"] = {HOSTILE: {"up": False, "why": HOSTILE}}
    for path in ["/", f"/flights/{record(6).id}", "/?capability=" + HOSTILE, "/login?then=/" + HOSTILE]:
        page = (await admin.get(path)).text
        assert "<script>alert" not in page
        assert "<img" not in page


async def test_pages_lead_through_all_flights_once(house: House, admin: httpx.AsyncClient) -> None:
    """Memory holds some, the database the rest: older pages follow without gap or repetition."""
    house.flights.records = [record(n) for n in range(110)]
    house.live.records = [record(n) for n in range(90, 120)]
    seen: list[str] = []
    path = "/"
    while path:
        page = (await admin.get(path)).text
        seen += re.findall(r'<li id="f-(\w+)"', page)
        more = re.search(r'href="(/\?[^"]*before=\w+)" rel="next"', page)
        path = more[1].replace("&amp;", "&") if more else ""
    assert seen == [record(n).id for n in range(119, -1, -1)]


async def test_the_filters_are_kept_on_the_way(admin: httpx.AsyncClient) -> None:
    """Only such flights are listed, and the live list and the next page ask for the same."""
    page = (await admin.get("/?end=refused&capability=support/answer")).text
    shown = re.findall(r'<li id="f-(\w+)"', page)
    assert shown
    by_id = {record(n).id: record(n) for n in range(120)}
    assert {by_id[one].end for one in shown} == {"refused"}
    assert "/live/flights?capability=support%2Fanswer&amp;end=refused" in page


async def test_a_database_that_is_down_is_told_calmly(house: House, admin: httpx.AsyncClient) -> None:
    """The newest flights stay visible; an older one gives 503 and says what is missing."""
    house.flights.down = True
    page = await admin.get("/")
    assert page.status_code == 200
    assert record(119).id in page.text
    assert "Older flights cannot be shown at the moment." in page.text
    missing = await admin.get("/flights/" + "0" * 32)
    assert missing.status_code == 503
    assert "Is PostgreSQL running?" in missing.text


async def test_too_many_live_pages_are_refused(house: House, admin: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the time to come back."""
    monkeypatch.setattr("tidegate.api.page.live.MOST_LISTENERS", 0)
    answer = await admin.get("/live/flights")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "10"


async def test_the_page_is_not_in_the_reference_of_the_api(admin: httpx.AsyncClient) -> None:
    """Its routes are for people."""
    paths = (await admin.get("/openapi.json")).json()["paths"]
    assert not [path for path in paths if not path.startswith("/api")]
