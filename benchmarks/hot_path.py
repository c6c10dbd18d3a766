"""What a request, and an event of a stream, cost the gateway's own code: one process, the real rooms, no sockets.

    .venv/bin/python benchmarks/hot_path.py [--repeats 5] [--terms 100000] [--calls]

Clients and engine are transports in memory: what a request writes to the engine is answered in the next turn of the event loop, what the
gateway writes to the client is looked at, and the client asks again. So the figures hold neither the system's reads and writes of sockets nor
anybody's scheduling, and small differences show: run two commits in turns. Of a request through sockets (relay.py) they are about half. Writes
benchmarks/results/hot_path.json; `--calls` counts calls of functions instead and writes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from common import ban, record, write_config
from uvicorn.server import ServerState

from tidegate.api.connection import Connection as Door
from tidegate.app.gateway import Gateway
from tidegate.core.keys import hash_key
from tidegate.core.ports import KeyRecord
from tidegate.engines.wire import Connection as Wire
from tidegate.settings import load

KEY = "tg-bench"
CLIENTS = 16
_EVENT = b'{"id":"c","object":"chat.completion.chunk","created":1,"model":"mock","choices":[{"index":0,"delta":%b,"finish_reason":%b}]}'
_USAGE = (
    b'{"id":"c","object":"chat.completion.chunk","created":1,"model":"mock","choices":[],'
    b'"usage":{"prompt_tokens":12,"completion_tokens":%d,"total_tokens":%d}}'
)
_WHOLE = (
    b'{"id":"c","object":"chat.completion","created":1,"model":"mock",'
    b'"choices":[{"index":0,"message":{"role":"assistant","content":"tok tok tok tok"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":12,"completion_tokens":4,"total_tokens":16}}'
)


class Memory(asyncio.Transport):
    """A transport that hands what is written to `on_write`."""

    def __init__(self, on_write: Any) -> None:
        super().__init__()
        self.write = on_write  # type: ignore[method-assign]
        self._closing = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    abort = close

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def request(stream: bool, tokens: int) -> bytes:
    messages = [{"role": "user", "content": f"Say {tokens} words, and say them well."}]
    fields: dict[str, Any] = {"model": "mock", "messages": messages, "max_tokens": tokens}
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps(fields).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer %b\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (KEY.encode(), len(body), body)
    )


def answer(stream: bool, tokens: int) -> list[bytes]:
    """What the engine writes, one piece for each turn of the loop."""
    if not stream:
        return [b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(_WHOLE), _WHOLE)]
    events = [_EVENT % (b'{"content":"tok%d "}' % number, b"null") for number in range(tokens)]
    events += [_EVENT % (b"{}", b'"stop"'), _USAGE % (tokens, tokens + 12), b"[DONE]"]
    pieces = [chunk(b"data: " + event + b"\n\n") for event in events]
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return [head, *pieces[:-3], b"".join(pieces[-3:]) + b"0\r\n\r\n"]


class Load:
    """So many requests, CLIENTS at a time."""

    def __init__(self, gateway: Gateway, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._gateway = gateway
        self._config = uvicorn.Config(
            gateway.door, http=Door, loop="none", lifespan="off", log_config=None, access_log=False, server_header=False, ws="none",
            proxy_headers=False,
        )  # fmt: skip
        self._config.load()
        self._pool = next(iter(gateway.fleet.members.values())).engine.pool  # type: ignore[attr-defined]
        self._pool._loop = loop
        self._answer: list[bytes] = []
        self._state = ServerState()
        for _ in range(CLIENTS):
            self._open_engine()
        self._clients = [self._open_client() for _ in range(CLIENTS)]

    def _open_engine(self) -> None:
        conn = Wire(self._pool)
        loop = self._loop

        def on_write(_: bytes) -> None:
            if len(self._answer) == 1:
                loop.call_soon(conn.data_received, self._answer[0])
            else:
                loop.call_soon(next_piece, iter(self._answer))

        def next_piece(pieces: Any) -> None:
            piece = next(pieces, None)
            if piece is not None:
                conn.data_received(piece)
                loop.call_soon(next_piece, pieces)

        conn.connection_made(Memory(on_write))
        self._pool._all.add(conn)
        self._pool.put_back(conn)

    def _open_client(self) -> Door:
        client = Door(config=self._config, server_state=self._state, app_state={}, _loop=self._loop)
        loop = self._loop

        def on_write(data: bytes) -> None:
            self.bytes += len(data)
            if data.endswith(self._end):
                assert b" 200 OK" in data[:20] or self._stream, data
                if self.left > 0:
                    self.left -= 1
                    loop.call_soon(client.data_received, self._request)
                else:
                    self._idle += 1
                    if self._idle == CLIENTS:
                        self._done.set_result(None)

        client.connection_made(Memory(on_write))
        return client

    async def run(self, count: int, *, stream: bool = False, tokens: int = 16) -> float:
        """CPU seconds."""
        self._request, self._answer, self._stream = request(stream, tokens), answer(stream, tokens), stream
        self._end = b"0\r\n\r\n" if stream else b"}\n"
        self.left, self._idle, self.bytes = count - CLIENTS, 0, 0
        self._done = self._loop.create_future()
        began = time.process_time()
        for client in self._clients:
            self._loop.call_soon(client.data_received, self._request)
        await self._done
        return time.process_time() - began


def gateway_in(folder: Path, terms: int) -> Gateway:
    config = write_config(folder, "postgres://nobody@127.0.0.1:9/none", "http://127.0.0.1:9", terms=ban(folder, terms) if terms else None)
    gateway = Gateway(load(config, {}))
    gateway.keys._take([KeyRecord(id="k", sha256=hash_key(KEY), tenant="bench", role="data", name="", created_unix_s=0.0)])
    return gateway


def count_calls(load_: Load, loop: asyncio.AbstractEventLoop, *, stream: bool) -> Counter[str]:
    """Calls for each request, by function; those of C begin with "C ". A coroutine counts each time that it goes on."""
    calls: Counter[str] = Counter()

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            code = frame.f_code
            calls[f"{code.co_filename.rsplit('/tidegate/', 1)[-1]}:{code.co_qualname}"] += 1
        elif event == "c_call":
            calls[f"C {getattr(arg, '__qualname__', arg)}"] += 1

    count = 320
    sys.setprofile(profile)
    loop.run_until_complete(load_.run(count, stream=stream))
    sys.setprofile(None)
    return Counter({name: number / count for name, number in calls.items()})


def tell_calls(load_: Load, loop: asyncio.AbstractEventLoop) -> None:
    for stream in (False, True):
        calls = count_calls(load_, loop, stream=stream)
        in_c = sum(number for name, number in calls.items() if name.startswith("C "))
        print(f"--- {'a stream of 16 events' if stream else 'a request'}: {calls.total() - in_c:.1f} Python calls, {in_c:.1f} C calls")
        for name, number in calls.most_common():
            if number >= 0.5:
                print(f"{number:7.1f} {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--terms", type=int, default=0, help="terms that are banned")
    parser.add_argument("--calls", action="store_true")
    options = parser.parse_args()
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    with tempfile.TemporaryDirectory() as folder:
        load_ = Load(gateway_in(Path(folder), options.terms), loop)
        loop.run_until_complete(load_.run(1000))
        loop.run_until_complete(load_.run(100, stream=True))
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)  # as app/serving.py does
        if options.calls:
            tell_calls(load_, loop)
            return
        found: dict[str, list[float]] = {"request_us": [], "event_us": [], "stream_without_events_us": []}
        for _ in range(options.repeats):
            found["request_us"].append(loop.run_until_complete(load_.run(options.requests)) / options.requests * 1e6)
            streams = options.requests // 12
            short, long = (loop.run_until_complete(load_.run(streams, stream=True, tokens=tokens)) / streams * 1e6 for tokens in (16, 128))
            found["event_us"].append((long - short) / 112)
            found["stream_without_events_us"].append(short - 16 * found["event_us"][-1])
    figures = {name: {"median": round(statistics.median(values), 2), "least": round(min(values), 2)} for name, values in found.items()}
    print(json.dumps(figures, indent=1))
    print("written:", record("hot_path", {"repeats": options.repeats, "terms": options.terms, "figures": figures}))


if __name__ == "__main__":
    main()
