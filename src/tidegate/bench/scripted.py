"""The scripted engine: a server with OpenAI's API that does as the prompt orders, misbehaviour at byte level included.

    python -m tidegate.bench.scripted --host 127.0.0.1 --port 0

prints `listening 127.0.0.1:PORT` and runs until SIGTERM. `bench/directives.py` says what may be ordered. `GET /stats` counts; the same
order gives the same bytes, always. /tokenize, /detokenize, /apply-template, /props and /completion answer as llama.cpp's, /tokenize and /detokenize
also as vLLM's.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import signal
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import httptools

from tidegate.bench.act import Act, Step
from tidegate.bench.behaviour import CLAIMED_CONTEXT, Behaviour
from tidegate.bench.response import answer
from tidegate.bench.script import MODEL, Kind, prompt_tokens, read
from tidegate.bench.steps import Steps, Turn
from tidegate.bench.tokens import TEMPLATE, decode, encode, render
from tidegate.bench.whole import json_response, native
from tidegate.core.errors import SettingsError, TidegateError

_ROUTES: dict[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}


class Scripted:
    """The server, its counters, and what it was asked last. `refuse`: that many next connections are closed as soon as they come."""

    def __init__(self, api_key: str | None = None, behaviour: Behaviour | None = None) -> None:
        self.api_key = api_key
        self.behaviour = behaviour or Behaviour()
        #: The steps that answers share, where it has speeds.
        self.steps: Steps | None = None
        #: Those whose answer waits for a slot, the first to come first.
        self.waiting: deque[_Connection] = deque()
        self.refuse = 0
        self.requests = 0
        self.active = 0
        self.aborted = 0
        self.accepted = 0
        #: Bytes written to connections, those of streams that were aborted too.
        self.written = 0
        self.bodies: deque[dict[str, Any]] = deque(maxlen=16)
        self.digests: deque[str] = deque(maxlen=16)
        self.connections: set[_Connection] = set()
        self.host = ""
        self.port = 0
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def stats(self) -> dict[str, Any]:
        """What `GET /stats` says: counts, and digests of the last prompts (never their text)."""
        return {
            "requests": self.requests,
            "active": self.active,
            "waiting": len(self.waiting),
            "aborted": self.aborted,
            "connections": len(self.connections),
            "accepted": self.accepted,
            "written": self.written,
            "prompts": list(self.digests),
            "models": [body.get("model") for body in self.bodies],
        }

    @property
    def context(self) -> int:
        """Tokens of context that are claimed."""
        return self.behaviour.context or CLAIMED_CONTEXT

    def enter(self, connection: _Connection) -> bool:
        """Whether there is a slot for an answer; else the connection stands in the queue, and is called."""
        if self.behaviour.slots and self.active >= self.behaviour.slots:
            self.waiting.append(connection)
            return False
        self.active += 1
        return True

    def leave(self) -> None:
        """A slot is free: whoever has waited longest has it."""
        self.active -= 1
        if self.waiting and (not self.behaviour.slots or self.active < self.behaviour.slots):
            self.active += 1
            asyncio.get_running_loop().call_soon(self.waiting.popleft().begin)  # not at once: a long queue of short answers would be one deep stack

    async def listen(self, host: str, port: int, **options: Any) -> None:
        """Begin to listen; `options` go to `loop.create_server`."""
        if self.behaviour.speeds is not None:
            self.steps = Steps(self.behaviour.speeds, asyncio.get_running_loop())
        self._server = await asyncio.get_running_loop().create_server(lambda: _Connection(self), host, port, **options)
        self.host, self.port = self._server.sockets[0].getsockname()[:2]

    async def close(self) -> None:
        """Stop listening and close every connection."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.transport.abort()
        for _ in range(100):  # the loop closes sockets in its next turns
            if not self.connections:
                break
            await asyncio.sleep(0)
        if self._server is not None:
            await self._server.wait_closed()


