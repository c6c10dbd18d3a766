"""Events that are made here: OpenAI's shape, and one identity for the whole stream, whoever said the first event."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from tidegate.admission.limits import Ticket
from tidegate.api.events import EventMaker, Kind
from tidegate.api.exchange import Exchange
from tidegate.api.openai import Relay
from tidegate.core.ask import Ask, Caller, Deadline
from tidegate.core.chunk import Chunk, ToolDelta, Usage
from tidegate.core.flight import Flight

ENGINES_OWN = json.dumps({
    "id": "engine-7", "created": 1234, "model": "its-model", "object": "chat.completion.chunk", "extra": 1,
    "choices": [{"index": 0, "delta": {"role": "assistant", "content": "A"}, "finish_reason": None}],
}).encode()


class Client:
    """Stands where an exchange stands: keeps what is written."""

    def __init__(self) -> None:
        self.flight = Flight("/v1/chat/completions")
        self.flight.model = "asked"
        self.started = False
        self.heads = 0
        self.written: list[bytes] = []

    def start_stream(self, piece: bytes, headers: Sequence[Any]) -> None:
        self.started = True
        self.heads += 1
        self.written.append(piece)

    def write(self, piece: bytes) -> None:
        self.written.append(piece)


class NoTicket:
    def headers(self) -> list[Any]:
        return []


def relay_to(client: Client, kind: Kind = "chat", *, shows_usage: bool = False) -> Relay:
    ask = Ask(client.flight, Caller("key", "tenant"), Deadline(60.0))
    ask.shows_usage = "last" if shows_usage else "never"
    return Relay(kind, cast(Exchange, client), cast(Ticket, NoTicket()), ask)


def events_of(written: list[bytes]) -> list[dict[str, Any]]:
    return [json.loads(event.removeprefix(b"data: ")) for event in b"".join(written).split(b"\n\n") if event]


def made(kind: Kind, *chunks: Chunk, shows_usage: bool = False) -> list[dict[str, Any]]:
    client = Client()
    relay = relay_to(client, kind, shows_usage=shows_usage)
    for chunk in chunks:
        relay.emit([chunk])
    return events_of(client.written)


def test_made_chat_events_are_openais() -> None:
    """Text, reasoning, a tool call and the end of a chat read as OpenAI's own events; only the first names the role."""
    found = made(
        "chat", Chunk(1, "reasoning", "hm"), Chunk(2, text='a "quoted"\n字'),
        Chunk(3, "tool_call", tools=[ToolDelta(0, "call_1", "look", "")]), Chunk(4, "tool_call", tools=[ToolDelta(0, arguments='{"q"')]),
        Chunk(5, "notice", finish="tool_calls"),
    )
    for event in found:
        ChatCompletionChunk.model_validate(event, strict=True)
    assert [event["choices"][0]["delta"] for event in found] == [
        {"role": "assistant", "reasoning_content": "hm"},
        {"content": 'a "quoted"\n字'},
        {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"q"'}}]},
        {},
    ]
    assert [event["choices"][0]["finish_reason"] for event in found] == [None, None, None, None, "tool_calls"]


def test_made_completion_events_are_openais() -> None:
    """Plain completions carry `text`."""
    found = made("completion", Chunk(1, text="a"), Chunk(2, text="b", finish="length"))
    for event in found[:2]:
        assert event["object"] == "text_completion"
    Completion.model_validate(found[-1], strict=True)
    assert [(event["choices"][0]["text"], event["choices"][0]["finish_reason"]) for event in found] == [("a", None), ("b", None), ("", "length")]


def test_made_events_are_one_answer() -> None:
    """All made events carry the same id, time and model: the flight's."""
    found = made("chat", Chunk(1, text="a"), Chunk(2, text="b"), Chunk(3, "usage", usage=Usage(1, 2, exact=False)), shows_usage=True)
    assert len({(event["id"], event["created"], event["model"]) for event in found}) == 1
    assert found[0]["model"] == "asked"
    assert found[-1]["usage"]["exact"] is False
    assert found[-1]["choices"] == []


@pytest.mark.parametrize("in_one_batch", [True, False])
def test_made_events_go_on_under_the_engines_name(in_one_batch: bool) -> None:
    """Where an event of the engine went before, it is passed on untouched, and what is made after it has its id, time and model and no
    second role."""
    client = Client()
    relay = relay_to(client)
    chunks = [Chunk(1, text="A", raw=ENGINES_OWN), Chunk(2, text="B"), Chunk(3, "notice", finish="stop")]
    for batch in [chunks] if in_one_batch else [[chunk] for chunk in chunks]:
        relay.emit(batch)
    assert client.heads == 1
    assert b"".join(client.written).startswith(b"data: " + ENGINES_OWN + b"\n\n")
    own, text, end = events_of(client.written)
    for event in (text, end):
        assert (event["id"], event["created"], event["model"]) == ("engine-7", 1234, "its-model")
    assert text["choices"][0]["delta"] == {"content": "B"}
    assert own["extra"] == 1


@pytest.mark.parametrize("first", [b"{}", b"no JSON", b"[1]", b'{"id": 7}', b'{"id": "", "created": null}', b"\xff"])
def test_an_engine_without_an_identity_gets_ours(first: bytes) -> None:
    """Whatever the engine's first event is, the made ones are whole."""
    flight = Flight("/v1/chat/completions")
    event = json.loads(EventMaker("chat", flight, first).events(Chunk(1, text="x")).removeprefix(b"data: "))
    assert event["id"].endswith(flight.id)
    assert event["created"] > 1_700_000_000


def test_what_says_nothing_writes_nothing() -> None:
    """A chunk without words, or usage that nobody asked for, is no event, and does not begin the response."""
    client = Client()
    relay = relay_to(client)
    assert relay.emit([Chunk(1), Chunk(2, "usage", usage=Usage(1, 1))]) is None
    assert not client.started
