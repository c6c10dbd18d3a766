"""Callers that mean harm: what they send never ends in a 500, widens a limit, fills the memory or touches anybody else."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest
from tests.api.conftest import House, until


def new_key(house: House, **fields: Any) -> str:
    with house.client("admin") as client:
        key: str = client.post("/api/v1/keys", json={"tenant": "hostile", **fields}).json()["key"]
        return key


def connect(house: House) -> socket.socket:
    url = httpx.URL(house.url)
    return socket.create_connection((url.host, url.port or 80), timeout=15)


def request(body: bytes, *, key: str = "", path: str = "/v1/chat/completions", method: str = "POST", more: str = "") -> bytes:
    """A request as it goes over the wire."""
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    return f"{method} {path} HTTP/1.1\r\nHost: gateway\r\n{authorization}{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


def chat(order: str, **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": order}], **fields}).encode()


def read_all(connection: socket.socket) -> bytes:
    """All bytes until the other side closes."""
    found = b""
    while piece := connection.recv(65536):
        found += piece
    return found


# -- limits


@pytest.mark.parametrize("claim", ["-1000000", "1" + "0" * 400])
def test_a_token_limit_holds_whatever_max_tokens_says(house: House, claim: str) -> None:
    """Neither a negative nor an absurd `max_tokens` gives a key more tokens than its limit, or ends in a 500."""
    key = {"authorization": "Bearer " + new_key(house, tokens_per_minute=100)}
    claimed = chat("##n=2##", max_tokens=0).replace(b'"max_tokens": 0', b'"max_tokens": ' + claim.encode())
    first = httpx.post(house.url + "/v1/chat/completions", headers=key, content=claimed)
    assert (first.status_code, int(first.headers["x-ratelimit-remaining-tokens"]) <= 100) == (200, True)
    second = httpx.post(house.url + "/v1/chat/completions", headers=key, content=chat("##n=1##", max_tokens=1))
    assert second.status_code == 200, "nothing but the tokens used is owed"


def test_asking_and_leaving_counts(house: House) -> None:
    """A request whose caller left before the first token stays counted: the engine worked for it."""
    key = new_key(house, requests_per_minute=2)
    before = house.stats()["requests"]
    for turn in (1, 2):
        with connect(house) as connection:
            connection.sendall(request(chat("##t=20000##", stream=True), key=key))
            until(lambda turn=turn: house.stats()["requests"] >= before + turn, "the engine's request")
    until(lambda: house.stats()["active"] == 0, "the end of what nobody waits for")
    answer = httpx.post(house.url + "/v1/chat/completions", headers={"authorization": f"Bearer {key}"}, content=chat("##n=1##"))
    assert answer.status_code == 429


def test_what_an_engine_fails_at_is_not_counted(house: House) -> None:
    """An engine's failure costs the caller nothing."""
    key = {"authorization": "Bearer " + new_key(house, requests_per_minute=1)}
    for _ in range(3):
        assert httpx.post(house.url + "/v1/chat/completions", headers=key, content=chat("##m=server_error##")).status_code == 500
    assert httpx.post(house.url + "/v1/chat/completions", headers=key, content=chat("##n=1##")).status_code == 200


# -- what does not end, and what is no HTTP


def test_a_head_without_end_is_refused(house: House) -> None:
    """Headers are bounded: who sends more gets 431 with a trace_id and is let go, long before the memory notices."""
    with connect(house) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: gateway\r\nX-Long: ")
        with pytest.raises(OSError, match=r"reset|Broken"):  # noqa: PT012 - the refusal comes while it is still sent
            for _ in range(400):
                connection.sendall(b"a" * 65536)
            raise AssertionError("25 MB of one header were taken")


def test_a_head_that_is_too_large_is_told_so(house: House) -> None:
    """The refusal is one of ours: OpenAI's shape, a code, a trace_id."""
    with connect(house) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX-Long: " + b"a" * 60_000)
        connection.sendall(b"a" * 6_000)
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert head.startswith(b"HTTP/1.1 431 ")
    assert (error["code"], len(error["trace_id"])) == ("head_too_large", 32)


@pytest.mark.parametrize("length", ["abc", "-5", "+5", "1_0", "0x5", "5\r\nContent-Length: 6", "9" * 30, ""])
def test_lies_about_the_length_are_bad_requests(house: House, length: str) -> None:
    """A Content-Length that is no number, or two of them, is a 400 in our shape, and never an unexpected error."""
    with connect(house) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nContent-Length: {length}\r\n\r\n"
        connection.sendall(head.encode() + chat("##n=1##"))
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "bad_request"


