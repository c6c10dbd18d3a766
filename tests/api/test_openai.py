"""The OpenAI-compatible routes: the official SDK unchanged, every bad input said clearly, every end judged and booked."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import openai
import pytest
from tests.api.conftest import House, until

WORDS = "##n=6##"


def sdk(house: House, key: str = "data", **more: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=house.url + "/v1", api_key=house.keys[key], max_retries=0, **more)


MESSAGES: Any = [{"role": "user", "content": WORDS}]


def test_the_sdk_gets_a_whole_answer(house: House) -> None:
    """A non-streaming completion has text, usage and a request id that is the flight's."""
    with sdk(house) as client:
        answer = client.chat.completions.create(model="scripted", messages=MESSAGES)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    flight = house.flight(str(answer._request_id))
    assert (flight["end"], flight["usage"]["completion_tokens"], flight["usage"]["exact"]) == ("stop", 6, True)


def test_the_sdk_streams(house: House) -> None:
    """Six tokens come as six events with text; the flight has a stamp for each and knows the first."""
    with sdk(house) as client:
        raw = client.chat.completions.with_raw_response.create(model="scripted", messages=MESSAGES, stream=True)
        chunks = list(raw.parse())
    words = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert len(words) == 6
    assert not any(chunk.usage for chunk in chunks), "nobody asked for usage"
    flight = house.flight(raw.headers["x-request-id"])
    assert len(flight["token_ns"]) == 6
    assert flight["first_token_ns"] == flight["token_ns"][0]
    assert flight["usage"]["completion_tokens"] == 6
    assert flight["stream"] is True


def test_the_sdk_gets_usage_where_it_asks(house: House) -> None:
    """`include_usage` brings the usage chunk, last."""
    with sdk(house) as client:
        chunks = list(client.chat.completions.create(
            model="scripted", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        ))
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6


def test_the_sdk_completes_text(house: House) -> None:
    """/v1/completions, whole and streamed."""
    with sdk(house) as client:
        whole = client.completions.create(model="scripted", prompt=WORDS)
        streamed = client.completions.create(model="scripted", prompt=WORDS, stream=True)
        assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in streamed if chunk.choices)


def test_the_sdk_lists_models(house: House) -> None:
    """/v1/models names what can be asked."""
    with sdk(house) as client:
        assert [model.id for model in client.models.list()] == ["scripted", "nowhere"]


def test_the_sdk_asks_for_one_model(house: House) -> None:
    """/v1/models/ID is the row of the list; a name that there is not is 404 with the nearest ones."""
    with sdk(house) as client:
        assert client.models.retrieve("scripted") == client.models.list().data[0]
        with pytest.raises(openai.NotFoundError) as refused:
            client.models.retrieve("meta-llama/scriptet")
    assert isinstance(refused.value.body, dict)
    assert (refused.value.body["param"], "scripted" in refused.value.body["hint"]) == ("model", True)
    assert "'meta-llama/scriptet'" in refused.value.body["message"]
    assert house.flights()[0]["route"] == "/v1/models"


def test_the_sdk_times_out_and_the_engine_is_freed(house: House) -> None:
    """A client's own time-out frees the engine and ends in a flight."""
    with sdk(house, timeout=0.3) as client, pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "##m=hang##"}])
    until(lambda: house.stats()["active"] == 0, "the engine's release")
    until(lambda: house.flights()[0]["end"] == "client_gone", "the flight of the client that left")
    assert house.flights()[0]["http_status"] == 499


def test_the_sdk_cancels_a_stream_and_the_engine_is_freed(house: House) -> None:
    """Closing a stream in the middle frees the engine; the tokens so far are booked as an estimate."""
    with sdk(house) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="scripted", messages=[{"role": "user", "content": "##i=50,n=1000##"}], stream=True
        )
        stream = raw.parse()
        for _ in range(4):
            next(stream)
        stream.close()
    until(lambda: house.stats()["active"] == 0, "the engine's release")
    until(lambda: house.flight_ended(raw.headers["x-request-id"]), "the flight")
    flight = house.flight(raw.headers["x-request-id"])
    assert flight["end"] == "client_gone"
    assert not flight["usage"]["exact"]
    assert len(flight["token_ns"]) >= 2
    assert flight["usage"]["completion_tokens"] >= 1


