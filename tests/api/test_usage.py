"""Usage in streams: as it runs, right on every end, exact or marked as an estimate."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.api.conftest import House
from tests.api.test_barge_in import LONG, Older, headers
from tests.api.test_websocket import CHAT, COMPLETION, DONE, STREAM, ask, body, opened, rest

from tidegate.api.fields import CONTINUOUS_USAGE, stream_options
from tidegate.api.openai import Relay
from tidegate.core.ask import Ask, Caller, Deadline
from tidegate.core.chunk import Chunk, Usage
from tidegate.core.errors import BadRequest
from tidegate.core.flight import Flight

CONTINUOUS = {"stream_options": {"continuous_usage": True}}
INCLUDED = {"stream_options": {"include_usage": True}}


def events(house: House, path: str, order: str, **more: Any) -> list[dict[str, Any]]:
    """The payloads of an SSE stream, without [DONE]."""
    with house.client() as client:
        answer = client.post(path, json=body(path, order, stream=True, **more))
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != DONE]


def counts(said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one["usage"] for one in said if one.get("usage")]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_usage_grows_with_the_answer(house: House, path: str) -> None:
    """An event without choices after each batch: estimates that only grow, then the engine's own count."""
    said = events(house, path, "##i=20,n=12##", **CONTINUOUS)
    told = counts(said)
    assert len(told) >= 5
    assert all(one["choices"] == [] for one in said if one.get("usage"))
    grown = [usage["completion_tokens"] for usage in told[:-1]]
    assert grown == sorted(grown)
    assert 0 < grown[0] < grown[-1]
    assert {usage["exact"] for usage in told[:-1]} == {False}
    assert (told[-1]["completion_tokens"], told[-1].get("exact", True)) == (12, True)
    assert told[-1]["prompt_tokens"] > 0


def test_usage_comes_with_events_not_instead(house: House) -> None:
    """Without the option the same events come, minus the counts; each count stands behind what it counts."""
    with_counts = events(house, CHAT, "##i=20,n=6##", **CONTINUOUS)
    without = events(house, CHAT, "##i=20,n=6##")
    words = [one["choices"][0]["delta"].get("content") for one in with_counts if one["choices"]]
    assert words == [one["choices"][0]["delta"].get("content") for one in without]
    assert not counts(without)
    assert with_counts[0]["choices"], "first something to count"
    assert len({one["id"] for one in with_counts}) == 1, "one id for the whole answer"


def test_an_engine_that_tells_nothing_is_estimated_to_the_end(house: House) -> None:
    """The last count is still marked as an estimate, and the flight has the same."""
    said = events(house, CHAT, "##i=20,n=6,m=no_usage##", **CONTINUOUS)
    last = counts(said)[-1]
    assert last["exact"] is False
    assert last["completion_tokens"] > 0


def test_our_option_is_not_forwarded(house: House) -> None:
    """The engine sees `include_usage` alone, also where the caller's own bytes could be sent on."""
    said = events(house, CHAT, "##n=3##", model="scripted", stream_options={"include_usage": True, "continuous_usage": True})
    assert counts(said)[-1]["completion_tokens"] == 3
    assert "continuous_usage" not in json.dumps(house.stats())


