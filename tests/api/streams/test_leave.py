"""Clients that leave: the engine is freed at once, or as the policy says, and every request ends in one flight."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.api.streams.conftest import FAST, Gateway, Open, until

from tidegate.engines.wire import Connection as EngineConnection


async def before_the_first_token(gateway: Gateway) -> Any:
    client = await gateway.ask("##t=60000##")
    await until(lambda: gateway.engine.active == 1)
    return client


async def between_tokens(gateway: Gateway) -> Any:
    client = await gateway.ask("##i=20,n=50000##")
    await client.until(lambda: len(client.events) >= 3)
    return client


async def of_a_whole_answer(gateway: Gateway) -> Any:
    client = await gateway.ask("##t=60000##", stream=False)
    await until(lambda: gateway.engine.active == 1)
    return client


async def while_it_reads_nothing(gateway: Gateway) -> Any:
    client = await gateway.ask(FAST, receive_buffer=4096)
    await until(lambda: any(connection.flow.write_paused for connection in gateway.connections))
    return client


async def after_a_pipelined_request(gateway: Gateway) -> Any:
    client = await before_the_first_token(gateway)
    await client.post({"messages": [{"role": "user", "content": "##n=1##"}]})
    await until(lambda: any(connection.pipeline for connection in gateway.connections))
    return client


async def after_a_large_body(gateway: Gateway) -> Any:
    """Its end comes in one piece, while it is waited for: then the socket is paused until somebody says otherwise."""
    client = await gateway.client()
    body = json.dumps({"messages": [{"role": "user", "content": "##t=60000##" + " " * 110_000}], "stream": True}).encode()
    await client.send("POST", "/v1/chat/completions", body, cut=100_000)
    await until(lambda: len(gateway.house.running) == 1)
    await asyncio.sleep(0)
    await asyncio.get_running_loop().sock_sendall(client.socket, body[-100_000:])
    await until(lambda: gateway.engine.active == 1)
    return client


MOMENTS = [before_the_first_token, between_tokens, of_a_whole_answer, while_it_reads_nothing, after_a_pipelined_request, after_a_large_body]


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
async def test_the_engine_is_freed_when_the_client_leaves(open_gateway: Open, moment: Callable[..., Any], reset: bool) -> None:
    """Whenever a client closes or resets its connection, the engine's connection is aborted and the flight says that the client left."""
    gateway = await open_gateway()
    client = await moment(gateway)
    client.leave(reset=reset)
    await gateway.settled(1)
    assert gateway.engine.aborted == 1
    flight = gateway.notes.last
    assert (flight.end, flight.http_status, gateway.notes.booked) == ("client_gone", 499, 1)
    assert flight.usage.prompt_tokens > 0
    assert not flight.usage.exact
    await until(lambda: not gateway.state.connections and not gateway.state.tasks)


async def test_tokens_so_far_are_booked(open_gateway: Open) -> None:
    """A client that leaves between tokens is booked with those that came, as an estimate."""
    gateway = await open_gateway()
    client = await gateway.ask("##i=1,n=50000##")
    await client.until(lambda: len(client.events) >= 20)
    client.leave()
    await gateway.settled(1)
    flight = gateway.notes.last
    assert len(flight.token_ns) >= 19
    assert (flight.usage.exact, flight.usage.completion_tokens >= 10) == (False, True)


async def test_a_client_that_only_stops_sending_is_answered(open_gateway: Open) -> None:
    """`shutdown(SHUT_WR)` after the request is not leaving: streams and whole answers come to their end, and then the connection closes."""
    gateway = await open_gateway()
    for stream in (True, False):
        client = await gateway.ask("##t=30,i=5,n=20##", stream=stream)
        await until(lambda: gateway.engine.active == 1)
        client.socket.shutdown(socket.SHUT_WR)
        body = await client.rest()
        assert (b"[DONE]" in body) == stream
        assert b"stop" in body
        assert await client.read() == b""
    await gateway.settled(2)
    assert {flight.end for flight in gateway.notes.flights.values()} == {"stop"}


async def test_a_client_that_stops_sending_and_leaves_later_is_noticed(open_gateway: Open) -> None:
    """A client that read on for a while after it had stopped sending, and then leaves, frees the engine too."""
    gateway = await open_gateway()
    client = await gateway.ask("##i=5,n=50000##")
    client.socket.shutdown(socket.SHUT_WR)
    await client.until(lambda: len(client.events) > 10)
    client.leave()
    await gateway.settled(1)
    assert gateway.notes.last.end == "client_gone"


