"""Barge-in: a newer message of a conversation cuts the answer that still runs, and nothing else."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.api.conftest import CAPABILITIES, House, until
from tests.api.test_exchange import Notes
from tests.api.test_websocket import CHAT, DONE, STREAM, ask, body, opened, rest

from tidegate.api.auth import KeyRing
from tidegate.api.conversations import MOST_CHARS, Conversations, Key, named_conversation
from tidegate.api.exchange import Exchange
from tidegate.api.exchange import House as Rooms
from tidegate.core.errors import BadRequest, EngineCut
from tidegate.core.flight import Flight
from tidegate.pipeline.capability import load
from tidegate.stores.systems.memory import Memory

LONG = "##i=20,n=2000##"


def headers(name: str = "c1", *, barge_in: bool = False) -> dict[str, str]:
    return {"x-tidegate-conversation": name, **({"x-tidegate-barge-in": "1"} if barge_in else {})}


class Older:
    """A streamed request that runs while the test does something else."""

    def __init__(self, house: House, order: str, *, key: str = "data", **more: Any) -> None:
        self.lines: list[str] = []
        self.status = 0
        self.text = ""
        self.began = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(house, order, key, more))
        self._thread.start()

    def _read(self, house: House, order: str, key: str, more: dict[str, Any]) -> None:
        fields = body(CHAT, order, stream=more.pop("stream", True))
        with house.client(key) as client, client.stream("POST", CHAT, json=fields, headers=more.pop("headers", headers())) as answer:
            self.status = answer.status_code
            for line in answer.iter_lines():
                self.lines.append(line)
                self.began.set()

    def end(self) -> dict[str, Any]:
        """What the last event (or the whole body) says."""
        self._thread.join(20)
        assert not self._thread.is_alive(), "it was not cut"
        said: dict[str, Any] = json.loads([line for line in self.lines if line][-1].removeprefix("data: "))
        return said


@pytest.fixture(autouse=True)
def nothing_runs_on(house: House) -> Iterator[None]:
    yield
    until(lambda: house.stats()["active"] == 0, "the end of all runs", 5)
    # one is the question itself
    until(lambda: httpx.get(house.url + "/health").json()["requests_in_flight"] == 0, "the end of all requests", 5)


def test_a_newer_message_cuts_the_running_one(house: House) -> None:
    """The engine is free at once; the older stream ends in an error that names the newer one; its flight keeps what it used."""
    older = Older(house, LONG)
    assert older.began.wait(10)
    with house.client() as client:
        newer = client.post(CHAT, json=body(CHAT, "##n=3##"), headers=headers(barge_in=True))
    assert newer.status_code == 200
    said = older.end()["error"]
    assert (said["code"], said["status"], said["superseded_by"]) == ("superseded", 409, newer.headers["x-request-id"])
    assert newer.headers["x-request-id"] in said["message"]
    assert f"data: {DONE}" not in older.lines
    flight = house.flight(said["trace_id"])
    assert (flight["end"], flight["error_code"], flight["http_status"]) == ("client_gone", "superseded", 200)
    assert flight["usage"]["completion_tokens"] > 0
    decisions = {what: facts for _, what, facts in house.flight(newer.headers["x-request-id"])["decisions"]}
    assert decisions["barge_in"]["superseded"] == [said["trace_id"]]


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_has_not_begun_to_answer_gets_409(house: House, stream: bool) -> None:
    """It still waits for its first token: status 409 in OpenAI's shape, and the engine's run ends."""
    requests = house.stats()["requests"]
    older = Older(house, "##t=20000##", stream=stream)
    until(lambda: house.stats()["requests"] > requests, "the older request")
    with house.client() as client:
        newer = client.post(CHAT, json=body(CHAT, "##n=3##"), headers=headers(barge_in=True))
    said = older.end()["error"]
    assert (older.status, said["code"], said["superseded_by"]) == (409, "superseded", newer.headers["x-request-id"])
    assert house.flight(said["trace_id"])["end"] == "client_gone"


@pytest.mark.parametrize(
    ("key", "newer"),
    [
        ("data", headers()),
        ("data", {**headers(), "x-tidegate-barge-in": "0"}),
        ("data", headers("c2", barge_in=True)),
        ("other", headers(barge_in=True)),
        ("second", headers(barge_in=True)),
        ("data", {}),
    ],
    ids=["no barge-in", "barge-in off", "another conversation", "another tenant", "another key", "no conversation"],
)
def test_everything_else_runs_on(house: House, key: str, newer: dict[str, str]) -> None:
    """Without barge-in, in another conversation or as another caller: both are answered."""
    older = Older(house, "##i=20,n=40##")
    assert older.began.wait(10)
    with house.client(key) as client:
        answer = client.post(CHAT, json=body(CHAT, "##n=3##"), headers=newer)
    assert answer.status_code == 200
    older._thread.join(20)
    assert [line for line in older.lines if line][-1] == f"data: {DONE}"


def test_a_newcomer_that_is_refused_cuts_nothing(house: House) -> None:
    """A message that cannot run must not cost the answer that does."""
    older = Older(house, "##i=20,n=40##")
    assert older.began.wait(10)
    with house.client() as client:
        assert client.post(CHAT, json={"messages": []}, headers=headers(barge_in=True)).status_code == 400
    older._thread.join(20)
    assert [line for line in older.lines if line][-1] == f"data: {DONE}"


def test_of_two_newcomers_one_is_left(house: House) -> None:
    """They come at once: the later one cuts both others, each error names the one that cut it, and one answer comes to its end."""
    older = Older(house, LONG)
    assert older.began.wait(10)
    newcomers = [Older(house, "##i=20,n=40##", headers=headers(barge_in=True)) for _ in range(4)]
    for one in (older, *newcomers):
        one._thread.join(20)
        assert not one._thread.is_alive()
    last = [[line for line in one.lines if line][-1] for one in newcomers]
    assert last.count(f"data: {DONE}") == 1
    cut = [json.loads(line.removeprefix("data: "))["error"]["code"] for line in last if DONE not in line]
    assert cut == ["superseded"] * 3
    assert older.end()["error"]["code"] == "superseded"


def test_a_storm_of_newcomers_leaves_nothing(house: House) -> None:
    """Thirty at random moments: every one ends in [DONE] or superseded, and nothing runs on."""
    runs = []
    for number in range(30):
        runs.append(Older(house, f"##t={number % 5 * 5},i={number % 3},n=30##", headers=headers(barge_in=True)))
        time.sleep(number % 4 * 0.003)
    ends = []
    for one in runs:
        one._thread.join(20)
        ends.append([line for line in one.lines if line][-1])
        assert DONE in ends[-1] or json.loads(ends[-1].removeprefix("data: "))["error"]["code"] == "superseded"
    assert f"data: {DONE}" in ends, "whoever came last is answered"


@pytest.mark.parametrize(
    ("given_headers", "param"),
    [
        ({"x-tidegate-conversation": ""}, "x-tidegate-conversation"),
        ({"x-tidegate-conversation": "x" * (MOST_CHARS + 1)}, "x-tidegate-conversation"),
        ({"x-tidegate-conversation": "c", "x-tidegate-barge-in": "yes"}, "x-tidegate-barge-in"),
        ({"x-tidegate-barge-in": "1"}, "x-tidegate-conversation"),
    ],
)
def test_headers_that_cannot_be_kept_are_refused(house: House, given_headers: dict[str, str], param: str) -> None:
    """By name, before an engine is asked, and at no cost to the key."""
    requests = house.stats()["requests"]
    with house.client() as client:
        answer = client.post(CHAT, json=body(CHAT, "##n=3##"), headers=given_headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert house.stats()["requests"] == requests


# -- on a socket


@pytest.mark.parametrize("more", [{}, {"x-tidegate-barge-in": "1"}, headers("socket"), headers("socket", barge_in=True)])
def test_a_message_while_a_run_is_on_cuts_it(house: House, more: dict[str, str]) -> None:
    """The socket is the conversation: first the older one's error, which names the newer, then the newer one's answer."""
    with opened(house, headers=more) as client:
        client.send(json.dumps(body(CHAT, LONG)))
        client.recv(timeout=15)
        client.send(json.dumps(body(CHAT, "##n=3##")))
        cut = json.loads(rest(client, CHAT)[-1])["error"]
        assert rest(client, CHAT)[-1] == DONE
    assert (cut["code"], cut["status"]) == ("superseded", 409)
    newer = house.flight(cut["superseded_by"])
    assert newer["end"] == "stop"
    assert newer["usage"]["completion_tokens"] == 3
    assert house.flight(cut["trace_id"])["error_code"] == "superseded"


def test_every_message_of_a_burst_gets_its_end(house: House) -> None:
    """Twenty messages in one write: each has one last frame, in order, and only the last one is answered."""
    with opened(house) as client:
        for number in range(20):
            client.send(json.dumps(body(CHAT, LONG if number < 19 else "##n=2##")))
        ends = [rest(client, CHAT)[-1] for _ in range(20)]
        assert ends[-1] == DONE
        cut = [json.loads(end)["error"] for end in ends[:-1]]
        assert {error["code"] for error in cut} == {"superseded"}
        assert [error["superseded_by"] for error in cut[:-1]] == [error["trace_id"] for error in cut[1:]]
        assert ask(client, CHAT, body(CHAT, "##n=2##"))[-1] == DONE


def test_a_capabilitys_run_is_cut_too(house: House) -> None:
    """Its error is an event by that name."""
    with opened(house, STREAM) as client:
        client.send(json.dumps({"order": LONG}))
        client.recv(timeout=15)
        client.send(json.dumps({"order": "##n=3##"}))
        cut = json.loads(rest(client, STREAM)[-1])
        assert (cut["event"], cut["data"]["error"]["code"]) == ("error", "superseded")
        assert json.loads(rest(client, STREAM)[-1])["event"] == "answer"


def test_a_named_conversation_spans_connections(house: House) -> None:
    """A socket that names it takes part: a POST with barge-in cuts its run, and the socket lives on."""
    with opened(house, headers=headers("spanning")) as client:
        client.send(json.dumps(body(CHAT, LONG)))
        client.recv(timeout=15)
        with house.client() as poster:
            newer = poster.post(CHAT, json=body(CHAT, "##n=3##"), headers=headers("spanning", barge_in=True))
        cut = json.loads(rest(client, CHAT)[-1])["error"]
        assert cut["superseded_by"] == newer.headers["x-request-id"]
        assert ask(client, CHAT, body(CHAT, "##n=2##"))[-1] == DONE


# -- the registry


class Noted:
    """A run that notes who cut it."""

    def __init__(self, cuttable: bool = True) -> None:
        self.flight = Flight("/x")
        self.by: list[str] = []
        self._cuttable = cuttable

    def supersede(self, by: str) -> bool:
        if self._cuttable:
            self.by.append(by)
        return self._cuttable


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.booleans(), st.integers(0, 9)), max_size=30))
def test_the_registry_is_empty_when_nothing_runs(steps: list[tuple[str, bool, bool, int]]) -> None:
    """Whoever comes in whatever order: barge-in cuts exactly those that run in the same conversation and are not ending, and all leave."""
    conversations = Conversations()
    running: list[tuple[Key, Noted]] = []
    for name, barge_in, cuttable, leaves in steps:
        key, run = Key("t", "k", name), Noted(cuttable)
        there = [one for at, one in running if at == key]
        cut = conversations.enter(key, run, barge_in=barge_in)
        assert cut == ([one.flight.id for one in there if one._cuttable] if barge_in else [])
        assert run.by == []
        running.append((key, run))
        if leaves < len(running):
            gone = running.pop(leaves)
            conversations.leave(*gone)
            conversations.leave(*gone)  # twice is as once
    assert len(conversations) == len({key for key, _ in running})
    for key, run in running:
        conversations.leave(key, run)
    assert len(conversations) == 0


@given(st.binary(max_size=300))
def test_any_name_of_up_to_200_characters_is_taken(name: bytes) -> None:
    """A name is bytes of the caller's; only its length is judged."""
    text = name.decode("utf-8", "surrogateescape")
    if 1 <= len(text) <= MOST_CHARS:
        assert named_conversation({b"x-tidegate-conversation": name}) == (text, None)
    else:
        with pytest.raises(BadRequest):
            named_conversation({b"x-tidegate-conversation": name})


