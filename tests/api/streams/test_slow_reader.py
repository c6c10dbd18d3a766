"""Clients that read slowly, or not at all: what waits for them is bounded, whatever the policy, and leaving still frees the engine at once."""

from __future__ import annotations

import asyncio
import json

import hypothesis
import pytest
from hypothesis import strategies as st
from tests.api.streams.conftest import FAST, Gateway, Open, until

import tidegate.api.coalesce as coalesce_module
from tidegate.api.coalesce import coalesce
from tidegate.engines.openai_http import OpenAIHttp

MOST_BYTES = 8_000_000
POLICIES = ["block", "coalesce", "drop"]


def held_bytes(gateway: Gateway) -> int:
    """What the gateway holds for clients that do not read, from the engine's socket to theirs."""
    to_clients = sum(connection.transport.get_write_buffer_size() for connection in gateway.connections)
    merged = sum(exchange._held.size for exchange in gateway.house.running if exchange._held)
    from_engines = 0
    for engine in gateway.fleet.engines:
        assert isinstance(engine, OpenAIHttp)
        from_engines += sum(connection.reply._size for connection in engine.pool._all if connection.reply is not None)
    return to_clients + merged + from_engines


@pytest.mark.parametrize("policy", POLICIES)
async def test_an_endless_stream_to_a_client_that_does_not_read_is_bounded(open_gateway: Open, policy: str) -> None:
    """Whatever the policy, the engine comes to stand still while little waits for the client."""
    gateway = await open_gateway(slow_reader=policy)
    await gateway.ask(FAST, receive_buffer=4096)
    await until(lambda: any(connection.flow.write_paused for connection in gateway.connections))
    written, most = -1, 0
    while gateway.engine.written != written:
        written = gateway.engine.written
        for _ in range(100):
            await asyncio.sleep(0.001)
            most = max(most, held_bytes(gateway))
    assert 0 < most < 1_000_000 < MOST_BYTES
    assert gateway.engine.active == 1


async def test_a_slow_reader_gets_everything(open_gateway: Open) -> None:
    """With `block`, a client that pauses gets each event as the engine said it."""
    gateway = await open_gateway()
    order = f"##i=0.05,n=800,w={'x' * 180}##"
    client = await gateway.ask(order, receive_buffer=4096)
    await until(lambda: any(connection.flow.write_paused for connection in gateway.connections))
    await client.rest()
    assert client.text == "x" * 180 * 800
    assert len(gateway.notes.last.token_ns) == 800


async def test_coalesced_events_say_the_same(open_gateway: Open) -> None:
    """With `coalesce`, a client that pauses gets all the text, in fewer events, while the engine went on."""
    gateway = await open_gateway(slow_reader="coalesce", coalesce_bytes=4_000_000)
    order = f"##i=0.05,n=6000,w={'x' * 180}##"
    client = await gateway.ask(order, receive_buffer=4096)
    await until(lambda: gateway.engine.requests == 1 and gateway.engine.active == 0)
    assert gateway.house.running, "the client has not read yet"
    await client.rest()
    assert client.text == "x" * 180 * 6000
    assert len(client.events) < 5000
    assert client.body.endswith(b"data: [DONE]\n\n")
    assert gateway.notes.last.usage.completion_tokens == 6000


async def test_a_client_is_given_up(open_gateway: Open) -> None:
    """With `drop`, a client that reads no byte for `slow_reader_s` is let go, and its flight says why."""
    gateway = await open_gateway(slow_reader="drop", slow_reader_s=0.5)
    client = await gateway.ask(FAST, receive_buffer=4096)
    await gateway.settled(1)
    flight = gateway.notes.last
    assert (flight.end, flight.error_code, flight.http_status) == ("client_gone", "slow_reader", 499)
    assert gateway.engine.aborted == 1
    await client.rest()  # what had left already, and then the connection closes in the middle
    assert b"[DONE]" not in client.body


async def test_a_client_that_reads_a_little_is_not_given_up(open_gateway: Open) -> None:
    """Progress counts, not speed: who reads on, however slowly, stays."""
    gateway = await open_gateway(slow_reader="drop", slow_reader_s=0.6)
    client = await gateway.ask(FAST, receive_buffer=4096)
    await until(lambda: any(connection.flow.write_paused for connection in gateway.connections))
    for _ in range(15):
        for _ in range(20):
            await client.read()
        await asyncio.sleep(0.1)
    assert gateway.house.running
    assert not gateway.notes.booked
    client.leave()
    await gateway.settled(1)


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_slow_reader_that_leaves_frees_the_engine(open_gateway: Open, policy: str) -> None:
    """Where a client both reads slowly and leaves, nothing waits for its buffer."""
    gateway = await open_gateway(slow_reader=policy)
    client = await gateway.ask(FAST, receive_buffer=4096)
    await until(lambda: any(connection.flow.write_paused for connection in gateway.connections))
    client.leave()
    await gateway.settled(1)
    assert (gateway.notes.last.end, gateway.engine.aborted) == ("client_gone", 1)


