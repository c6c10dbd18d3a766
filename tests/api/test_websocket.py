"""WebSocket: what a socket carries is what SSE carries; what harms is bounded; whoever leaves frees the engine."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.api.conftest import House, start_gateway, stop, until, url_of
from uvicorn.config import Config
from uvicorn.server import ServerState
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.sync.client import ClientConnection, connect

from tidegate.api import websocket_connection
from tidegate.api.exchange import Exchange
from tidegate.api.exchange import House as Rooms
from tidegate.api.websocket import Session, frames
from tidegate.api.websocket_connection import CLOSE_S, MOST_FRAGMENTS, PING_S, SocketConnection
from tidegate.core.ask import Caller

CHAT, COMPLETION, STREAM, CONTRACT = "/v1/chat/completions", "/v1/completions", "/api/v1/test/stream", "/api/v1/test/contract"
DONE = "[DONE]"


def body(path: str, order: str, **more: Any) -> dict[str, Any]:
    """The same order for every route."""
    if path == CHAT:
        return {"messages": [{"role": "user", "content": order}], **more}
    return {"prompt": order, **more} if path == COMPLETION else {"order": order, **more}


@contextlib.contextmanager
def opened(house: House, path: str = CHAT, *, key: str = "data", **more: Any) -> Iterator[ClientConnection]:
    headers = {"authorization": f"Bearer {house.keys[key]}", **more.pop("headers", {})}
    with connect(house.url.replace("http", "ws") + path, additional_headers=headers, proxy=None, **more) as client:
        yield client


def is_last(path: str, frame: str) -> bool:
    if frame == DONE or frame.startswith(('{"error"', '{"event":"error"')):
        return True
    return path.startswith("/api/") and json.loads(frame)["event"] == "answer"


def ask(client: ClientConnection, path: str, fields: dict[str, Any]) -> list[str]:
    """The frames of one request, to its last."""
    client.send(json.dumps(fields))
    return rest(client, path)


def rest(client: ClientConnection, path: str) -> list[str]:
    said: list[str] = []
    while not said or not is_last(path, said[-1]):
        frame = client.recv(timeout=15)
        assert isinstance(frame, str)
        said.append(frame)
    return said


def sse(house: House, path: str, fields: dict[str, Any]) -> list[str]:
    """The events of a POST as frames would say them."""
    fields = fields if path.startswith("/api/") else {**fields, "stream": True}
    with house.client() as client:
        answer = client.post(path, json=fields, headers={"accept": "text/event-stream"})
    if "json" in answer.headers["content-type"]:
        said = {"error": {**answer.json()["error"], "status": answer.status_code}}
        return [json.dumps({"event": "error", "data": said} if path.startswith("/api/") else said)]
    found = []
    for event in answer.text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in event.split("\n") if line and not line.startswith(":"))
        if "data" in lines:
            found.append(f'{{"event":"{lines["event"]}","data":{lines["data"]}}}' if "event" in lines else lines["data"])
    return found


def same(frame: str) -> Any:
    """A frame without what differs from run to run."""
    if frame == DONE:
        return frame
    said = json.loads(frame)
    data = said.get("data", said)
    for fields in (data, data.get("error", {})):
        fields.pop("trace_id", None)
        fields.pop("id", None)
    data.pop("created", None)
    if "error" in data:  # what a limit of time said
        data["error"].pop("retry_after_s", None)
    return said


def told(said: list[str]) -> list[Any]:
    """What frames say, one after the other. A capability's tokens are one text: how they fall into events is up to the reads of a socket."""
    found: list[Any] = []
    for one in map(same, said):
        if found and isinstance(one, dict) and one.get("event") == "token" == found[-1].get("event"):
            found[-1]["data"]["text"] += one["data"]["text"]
        else:
            found.append(one)
    return found


# -- one to one