@pytest.mark.parametrize(("fields", "param"), [
    ({"stream": True, "stream_options": {"continuous_usage": "yes"}}, "stream_options.continuous_usage"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": False, "stream_options": {"continuous_usage": True}}, "stream_options.continuous_usage"),
])  # fmt: skip
def test_what_cannot_be_kept_is_refused(house: House, fields: dict[str, Any], param: str) -> None:
    """By name: a wrong type, and a stream's option on a whole answer."""
    answer = house.chat("##n=1##", **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("options", [CONTINUOUS, INCLUDED])
@pytest.mark.parametrize(("order", "code"), [
    ("##i=10,n=8,m=cut,k=4##", "engine_cut"),
    ("##i=10,n=8,m=stall,k=4##", "engine_stalled"),
    ("##i=10,n=8,m=error_event,k=4##", None),
    ("##i=10,n=8,m=abort,k=4##", "engine_cut"),
])  # fmt: skip
def test_a_stream_that_breaks_tells_what_it_used(house: House, options: dict[str, Any], order: str, code: str | None) -> None:
    """The error event carries the usage so far, the same as the flight's."""
    last = events(house, CHAT, order, **options)[-1]
    assert code in (None, last["error"]["code"])
    flight = house.flight(last["error"]["trace_id"])
    assert last["usage"]["completion_tokens"] == flight["usage"]["completion_tokens"] > 0
    assert last["usage"]["exact"] is False


def test_who_did_not_ask_is_not_told(house: House) -> None:
    """Neither at the end nor in an error."""
    assert not counts(events(house, CHAT, "##n=8,m=cut,k=4##"))


def test_a_superseded_stream_tells_what_it_used(house: House) -> None:
    """Also an end that a newer message made."""
    older = Older(house, LONG)
    assert older.began.wait(10)
    with opened(house) as client:
        client.send(json.dumps(body(CHAT, LONG, **INCLUDED)))
        client.recv(timeout=15)
        client.send(json.dumps(body(CHAT, "##n=2##")))
        last = json.loads(rest(client, CHAT)[-1])
        assert last["error"]["code"] == "superseded"
        assert last["usage"]["completion_tokens"] > 0
        assert rest(client, CHAT)[-1] == DONE
    with house.client() as client_2:
        client_2.post(CHAT, json=body(CHAT, "##n=1##"), headers=headers(barge_in=True))
    assert "usage" not in older.end()


def test_usage_on_a_socket(house: House) -> None:
    """The same option, the same counts."""
    with opened(house) as client:
        said = [json.loads(one) for one in ask(client, CHAT, body(CHAT, "##i=20,n=6##", **CONTINUOUS)) if one != DONE]
    assert len(counts(said)) >= 3
    assert counts(said)[-1]["completion_tokens"] == 6


def capability_events(answer: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    blocks = [block.split("\n") for block in answer.text.split("\n\n") if block and not block.startswith(":")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


def test_usage_in_a_capabilitys_tokens(house: House) -> None:
    """Business fields have no place for the option: a header asks, and each token event carries the count so far."""
    sse = {"accept": "text/event-stream"}
    with house.client() as client:
        plain = capability_events(client.post(STREAM, json={"order": "##i=20,n=6##"}, headers=sse))
        told = capability_events(
            client.post(STREAM, json={"order": "##i=20,n=6##"}, headers={**sse, "x-tidegate-continuous-usage": "1"})
        )
    assert all("usage" not in data for name, data in plain if name == "token")
    grown = [data["usage"]["completion_tokens"] for name, data in told if name == "token"]
    assert len(grown) >= 3
    assert grown == sorted(grown)
    assert told[-1][1]["usage"]["completion_tokens"] == 6


def test_a_capability_that_breaks_tells_what_it_used(house: House) -> None:
    """Its answer would have told; so does its error."""
    with house.client() as client:
        answer = client.post(STREAM, json={"order": "##i=20,n=8,m=cut,k=4##"}, headers={"accept": "text/event-stream"})
    name, data = capability_events(answer)[-1]
    assert name == "error"
    assert data["usage"]["completion_tokens"] > 0


# -- one piece at a time


class Page:
    """An exchange that notes what is written."""

    def __init__(self) -> None:
        self.flight = Flight("/x")
        self.started = False
        self.written: list[bytes] = []

    def start_stream(self, piece: bytes, headers: Any = ()) -> None:
        self.started = True
        self.written.append(piece)

    def write(self, piece: bytes) -> None:
        self.written.append(piece)


class Counter:
    """A running generation whose count is set from outside."""

    usage = Usage(5, 0, exact=False)


class Free:
    """A ticket without limits."""

    def headers(self) -> tuple[()]:
        return ()


def relay(shows: Any) -> tuple[Page, Counter, Callable[[list[Chunk]], Any]]:
    page, counter = Page(), Counter()
    one = Ask(page.flight, Caller("k", "t"), Deadline(60))
    one.shows_usage, one.running = shows, counter
    return page, counter, Relay("chat", page, Free(), one).emit  # type: ignore[arg-type]


BATCHES = st.lists(st.lists(st.tuples(st.sampled_from(["raw", "made", "hidden", "engine"]), st.integers(1, 5)), min_size=1, max_size=4), max_size=8)


@given(BATCHES, st.sampled_from(["never", "last", "always"]))
def test_every_count_is_the_count_so_far(batches: list[list[tuple[str, int]]], shows: str) -> None:
    """Whatever comes in which batches: with `always` each written batch ends in a count that is right then, the engine's own where it told one;
    with `never` no count is written, with `last` only the engine's."""
    page, counter, emit = relay(shows)
    used = 0
    for batch in batches:
        chunks = []
        for kind, tokens in batch:
            if kind in ("raw", "made"):
                used += tokens
            raw = {
                "raw": b'{"id":"i","choices":[{"index":0,"delta":{"content":"x"}}]}', "made": None,
                "hidden": None, "engine": b'{"id":"i","choices":[],"usage":{"completion_tokens":%d}}' % used,
            }[kind]
            usage = Usage(5, used) if kind == "engine" else None
            text = "x" if kind in ("raw", "made") else ""
            chunks.append(Chunk(1, "usage" if usage else "text" if text else "notice", text, raw, usage=usage))
        counter.usage = Usage(5, used, exact=False)
        before = len(page.written)
        emit(chunks)
        for piece in page.written[before:]:
            said = [json.loads(line.removeprefix("data: ")) for line in piece.decode().split("\n\n") if line]
            if shows == "always":
                assert said[-1]["usage"]["completion_tokens"] == used
            elif shows == "never":
                assert not counts(said)


@given(st.dictionaries(st.sampled_from(["include_usage", CONTINUOUS_USAGE, "other"]), st.sampled_from([True, False, None, "x", 1])), st.booleans())
def test_options_are_read_or_refused(options: dict[str, Any], streams: bool) -> None:
    """Ours is taken out, what is not ours stays as it was, and what is no yes or no is refused."""
    fields = {"stream_options": dict(options)}
    odd = any(type(options.get(name)) in (int, str) for name in ("include_usage", CONTINUOUS_USAGE))
    if odd or (options.get(CONTINUOUS_USAGE) is True and not streams):
        with pytest.raises(BadRequest):
            stream_options(fields, streams)
        return
    wants = stream_options(fields, streams)
    assert wants == ("always" if options.get(CONTINUOUS_USAGE) else "last" if options.get("include_usage") else "never")
    assert fields["stream_options"] == {name: value for name, value in options.items() if name != CONTINUOUS_USAGE}
