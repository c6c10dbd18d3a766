"""Many streams, slow readers, and clients that leave: what they cost and what they leave behind.

    .venv/bin/python benchmarks/streams.py [--rounds 5] [--clients 2000]

Engine and clients live in this process, the gateway in one of its own, the database beside it. Everything is on 127.0.0.1, bounded in count
and time. Writes benchmarks/results/streams.json.

- open: memory of 2,000 streams that have said one token and are silent.
- slow: growth of the gateway while one client asks for an endless stream and does not read.
- leaving: clients that leave at a random moment, by FIN or RST, streamed and not; the time from their close to the loss of the engine's
  connection; what is left after each round: running generations, requests, memory, and a flight for each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx
import psycopg
import uvloop
from common import database, record, rss_mb, write_config

OPEN = 2000
WARM = 18_000
CALM = 600
FIRST_TOKEN_S, TOKEN_S, TOKENS = 0.02, 0.005, 400
EVENT = (
    b'data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"mock",'
    b'"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Engine(asyncio.Protocol):
    """Says a token every TOKEN_S, one and no more (`quiet`), or without end and pause (`endless`); notes when its client is gone."""

    active = 0
    lost_ns: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.data = b""
        self.number = ""
        self.timer: asyncio.TimerHandle | None = None
        self.paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, found, body = self.data.partition(b"\r\n\r\n")
        if not found or len(body) < int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0] or 0):
            return
        self.data = b""
        if not body:  # a question for figures
            self.transport.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            return
        said = json.loads(body)["messages"][0]["content"]
        self.kind, self.number = said.split()
        Engine.active += 1
        self.said = 0
        self.timer = self.loop.call_later(FIRST_TOKEN_S, self.begin)

    def begin(self) -> None:
        self.transport.write(HEAD + chunk(EVENT))
        self.said = 1
        if self.kind == "endless":
            self.pour()
        elif self.kind == "walk":
            self.timer = self.loop.call_later(TOKEN_S, self.token)

    def token(self) -> None:
        self.transport.write(chunk(EVENT))
        self.said += 1
        if self.said < TOKENS:
            self.timer = self.loop.call_later(TOKEN_S, self.token)

    def pour(self) -> None:
        self.timer = None
        for _ in range(100):
            if self.paused:
                return
            self.transport.write(chunk(EVENT) * 20)
        self.timer = self.loop.call_later(0, self.pour)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if self.number and self.kind == "endless" and self.timer is None:
            self.pour()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if self.number:
            Engine.active -= 1
            Engine.lost_ns[self.number] = time.perf_counter_ns()


def request(key: str, kind: str, number: int, *, stream: bool = True) -> bytes:
    body = json.dumps({"model": "mock", "messages": [{"role": "user", "content": f"{kind} {number}"}], "stream": stream}).encode()
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    )


async def until(what: str, true: Any, within_s: float = 30.0) -> None:
    end = time.perf_counter_ns() + within_s * 1e9
    while not true():
        if time.perf_counter_ns() > end:
            raise RuntimeError(f"{what} did not happen within {within_s} s")
        await asyncio.sleep(0.02)


@asynccontextmanager
async def gateway(home: Path, dsn: str) -> AsyncIterator[tuple[int, str, int]]:
    """(pid, host, port) of a gateway whose engine is ours. llama_cpp's way of asking: it streams from the engine whatever the client asked."""
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0, backlog=4096)
    port = server.sockets[0].getsockname()[1]
    config = write_config(home, dsn, f"http://127.0.0.1:{port}", limits=True)
    config.write_text(config.read_text().replace('adapter = "openai"', 'adapter = "llama_cpp"'))
    note = home / "data" / "run" / "gateway.json"
    note.unlink(missing_ok=True)
    process = subprocess.Popen([sys.executable, "-m", "tidegate.cli", "serve", "--config", str(config), "--port", "0"])  # noqa: ASYNC220 - before the clients
    try:
        await until("the start", note.exists)
        await asyncio.sleep(1)
        at = json.loads(note.read_bytes())["url"].removeprefix("http://").split(":")
        yield process.pid, at[0], int(at[1])
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 60)
        server.close()


async def open_streams(at: tuple[int, str, int], key: str) -> dict[str, Any]:
    pid, host, port = at
    before = rss_mb(pid)
    writers = []
    for number in range(OPEN):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(request(key, "quiet", number))
        writers.append((reader, writer))
    for reader, _ in writers:
        await reader.readuntil(b" word")
    await asyncio.sleep(1)
    more = rss_mb(pid) - before
    for _, writer in writers:
        writer.close()
    await until("the engine's release", lambda: Engine.active == 0)
    return {"open_streams": OPEN, "more_rss_mb": round(more, 1)}


async def slow_reader(at: tuple[int, str, int], key: str) -> dict[str, Any]:
    pid, host, port = at
    before = rss_mb(pid)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, port))
    await asyncio.get_running_loop().sock_sendall(sock, request(key, "endless", 0))
    peak = 0.0
    for _ in range(50):
        await asyncio.sleep(0.1)
        peak = max(peak, rss_mb(pid) - before)
    sock.close()
    await until("the engine's release", lambda: Engine.active == 0)
    return {"slow_reader_s": 5, "slow_reader_peak_growth_mb": round(peak, 2)}