@pytest.mark.parametrize("offer", ["Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\nConnection: Upgrade, HTTP2-Settings\r\n",
                                   "Connection: Upgrade\r\nUpgrade: websocket\r\n"])
def test_an_offered_upgrade_is_declined_by_answering(house: House, offer: str) -> None:
    """A client that offers HTTP/2 with its request (Java's does) gets its answer in HTTP/1.1, and so does its next request."""
    key = house.keys["data"]
    with connect(house) as connection:
        connection.sendall(request(chat("##n=1,w=hello##"), key=key, more=offer))
        connection.sendall(request(chat("##n=1,w=again##"), key=key, more="Connection: close\r\n"))
        answers = read_all(connection)
    assert answers.count(b"HTTP/1.1 200 OK") == 2
    assert b"hello" in answers
    assert b"again" in answers


def test_a_large_body_for_the_control_plane_is_not_read(house: House) -> None:
    """Without a key nobody makes the gateway hold a body: what is longer than the bound is refused, told or not."""
    told = httpx.post(house.url + "/api/v1/keys", content=b"x" * 5_000_000, headers={"content-type": "application/json"})
    untold = httpx.post(house.url + "/api/v1/keys", content=(b"x" * 65536 for _ in range(80)), headers={"content-type": "application/json"})
    assert [(answer.status_code, answer.json()["error"]["code"]) for answer in (told, untold)] == [(413, "body_too_large")] * 2


def test_a_limit_that_no_table_holds_is_refused(house: House) -> None:
    """A key's limit beyond the key table's numbers is the caller's mistake, not a fault in Tidegate."""
    with house.client("admin") as client:
        answer = client.post("/api/v1/keys", json={"tenant": "hostile", "requests_per_minute": 2**31})
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "requests_per_minute")


# -- bodies


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("depth", [300, 700, 900, 950, 5000])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": [{"type": "text", "text": %s}]}]}'),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "##n=1##"}], "tools": %s}'),
        ("/v1/completions", '{"prompt": "##n=1##", "logit_bias": {"1": %s}}'),
        ("/v1/embeddings", '{"input": %s}'),
        ("/api/v1/test/stream", '{"order": %s}'),
    ],
)
def test_a_body_nested_too_deeply_is_a_bad_request(house: House, depth: int, path: str, body: str) -> None:
    """No depth of nesting ends in an unexpected error, on no route."""
    with house.client("kept") as client:
        answer = client.post(path, content=body % nested(depth))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_request")
    assert "nested" in answer.json()["error"]["message"]


@pytest.mark.parametrize("role", [["user"], {}, 1, None, True])
def test_a_role_of_any_type_is_judged(house: House, role: Any) -> None:
    """A role that is no text is not a known role."""
    with house.client() as client:
        answer = client.post("/v1/chat/completions", json={"messages": [{"role": role, "content": "x"}]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].role")


def test_names_that_a_caller_made_up_are_kept_short(house: House) -> None:
    """A model's name or a path of a megabyte is not what a flight remembers: hundreds of flights wait in memory."""
    with house.client() as client:
        model = client.post("/v1/chat/completions", content=chat("x", model="m" * 1_000_000))
        path = client.get("/v1/" + "p" * 50_000)
    assert (model.status_code, path.status_code) == (404, 404)
    assert len(house.flight(model.headers["x-request-id"])["model"]) <= 200
    assert len(house.flight(path.headers["x-request-id"])["route"]) <= 200


def test_paths_that_a_caller_made_up_are_no_metrics(house: House) -> None:
    """However many paths are tried, the served routes keep their own series."""
    with house.client() as client:
        for n in range(80):
            client.get(f"/v1/made-up-{n}")
        told = client.get("/metrics").text
    assert "made-up" not in told


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages[0].content"),
        ({"tools": [1]}, "tools"), ({"functions": ["x"]}, "functions"), ({"stop": [1]}, "stop"), ({"stop": [["x"]]}, "stop"),
    ],
)
def test_wrong_types_deep_inside_are_the_callers_mistake(house: House, fields: dict[str, Any], param: str) -> None:
    """What engines answer with a 500 is said before, with the place that is wrong."""
    with house.client() as client:
        answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