class _Connection(asyncio.Protocol):
    """One client. Requests on it are answered one after the other."""

    transport: asyncio.Transport

    def __init__(self, server: Scripted) -> None:
        self.server = server
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []
        self._key = b""
        self._waiting: deque[tuple[bytes, str, bytes, bytes]] = deque()
        self._steps: Iterator[Step] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        #: In the engine's steps: the prompt's tokens, and once it has begun its turn, tokens that it has and that are not yet said, and whether
        #: the answer waits for one.
        self._prompt_tokens = 0
        self._turn: Turn | None = None
        self._tokens = 0
        self._awaits_token = False
        self._paused = False
        self._stale = False
        self._loop = asyncio.get_running_loop()

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.server.accepted += 1
        self.server.connections.add(self)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.server.refuse > 0:
            self.server.refuse -= 1
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._stale:
            self.transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._write(json_response(400, {"error": {"message": f"not HTTP: {error}"}}))
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._steps is not None:
            self._steps = None
            self.server.aborted += 1
            if self in self.server.waiting:
                self.server.waiting.remove(self)
            else:
                self._leave()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._steps is not None and self._timer is None and not self._awaits_token and self not in self.server.waiting:
            self._play()

    # -- httptools' side

    def on_message_begin(self) -> None:
        self._url = self._key = b""
        self._body = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"authorization":
            self._key = value

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        self._waiting.append((self._parser.get_method(), self._url.decode("latin-1"), b"".join(self._body), self._key))
        self._next()

    # --

    def _next(self) -> None:
        while self._waiting and self._steps is None and not self.transport.is_closing():
            self._respond(*self._waiting.popleft())

    def _respond(self, method: bytes, url: str, body: bytes, key: bytes) -> None:
        server = self.server
        kind = _ROUTES.get(url)
        if method == b"POST" and kind is not None:
            server.requests += 1
            if server.api_key and key != b"Bearer " + server.api_key.encode():
                self._write(json_response(401, {"error": {"message": "no such key", "code": "invalid_api_key"}}))
                return
            try:
                steps = self._generate(kind, body)
            except TidegateError as error:
                self._write(json_response(400, {"error": {"message": f"{error.message} {error.hint or ''}", "type": error.type}}))
                return
            self._steps = steps
            if server.enter(self):
                self.begin()
        elif url == "/v1/models":
            model = {"id": MODEL, "object": "model", "created": 1, "owned_by": "scripted", "max_model_len": server.context}
            self._write(json_response(200, {"object": "list", "data": [model]}))
        elif method == b"POST" and url in _TOKEN_ROUTES:
            self._respond_json(_TOKEN_ROUTES[url], body)
        elif url == "/props":
            context = {"n_ctx": server.context, "params": {}}
            self._write(json_response(200, {"chat_template": TEMPLATE, "default_generation_settings": context, "model_alias": MODEL}))
        elif url == "/health":
            self._write(json_response(200, {"status": "ok"}))
        elif url == "/stats":
            self._write(json_response(200, server.stats()))
        else:
            self._write(json_response(404, {"error": {"message": f"no route {url}", "type": "not_found"}}))

    def begin(self) -> None:
        """The answer has a slot."""
        self._due = self._loop.time()
        self._play()

    def _respond_json(self, make: Callable[[dict[str, Any]], Any], body: bytes) -> None:
        """A question about tokens: no generation, so it is not counted as a request."""
        try:
            self._write(json_response(200, make(_object(body))))
        except TidegateError as error:
            self._write(json_response(400, {"error": {"message": error.message, "type": error.type}}))

    def _generate(self, kind: Kind, body: bytes) -> Iterator[Step]:
        fields = _object(body)
        self.server.bodies.append(fields)
        request = read(kind, fields)
        self.server.digests.append(hashlib.sha256(request.prompt.encode("utf-8", "replace")).hexdigest()[:16])
        self._prompt_tokens = prompt_tokens(request)
        return answer(self.server.behaviour.apply(request, fields))

    def _play(self) -> None:
        """Take steps until one has to be waited for. Bytes in a row are one write."""
        self._timer = None
        steps = self._steps
        gathered: list[bytes] = []
        size = 0
        while steps is not None and not self._paused:
            step = next(steps, None)
            if isinstance(step, bytes):
                gathered.append(step)
                size += len(step)
                if size >= 65_536:
                    self._write(b"".join(gathered))
                    gathered, size = [], 0
                continue
            if gathered:
                self._write(b"".join(gathered))
                gathered, size = [], 0
            if step is None:
                self._done()
                self._next()
                return
            if isinstance(step, float):
                # absolute: a late wake-up does not push the next one back
                self._due += step / 1000
                self._timer = self._loop.call_later(max(0.0, self._due - self._loop.time()), self._play)
                return
            if step is Act.NEXT:
                if self._takes_token():
                    continue
                return
            if self._act(step):
                return
        if gathered:
            self._write(b"".join(gathered))

    def _takes_token(self) -> bool:
        """Whether the next token is there; else `_on_token` goes on with it. The first time the prompt is given to the engine."""
        steps = self.server.steps
        assert steps is not None, "answers come in steps where there are some"
        if self._tokens:
            self._tokens -= 1
            return True
        self._awaits_token = True
        if self._turn is None:
            self._turn = steps.enter(self._prompt_tokens, self._on_token)
        return False

    def _on_token(self) -> None:
        if self._awaits_token:
            self._awaits_token = False
            self._play()
        else:  # the client reads slowly
            self._tokens += 1

    def _act(self, act: Act) -> bool:
        """Do it; True where no step comes after it."""
        if act is Act.HANG:
            return True
        if act is Act.STALE:
            self._stale = True
            return False
        self._done()
        if act is Act.REFUSE:
            self.server.refuse += 1
        if act is Act.BREAK:
            self._write(b"zz\r\nno chunk\r\n")
        if act is Act.RESET:
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
        else:
            self.transport.close()
        return True

    def _done(self) -> None:
        self._steps = None
        self._leave()

    def _leave(self) -> None:
        """The slot, and the place in the engine's steps, is free."""
        if self._turn is not None and self.server.steps is not None:
            self.server.steps.leave(self._turn)
        self._turn, self._tokens, self._awaits_token = None, 0, False
        self.server.leave()

    def _write(self, data: bytes) -> None:
        self.server.written += len(data)
        self.transport.write(data)