async def leave_once(at: tuple[int, str, int], key: str, number: int, draw: random.Random, left_ns: dict[str, int]) -> None:
    _, host, port = at
    stream, rst, wait_s = draw.random() < 0.7, draw.random() < 0.5, draw.random() * 0.08
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return
    writer.write(request(key, "walk", number, stream=stream))
    await asyncio.sleep(wait_s)
    left_ns[str(number)] = time.perf_counter_ns()
    if rst:
        writer.transport.abort()
    else:
        writer.close()


async def leave_at_first_word(at: tuple[int, str, int], key: str, number: int) -> None:
    _, host, port = at
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request(key, "walk", number))
    await reader.readuntil(b" word")
    writer.close()


async def warm(at: tuple[int, str, int], key: str, dsn: str) -> None:
    """Fill what is bounded, the newest flights in memory, which instance knows which prompt, the C library's own stock: what grows after that
    grows for ever. Then forget the flights."""
    waiting: set[asyncio.Task[None]] = set()
    for number in range(WARM):
        if len(waiting) >= 64:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        waiting.add(asyncio.create_task(leave_at_first_word(at, key, -1 - number)))
    await asyncio.wait(waiting)

    await until("the warm-up's flights", lambda: Engine.active == 0)
    await asyncio.sleep(3)  # the spool is drained twice a second
    with psycopg.connect(dsn) as link:
        link.execute("delete from flights")


async def calmly(at: tuple[int, str, int], key: str) -> dict[str, float]:
    """The time from a client's close to the loss of the engine's connection where engine and clients, which are this one process, have time to look:
    600 clients, two at once."""
    draw = random.Random(12)
    left_ns: dict[str, int] = {}
    Engine.lost_ns.clear()
    for number in range(0, CALM, 2):
        await asyncio.gather(*(leave_once(at, key, number + one, draw, left_ns) for one in (0, 1)))
    await until("zero running generations", lambda: Engine.active == 0)
    return percentiles(left_ns)


def percentiles(left_ns: dict[str, int]) -> dict[str, float]:
    """Milliseconds between close and loss, of the clients whose request reached the engine before they left."""
    took_ms = sorted((Engine.lost_ns[number] - left) / 1e6 for number, left in left_ns.items() if number in Engine.lost_ns)
    return {"reached": len(took_ms), **{f"p{q}": round(took_ms[min(len(took_ms) - 1, len(took_ms) * q // 100)], 2) for q in (50, 95, 99)}}


async def leaving(at: tuple[int, str, int], key: str, dsn: str, rounds: int, clients: int) -> dict[str, Any]:
    pid, host, port = at
    draw = random.Random(11)
    left_ns: dict[str, int] = {}
    Engine.lost_ns.clear()
    sizes = []
    for turn in range(rounds):
        waiting: set[asyncio.Task[None]] = set()
        for number in range(turn * clients, (turn + 1) * clients):
            if len(waiting) >= 64:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            waiting.add(asyncio.create_task(leave_once(at, key, number, draw, left_ns)))
        await asyncio.wait(waiting)
        await until("zero running generations", lambda: Engine.active == 0)
        await asyncio.sleep(1.5)
        sizes.append(round(rss_mb(pid), 1))
    async with httpx.AsyncClient() as client:
        health = (await client.get(f"http://{host}:{port}/health")).json()
    sent = len(left_ns)

    def flights() -> int:
        with psycopg.connect(dsn) as link:
            row = link.execute("select count(*) from flights where record->>'end' = 'client_gone'").fetchone()
            assert row is not None
            return int(row[0])

    await until("a flight for each", lambda: flights() >= sent)
    return {
        "clients": sent, "flights_client_gone": flights(), "running_generations": Engine.active,
        "requests_in_flight": health["requests_in_flight"], "gateway_open_fds": len(os.listdir(f"/proc/{pid}/fd")), "rss_mb_by_round": sizes,
        "close_to_engine_loss_ms": percentiles(left_ns),
    }


async def measure(home: Path, dsn: str, key: str, rounds: int, clients: int) -> dict[str, Any]:
    async with gateway(home, dsn) as at:
        found = await open_streams(at, key)
    async with gateway(home, dsn) as at:  # a new one: the flights of 2,000 streams on their way to the database are memory, too
        found |= await slow_reader(at, key)
        found["close_to_engine_loss_ms_two_at_once"] = await calmly(at, key)
    async with gateway(home, dsn) as at:
        await warm(at, key, dsn)
        found["leaving"] = await leaving(at, key, dsn, rounds, clients)
    gone = found["leaving"]
    found["gates"] = {
        "2,000 open streams < 100 MB": found["more_rss_mb"] < 100,
        "slow reader < 8 MB": found["slow_reader_peak_growth_mb"] < 8,
        "close to the engine's loss <= 10 ms P99": found["close_to_engine_loss_ms_two_at_once"]["p99"] <= 10,
        "nothing left running": gone["running_generations"] == gone["requests_in_flight"] == 0,
        "a flight for each": gone["flights_client_gone"] == gone["clients"],
        "memory flat": gone["rss_mb_by_round"][-1] - gone["rss_mb_by_round"][0] < 2,
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=2000)
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))
    with database() as (home, dsn, key):
        result = uvloop.run(measure(home, dsn, key, options.rounds, options.clients))
    print(json.dumps(result, indent=1))
    print("written:", record("streams", result))


if __name__ == "__main__":
    main()