ORDERS = [
    "##n=5##", "##n=1##", "##n=3,i=20##", "##n=8,m=cut,k=3##", "##n=4,m=error_event,k=2##", "##m=server_error##", "##m=rate_limit##",
    "##m=context##", "##m=empty##", "##m=silent##", "##m=no_usage,n=4##", "##m=reasoning,n=4##", "##m=tools##", "##m=two_choices,n=3##",
    "##m=comments,n=3##", "##m=crlf,n=3##", "##m=ids,n=3##", "##m=no_done,n=3##", "##m=no_finish,n=3##", "##m=refuse_key##", "##m=junk_json,n=4##",
    "##m=utf8_split,n=12##", "##m=dribble,n=3##", "##m=end_early,n=4,k=2##", "##m=abort,n=4##",
]  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("path", [CHAT, COMPLETION, STREAM])
def test_a_socket_says_what_sse_says(house: House, path: str, order: str) -> None:
    """The same order over both: the same payloads in the same sequence, good and bad."""
    with opened(house, path) as client:
        said = ask(client, path, body(path, order))
    assert told(said) == told(sse(house, path, body(path, order)))


@pytest.mark.parametrize("fields", [{}, {"messages": []}, {"messages": 3}, {"messages": [{"role": "user", "content": "x"}], "colour": 1}])
def test_a_request_that_is_refused_leaves_the_socket_open(house: House, fields: dict[str, Any]) -> None:
    """The error object with its status is a frame; the next request on the same socket is answered."""
    with opened(house) as client:
        [refused] = ask(client, CHAT, fields)
        assert same(refused) == same(sse(house, CHAT, fields)[0])
        assert ask(client, CHAT, body(CHAT, "##n=2##"))[-1] == DONE


@pytest.mark.parametrize("said", ["", "[]", "nothing", "{", '"text"', "[" * 5000])
def test_what_is_no_object_is_refused(house: House, said: str) -> None:
    """Any text gets an error frame with status 400, and the socket lives on."""
    with opened(house) as client:
        client.send(said)
        [refused] = rest(client, CHAT)
        assert json.loads(refused)["error"]["status"] == 400
        assert ask(client, CHAT, body(CHAT, "##n=2##"))[-1] == DONE


def test_many_requests_on_one_socket(house: House) -> None:
    """One after the other, each with a flight of its own that says it came by a socket."""
    before = {flight["id"] for flight in house.flights()}
    with opened(house) as client:
        for _ in range(5):
            assert ask(client, CHAT, body(CHAT, "##n=3##"))[-1] == DONE
    new = [flight for flight in house.flights() if flight["id"] not in before]
    assert len(new) == 5
    for flight in new:
        assert (flight["route"], flight["stream"], flight["end"], flight["http_status"]) == (CHAT, True, "stop", 200)
        assert "websocket" in [what for _, what, _ in flight["decisions"]]
        assert flight["usage"]["completion_tokens"] == 3


def test_a_contract_gives_its_answer_alone(house: House) -> None:
    """A capability whose answer is checked as a whole: one frame, the answer."""
    with opened(house, CONTRACT) as client:
        said = ask(client, CONTRACT, {"order": '##json={"decision": "accept"}##'})
    assert [json.loads(frame)["event"] for frame in said] == ["answer"]


def test_stream_false_is_refused(house: House) -> None:
    """A socket always streams: `stream` true says nothing new, false cannot be kept."""
    with opened(house) as client:
        [refused] = ask(client, CHAT, body(CHAT, "##n=2##", stream=False))
        assert json.loads(refused)["error"]["param"] == "stream"
        assert ask(client, CHAT, body(CHAT, "##n=2##", stream=True))[-1] == DONE


def test_a_body_that_could_be_forwarded_as_it_came_still_streams(house: House) -> None:
    """A named model and usage asked for: the caller's own bytes would be sent on, but they do not say `stream`."""
    with opened(house) as client:
        said = ask(client, CHAT, body(CHAT, "##n=3##", model="scripted", stream_options={"include_usage": True}))
    assert said[-1] == DONE
    assert json.loads(said[-2])["usage"]["completion_tokens"] == 3