def _object(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise TidegateError("The body is not a JSON object.")
    return fields


def _tokenize(fields: dict[str, Any]) -> dict[str, Any]:
    """As llama.cpp's where it says `content` (ids in a list stay ids), as vLLM's where it says `prompt` or `messages`."""
    if "content" in fields:
        content = fields["content"]
        parts = content if isinstance(content, list) else [content]
        special = fields.get("parse_special", True) is not False
        ids: list[int] = []
        for part in parts:
            ids += [part] if isinstance(part, int) else encode(str(part), special=special)
        if fields.get("with_pieces") is True:
            return {"tokens": [{"id": number, "piece": decode([number]).decode("utf-8", "replace")} for number in ids]}
        return {"tokens": ids}
    text = render(fields["messages"], add_generation_prompt=fields.get("add_generation_prompt") is not False) if "messages" in fields else None
    ids = encode(text if text is not None else str(fields.get("prompt", "")), special=True)
    strings = [decode([number]).decode("utf-8", "replace") for number in ids] if fields.get("return_token_strs") is True else None
    return {"tokens": ids, "count": len(ids), "max_model_len": 8192, "token_strs": strings}


def _detokenize(fields: dict[str, Any]) -> dict[str, str]:
    tokens = fields.get("tokens")
    try:
        text = decode(tokens if isinstance(tokens, list) else []).decode("utf-8", "replace")
    except ValueError as error:
        raise TidegateError(str(error)) from None
    return {"content": text, "prompt": text}


def _apply_template(fields: dict[str, Any]) -> dict[str, str]:
    return {"prompt": render(fields.get("messages"), add_generation_prompt=fields.get("add_generation_prompt") is not False)}


def _completion(fields: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp's own completion, whole and without faults."""
    limit = fields.get("n_predict")
    return native(read("completion", fields), limit if isinstance(limit, int) and limit >= 0 else None)


_TOKEN_ROUTES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "/tokenize": _tokenize, "/detokenize": _detokenize, "/apply-template": _apply_template, "/completion": _completion,
}  # fmt: skip


async def start(
    host: str = "127.0.0.1", port: int = 0, *, api_key: str | None = None, behaviour: Behaviour | None = None, **options: Any
) -> Scripted:
    """A running server in this event loop; close it with `await server.close()`. `options` go to `loop.create_server` (e.g. `ssl`)."""
    server = Scripted(api_key, behaviour)
    await server.listen(host, port, **options)
    return server


async def _serve(host: str, port: int, api_key: str | None, behaviour: Behaviour | None = None) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        server = await start(host, port, api_key=api_key, behaviour=behaviour)
    except OSError as error:
        raise SettingsError(f"The scripted engine cannot listen on {host}:{port}: {error.strerror}.", hint="Name a free port.") from None
    print(f"listening {server.host}:{server.port}", flush=True)
    await stop.wait()
    await server.close()


def run(host: str, port: int, api_key: str | None, behaviour: Behaviour | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Raises SettingsError where the port is taken."""
    import uvloop

    uvloop.run(_serve(host, port, api_key, behaviour))


def main() -> None:
    """The same without the options of `tidegate scripted`."""
    parser = argparse.ArgumentParser(
        prog="tidegate scripted", description="An OpenAI-compatible engine that does as the prompt orders.",
        epilog="A prompt orders with ##t=20,i=5,n=3##: 20 ms to the first token, 5 ms between tokens, 3 tokens; m=cut breaks the stream off. "
        "All orders and faults: docs/engines.md.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0, the default, takes a free one and prints it")
    parser.add_argument("--api-key", default=None, help="refuse requests that do not bring it")
    args = parser.parse_args()
    run(args.host, args.port, args.api_key)


if __name__ == "__main__":
    main()
