"""One WebSocket connection: uvicorn's own, with bounds on what a client may send and how long it may be silent or not read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

#: Says nothing below a warning: what the libraries tell besides are the frames and heads themselves, with keys and texts in them.
_log = logging.getLogger("tidegate.api.websocket.wire")
_log.setLevel(logging.WARNING)

#: Seconds of silence after which a client is asked for a sign of life.
PING_S = 20.0
#: Seconds that a client gets to answer the handshake's end and a close.
CLOSE_S = 5.0
#: Pings that a client may send between two looks, which are about a second apart.
MOST_PINGS = 1000
#: Pieces that a message may come in. Its bytes are bounded anyhow, but empty pieces take memory too.
MOST_FRAGMENTS = 16_384
#: Bytes that may wait for the handshake's answer before the socket is read no further.
MOST_EARLY_BYTES = 64 * 1024


class SocketConnection(WebSocketsSansIOProtocol):
    """`look` is called about once a second. `busy` is true while a request runs; `stopping` once the server does, and then no message is taken."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.logger = self.conn.logger = _log
        self.conn.debug = False
        self.busy = self.stopping = False
        self._began_s = self._heard_s = self._moved_s = self._rested_s = self.loop.time()
        self._pinged_s = self._closing_s = 0.0
        self._waiting = 0  # bytes that were not taken by the client at the last look
        self._pings = 0
        self._early: list[bytes] = []  # came before the handshake was answered

    # -- the session's side

    def begin(self) -> None:
        """A request runs."""
        self.busy = True

    def rest(self) -> None:
        """Nothing runs any more."""
        self.busy = False
        self._rested_s = self.loop.time()
        if self.stopping:
            self.close(1001, "Tidegate is stopping.")

    def write(self, payloads: Iterable[bytes]) -> None:
        """One text frame each, in one write. No-op where nobody can read it any more."""
        if self.close_sent or self.disconnected or self.transport.is_closing():
            return
        for payload in payloads:
            self.conn.send_text(payload)
        self._flush()

    def close(self, code: int, reason: str) -> None:
        """Say goodbye, and end the connection when the client has, or after CLOSE_S. No-op where it is closing already."""
        if self.close_sent or self.transport.is_closing() or not self.handshake_complete:
            return
        self.conn.send_close(code, reason)
        self._closing(code)

    # -- the server's side

    def look(self, now_s: float, patience_s: float, idle_s: float) -> None:
        """End a connection on which nothing runs for `idle_s`, and one whose client neither reads nor answers a ping for `patience_s`."""
        self._pings = 0
        transport = self.transport
        if self.close_sent or transport.is_closing():
            self._closing_s = self._closing_s or now_s
            if now_s - self._closing_s > CLOSE_S:
                transport.abort()
        elif not self.handshake_complete:
            if now_s - self._began_s > patience_s:
                transport.abort()
        elif self._gone(now_s, patience_s):
            transport.abort()
        elif not self.busy and now_s - self._rested_s > idle_s:
            self.close(1000, f"Nothing was asked for {idle_s:.0f} s.")

    def _gone(self, now_s: float, patience_s: float) -> bool:
        waiting = self.transport.get_write_buffer_size()
        if not waiting or waiting < self._waiting:
            self._moved_s = now_s
        self._waiting = waiting
        if now_s - self._moved_s > patience_s:
            return True
        if self._heard_s > self._pinged_s:  # a sign of life since the last ping
            self._pinged_s = 0.0
        if self._pinged_s:
            return now_s - self._pinged_s > patience_s
        if not waiting and now_s - self._heard_s > PING_S:  # behind other bytes a ping would say nothing
            self._pinged_s = now_s
            self.conn.send_ping(b"tide")
            self._flush()
        return False

    def shutdown(self) -> None:
        """The server stops: what runs may end, within the server's grace."""
        self.stopping = True
        if not self.handshake_complete:
            self.transport.close()
        elif not self.busy:
            self.close(1001, "Tidegate is stopping.")

    # -- the client's side

    def data_received(self, data: bytes) -> None:
        self._heard_s = self.loop.time()
        if self.handshake_initiated and not self.handshake_complete:  # what is said to frames must not go before the handshake's answer
            self._early.append(data)
            if sum(map(len, self._early)) > MOST_EARLY_BYTES:
                self.read_paused = True
                self.transport.pause_reading()
        elif self.conn.parser_exc is None:  # after a mistake in the protocol nothing is read any more
            super().data_received(data)

    async def send(self, message: Any) -> None:
        await super().send(message)
        if self._early and self.handshake_complete:
            early, self._early = b"".join(self._early), []
            if self.read_paused:
                self.read_paused = False
                self.transport.resume_reading()
            if not self.disconnected:
                self.data_received(early)

    def handle_bytes(self, event: Frame) -> None:
        self.close(1003, "A message is text: one JSON object.")

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= MOST_FRAGMENTS:
            self.frames = []
            self.close(1008, f"A message may come in {MOST_FRAGMENTS} pieces.")
        super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        """As uvicorn's, but a message stays bytes: what reads it wants bytes."""
        data = self.frames[0] if len(self.frames) == 1 else b"".join(self.frames)
        self.frames = []
        if self.close_sent:
            return
        try:
            str(data, "utf-8")
        except UnicodeDecodeError as error:
            self.conn.fail(1007, f"Not UTF-8: {error.reason} at byte {error.start}.")
            self._closing(1007)
            return
        self.queue.put_nowait({"type": "websocket.receive", "bytes": data})
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def handle_ping(self) -> None:
        self._pings += 1
        if self._pings > MOST_PINGS:
            self.close(1008, "Too many pings.")
            return
        pongs = self.conn.data_to_send()
        if pongs and self.writable.is_set():  # who does not read needs no pong, and they would fill our memory
            self.transport.write(b"".join(pongs))

    def handle_pong(self, event: Frame) -> None:
        """Every byte from the client is a sign of life."""

    def handle_parser_exception(self) -> None:
        sent = self.conn.close_sent
        self._closing(sent.code if sent is not None else 1002)

    def _flush(self) -> None:
        if pieces := self.conn.data_to_send():
            self.transport.write(b"".join(pieces))

    def _closing(self, code: int) -> None:
        """A close frame lies ready: send it, and read on until the client has seen it, or the rest would reset the connection and destroy it."""
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code})
        for piece in self.conn.data_to_send():
            if piece:
                self.transport.write(piece)
            elif self.transport.can_write_eof():
                self.transport.write_eof()
        self.close_sent = True
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self.close_timer = self.loop.call_later(CLOSE_S, self.transport.abort)


def serve_socket(
    transport: asyncio.Transport, head: bytes, rest: bytes, config: Any, server_state: Any, app_state: dict[str, Any], loop: asyncio.AbstractEventLoop
) -> bool:
    """Go on as a WebSocket on `transport`, whose client sent `head` and already `rest`. False: the head is none that one can go on from."""
    connection = SocketConnection(config, server_state, app_state, loop)
    connection.connection_made(transport)
    connection.data_received(head)
    if not connection.handshake_initiated:
        server_state.connections.discard(connection)
        return False
    transport.set_protocol(connection)
    if rest:
        connection.data_received(rest)
    return True
