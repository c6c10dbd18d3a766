"""Several workers are one gateway: a client finds its kept stream whichever it reaches, and a barge-in cuts in all of them."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.api.streams.conftest import BOUND_S, FAST, Client, Gateway, Open, Worker, until

from tidegate.api import peers as peers_module
from tidegate.api.whereabouts import Listed, Whereabouts
from tidegate.stores.systems.memory import Memory

WORDS = 300
ORDER = f"##i=1,n={WORDS}##"
LONG = "##i=20,n=2000##"
CHAT = "/v1/chat/completions"

Begin = Callable[..., Awaitable[list[Gateway]]]


@pytest.fixture
def begin(open_gateway: Open, tmp_path: Path) -> Begin:
    """Starts so many workers in this loop, with settings of `[streams]`."""

    async def started(count: int = 2, **settings: Any) -> list[Gateway]:
        memory, store, keys = Whereabouts(count, 50), Memory(), {}
        (tmp_path / "run").mkdir(mode=0o700)
        workers = []
        for number in range(count):
            whereabouts = copy.copy(memory)
            whereabouts.join(number)
            workers.append(await open_gateway(worker=Worker(whereabouts, tmp_path / "run", store, keys), **settings))
        return workers

    return started


async def come_back(gateway: Gateway, last_id: str, way: str = "GET", *, headers: str = "", receive_buffer: int = 0, **more: Any) -> Client:
    client = await gateway.client(receive_buffer=receive_buffer)
    headers += f"Last-Event-ID: {last_id}\r\n"
    if way == "GET":
        await client.send("GET", f"/v1/streams/{last_id.split('.')[0]}", headers=headers, **more)
    else:
        await client.post({"messages": [{"role": "user", "content": "x" * 100_000}], "stream": True}, headers=headers, **more)
    return client


async def left(gateway: Gateway, events: int = 20, order: str = ORDER) -> Client:
    """A client that has so many events of a stream, and left."""
    client = await gateway.ask(order)
    await client.until(lambda: len(client.events) >= events)
    client.leave()
    return client


async def dies(worker: Gateway) -> None:
    """As a killed worker: nobody answers on its socket."""
    assert worker._serving is not None
    worker._serving.cancel()
    await asyncio.gather(worker._serving, return_exceptions=True)


# -- kept streams


@pytest.mark.parametrize("way", ["GET", "POST"])
async def test_the_rest_comes_from_any_worker(begin: Begin, way: str) -> None:
    """Byte for byte what the worker that keeps it would have sent, and the engine was asked once; the resume is one flight, booked there."""
    workers = await begin(2, leave="keep")
    first = await left(workers[0])
    here, there = await come_back(workers[0], first.last_id, way), None
    await here.rest()
    there = await come_back(workers[1], first.last_id, way)
    await there.rest()
    assert there.status == 200
    assert there.body == here.body
    assert there.events[-1].endswith(b"data: [DONE]")
    assert [event.split(b"\n")[0].rpartition(b".")[2] for event in first.events + there.events] == [
        b"%d" % number for number in range(1, len(first.events + there.events) + 1)
    ]
    assert workers[0].engine.requests == 1
    assert workers[1].notes.booked == 0
    flight = workers[0].notes.flights[there.headers["x-request-id"]]
    assert (flight.end, flight.http_status) == ("stop", 200)
    await until(lambda: not workers[1].connections)
    assert not workers[1].house.running


async def test_many_breaks_over_four_workers_lose_nothing(begin: Begin) -> None:
    """Wherever it comes back, by either way, from the last event that it has."""
    workers, draw = await begin(4, leave="keep"), random.Random(7)
    client = await workers[2].ask("##i=1,n=400##")
    whole: list[bytes] = []
    while True:
        wanted = draw.randint(1, 60)
        while len(client.events) < wanted and not client.complete:
            await client.read()
        whole += client.events
        if client.complete:
            break
        client.leave()
        client = await come_back(workers[draw.randrange(4)], whole[-1].split(b"\n")[0].removeprefix(b"id: ").decode(), draw.choice(["GET", "POST"]))
    assert client.status == 200
    assert [event.split(b"\n")[0].rpartition(b".")[2] for event in whole] == [b"%d" % number for number in range(1, len(whole) + 1)]
    assert whole[-1].endswith(b"data: [DONE]")
    assert workers[2].engine.requests == 1


async def test_a_connection_is_good_for_more_requests(begin: Begin) -> None:
    """It stays open behind the rest of the stream, and whoever has it now answers."""
    workers = await begin(2, leave="keep")
    first = await left(workers[0], order="##n=30##")
    back = await come_back(workers[1], first.last_id)
    await back.rest()
    back.complete, back.body = False, b""
    await back.post({"messages": [{"role": "user", "content": "##n=3##"}], "model": "scripted"})
    await back.rest()
    assert back.status == 200
    assert workers[0].notes.last.id == back.headers["x-request-id"]


async def test_a_client_that_leaves_begins_the_grace(begin: Begin) -> None:
    """It came by way of another worker, and leaves again: its stream waits `grace_s` from there, then its run is cancelled and it is lost."""
    workers = await begin(2, leave="keep", grace_s=0.3)
    first = await left(workers[0], order=LONG)
    back = await come_back(workers[1], first.last_id)
    await back.until(lambda: len(back.events) >= 3)
    [stream] = workers[0].house.kept._streams.values()
    assert stream.reader is not None
    back.leave(reset=True)
    await until(lambda: stream.reader is None)
    await until(lambda: not workers[0].house.running and workers[0].engine.active == 0)
    late = await come_back(workers[1], back.last_id)
    await late.rest()
    assert (late.status, late.error()["code"]) == (410, "resume_lost")


async def test_a_slow_reader_slows_the_stream(begin: Begin) -> None:
    """Who reads nothing after its return by another worker: both hold what they would hold for a client of their own, and the engine waits."""
    workers = await begin(2, leave="keep", replay_bytes=65_536)
    first = await left(workers[0], order=FAST)
    back = await come_back(workers[1], first.last_id, receive_buffer=4096)
    [stream] = workers[0].house.kept._streams.values()
    await until(lambda: stream.reader is not None and stream.reader.sink.full)
    await until(lambda: bool(stream._waiters))  # the run waits for room
    assert workers[0].house.kept.size <= 65_536 + 1000
    assert not workers[1].connections
    await back.until(lambda: len(back.events) >= 2000)
    numbers = [int(event.split(b"\n")[0].split(b".")[1]) for event in first.events + back.events]
    assert numbers == list(range(1, len(numbers) + 1))


async def test_two_readers_by_two_workers(begin: Begin) -> None:
    """The newer one goes on, the older one is told so."""
    workers = await begin(3, leave="keep")
    first = await workers[0].ask(LONG)
    await first.until(lambda: len(first.events) >= 3)
    second = await come_back(workers[1], first.last_id)
    await second.until(lambda: len(second.events) >= 3)
    third = await come_back(workers[2], second.last_id)
    await third.until(lambda: len(third.events) >= 3)
    for one in (first, second):
        await one.rest()
        assert one.error()["code"] == "resumed_elsewhere"


async def test_others_do_not_learn_of_a_stream(begin: Begin) -> None:
    """Another key gets 404 in every worker, as for one that never was; an id that is none too."""
    workers = await begin(2, leave="keep")
    first = await left(workers[0])
    answers = []
    for last_id, key in ((first.last_id, "same"), (first.last_id, "other"), ("0" * 32 + ".1", "data")):
        for worker in workers:
            client = await come_back(worker, last_id, key=key)
            await client.rest()
            answers.append((client.status, client.error()["message"]))
    assert answers == [(404, "There is no such stream of yours.")] * 6
    client = await workers[1].client()
    await client.send("GET", "/v1/streams/zz")
    await client.rest()
    assert client.status == 404


async def test_a_stream_that_is_gone_is_said_to_be_by_all(begin: Begin) -> None:
    """Its grace is over: 410 wherever its client comes."""
    workers = await begin(2, leave="keep", grace_s=0.1)
    first = await left(workers[0])
    await until(lambda: not len(workers[0].house.kept))
    for worker in workers:
        late = await come_back(worker, first.last_id)
        await late.rest()
        assert (late.status, late.error()["code"]) == (410, "resume_lost")


@pytest.mark.parametrize("how", ["dead", "another with its number", "stopped", "breaks off", "dies before it goes on"])
async def test_a_worker_that_cannot_take_a_client(begin: Begin, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The stream is lost, and whoever comes for it is told so on its own connection, which is good for another request."""
    monkeypatch.setattr(peers_module, "PATIENCE_S", 0.3)
    workers = await begin(2, leave="keep")
    first = await left(workers[0], order=LONG)
    await dies(workers[0])
    peers = workers[0].peers
    assert peers is not None
    if how == "another with its number":
        again = copy.copy(workers[0].house.whereabouts)
        assert again is not None
        again.join(0)
    elif how != "dead":
        peers.listen()
        assert peers._listening is not None
        listening = peers._listening

        async def serve() -> None:
            link, _ = await asyncio.get_running_loop().sock_accept(listening)
            with link:
                if how == "stopped":
                    await asyncio.sleep(BOUND_S)
                await peers_module._receive(link, 100)
                if how == "dies before it goes on":
                    link.send(bytes(3))

        workers[0]._serving = asyncio.create_task(serve())
    back = await come_back(workers[1], first.last_id)
    await back.rest()
    assert (back.status, back.error()["code"]) == (410, "resume_lost")
    assert workers[1].notes.last.error_code == "resume_lost"
    back.complete, back.body = False, b""
    await back.post({"messages": [{"role": "user", "content": "##n=3##"}], "model": "scripted"})
    await back.rest()
    assert back.status == 200
    if peers._listening is not None:
        peers._listening.close()