def test_limits_hold_on_a_socket(house: House) -> None:
    """The key's limits count every message; a refusal says when to come back."""
    with house.client("admin") as admin:
        key = admin.post("/api/v1/keys", json={"tenant": "sockets", "requests_per_minute": 2}).json()["key"]
    house.keys["limited"] = key
    with opened(house, key="limited") as client:
        for _ in range(2):
            assert ask(client, CHAT, body(CHAT, "##n=1##"))[-1] == DONE
        [refused] = ask(client, CHAT, body(CHAT, "##n=1##"))
    error = json.loads(refused)["error"]
    assert (error["status"], error["code"]) == (429, "rate_limit_exceeded")
    assert error["retry_after_s"] > 0


DATA = st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2)


@given(st.lists(st.tuples(st.sampled_from([b"", b"token", b"answer"]), DATA), max_size=5))
def test_frames_are_the_data_of_events(events: list[tuple[bytes, dict[str, str]]]) -> None:
    """Whole events in one piece become one frame each: the data alone, or with its name. Comments become none."""
    piece, wanted = b": keep-alive\n\n", []
    for name, data in events:
        piece += (b"event: " + name + b"\n" if name else b"") + b"data: " + json.dumps(data).encode() + b"\n\n"
        wanted.append({"event": name.decode(), "data": data} if name else data)
    assert [json.loads(frame) for frame in frames(piece)] == wanted


def test_a_frame_is_utf8_whatever_the_engine_said() -> None:
    """Bytes that are no UTF-8 would make the client end the connection."""
    assert [frame.decode() for frame in frames(b'data: "\xff\xe4"\n\n')] == ['"\ufffd\ufffd"']


# -- who asks


def test_a_key_in_a_subprotocol_opens_the_socket(house: House) -> None:
    """Browsers cannot set headers: they offer `tidegate` and the key; the answer selects `tidegate`, and the key is in no log."""
    key = house.keys["data"]
    with connect(house.url.replace("http", "ws") + CHAT, subprotocols=["tidegate", f"key.{key}"], proxy=None) as client:  # type: ignore[list-item]
        assert client.subprotocol == "tidegate"
        assert ask(client, CHAT, body(CHAT, "##n=2##"))[-1] == DONE
    assert key not in (house.data / "gateway.log").read_text()


@pytest.mark.parametrize(
    ("offered", "headers", "status"),
    [
        ([], {}, 401),
        ([], {"authorization": "Bearer tg_wrong"}, 401),
        (["tidegate", "key.tg_wrong"], {}, 401),
        (["tidegate"], {}, 401),
        ([], {"authorization": "Basic eA=="}, 401),
    ],
)
def test_a_handshake_without_a_good_key_is_refused(house: House, offered: list[str], headers: dict[str, str], status: int) -> None:
    """Before the upgrade, with the status and the error object of any request, and a flight."""
    with (
        pytest.raises(InvalidStatus) as refused,
        connect(house.url.replace("http", "ws") + CHAT, subprotocols=offered or None, additional_headers=headers, proxy=None),  # type: ignore[arg-type]
    ):
        pass
    response = refused.value.response
    assert response.status_code == status
    error = json.loads(response.body or b"")["error"]
    flight = house.flight(error["trace_id"])
    assert (flight["http_status"], flight["route"], flight["end"]) == (status, CHAT, "refused")


def test_an_admin_key_cannot_ask(house: House) -> None:
    """As on POST: 403."""
    with pytest.raises(InvalidStatus) as refused, opened(house, key="admin"):
        pass
    assert refused.value.response.status_code == 403


def test_another_site_cannot_use_the_pages_session(house: House) -> None:
    """A browser sends the cookie with a socket that another site opens; its Origin gives it away."""
    with house.client() as client:
        home = client.post("/login", data={"key": house.keys["data"]}, headers={"origin": house.url}, follow_redirects=False)
    cookie = home.headers["set-cookie"].split(";")[0]
    url = house.url.replace("http", "ws") + CHAT
    with connect(url, additional_headers={"cookie": cookie}, origin=house.url, proxy=None) as socket_of_page:  # type: ignore[arg-type]
        assert ask(socket_of_page, CHAT, body(CHAT, "##n=2##"))[-1] == DONE
    with (
        pytest.raises(InvalidStatus) as refused,
        connect(url, additional_headers={"cookie": cookie}, origin="https://elsewhere.example", proxy=None),  # type: ignore[arg-type]
    ):
        pass
    assert refused.value.response.status_code == 403


