"""A request to a hot route, and its response: uvicorn's cycle without what only ASGI needs.

uvicorn makes a scope, an event and a task for a request before its body is there, and an application reads the body through a coroutine. A
hot route wants its path, its headers and its body, and nothing before they are whole. It stays a RequestResponseCycle in all that is written
to it and read from it, so that nothing else has to know the difference.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

#: Bodies up to this size are waited for before the request begins; larger ones are read by the request itself, once its key is known.
SMALL_BODY_BYTES = 64 * 1024


class _Nobody:
    """Stands where somebody could wait for the client, until somebody does."""

    def set(self) -> None:
        return None

    def clear(self) -> None:
        return None


_NOBODY: Any = _Nobody()


class Turn(RequestResponseCycle):
    """`connection` is the protocol that reads the request, `path` where it goes."""

    # What every request has in common costs none of them anything.
    message_event: asyncio.Event = _NOBODY
    disconnected = False
    waiting_for_100_continue = False
    more_body = True
    response_started = False
    response_complete = False
    chunked_encoding = None
    expected_content_length = 0
    access_log = False
    #: Whether somebody works on it already, and who.
    begun = False
    task: asyncio.Task[None] | None = None

    def __init__(self, connection: HttpToolsProtocol, path: str, headers: list[tuple[bytes, bytes]], *, keep_alive: bool) -> None:
        self.began_ns = time.perf_counter_ns()
        self.scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "http_version": "1.1"}  # type: ignore[typeddict-item]
        #: By their lower-case names; of a header that comes several times the last.
        self.headers = dict(headers)
        self.connection = connection
        self.transport = connection.transport
        self.flow = connection.flow
        self.logger = connection.logger
        self.default_headers = connection.server_state.default_headers
        self.on_response = connection.on_response_complete
        self.keep_alive = keep_alive
        self.body = bytearray()

    def whole_body(self) -> bytes | None:
        """The body, where it is all there; None: ask `receive`."""
        return None if self.more_body or self.disconnected else bytes(self.body)

    async def receive(self) -> Any:
        """As uvicorn's; from now on somebody waits."""
        if self.message_event is _NOBODY:
            self.message_event = asyncio.Event()
            if self.body or not self.more_body or self.disconnected:
                self.message_event.set()
        return await super().receive()

    @property
    def small(self) -> bool:
        """Whether the body is known to be no larger than SMALL_BODY_BYTES."""
        length = self.headers.get(b"content-length")
        return length is not None and int(length) <= SMALL_BODY_BYTES  # digits: the parser saw to that