async def test_a_connection_with_more_on_it_does_not_go(begin: Begin) -> None:
    """A client that has sent its next request already is told to come on a connection of its own: nothing of the next one is lost."""
    workers = await begin(2, leave="keep")
    first = await left(workers[0])
    client = await workers[1].client()
    head = f"GET /v1/streams/{first.last_id.split('.')[0]} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.gateway.keys['data']}\r\n\r\n"
    await asyncio.get_running_loop().sock_sendall(client.socket, head.encode() * 2)
    await client.until(lambda: client.bytes.count(b"HTTP/1.1 ") == 2)
    assert client.bytes.count(b"HTTP/1.1 503 ") == 1
    await client.until(lambda: b"data: [DONE]" in client.body)  # the second one, with nothing behind it, went


async def test_nobody_else_may_open_the_sockets(begin: Begin) -> None:
    """0600, in a folder of 0700."""
    workers = await begin(2, leave="keep")
    assert workers[0].worker is not None
    for path in workers[0].worker.folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(workers[0].worker.folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "sent",
    [b"", b"H", b"H\xff\xff\xff\xff", b"H\0\0\0\x05hello", b"X\0\0\0\0", b"C\0\0\0\x05hello", b"C\0\0\0\x02\x93\xa1", b"C\0\0\0\x04\x93\x01\x02\x03"],
)
async def test_what_no_worker_says_harms_nobody(begin: Begin, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken, endless or unknown: the link is closed, and the worker serves on."""
    monkeypatch.setattr(peers_module, "PATIENCE_S", 0.2)
    workers = await begin(2, leave="keep")
    assert workers[0].peers is not None
    reader, writer = await asyncio.open_unix_connection(str(workers[0].peers._path(0)))
    writer.write(sent)
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
    first = await left(workers[0], order="##n=30##")
    back = await come_back(workers[1], first.last_id)
    await back.rest()
    assert back.status == 200


# -- barge-in


def headers(*, barge_in: bool = False, name: str = "c1") -> str:
    return f"x-tidegate-conversation: {name}\r\n" + ("x-tidegate-barge-in: 1\r\n" if barge_in else "")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_newer_message_cuts_in_every_worker(begin: Begin, stream: bool) -> None:
    """What runs elsewhere of the conversation is cut before the newer one is answered, and both flights name each other."""
    workers = await begin(3)
    older = [await worker.ask(LONG, headers=headers(), stream=stream) for worker in workers[:2]]
    other = await workers[0].ask("##i=20,n=40##", headers=headers(name="c2"))
    await until(lambda: workers[0].engine.active == 3)
    newer = await workers[2].ask("##n=3##", headers=headers(barge_in=True))
    await newer.rest()
    for one in older:
        await one.rest()
        assert (one.error()["code"], one.error()["superseded_by"]) == ("superseded", newer.headers["x-request-id"])
    [superseded] = [facts["superseded"] for _, what, facts in workers[2].notes.last.decisions if what == "barge_in"]
    assert sorted(superseded) == sorted(one.error()["trace_id"] for one in older)
    await other.rest()
    assert other.events[-1] == b"data: [DONE]"
    for worker in workers:
        assert len(worker.house.conversations) == 0


async def test_of_many_newcomers_one_is_left(begin: Begin) -> None:
    """They come at once in four workers: the last one cuts all others, and one answer comes to its end."""
    workers = await begin(4)
    runs = [await workers[number % 4].ask("##i=20,n=60##", headers=headers(barge_in=True)) for number in range(12)]
    ends = []
    for one in runs:
        await one.rest()
        ends.append("done" if one.events[-1:] == [b"data: [DONE]"] else one.error()["code"])
    assert sorted(ends) == ["done"] + ["superseded"] * 11
    for worker in workers:
        assert len(worker.house.conversations) == 0


async def test_without_barge_in_nobody_is_cut(begin: Begin) -> None:
    """And another key's conversation of the same name is another one."""
    workers = await begin(2)
    older = await workers[0].ask("##i=20,n=30##", headers=headers())
    await older.until(lambda: len(older.events) >= 2)
    for key, more in (("data", headers()), ("other", headers(barge_in=True)), ("same", headers(barge_in=True))):
        newer = await workers[1].ask("##n=3##", key=key, headers=more)
        await newer.rest()
        assert newer.events[-1] == b"data: [DONE]"
    await older.rest()
    assert older.events[-1] == b"data: [DONE]"


@pytest.mark.parametrize("how", ["dead", "stopped"])
async def test_a_worker_that_is_not_there_holds_no_newcomer(begin: Begin, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Its runs ended with it, or it hears of it later: the newer message is answered all the same."""
    monkeypatch.setattr(peers_module, "PATIENCE_S", 0.3)
    workers = await begin(2)
    older = await workers[0].ask(LONG, headers=headers())
    await older.until(lambda: len(older.events) >= 2)
    await dies(workers[0])
    assert workers[0].peers is not None
    if how == "stopped":
        workers[0].peers.listen()
    newer = await workers[1].ask("##n=3##", headers=headers(barge_in=True))
    await newer.rest()
    assert newer.events[-1] == b"data: [DONE]"
    older.leave()
    if workers[0].peers._listening is not None:
        workers[0].peers._listening.close()
    await workers[0].settled(1)


async def test_a_socket_takes_part(begin: Begin) -> None:
    """The WebSocket twin: a run on a socket of one worker is cut by a message that another one gets, and the socket lives on."""
    websockets = pytest.importorskip("websockets.asyncio.client")
    workers = await begin(2)
    key = workers[0].keys["data"]
    url = f"ws://{workers[0].host}:{workers[0].port}{CHAT}"
    named = {"authorization": f"Bearer {key}", "x-tidegate-conversation": "c1"}
    async with websockets.connect(url, additional_headers=named, compression=None) as socket:
        await socket.send(json.dumps({"messages": [{"role": "user", "content": LONG}]}))
        await socket.recv()
        newer = await workers[1].ask("##n=3##", headers=headers(barge_in=True))
        await newer.rest()
        while "error" not in (last := json.loads(await socket.recv())):
            pass
        assert (last["error"]["code"], last["error"]["superseded_by"]) == ("superseded", newer.headers["x-request-id"])
        await socket.send(json.dumps({"messages": [{"role": "user", "content": "##n=2##"}]}))
        while await socket.recv() != "[DONE]":
            pass


# -- the list


_STEPS = st.tuples(st.sampled_from(["keep", "drop", "forget", "die", "enter", "leave"]), st.integers(0, 2), st.integers(0, 5))


@hypothesis_settings(deadline=None)
@given(st.lists(_STEPS, max_size=60))
def test_the_list_says_who_has_what(steps: list[tuple[str, int, int]]) -> None:
    """Streams that are kept, dropped and lost with their worker, and conversations that run in one or several, whatever happens in whatever order."""
    memory = Whereabouts(3, 4)
    workers = [joined(memory, number) for number in range(3)]
    kept: dict[str, tuple[int, bool]] = {}  # by id: the worker, and whether it lives
    held: list[set[str]] = [set(), set(), set()]
    running: list[set[str]] = [set(), set(), set()]
    newest = 0
    for number, (step, which, other) in enumerate(steps):
        worker, stream, name = workers[which], f"{number + 1:032x}", ("t", "k", f"c{other}")
        if step == "keep" and len(held[which]) < 4:
            worker.keep(stream, ("t", f"k{other % 2}"))
            kept[stream] = (which, True)
            held[which].add(stream)
        elif step in ("drop", "forget") and held[which]:
            stream = sorted(held[which])[other % len(held[which])]
            held[which].discard(stream)
            worker.drop(stream, remember=step == "drop")
            worker.drop(stream, remember=True)  # twice is as once
            if step == "forget":
                del kept[stream]
        elif step == "die":
            memory.clear(which)
            workers[which] = joined(memory, which)
            kept = {one: (at, lives and at != which) for one, (at, lives) in kept.items()}
            held[which], running[which] = set(), set()
        elif step == "enter":
            entered = worker.enter(name, look=True)
            assert entered.number > newest
            newest = entered.number
            assert entered.workers == [at for at in range(3) if at != which and name[2] in running[at]]
            running[which].add(name[2])
        elif step == "leave":
            worker.leave(name)
            running[which].discard(name[2])
        for one, (at, lives) in kept.items():
            found = {workers[other % 3].find(one, ("t", f"k{key}")) for key in range(2)}
            assert found == {None, Listed(at, lives)}
    assert workers[0].find("f" * 32, ("t", "k0")) is None


def joined(memory: Whereabouts, number: int) -> Whereabouts:
    mine = copy.copy(memory)
    mine.join(number)
    return mine