def test_a_revoked_key_ends_the_socket(house: House) -> None:
    """The next message gets 401, and the socket closes with 1008."""
    with house.client("admin") as admin:
        made = admin.post("/api/v1/keys", json={"tenant": "sockets"}).json()
        house.keys["revoked"] = made["key"]
        with opened(house, key="revoked") as client:
            assert ask(client, CHAT, body(CHAT, "##n=1##"))[-1] == DONE
            admin.delete(f"/api/v1/keys/{made['id']}").raise_for_status()

            def refused() -> bool:
                return "error" in ask(client, CHAT, body(CHAT, "##n=1##"))[-1]

            until(refused, "the key's end")
            with pytest.raises(ConnectionClosed) as closed:
                client.recv(timeout=15)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1008


# -- leaving


@pytest.mark.parametrize("order", ["##t=20000##", "##i=50,n=2000##"])
@pytest.mark.parametrize("way", ["close", "abort", "half"])
def test_leaving_frees_the_engine(house: House, order: str, way: str) -> None:
    """However the client goes, before the first token or in mid-stream: the engine's run ends, and the flight is booked."""
    before = {flight["id"] for flight in house.flights()}
    requests = house.stats()["requests"]
    with opened(house) as client:
        client.send(json.dumps(body(CHAT, order)))
        if "i=" in order:
            client.recv(timeout=15)
        until(lambda: house.stats()["requests"] > requests, "the engine's request")
        if way == "close":
            client.close()
        elif way == "abort":
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.socket.close()
        else:
            client.socket.shutdown(socket.SHUT_WR)
        until(lambda: house.stats()["active"] == 0, "the end of the engine's run", 5)

    def gone() -> list[dict[str, Any]]:
        return [flight for flight in house.flights() if flight["id"] not in before]

    until(lambda: len(gone()) == 1, "the flight")
    assert (gone()[0]["end"], gone()[0]["http_status"]) == ("client_gone", 499)


