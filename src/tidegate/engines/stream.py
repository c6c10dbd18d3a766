"""A running generation: pieces of a reply's body in, batches of chunks out, and a judged end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from tidegate.core.chunk import Chunk, Usage
from tidegate.core.errors import EngineCut, EngineError, TidegateError
from tidegate.core.flight import Flight
from tidegate.engines.dialect import Dialect
from tidegate.engines.sse import SseParser
from tidegate.engines.wire import Patience, Reply

_NEXT = "the next token (inter_token_s)"
#: Takes a batch; None, or what to await before it takes more.
Take = Callable[[list[Chunk]], Awaitable[None] | None]


class Stream:
    """An `EngineStream` over one HTTP reply of server-sent events.

    A batch holds what one wake-up found: the chunks of all reads since the last. Keep-alive comments are no sign of life: the time-outs
    count events. Where the engine never said its usage, the last batch ends in a `usage` chunk that carries an estimate (`exact=False`,
    `raw=None`). Cancelling the task that iterates aborts the connection.
    """

    __slots__ = (
        "_dialect", "_ended", "_events", "_failure", "_flight", "_idle_ns", "_left", "_limit", "_prompt_bytes", "_reply", "_rest", "_sse", "_take",
        "_thrown", "_until_ns",
    )

    def __init__(
        self, reply: Reply, dialect: Dialect, flight: Flight, patience: Patience, *, prompt_bytes: int, max_event_bytes: int,
        max_answer_bytes: int,
    ) -> None:
        self._reply = reply
        self._dialect = dialect
        self._flight = flight
        self._sse = SseParser(max_event_bytes)
        self._idle_ns = int(patience.inter_token_s * 1e9)
        self._until_ns = reply.sent_ns + int(patience.first_token_s * 1e9)
        self._events = 0
        self._limit = self._left = max_answer_bytes
        self._prompt_bytes = prompt_bytes
        self._failure: TidegateError | None = None
        self._ended = False
        self._take: Take | None = None
        self._rest: Awaitable[None] | None = None
        self._thrown: Exception | None = None

    @property
    def usage(self) -> Usage:
        """Tokens so far: as the engine said, else an estimate. Good at any time, also after an abort or an error."""
        return self._dialect.best_usage(self._prompt_bytes)

    def abort(self) -> None:
        """Close the engine's connection at once. No-op after the end."""
        self._reply.abort()
        self._ended = True

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> list[Chunk]:
        while True:
            chunks = self._step()
            if chunks:
                return chunks
            if self._ended:
                raise StopAsyncIteration
            await self._wait()

    async def relay(self, take: Take) -> None:
        """See `core.ports.EngineStream.relay`."""
        self._take = take
        reply = self._reply
        while True:
            if self._thrown is not None:
                raise self._thrown
            if self._rest is not None:
                rest, self._rest = self._rest, None
                await rest
                continue
            chunks = self._step()
            if chunks:
                self._rest = take(chunks)
                continue
            if self._ended:
                return
            reply.listener = self._on_read
            try:
                await self._wait()
            finally:
                reply.listener = None

    def _on_read(self) -> bool:
        """Called by the wire in the turn of a read. True: all is taken and more may come, the task need not wake."""
        reply, take = self._reply, self._take
        assert take is not None
        # libuv gives up to 32 reads of 256 KB in a row before any task runs: the taker may be busy, or through, since the last of them.
        if self._rest is not None or self._thrown is not None:
            return False
        try:
            while reply.pieces and self._failure is None and not self._ended:
                chunks = self._read()
                if chunks:
                    self._rest = take(chunks)
                    if self._rest is not None:
                        return False
        except Exception as error:  # noqa: BLE001 - what the taker raises belongs to the task that relays, not to the socket's callback
            self._thrown = error
            return False
        if self._ended or self._failure is not None or reply.done or reply.error is not None:
            return False
        if not self._until_ns:  # an event came: from here on until the next, whatever else comes
            self._until_ns = until_ns = time.perf_counter_ns() + self._idle_ns
            reply.extend(until_ns, _NEXT)
        return True

    def _step(self) -> list[Chunk]:
        """The next batch that is there; [] where there is none: at the end (`_ended`), or where one has to wait. Raises the failure."""
        reply = self._reply
        while not self._ended:
            if self._failure is not None:
                self._ended = True
                reply.abort()
                raise self._failure
            if reply.pieces:
                chunks = self._read()
                if chunks:
                    return chunks
            elif reply.error is not None:
                self._ended = True
                raise reply.error
            elif reply.done:
                chunks = self._end_of_body()
                if chunks:
                    return chunks
            else:
                return []
        return []

    async def _wait(self) -> None:
        if self._events:
            until_ns = self._until_ns or time.perf_counter_ns() + self._idle_ns
            waits_for = _NEXT
        else:
            until_ns = self._until_ns
            waits_for = "the first token (first_token_s)"
        # a wake-up without an event (a comment, half an event) does not start the time anew
        self._until_ns = until_ns
        try:
            await self._reply.wait(until_ns, waits_for)
        except asyncio.CancelledError:
            self.abort()
            raise

    def _read(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        dialect = self._dialect
        read, plain = dialect.chunk, self._sse.plain
        try:
            pieces = self._reply.take()
            if len(pieces) > 1 and pieces[0][0] == pieces[-1][0]:  # one read of many HTTP chunks
                pieces = [(pieces[0][0], b"".join([data for _, data in pieces]))]
            for at_ns, data in pieces:
                self._left -= len(data)
                if self._left < 0:
                    raise EngineError(f"{dialect.label} sent a stream of more than {self._limit} bytes.", hint="Raise max_answer_bytes.")
                payloads = plain(data)
                if payloads is None:
                    if self._read_oddly(data, at_ns, chunks):
                        return chunks
                    continue
                for payload in payloads:
                    chunk = read(payload, at_ns)
                    if chunk is not None:
                        chunks.append(chunk)
                    elif self._is_over(at_ns, chunks):
                        return chunks
        except TidegateError as error:
            self._failure = error  # what came before it is delivered first
            chunks += dialect.ready
        if chunks:
            self._events += 1
            self._until_ns = 0
        return chunks

    def _read_oddly(self, data: bytes, at_ns: int, chunks: list[Chunk]) -> bool:
        """Bytes that are not whole events of one line each: half an event, names, comments, other line ends. Whether the stream is over."""
        dialect = self._dialect
        for event in self._sse.feed(data):
            if event.event == b"error":
                raise dialect.error_event(event.data)
            chunk = dialect.chunk(event.data, at_ns)
            if chunk is None:
                if self._is_over(at_ns, chunks):
                    return True
                continue
            if chunk.raw is not None and 10 in chunk.raw:
                # it leaves on one `data:` line; between the tokens of JSON, where alone it can stand, a line end is a blank
                chunk.raw = chunk.raw.replace(b"\n", b" ")
            chunks.append(chunk)
        return False

    def _is_over(self, at_ns: int, chunks: list[Chunk]) -> bool:
        """After an event that is more or less than one chunk: take its chunks; whether it was the last word."""
        dialect = self._dialect
        chunks += dialect.ready
        dialect.ready.clear()
        if dialect.over:
            self._finish(at_ns, chunks)
        return dialect.over

    def _finish(self, at_ns: int, chunks: list[Chunk]) -> None:
        """The engine said that it is done: judge it, and complete what it left out."""
        dialect = self._dialect
        if not dialect.said and dialect.finish is None:
            self._failure = dialect.empty()
            return
        self._ended = True
        self._reply.drain()
        if dialect.finish is None:
            self._flight.decide("engine_finish_missing", taken_as="stop")
            chunks.append(Chunk(at_ns, "notice", finish="stop"))
        if dialect.odd_finish is not None:
            self._flight.decide("engine_finish_unknown", finish_reason=dialect.odd_finish[:64], taken_as=dialect.finish)
        if dialect.surrogates:
            self._flight.decide("engine_surrogates_replaced", count=dialect.surrogates)
        if dialect.usage is None:
            usage = self.usage
            if not usage.exact:
                self._flight.decide("usage_estimated")
            chunks.append(Chunk(at_ns, "usage", usage=usage))

    def _end_of_body(self) -> list[Chunk]:
        """The body ended well, as HTTP goes, but the dialect's last word (`[DONE]`) was not said."""
        dialect = self._dialect
        if dialect.finish is None:
            self._ended = True
            raise EngineCut(
                f"{dialect.label} ended the stream in the middle of its answer (no finish_reason, no [DONE]).", hint="Its log may say why."
            )
        if not dialect.ends_with_body:
            self._flight.decide("engine_done_missing", finish=dialect.finish)
        chunks: list[Chunk] = []
        self._finish(time.perf_counter_ns(), chunks)
        return chunks