@pytest.mark.parametrize(
    ("body", "status", "code", "says"),
    [
        (b"", 400, "bad_request", "empty"),
        (b"{", 400, "bad_request", "not JSON"),
        (b'{"messages": "\xff"}', 400, "bad_request", "UTF-8"),
        (b"[1]", 400, "bad_request", "not an object"),
        (b"[" * 100_000, 400, "bad_request", "nested"),
        (b'{"messages": []}', 400, "bad_request", "`messages` is missing or empty"),
        (b'{"messages": [{"role": "user", "content": "Hi"}], "stop": ["a", ""]}', 400, "bad_request", "`stop` holds an empty text"),
        (b'{"model": "scripted"}', 400, "bad_request", "`messages` is missing or empty"),
        (b'{"messages": "hi"}', 400, "bad_request", "`messages` must be a list"),
        (b'{"messages": [1]}', 400, "bad_request", "messages[0]"),
        (b'{"messages": [{"role": "boss", "content": "x"}]}', 400, "bad_request", "messages[0].role"),
        (b'{"messages": [{"role": "user", "content": 3}]}', 400, "bad_request", "messages[0].content"),
        (b'{"messages": [{"role": "user", "content": "x", "colour": 1}]}', 400, "bad_request", "'colour'"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temprature": 1}', 400, "bad_request", "'temprature'"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}', 400, "bad_request", "`temperature` must be a number"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": true}', 400, "bad_request", "`max_tokens`"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stream": "yes"}', 400, "bad_request", "`stream`"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 2}', 400, "bad_request", "`n`"),
        (b'{"messages": [{"role": "user", "content": "x"}], "model": "gpt-9"}', 404, "not_found", "gpt-9"),
    ],
)
def test_bad_input_is_said(house: House, body: bytes, status: int, code: str, says: str) -> None:
    """Each bad body gets its status, a machine code, words that name what is wrong, a way out and a trace_id with a flight."""
    with house.client() as client:
        answer = client.post("/v1/chat/completions", content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert says in error["message"]
    assert error["hint"]
    assert house.flight(error["trace_id"])["end"] == "refused"
    assert answer.headers["x-request-id"] == error["trace_id"]


def test_an_unknown_field_names_the_nearest_known_one(house: House) -> None:
    """A typing error is answered with the right word."""
    answer = house.chat("x", temprature=1)
    assert "'temperature'" in answer.json()["error"]["hint"]


def test_a_body_that_is_too_large_is_refused(house: House) -> None:
    """10 MB are refused with 413 whether their length is told before or not."""
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 10_000_000}]}).encode()
    with house.client() as client:
        for content in (body, (body[i : i + 65536] for i in range(0, len(body), 65536))):
            try:
                answer = client.post("/v1/chat/completions", content=content)
            except httpx.WriteError:
                continue  # the answer came before the body was sent, and the connection was closed on it
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({}, 401, "invalid_api_key"),
        ({"authorization": "Bearer tg_wrong"}, 401, "invalid_api_key"),
        ({"authorization": "Basic abc"}, 401, "invalid_api_key"),
        ({"x-api-key": "tg_wrong"}, 401, "invalid_api_key"),
    ],
)
def test_no_key_or_a_wrong_one_is_refused(house: House, headers: dict[str, str], status: int, code: str) -> None:
    """Without a known key nothing runs."""
    answer = httpx.post(house.url + "/v1/chat/completions", headers=headers, json={"messages": MESSAGES})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_an_admin_key_cannot_ask(house: House) -> None:
    """Admin is apart from data."""
    answer = house.chat(WORDS, key="admin")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
def test_a_wrong_method_is_said(house: House, path: str) -> None:
    """GET on a POST route is 405 in the same shape."""
    with house.client() as client:
        answer = client.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")


def test_an_unknown_route_is_said(house: House) -> None:
    """404 names the nearest route."""
    with house.client() as client:
        answer = client.post("/v1/chat/completion", json={})
    assert answer.status_code == 404
    assert "/v1/chat/completions" in answer.json()["error"]["hint"]