async def test_an_old_client_gets_plain_bytes(open_gateway: Open) -> None:
    """HTTP/1.0: no chunks, the end of the stream is the end of the connection."""
    gateway = await open_gateway()
    client = await gateway.client()
    await client.send("POST", "/v1/chat/completions", b'{"messages": [{"role": "user", "content": "##n=3##"}], "stream": true}', version="1.0")
    await client.rest()
    assert "transfer-encoding" not in client.headers
    assert client.bytes.endswith(b"\n\ndata: [DONE]\n\n")
    assert gateway.notes.last.end == "stop"


async def test_drain_reads_on_for_exact_usage(open_gateway: Open) -> None:
    """With `drain`, an answer that ends within the granted tokens is read to its end: its usage is exact, and still the client left."""
    gateway = await open_gateway(leave="drain", drain_tokens=1000)
    client = await gateway.ask("##i=2,n=60##")
    await client.until(lambda: len(client.events) >= 3)
    client.leave()
    await gateway.settled(1)
    flight = gateway.notes.last
    assert (flight.end, flight.http_status, flight.usage.exact, flight.usage.completion_tokens) == ("client_gone", 499, True, 60)
    assert gateway.engine.aborted == 0
    assert [fact["policy"] for _, what, fact in flight.decisions if what == "client_left"] == ["drain"]


async def test_drain_ends(open_gateway: Open) -> None:
    """With `drain`, an answer that goes on is given up after the granted tokens, not before and not much later."""
    gateway = await open_gateway(leave="drain", drain_tokens=40)
    client = await gateway.ask("##i=2,n=50000##")
    await client.until(lambda: len(client.events) >= 3)
    client.leave()
    await gateway.settled(1)
    flight = gateway.notes.last
    [left_at] = [fact["tokens"] for _, what, fact in flight.decisions if what == "client_left"]
    assert left_at + 40 <= len(flight.token_ns) <= left_at + 60
    assert (flight.end, gateway.engine.aborted) == ("client_gone", 1)


async def test_a_caller_chooses_what_the_operator_allows(open_gateway: Open) -> None:
    """The header `x-tidegate-leave` chooses among the allowed policies; anything else is refused with their names."""
    gateway = await open_gateway(callers_may=["keep"])
    client = await gateway.ask("##n=2##", headers="x-tidegate-leave: keep\r\n")
    await client.rest()
    assert client.last_id == client.headers["x-request-id"] + ".4"
    for wrong in ("drain", "stay", ""):
        client = await gateway.ask("##n=2##", headers=f"x-tidegate-leave: {wrong}\r\n")
        await client.rest()
        assert (client.status, client.error()["param"]) == (400, "x-tidegate-leave")
        assert "cancel, keep" in client.error()["message"]
    client = await gateway.ask("##n=2##")
    await client.rest()
    assert b"id: " not in client.body


async def test_a_choice_is_refused_where_the_operator_allows_none(open_gateway: Open) -> None:
    """A caller who wants a stream kept learns that it will not be, rather than when it comes back."""
    gateway = await open_gateway()
    client = await gateway.ask("##n=2##", headers="x-tidegate-leave: keep\r\n")
    await client.rest()
    assert (client.status, client.error()["param"]) == (400, "x-tidegate-leave")


async def test_from_leaving_to_abort(open_gateway: Open, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]) -> None:
    """The engine's connection is dropped in the turns of the loop that follow the client's going: nothing waits for a timer in between.

    The time is written down, not judged: the machine is shared. What is judged is that it needs a handful of turns.
    """
    gateway = await open_gateway()
    dropped: list[int] = []
    drop = EngineConnection.drop

    def noted(self: EngineConnection) -> None:
        dropped.append(time.perf_counter_ns())
        drop(self)

    monkeypatch.setattr(EngineConnection, "drop", noted)
    spent_ms: list[float] = []
    for moment in MOMENTS * 6:
        client = await moment(gateway)
        dropped.clear()
        left_ns = time.perf_counter_ns()
        client.leave()
        turns = 0
        while not dropped:
            await asyncio.sleep(0)
            turns += 1
            assert turns < 5000, moment.__name__
        spent_ms.append((dropped[0] - left_ns) / 1e6)
        await gateway.settled(1)
    spent_ms.sort()
    record_property("abort_ms_p50", spent_ms[len(spent_ms) // 2])
    record_property("abort_ms_max", spent_ms[-1])
    print(f"from close() to abort: P50 {spent_ms[len(spent_ms) // 2]:.2f} ms, max {spent_ms[-1]:.2f} ms")