async def test_the_threshold_is_a_setting(open_gateway: Open) -> None:
    """`buffer_bytes` says from when on a client counts as slow."""
    gateway = await open_gateway(buffer_bytes=1_000_000)
    await gateway.ask(FAST, receive_buffer=4096)
    await until(lambda: any(connection.transport.get_write_buffer_size() > 500_000 for connection in gateway.connections))


# -- merging


def chat(**delta: object) -> bytes:
    whole = {"id": "a", "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    return b"data: " + json.dumps(whole).encode() + b"\n\n"


def contents(events: bytes) -> list[object]:
    return [json.loads(event.partition(b"data: ")[2])["choices"][0]["delta"] for event in events.split(b"\n\n") if event]


def test_deltas_in_a_row_become_one() -> None:
    """Text joins text and reasoning joins reasoning; neither overtakes the other."""
    events = chat(content="a") + chat(content="b") + chat(reasoning_content="r") + chat(reasoning_content="s") + chat(content="data: c\n")
    assert contents(coalesce(events)) == [{"content": "ab"}, {"reasoning_content": "rs"}, {"content": "data: c\n"}]


def test_what_is_alone_leaves_as_it_came() -> None:
    """An event that is merged with none keeps its bytes."""
    events = b'data: {"choices":[{"delta":{"content":"a"}, "index":0}],  "odd": 1}\n\ndata: [DONE]\n\n: comment\n\nevent: error\ndata: {"x": 1}\n\n'
    assert coalesce(events) == events


@pytest.mark.parametrize("more", [{"logprobs": {"content": [1]}}, {"index": 1}, {"finish_reason": "stop"}, {"token_ids": [5]}])
def test_what_a_merge_would_lose_is_not_merged(more: dict[str, object]) -> None:
    """Events that differ in anything but their text stay two."""
    other = json.dumps({"id": "a", "model": "m", "choices": [{"index": 0, "delta": {"content": "b"}, "finish_reason": None, **more}]})
    events = chat(content="a") + b"data: " + other.encode() + b"\n\n"
    assert coalesce(events) == events


def test_the_newest_count_stands() -> None:
    """Where events tell usage so far, the merged one tells the newest."""
    events = b"".join(
        b'event: token\ndata: {"text":"%b","usage":{"completion_tokens":%d}}\n\n' % (text, count) for text, count in ((b"a", 1), (b"b", 2))
    )
    merged = coalesce(events)
    assert merged.startswith(b"event: token\ndata: ")
    assert json.loads(merged.partition(b"data: ")[2]) == {"text": "ab", "usage": {"completion_tokens": 2}}


@hypothesis.given(st.lists(st.text(max_size=5), min_size=1, max_size=30), st.integers(1, 8))
def test_each_event_is_read_once_as_it_comes(texts: list[str], size: int) -> None:
    """Merged piece by piece the events are those of all at once; each was decoded once, and the size is never less than the text that waits."""
    read: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        decode = coalesce_module._read
        patch.setattr(coalesce_module, "_read", lambda event: read.append(event) or decode(event))
        held = coalesce_module.Coalesced()
        for at in range(0, len(texts), size):
            held.add(b"".join(chat(content=text) for text in texts[at : at + size]))
            assert held.size >= sum(len(text.encode()) for text in texts[: at + size])
        merged = held.take()
    assert len(read) == len(texts)
    assert contents(merged) == [{"content": "".join(texts)}]
    assert (held.size, held.take()) == (0, b"")


KINDS = ("content", "reasoning_content", "other", "end", "odd")


@hypothesis.given(st.lists(st.tuples(st.sampled_from(KINDS), st.text(max_size=5)), max_size=30))
def test_merging_changes_no_text(said: list[tuple[str, str]]) -> None:
    """Whatever comes after whatever, the text of each kind is the same, in the same order between what is not merged."""

    def event(kind: str, text: str) -> bytes:
        if kind == "end":
            return b"data: [DONE]\n\n"
        if kind == "odd":
            return b"event: x\ndata: " + json.dumps({"text": text}).encode() + b"\n\n"
        if kind == "other":
            return b"event: token\ndata: " + json.dumps({"text": text}).encode() + b"\n\n"
        return chat(**{kind: text})

    def told(events: bytes) -> list[tuple[str, str]]:
        """Texts in a row of one kind as one."""
        rows: list[tuple[str, str]] = []
        for one in events.split(b"\n\n")[:-1]:
            head, _, data = one.partition(b"data: ")
            if data == b"[DONE]":
                rows.append(("end", ""))
                continue
            whole = json.loads(data)
            kind, text = (head.decode(), whole["text"]) if "text" in whole else next(iter(whole["choices"][0]["delta"].items()))
            if rows and rows[-1][0] == kind and kind != "event: x\n":
                rows[-1] = (kind, rows[-1][1] + text)
            else:
                rows.append((kind, text))
        return rows

    events = b"".join(event(kind, text) for kind, text in said)
    merged = coalesce(events)
    assert told(merged) == told(events)
    assert len(merged) <= len(events)