def test_a_killed_client_frees_the_engine(house: House) -> None:
    """kill -9 of the client's process in mid-stream."""
    program = (
        "import sys\nfrom websockets.sync.client import connect\n"
        "with connect(sys.argv[1], additional_headers={'authorization': 'Bearer ' + sys.argv[2]}, proxy=None) as client:\n"
        "    client.send(sys.argv[3])\n    client.recv()\n    print('began', flush=True)\n    client.recv(timeout=60)\n    input()\n"
    )
    order = json.dumps(body(CHAT, "##i=50,n=2000##"))
    url = house.url.replace("http", "ws") + CHAT
    with subprocess.Popen(
        [sys.executable, "-c", program, url, house.keys["data"], order], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"began\n"
        client.send_signal(signal.SIGKILL)
        until(lambda: house.stats()["active"] == 0, "the end of the engine's run", 5)


def test_a_slow_reader_slows_the_engine(house: House) -> None:
    """A client that does not read stops the engine's stream, not our memory; when it reads on, nothing is lost."""
    words = 100_000
    with raw(house, receive_bytes=16_384) as connection:
        before, resident = house.stats()["written"], resident_bytes(house)
        connection.sendall(frame(Opcode.TEXT, json.dumps(body(CHAT, f"##n={words}##")).encode()))
        written: list[int] = []

        def still() -> bool:
            written.append(house.stats()["written"])
            return len(written) > 20 and written[-1] - written[-20] < 20_000 < written[-1] - before  # asking counts, too

        until(still, "the engine's halt")
        assert resident_bytes(house) - resident < 8_000_000
        found = bytearray()
        while not found.endswith(b"[DONE]"):
            piece = connection.recv(1 << 20)
            assert piece
            found += piece
        assert house.stats()["written"] > written[-1] + 1_000_000, "it had halted before its end"
    assert found.count(b'"content":"') == words


def resident_bytes(house: House) -> int:
    return int(Path(f"/proc/{house.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- what harms: raw bytes


def raw(house: House, *, path: str = CHAT, receive_bytes: int = 0) -> socket.socket:
    """A connection after its handshake."""
    connection = knock(house, path=path, receive_bytes=receive_bytes)
    head = read_head(connection)
    assert head.startswith(b"HTTP/1.1 101"), head
    return connection


def knock(
    house: House, *, path: str = CHAT, more: str = "", method: str = "GET", version: str = "13", receive_bytes: int = 0, behind: bytes = b""
) -> socket.socket:
    """A connection that has sent its handshake, and `behind` in the same write."""
    url = httpx.URL(house.url)
    connection = socket.socket()
    connection.settimeout(15)
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect((url.host, url.port or 80))
    nonce = base64.b64encode(os.urandom(16)).decode()
    connection.sendall(
        f"{method} {path} HTTP/1.1\r\nHost: gateway\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: {nonce}\r\n"
        f"Sec-WebSocket-Version: {version}\r\nAuthorization: Bearer {house.keys['data']}\r\n{more}\r\n".encode()
        + behind
    )
    return connection


def read_head(connection: socket.socket) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        piece = connection.recv(1)
        if not piece:
            break
        head += piece
    return head


def frame(opcode: int, data: bytes, *, fin: bool = True) -> bytes:
    return Frame(Opcode(opcode), data, fin).serialize(mask=True)


def close_code(connection: socket.socket) -> int:
    """The code of the close frame that ends what the server sends; 0 where none came."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            found += piece
    at = 0
    while at < len(found):
        opcode, length = found[at] & 15, found[at + 1] & 127
        at += 2
        if length == 126:
            length = int.from_bytes(found[at : at + 2], "big")
            at += 2
        elif length == 127:
            length = int.from_bytes(found[at : at + 8], "big")
            at += 8
        if opcode == Opcode.CLOSE:
            return int.from_bytes(found[at : at + 2], "big")
        at += length
    return 0


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(Opcode.BINARY, b"{}"), 1003),
        (frame(Opcode.TEXT, b'{"a": "\xff"}'), 1007),
        (frame(Opcode.TEXT, b"\xe4", fin=False) + frame(Opcode.CONT, b"a"), 1007),
        (Frame(Opcode.TEXT, b"{}").serialize(mask=False), 1002),
        (frame(Opcode.CONT, b"{}"), 1002),
        (frame(Opcode.TEXT, b"{", fin=False) + frame(Opcode.TEXT, b"}"), 1002),
        (b"\xf1\x80\0\0\0\0", 1002),  # reserved bits
        (b"\x83\x80\0\0\0\0", 1002),  # an opcode that is not defined
        (b"\x09\x80\0\0\0\0", 1002),  # a ping in pieces
        (b"\x89\xfe\x10\x00" + b"\0" * 4100, 1002),  # a ping of 4 KiB
        (b"\x81\xff" + (1 << 40).to_bytes(8, "big") + b"\0\0\0\0", 1009),
        (b"\x81\xff" + b"\xff" * 8 + b"\0\0\0\0", 1009),
        (frame(Opcode.TEXT, b"x" * 3_000_000, fin=False) + frame(Opcode.CONT, b"x" * 3_000_000), 1009),
        (frame(Opcode.TEXT, b"", fin=False) + frame(Opcode.CONT, b"", fin=False) * (MOST_FRAGMENTS + 1), 1008),
        (frame(Opcode.PING, b"x") * 5000, 1008),
        (frame(Opcode.CLOSE, b"\x03"), 1002),
        (frame(Opcode.CLOSE, b"\x03\xe8"), 1000),
    ],
    ids=[
        "binary", "not UTF-8", "not UTF-8 in pieces", "unmasked", "a piece of nothing", "a text in a text", "reserved bits", "unknown opcode",
        "ping in pieces", "huge ping", "terabyte", "more than there is", "large in pieces", "countless pieces", "ping flood", "broken close", "close",
    ],
)
@pytest.mark.parametrize("early", [False, True], ids=["later", "in the handshake's own packet"])
def test_what_breaks_the_protocol_ends_the_socket_with_its_code(house: House, sent: bytes, code: int, early: bool) -> None:
    """A clean close that says why, whatever the bytes and however soon they come; the gateway lives on, and its log does not call it an error."""
    logged = (house.data / "gateway.log").read_bytes().count(b"Exception in ASGI")
    at_once = sent[:4096] if early else b""
    with knock(house, behind=at_once) as connection:
        assert read_head(connection).startswith(b"HTTP/1.1 101")
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent[len(at_once) :])
        assert close_code(connection) == code
    assert house.chat("##n=1##").status_code == 200
    assert (house.data / "gateway.log").read_bytes().count(b"Exception in ASGI") == logged


@pytest.mark.parametrize(
    "sent", [frame(Opcode.BINARY, b"{}"), Frame(Opcode.TEXT, b"{}").serialize(mask=False), frame(Opcode.CLOSE, b"")],
    ids=["binary", "unmasked", "close"],
)  # fmt: skip
def test_a_mistake_in_mid_stream_frees_the_engine(house: House, sent: bytes) -> None:
    """What ends the socket ends the run on it."""
    requests = house.stats()["requests"]
    with raw(house) as connection:
        connection.sendall(frame(Opcode.TEXT, json.dumps(body(CHAT, "##i=50,n=2000##")).encode()))
        until(lambda: house.stats()["requests"] > requests, "the engine's request")
        connection.sendall(sent)
        until(lambda: house.stats()["active"] == 0, "the end of the engine's run", 5)


def test_a_message_in_pieces_is_one_message(house: House) -> None:
    """Pieces split within a character, with a ping between them, one byte a write."""
    said = json.dumps(body(CHAT, "##n=2## 你好"), ensure_ascii=False).encode()
    sent = b"".join(
        frame(Opcode.TEXT if at == 0 else Opcode.CONT, said[at : at + 7], fin=at + 7 >= len(said)) + frame(Opcode.PING, b"p")
        for at in range(0, len(said), 7)
    )  # fmt: skip
    with raw(house) as connection:
        for at in range(len(sent)):
            connection.sendall(sent[at : at + 1])
        found = b""
        while b"[DONE]" not in found:
            piece = connection.recv(65536)
            assert piece
            found += piece


def test_a_socket_may_follow_requests_on_its_connection(house: House) -> None:
    """A connection that has answered a request becomes a socket; one that still owes an answer does not."""
    handshake = (
        f"GET {CHAT} HTTP/1.1\r\nHost: gateway\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Key: {base64.b64encode(b'0' * 16).decode()}\r\nAuthorization: Bearer {house.keys['data']}\r\n\r\n"
    ).encode()  # fmt: skip
    models = f"GET /v1/models HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {house.keys['data']}\r\n\r\n".encode()
    owes = json.dumps(body(CHAT, "##t=300,n=1##")).encode()
    asks = f"POST {CHAT} HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer {house.keys['data']}\r\nContent-Length: {len(owes)}\r\n\r\n".encode() + owes
    url = httpx.URL(house.url)
    with socket.create_connection((url.host, url.port or 80), timeout=15) as connection:
        connection.sendall(models)
        found = b""
        while not found.endswith(b"}\n"):
            found += connection.recv(65536)
        connection.sendall(handshake)
        assert read_head(connection).startswith(b"HTTP/1.1 101")
    with socket.create_connection((url.host, url.port or 80), timeout=15) as connection:
        connection.sendall(asks + handshake)
        found = b""
        while found.count(b"HTTP/1.1 ") < 2:
            piece = connection.recv(65536)
            assert piece
            found += piece
        assert found.startswith(b"HTTP/1.1 200")
        assert b"HTTP/1.1 101" not in found


def test_frames_right_behind_the_handshake_are_read(house: House) -> None:
    """A client that does not wait for the handshake's answer loses nothing."""
    with knock(house) as connection:
        connection.sendall(frame(Opcode.TEXT, json.dumps(body(CHAT, "##n=2##")).encode()))
        assert read_head(connection).startswith(b"HTTP/1.1 101")
        found = b""
        while b"[DONE]" not in found:
            piece = connection.recv(65536)
            assert piece
            found += piece


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/v1/models", "GET", b"200"), ("/v1/embeddings", "GET", b"405"), ("/v1/nothing", "GET", b"404"), (CHAT, "POST", b"400"),
        ("/health", "GET", b"200"),
    ],
)
def test_elsewhere_an_offered_upgrade_is_declined(house: House, path: str, method: str, status: bytes) -> None:
    """No other path and no other method opens a socket: the request is answered as if nothing had been offered."""
    with knock(house, path=path, method=method, more="Connection: close\r\n" if method == "GET" else "Content-Length: 0\r\n") as connection:
        assert read_head(connection).split(b" ", 2)[1] == status


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ("X-Filler: " + "f" * 70_000 + "\r\n", b"431"),
        ("X-Filler: " + "f" * 20_000 + "\r\n", b"431"),
        ("X-F: f\r\n" * 500, b"431"),
    ],
)
def test_the_handshakes_head_is_bounded(house: House, more: str, status: bytes) -> None:
    """Too many bytes or headers: refused before anything is opened."""
    with knock(house, more=more) as connection:
        assert read_head(connection).split(b" ", 2)[1] == status