@pytest.mark.parametrize(
    ("order", "status", "code"),
    [
        ("##m=rate_limit##", 429, None),
        ("##m=server_error##", 500, None),
        ("##m=overloaded##", 503, None),
        ("##m=context##", 400, "context_length_exceeded"),
        ("##m=gzip##", 502, "engine_error"),
        ("##m=redirect##", 502, "engine_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_engines_refusal_keeps_its_status(house: House, order: str, status: int, code: str | None, stream: bool) -> None:
    """What the engine refused is refused with its own status and code, streamed or not."""
    answer = house.chat(order, stream=stream)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    if code:
        assert error["code"] == code
    assert error["trace_id"]
    if status == 429:
        assert answer.headers["retry-after"] == "7"


@pytest.mark.parametrize(
    ("order", "end"),
    [
        ("##n=8,m=cut,k=3##", "cut"),
        ("##n=8,m=reset,k=3##", "cut"),
        ("##n=8,m=cut_event,k=3##", "cut"),
        ("##n=8,m=end_early,k=3##", "cut"),
        ("##n=8,m=error_event,k=3##", "error"),
        ("##n=8,m=stall,k=3##", "stalled"),
        ("##n=8,m=junk_json,k=3##", "error"),
    ],
)
def test_a_stream_that_breaks_ends_in_an_error_event(house: House, order: str, end: str) -> None:
    """What was said so far came through, then an error event with the trace_id, and no [DONE]."""
    answer = house.chat(order, stream=True)
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    error = json.loads(events[-1])["error"]
    assert "[DONE]" not in events
    assert len(events) >= 3
    flight = house.flight(error["trace_id"])
    assert flight["end"] == end
    assert flight["error_code"]


def test_an_empty_stream_is_no_success(house: House) -> None:
    """A stream that ends well but says nothing is an error, with the status of one: nothing had left yet."""
    answer = house.chat("##m=empty##", stream=True)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_empty")


def test_an_engine_that_is_down_is_503(house: House) -> None:
    """Nobody there: 503 with what to do."""
    answer = house.chat(WORDS, model="nowhere")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_down")
    assert house.flight(answer.headers["x-request-id"])["end"] == "error"


def test_a_client_that_leaves_while_it_sends_is_booked(house: House) -> None:
    """Half a body and gone: a flight says so, and the gateway goes on."""
    host, port = house.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        key = house.keys["data"]
        client.sendall(
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: 1000\r\n\r\n{{".encode()
        )
        before = {flight["id"] for flight in house.flights()}
    until(
        lambda: any(flight["end"] == "client_gone" for flight in house.flights() if flight["id"] not in before), "the flight of the client that left"
    )


def test_the_request_limit_of_a_key(house: House) -> None:
    """The third request of a key that may send two a minute is refused with the seconds to wait."""
    answers = [house.chat(WORDS, key="two") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
    assert 25 <= int(answers[2].headers["retry-after"]) <= 31
    assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"


def test_the_token_limit_of_a_key(house: House) -> None:
    """Tokens are reserved before and settled after; what was used up is refused until it has refilled."""
    assert house.chat(WORDS, key="tokens", max_tokens=900).status_code == 200
    assert house.chat(WORDS, key="tokens", max_tokens=900).status_code == 200, "the estimate was settled with the true count"
    assert house.chat("##n=1500##", key="tokens", max_tokens=900).status_code == 200
    refused = house.chat(WORDS, key="tokens", max_tokens=900)
    assert refused.status_code == 429
    assert "tokens" in refused.json()["error"]["message"]


def test_embeddings_without_an_embedder_are_said(house: House) -> None:
    """This gateway has none, and says what to set."""
    with house.client() as client:
        answer = client.post("/v1/embeddings", json={"input": "hello"})
    assert answer.status_code == 503
    assert "embedder" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_without_a_model_the_default_is_asked_by_its_name(house: House, stream: bool) -> None:
    """The engine is told its own model's name, also where the caller named none."""
    answer = house.chat(WORDS, stream=stream)
    assert answer.status_code == 200
    assert house.flight(answer.headers["x-request-id"])["model"] == "scripted"
    assert house.stats()["models"][-1] == "scripted"


def test_the_pages_session_asks_only_from_the_page(house: House) -> None:
    """A signed-in browser asks without a key from the page's own origin, and from no other."""
    with httpx.Client(base_url=house.url, timeout=30) as browser:
        signed_in = browser.post("/login", data={"key": house.keys["data"]}, headers={"origin": house.url})
        assert signed_in.status_code in (200, 303), signed_in.text
        body = {"messages": MESSAGES}
        assert browser.post("/v1/chat/completions", json=body, headers={"origin": house.url}).status_code == 200
        for origin in ("http://evil.example", "null", ""):
            refused = browser.post("/v1/chat/completions", json=body, headers={"origin": origin})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden"), origin
        assert browser.post("/v1/chat/completions", json=body).status_code == 403


def test_an_engine_that_tells_no_usage_is_estimated_and_said_so(house: House) -> None:
    """A client that asked for usage gets one, marked as an estimate; so is the flight."""
    with sdk(house) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="scripted", messages=[{"role": "user", "content": "##n=5,m=no_usage##"}], stream=True, stream_options={"include_usage": True}
        )
        usage = list(raw.parse())[-1].usage
    assert usage is not None
    assert usage.completion_tokens > 0
    assert usage.to_dict()["exact"] is False
    assert house.flight(raw.headers["x-request-id"])["usage"]["exact"] is False


def test_tool_calls_come_through_and_are_stamped(house: House) -> None:
    """A stream of tool calls alone has a first token too, and the client's SDK puts the call together."""
    with sdk(house) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="scripted", messages=[{"role": "user", "content": "##m=tools##"}], stream=True
        )
        calls = [call for chunk in raw.parse() for choice in chunk.choices for call in choice.delta.tool_calls or []]
    assert calls[0].function is not None
    assert calls[0].function.name
    flight = house.flight(raw.headers["x-request-id"])
    assert flight["end"] == "tool_calls"
    assert flight["first_token_ns"] > 0
