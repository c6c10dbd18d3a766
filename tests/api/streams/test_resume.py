"""Coming back: a client that left a kept stream gets the rest, nothing lost and nothing twice."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from tests.api.streams.conftest import FAST, Client, Gateway, Open, until

from tidegate.pipeline.capability import load

WORDS = 300
ORDER = f"##i=1,n={WORDS}##"


async def whole_text(gateway: Gateway, order: str = ORDER) -> str:
    """What the engine says to an order: always the same."""
    client = await gateway.ask(order)
    await client.rest()
    return client.text


async def come_back(gateway: Gateway, last_id: str, way: str = "GET", **more: Any) -> Client:
    """A new connection that asks for the rest, by either way."""
    client = await gateway.client()
    headers = f"Last-Event-ID: {last_id}\r\n"
    if way == "GET":
        await client.send("GET", f"/v1/streams/{last_id.split('.')[0]}", headers=headers, **more)
    else:
        await client.post({"messages": [{"role": "user", "content": "anything"}], "stream": True}, headers=headers, **more)
    return client


@pytest.mark.parametrize("way", ["GET", "POST"])
async def test_a_client_that_comes_back_gets_the_rest(open_gateway: Open, way: str) -> None:
    """While the answer still runs: what was said meanwhile, then live on, to `[DONE]`. The engine was asked once."""
    gateway = await open_gateway(leave="keep")
    whole = await whole_text(gateway)
    asked = gateway.engine.requests
    first = await gateway.ask(ORDER)
    await first.until(lambda: len(first.events) >= 20)
    first.leave()
    last_id = first.last_id
    second = await come_back(gateway, last_id, way)
    await second.rest()
    assert first.text + second.text == whole
    assert second.events[-1].endswith(b"data: [DONE]")
    assert gateway.engine.requests == asked + 1


async def test_both_flights_are_booked(open_gateway: Open) -> None:
    """The run's flight says how the answer ended and that its client left; the reader's own names the first, and books no tokens twice."""
    gateway = await open_gateway(leave="keep")
    first = await gateway.ask(ORDER)
    await first.until(lambda: len(first.events) >= 20)
    first.leave()
    second = await come_back(gateway, first.last_id)
    await second.rest()
    await gateway.settled(2)
    run, reader = (gateway.notes.flights[client.headers["x-request-id"]] for client in (first, second))
    assert (run.end, run.http_status, run.usage.completion_tokens, run.usage.exact) == ("stop", 499, WORDS, True)
    assert (reader.end, reader.http_status, reader.usage.total_tokens, reader.model) == ("stop", 200, 0, "scripted")
    [(resumed)] = [facts for _, what, facts in reader.decisions if what == "resumed"]
    assert resumed == {"of": run.id, "after": int(first.last_id.split(".")[1])}
    assert second.headers["x-tidegate-resumes"] == run.id


async def test_many_breaks_lose_nothing(open_gateway: Open) -> None:
    """A client that breaks off at random bytes, again and again, has the whole text in the end."""
    gateway = await open_gateway(leave="keep")
    whole = await whole_text(gateway)
    draw = random.Random(7)
    client = await gateway.ask(ORDER)
    await client.until(lambda: len(client.events) > 0)
    events: list[bytes] = []
    last_id = ""
    breaks = 0
    while True:
        some = draw.randint(1, 4000)
        while len(client.body) < some and not client.complete:
            await client.read(draw.choice((1, 7, 100, 5000)))
        events += client.events  # half an event is none
        if client.complete:
            break
        last_id = client.last_id if client.events else last_id
        client.leave(reset=draw.random() < 0.5)
        breaks += 1
        client = await come_back(gateway, last_id, draw.choice(("GET", "POST")))
        await client.until(lambda: client.status == 200)  # noqa: B023 - the client of this turn is meant
    assert breaks > 10
    reader = Client(gateway)
    reader.body = b"".join(event + b"\n\n" for event in events)
    assert reader.text == whole
    numbers = [int(event.split(b"\n")[0].split(b".")[1]) for event in events]
    assert numbers == list(range(1, len(numbers) + 1))


async def test_a_finished_stream_can_be_read_again(open_gateway: Open) -> None:
    """After the end, and from the beginning where no position is given: what was on its way to a client that broke off is lost to it."""
    gateway = await open_gateway(leave="keep")
    first = await gateway.ask("##n=5##")
    await first.rest()
    again = await gateway.client()
    await again.send("GET", "/v1/streams/" + first.headers["x-request-id"])
    await again.rest()
    assert again.events == first.events


async def test_others_do_not_learn_of_a_stream(open_gateway: Open) -> None:
    """Another key, of the same tenant or not, is answered as if there were no such stream."""
    gateway = await open_gateway(leave="keep")
    first = await gateway.ask("##n=5##")
    await first.rest()
    said = set()
    for key in ("same", "other"):
        for last_id in (first.last_id, "f" * 32 + ".1"):
            for way in ("GET", "POST"):
                client = await come_back(gateway, last_id, way, key=key)
                await client.rest()
                assert client.status == 404
                said.add(client.error()["message"])
    assert len(said) == 1


async def test_too_late_is_said(open_gateway: Open) -> None:
    """After the grace time the run is cancelled, its client is booked as gone, and who comes then is told that the rest is lost."""
    gateway = await open_gateway(leave="keep", grace_s=0.3)
    first = await gateway.ask("##i=5,n=50000##")
    await first.until(lambda: len(first.events) >= 5)
    first.leave()
    await gateway.settled(1)
    assert (gateway.notes.last.end, gateway.notes.last.http_status, gateway.engine.aborted) == ("client_gone", 499, 1)
    assert gateway.notes.last.usage.completion_tokens > 0
    for way in ("GET", "POST"):
        late = await come_back(gateway, first.last_id, way)
        await late.rest()
        assert (late.status, late.error()["code"]) == (410, "resume_lost")
    assert gateway.engine.requests == 1


async def test_who_left_before_the_head_is_cancelled(open_gateway: Open) -> None:
    """Without a head the client knows no id to come back with: nothing is kept for it."""
    gateway = await open_gateway(leave="keep")
    first = await gateway.ask("##t=60000##")
    await until(lambda: gateway.engine.active == 1)
    first.leave()
    await gateway.settled(1)
    assert (gateway.notes.last.end, len(gateway.house.kept)) == ("client_gone", 0)


async def test_two_readers(open_gateway: Open) -> None:
    """The newer reader goes on; the older one, be it the first client or one that came back, is ended with an error event and no `[DONE]`."""
    gateway = await open_gateway(leave="keep")
    whole = await whole_text(gateway)
    clients = [await gateway.ask(ORDER)]
    await clients[0].until(lambda: len(clients[0].events) >= 20)
    for _ in range(2):
        clients.append(await come_back(gateway, clients[-1].last_id))
        await clients[-1].until(lambda: len(clients[-1].events) >= 20)
    for client in clients:
        await client.rest()
    for older in clients[:2]:
        assert older.error()["code"] == "resumed_elsewhere"
        assert b"[DONE]" not in older.body
    assert clients[2].events[-1].endswith(b"[DONE]")
    await gateway.settled(4)
    assert gateway.notes.flights[clients[0].headers["x-request-id"]].end == "stop"
    assert gateway.notes.flights[clients[1].headers["x-request-id"]].end == "client_gone"
    # each took over from what the one before had read, so the newest has the rest from there
    assert whole.endswith(clients[2].text)


async def test_the_end_of_a_failed_answer_is_kept_too(open_gateway: Open) -> None:
    """Who comes back to an answer that failed gets what there was, and the error."""
    gateway = await open_gateway(leave="keep")
    first = await gateway.ask("##i=5,n=40,m=error_event,k=30##")
    await first.until(lambda: len(first.events) >= 3)
    first.leave()
    await until(lambda: gateway.engine.active == 0)
    second = await come_back(gateway, first.last_id)
    await second.rest()
    assert second.error()["code"] == "engine_dead"
    assert second.error()["trace_id"] == first.headers["x-request-id"]
    assert b"[DONE]" not in second.body
    await gateway.settled(2)
    assert {flight.end for flight in gateway.notes.flights.values()} == {"error"}


async def test_an_endless_answer_is_bounded(open_gateway: Open) -> None:
    """While nobody reads, a kept stream takes no more than its buffer: the engine waits. Who comes back finds nothing missing."""
    gateway = await open_gateway(leave="keep", replay_bytes=65_536)
    first = await gateway.ask(FAST)
    await first.until(lambda: len(first.events) >= 3)
    first.leave()
    await until(lambda: gateway.house.kept.size > 32_768)
    written = 0
    while gateway.engine.written != written:  # until the engine stands still
        written = gateway.engine.written
        for _ in range(50):
            await asyncio.sleep(0.001)
    assert gateway.house.kept.size <= 65_536 + 1000
    second = await come_back(gateway, first.last_id)
    await second.until(lambda: len(second.events) >= 500)
    numbers = [int(event.split(b"\n")[0].split(b".")[1]) for event in first.events + second.events]
    assert numbers == list(range(1, len(numbers) + 1))


async def test_a_capability_is_kept_as_it_says(open_gateway: Open, tmp_path: Any) -> None:
    """`[leave]` in capability.toml: events of a business stream carry ids, and the same POST with `Last-Event-ID` gets the rest."""
    folder = tmp_path / "test" / "kept"
    (folder / "prompts" / "v1").mkdir(parents=True)
    (folder / "capability.toml").write_text('stages = ["prompt", "generate"]\nmodel = "scripted"\n[leave]\npolicy = "keep"\n')
    (folder / "input.schema.json").write_text('{"type": "object", "properties": {"order": {"type": "string"}}}')
    (folder / "output.schema.json").write_text('{"type": "object"}')
    (folder / "prompts" / "v1" / "template.jinja").write_text("{% block system %}s{% endblock %}{% block user %}{{ input.order }}{% endblock %}")
    gateway = await open_gateway(load(folder))
    first = await gateway.client()
    accept = "Accept: text/event-stream\r\n"
    await first.post({"order": ORDER}, path="/api/v1/test/kept", headers=accept)
    await first.until(lambda: len(first.events) >= 20)
    first.leave()
    second = await gateway.client()
    await second.post({"order": ORDER}, path="/api/v1/test/kept", headers=accept + f"Last-Event-ID: {first.last_id}\r\n")
    await second.rest()
    answer = second.events[-1]
    assert b"\nevent: answer\n" in answer
    assert first.text + second.text == json.loads(answer.partition(b"data: ")[2])["answer"]
    assert gateway.engine.requests == 1


async def test_coming_back_where_nothing_is_kept_is_refused(open_gateway: Open) -> None:
    """A gateway that keeps no streams does not run the request again, which would say everything twice."""
    gateway = await open_gateway()
    asked = gateway.engine.requests
    client = await come_back(gateway, "01a22979146dc4fca89017a2ebae7653.7", "POST")
    await client.rest()
    assert client.status == 404
    assert gateway.engine.requests == asked
