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