def test_a_capability_may_barge_in_by_itself(tmp_path: Path) -> None:
    """`barge_in` under [generate] in capability.toml: its callers need not ask for it."""
    folder = CAPABILITIES / "test" / "stream"
    assert load(folder).manifest.generate.barge_in is False
    copy = tmp_path / "test" / "stream"
    copy.parent.mkdir()
    shutil.copytree(folder, copy)
    manifest = copy / "capability.toml"
    manifest.write_text(manifest.read_text() + "\n[generate]\nbarge_in = true\n")
    assert load(copy).manifest.generate.barge_in is True


class Wire:
    """The ASGI of one request whose client stays."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


def new_rooms(notes: Notes) -> Rooms:
    return Rooms(KeyRing(Memory(), {}, refresh_s=1.0), [notes], b"secret", lambda *_: b"", 1000, 10.0)


def new_exchange(rooms: Rooms, **said: str) -> tuple[Exchange, Wire]:
    wire = Wire()
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in said.items()]
    return Exchange(rooms, {"path": "/v1/x", "method": "POST", "headers": named}, wire.receive, wire.send), wire


@pytest.mark.parametrize("older_ends", ["waits", "fails", "has not begun"])
async def test_nothing_of_a_conversation_is_left(older_ends: str) -> None:
    """Whatever the older one is doing when it is cut: both are booked once, and neither the registry nor a task is left."""
    notes = Notes()
    rooms = new_rooms(notes)
    older, wire = new_exchange(rooms, x_tidegate_conversation="c")
    newer, _ = new_exchange(rooms, x_tidegate_conversation="c", x_tidegate_barge_in="1")
    there = asyncio.all_tasks()

    async def waits(exchange: Exchange) -> None:
        if older_ends != "has not begun":
            exchange.watch()
        exchange.converse()
        begun.set()
        if older_ends == "has not begun":
            await go_on.wait()
            exchange.watch()
        try:
            await asyncio.Event().wait()
        finally:
            if older_ends == "fails":
                raise EngineCut("The engine broke off in the same moment.")

    async def answers(exchange: Exchange) -> None:
        exchange.watch()
        exchange.converse()
        exchange.flight.end = "stop"
        await exchange.json(200, b"{}")

    begun, go_on = asyncio.Event(), asyncio.Event()
    task = asyncio.get_running_loop().create_task(older.run(waits))
    await begun.wait()
    assert len(rooms.conversations) == 1
    await newer.run(answers)
    go_on.set()
    await task
    assert len(rooms.conversations) == 0
    assert not rooms.running
    assert sorted(record.error_code for record, _ in notes.given) == ["", "engine_cut" if older_ends == "fails" else "superseded"]
    assert wire.sent[0]["status"] == (502 if older_ends == "fails" else 409)
    for left in asyncio.all_tasks() - there:  # who waits for a client that stays is ended by a real connection's end
        left.cancel()


async def test_an_older_one_that_is_ending_is_left_alone() -> None:
    """Neither what has ended nor what the client left or the deadline ended is cut a second time."""
    rooms = new_rooms(Notes())
    for state in ("done", "gone", "expired"):
        exchange, _ = new_exchange(rooms)
        setattr(exchange, state, True)
        assert exchange.supersede("newer") is False
        assert exchange.superseded_by == ""

