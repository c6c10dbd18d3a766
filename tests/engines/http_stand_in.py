"""A small HTTP server in the test's own loop whose routes a test writes: for engines that cannot run here, on their documented wire format."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

#: What a route answers with: JSON with status 200, a status and JSON, bytes (plain text), or Events.
Route = Callable[[dict[str, Any]], Any]

SPECIAL = re.compile(r"(<\|[a-z_]+\|>|<s>)")


class Events:
    """A stream of server-sent events, each a JSON value or bytes as they are. `hangs`: after them nothing comes and the connection stays."""

    def __init__(self, *events: Any, done: bool = False, hangs: bool = False) -> None:
        self.events = [*events, b"[DONE]"] if done else list(events)
        self.hangs = hangs


class HttpStandIn:
    """`routes`: "/path" -> what answers a request, given its JSON (an empty object for a GET)."""

    def __init__(self, routes: dict[str, Route]) -> None:
        self.routes = routes
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.active = 0
        self.url = ""
        self._server: asyncio.Server | None = None

    def last(self, path: str) -> dict[str, Any]:
        """The JSON of the newest request to a path."""
        return next(fields for asked, fields in reversed(self.asked) if asked == path)

    async def start(self) -> HttpStandIn:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.url = f"http://{host}:{port}"
        return self

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
            body = await reader.readexactly(int(length[1])) if length else b""
            path, fields = head.split(" ")[1], json.loads(body or b"{}")
            self.asked.append((path, fields))
            self.active += 1
            try:
                await self._answer(self.routes.get(path, lambda _: (404, {"detail": "Not Found"}))(fields), reader, writer)
            finally:
                self.active -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, answer: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if isinstance(answer, Events):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n")
            for event in answer.events:
                piece = b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            if answer.hangs:
                await reader.read()
                return
            writer.write(b"0\r\n\r\n")
        else:
            status, said = answer if isinstance(answer, tuple) else (200, answer)
            data = said if isinstance(said, bytes) else json.dumps(said).encode()
            kind = b"text/plain" if isinstance(said, bytes) else b"application/json"
            writer.write(b"HTTP/1.1 %d X\r\ncontent-type: %b\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (status, kind, len(data), data))
        await writer.drain()


class Tokenizer:
    """One id a character; control tokens are one token, and are read as such in every text, as by Hugging Face's tokenizers."""

    CONTROL: Sequence[str] = ("<s>", "<|im_start|>", "<|im_end|>")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in SPECIAL.split(text):
            ids += [self.CONTROL.index(piece)] if piece in self.CONTROL else [ord(character) + 100 for character in piece]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.CONTROL[token] if token < 100 else chr(token - 100) for token in ids)
