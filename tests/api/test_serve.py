"""`tidegate serve` as a process: the database goes and comes, deadlines end requests, a stop lets answers finish."""

from __future__ import annotations

import json
import resource
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from tests.api.conftest import House, start_gateway, stop, until, url_of

NOWHERE = "postgresql://tidegate@127.0.0.1:9/tidegate"
ASK = {"messages": [{"role": "user", "content": "##n=3##"}]}


def post(url: str, key: str, body: dict[str, Any] = ASK) -> httpx.Response:
    return httpx.post(url + "/v1/chat/completions", headers={"authorization": f"Bearer {key}"}, json=body, timeout=30)


def test_a_gateway_answers_without_its_database_and_catches_up(house: House, postgres_dsn: str, tmp_path: Path) -> None:
    """Started while the database is down it knows the keys of its last run, answers, and its flights arrive once the database is back."""
    key = house.keys["data"]
    first = start_gateway(tmp_path, postgres_dsn, house.engine)
    assert post(url_of(tmp_path, first), key).status_code == 200
    stop(first)

    without = start_gateway(tmp_path, NOWHERE, house.engine)
    url = url_of(tmp_path, without)
    answers = [post(url, key) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200] * 5
    health = httpx.get(url + "/health").json()
    assert health["database"]["up"] is False
    assert any("database" in why for why in health["why"])
    assert post(url, "tg_unknown").status_code == 401
    stop(without)

    back = start_gateway(tmp_path, postgres_dsn, house.engine)
    try:
        url_of(tmp_path, back)
        ids = [answer.headers["x-request-id"] for answer in answers]

        def arrived() -> bool:
            with psycopg.connect(postgres_dsn) as link:
                return link.execute("select count(*) from flights where id = any(%s)", [ids]).fetchone() == (5,)

        until(arrived, "the flights' arrival")
    finally:
        stop(back)


def test_a_first_start_without_a_database_says_so(house: House, tmp_path: Path) -> None:
    """No keys were ever read: 503 with Retry-After, and not 401, which would send people to look for a wrong key."""
    gateway = start_gateway(tmp_path, NOWHERE, house.engine)
    try:
        answer = post(url_of(tmp_path, gateway), house.keys["data"])
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_down")
        assert answer.headers["retry-after"]
    finally:
        stop(gateway)


def test_a_request_past_its_deadline_is_ended(house: House, postgres_dsn: str, tmp_path: Path) -> None:
    """Before the first byte: 504. In mid-stream: an error event. The engine is freed both times."""
    gateway = start_gateway(tmp_path, postgres_dsn, house.engine, TIDEGATE_SERVER__DEADLINE_S="1", TIDEGATE_ENGINES__SCRIPTED__INTER_TOKEN_S="30")
    try:
        url, key = url_of(tmp_path, gateway), house.keys["data"]
        answer = post(url, key, {"messages": [{"role": "user", "content": "##m=hang##"}]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        answer = post(url, key, {"messages": [{"role": "user", "content": "##i=100,n=1000##"}], "stream": True})
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert json.loads(events[-1])["error"]["code"] == "deadline_exceeded"
        until(lambda: house.stats()["active"] == 0, "the engine's release")
    finally:
        stop(gateway)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_running_answers_finish(house: House, postgres_dsn: str, tmp_path: Path, number: signal.Signals) -> None:
    """A signal in mid-stream: the stream ends with [DONE], its flight reaches the database, the process ends with 0."""
    gateway = start_gateway(tmp_path, postgres_dsn, house.engine)
    url, key = url_of(tmp_path, gateway), house.keys["data"]
    texts: list[str] = []
    ids: list[str] = []
    begun = threading.Event()

    def read() -> None:
        body = {"messages": [{"role": "user", "content": "##i=30,n=40##"}], "stream": True}
        headers = {"authorization": f"Bearer {key}"}
        with httpx.stream("POST", url + "/v1/chat/completions", headers=headers, json=body, timeout=30) as answer:
            ids.append(answer.headers["x-request-id"])
            for text in answer.iter_text():
                texts.append(text)
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(10)
    gateway.send_signal(number)
    reader.join(20)
    assert gateway.wait(20) == 0
    assert "".join(texts).endswith("data: [DONE]\n\n")
    with psycopg.connect(postgres_dsn) as link:
        assert link.execute("select \"end\" from flights where id = %s", ids).fetchone() == ("stop",)


def test_a_killed_gateway_loses_no_answered_flight(house: House, postgres_dsn: str, tmp_path: Path) -> None:
    """kill -9 right after an answer: the next start brings its flight to the database."""
    gateway = start_gateway(tmp_path, NOWHERE, house.engine)
    (tmp_path / "keys.msgpack").write_bytes((house.data / "keys.msgpack").read_bytes())
    stop(gateway)
    gateway = start_gateway(tmp_path, NOWHERE, house.engine)
    answer = post(url_of(tmp_path, gateway), house.keys["data"])
    gateway.kill()
    gateway.wait()
    assert answer.status_code == 200
    again = start_gateway(tmp_path, postgres_dsn, house.engine)
    try:
        url = url_of(tmp_path, again)
        headers = {"authorization": f"Bearer {house.keys['admin']}"}
        until(
            lambda: httpx.get(f"{url}/api/v1/flights/{answer.headers['x-request-id']}", headers=headers).status_code == 200, "the flight's arrival"
        )
    finally:
        stop(again)


def test_a_taken_port_is_an_error_that_names_it(house: House, postgres_dsn: str, tmp_path: Path) -> None:
    """`serve` never takes another port than the one it was told."""
    port = house.url.rpartition(":")[2]
    gateway = start_gateway(tmp_path, postgres_dsn, house.engine, TIDEGATE_SERVER__PORT=port)
    assert gateway.wait(30) != 0
    assert port in (tmp_path / "gateway.log").read_text()


def test_who_sends_no_whole_request_is_let_go(house: House, postgres_dsn: str, tmp_path: Path) -> None:
    """A connection on which nothing comes, half a head or half a body is closed in time; one that answers well is kept."""
    process = start_gateway(
        tmp_path, postgres_dsn, house.engine, TIDEGATE_SERVER__KEEP_ALIVE_S="1", TIDEGATE_SERVER__DEADLINE_S="2"
    )
    url = httpx.URL(url_of(tmp_path, process))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {house.keys['data']}\r\nContent-Length: 100\r\n\r\n"
    for begun in (b"", b"GET /hea", head.encode(), head.encode() + b'{"messages"', b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\nGET /v"):
        with socket.create_connection((url.host, url.port or 80), timeout=15) as connection:
            connection.sendall(begun)
            while connection.recv(65536):  # a time-out here is the failure
                pass
    stop(process)


def test_a_thousand_streams_fit_under_the_usual_limit_of_files(house: House, postgres_dsn: str, tmp_path: Path) -> None:
    """Started with a soft limit of 1024 open files, as most shells have it, the gateway takes what the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        process = start_gateway(tmp_path, postgres_dsn, house.engine)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    url_of(tmp_path, process)
    [line] = [line for line in Path(f"/proc/{process.pid}/limits").read_text().splitlines() if line.startswith("Max open files")]
    stop(process)
    assert int(line.split()[3]) == min(int(line.split()[4]), 65_536)