def test_a_version_that_is_not_spoken_is_refused(house: House) -> None:
    """Only version 13 exists outside of drafts."""
    with knock(house, version="8") as connection:
        assert read_head(connection).split(b" ", 2)[1] == b"400"


# -- time, and the server's stop


class FakeTransport(asyncio.Transport):
    """Takes what is written; `taken` bytes of it count as sent."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.waiting = 0
        self.aborted = self.closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return self.closed or self.aborted

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def quiet(scope: Any, receive: Any, send: Any) -> None:
    """An app that accepts, and waits for the end."""
    await receive()
    await send({"type": "websocket.accept"})
    while (await receive())["type"] != "websocket.disconnect":
        pass


async def open_socket(app: Any = quiet) -> tuple[SocketConnection, FakeTransport, float]:
    config = Config(app, lifespan="off", log_config=None, ws="none", ws_ping_interval=None)
    config.load()
    connection = SocketConnection(config, ServerState(), {}, asyncio.get_running_loop())
    transport = FakeTransport()
    connection.connection_made(transport)
    connection.data_received(
        b"GET /x HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        b"authorization: Bearer k\r\nSec-WebSocket-Key: " + base64.b64encode(b"0" * 16) + b"\r\n\r\n"
    )
    while not connection.handshake_complete:  # noqa: ASYNC110 - the app above accepts within a few turns
        await asyncio.sleep(0)
    transport.written = b""
    return connection, transport, asyncio.get_running_loop().time()


def ended(connection: SocketConnection) -> None:
    connection.connection_lost(None)


class Known:
    """Every key is good."""

    def known(self, presented_key: str) -> Caller:
        return Caller("key", "tenant")


async def test_the_older_ones_end_goes_before_the_newer_ones_beginning() -> None:
    """However long the older run takes to end after it was cut, no frame of the newer one goes first."""

    async def route(exchange: Exchange) -> None:
        exchange.new_ask(Caller("key", "tenant"))
        said = await exchange.body()
        exchange.watch()
        exchange.start_stream(b"data: " + said + b"\n\n")
        if said == b"alpha":
            try:
                await asyncio.Event().wait()
            finally:
                for _ in range(50):
                    await asyncio.sleep(0)
        exchange.flight.end = "stop"
        await exchange.end_stream(b"data: [DONE]\n\n")

    rooms = Rooms(Known(), [], b"secret", lambda *_: b"", 1000, 10.0)  # type: ignore[arg-type]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await Session(rooms, scope, receive, send, route).run()

    async with asyncio.timeout(10):
        connection, transport, _ = await open_socket(app)
        for said in (b"alpha", b"omega"):
            connection.data_received(frame(Opcode.TEXT, said))
            while said not in transport.written:  # noqa: ASYNC110 - a few turns
                await asyncio.sleep(0)
        while b"[DONE]" not in transport.written:  # noqa: ASYNC110
            await asyncio.sleep(0)
    places = [transport.written.index(word) for word in (b"alpha", b'"superseded"', b"omega", b"[DONE]")]
    assert places == sorted(places)
    ended(connection)
    async with asyncio.timeout(10):
        while connection.tasks:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_client_that_answers_pings_stays() -> None:
    """Silence is asked about, and any sign of life will do."""
    connection, transport, now_s = await open_socket()
    connection.begin()
    connection.look(now_s + PING_S + 1, 75, 600)
    assert transport.written[0] & 15 == Opcode.PING
    connection.data_received(frame(Opcode.PONG, b"tide"))
    connection._heard_s = now_s + PING_S + 2
    connection.look(now_s + PING_S + 3, 75, 600)
    connection.look(now_s + PING_S + 200, 75, 600)
    assert not transport.is_closing()
    ended(connection)


async def test_a_half_open_connection_is_ended() -> None:
    """A client whose machine is gone answers no ping: after the patience for it the connection is dropped."""
    connection, transport, now_s = await open_socket()
    connection.begin()
    connection.look(now_s + PING_S + 1, 75, 600)
    connection.look(now_s + PING_S + 70, 75, 600)
    assert not transport.aborted
    connection.look(now_s + PING_S + 80, 75, 600)
    assert transport.aborted
    ended(connection)


async def test_a_client_that_takes_nothing_is_ended() -> None:
    """Bytes wait, and none is taken for as long as one is patient; as long as some are, a slow reader is only slow."""
    connection, transport, now_s = await open_socket()
    connection.begin()
    for second, waiting in ((1, 5000), (70, 4999), (140, 4998), (210, 4998)):
        transport.waiting = waiting
        connection.look(now_s + second, 75, 600)
        assert not transport.aborted
    connection.look(now_s + 216, 75, 600)
    assert transport.aborted
    ended(connection)


async def test_an_idle_socket_is_closed() -> None:
    """Nothing runs and nothing is asked: 1000. Who does not answer that is dropped a little later."""
    connection, transport, now_s = await open_socket()
    connection.begin()
    connection._heard_s = now_s + 1000
    connection.look(now_s + 1000, 75, 600)
    assert not connection.close_sent, "a long run is not idleness"
    connection.rest()
    connection._rested_s = now_s + 1000
    connection._heard_s = now_s + 1599
    connection.look(now_s + 1601, 75, 600)
    assert transport.written[:1] == bytes([0x80 | Opcode.CLOSE])
    assert transport.written[2:4] == (1000).to_bytes(2, "big")
    connection.look(now_s + 1602, 75, 600)
    assert not transport.aborted
    connection.look(now_s + 1603 + CLOSE_S, 75, 600)
    assert transport.aborted
    ended(connection)


async def test_pongs_do_not_fill_the_memory() -> None:
    """Who pings and does not read gets no pongs."""
    connection, transport, _ = await open_socket()
    connection.pause_writing()
    for _ in range(websocket_connection.MOST_PINGS):
        connection.data_received(frame(Opcode.PING, b"x" * 100))
    assert transport.written == b""
    connection.resume_writing()
    connection.look(0, 75, 600)
    connection.data_received(frame(Opcode.PING, b"x"))
    assert transport.written != b""
    ended(connection)


def test_a_stop_lets_a_run_end_and_closes_idle_sockets(house: House, postgres_dsn: str, tmp_path: Path) -> None:
    """SIGTERM: an idle socket closes with 1001 at once, a running answer comes to its end first."""
    gateway = start_gateway(tmp_path, postgres_dsn, house.engine)
    try:
        url = url_of(tmp_path, gateway)
        headers = {"authorization": f"Bearer {house.keys['data']}"}
        until(lambda: httpx.post(url + CHAT, headers=headers, json=body(CHAT, "##n=1##")).status_code == 200, "a good key")
        ws = url.replace("http", "ws") + CHAT
        with connect(ws, additional_headers=headers, proxy=None) as idle, connect(ws, additional_headers=headers, proxy=None) as busy:
            busy.send(json.dumps(body(CHAT, "##i=50,n=20##")))
            first = busy.recv(timeout=15)
            gateway.terminate()
            for client, answered in ((idle, False), (busy, True)):
                if answered:
                    assert [first, *rest(client, CHAT)][-1] == DONE
                with pytest.raises(ConnectionClosed) as closed:
                    client.recv(timeout=15)
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == 1001
        assert gateway.wait(15) == 0
    finally:
        stop(gateway)
