"""One request and its response on a hot route: reads, answers, notices when the client leaves, and books the flight whatever happens."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import msgspec

from tidegate import __version__
from tidegate.api.auth import KeyRing, need_data, no_key, presented_key
from tidegate.api.conversations import Conversations, Key, named_conversation
from tidegate.api.errors import error_body, error_bytes, error_headers
from tidegate.api.events import usage_fields
from tidegate.api.page.session import same_origin, session_caller
from tidegate.api.response import cycle_of, write_head, write_last, write_piece, write_whole
from tidegate.core.ask import Ask, Caller, Deadline
from tidegate.core.chunk import CLEAN_ENDS, End
from tidegate.core.errors import (
    BadRequest,
    BodyTooLarge,
    ClientGone,
    DeadlineExceeded,
    EngineCut,
    EngineEmpty,
    EngineError,
    EngineStalled,
    Forbidden,
    MethodNotAllowed,
    Superseded,
    TidegateError,
)
from tidegate.core.flight import Flight
from tidegate.core.ports import FlightSink, KeptText

log = logging.getLogger(__name__)

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]
Seal = Callable[[str, dict[str, Any]], bytes]

#: Characters of a name that a caller made up (a path, a model) that a flight keeps: flights wait in memory by the hundred.
MOST_NAME_CHARS = 200
JSON_TYPE: Header = (b"content-type", b"application/json")
SSE_HEADERS: list[Header] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_ENDS: list[tuple[type[TidegateError], End]] = [
    (ClientGone, "client_gone"), (EngineCut, "cut"), (EngineStalled, "stalled"), (EngineEmpty, "empty"), (EngineError, "error"),
    (BadRequest, "refused"), (Superseded, "client_gone"),
]


@dataclass(slots=True)
class House:
    """What every hot route needs of the rest."""

    keys: KeyRing
    sinks: Sequence[FlightSink]
    secret: bytes
    seal: Seal
    max_body_bytes: int
    deadline_s: float
    running: set[Exchange] = field(default_factory=set)
    conversations: Conversations = field(default_factory=Conversations)

    async def keep_deadlines(self) -> None:
        """Ends requests past their deadline; runs until cancelled. One look a second for all costs less than a timer for each."""
        while True:
            await asyncio.sleep(1.0)
            for exchange in list(self.running):
                exchange.expire()


class Exchange:
    """`flight` begins when the request's head was read. Routes call `body`, `caller`, then answer once by `json` or `start_stream` and on."""

    __slots__ = (
        "_conversation", "_cycle", "_receive", "_send", "_task", "ask", "done", "expired", "flight", "gone", "house", "on_socket", "path", "scope",
        "started", "status", "superseded_by",
    )

    def __init__(self, house: House, scope: Scope, receive: Receive, send: Send) -> None:
        self.house = house
        self.scope = scope
        self._receive = receive
        self._send = send
        self._cycle = cycle_of(send)
        self.path: str = scope["path"]
        self.flight = Flight(self.path[:MOST_NAME_CHARS])
        self.ask: Ask | None = None
        self.started = self.done = self.gone = self.expired = False
        self.status = 0
        self._task: asyncio.Task[Any] | None = None
        self._conversation: Key | None = None
        self.superseded_by = ""  # the trace_id of the message that cut this one
        self.on_socket = False  # a message on a WebSocket: it always streams

    # -- in

    def need_post(self) -> None:
        if self.scope["method"] != "POST":
            raise MethodNotAllowed(f"{self.path} takes POST, not {self.scope['method']}.", hint="Send a POST with a JSON body.")

    async def caller(self) -> Caller:
        """Who asks: an API key, or the page's session for requests of the page itself."""
        headers = self.scope["headers"]
        key = presented_key(headers)
        caller = self._session(headers) if key is None else self.house.keys.known(key)
        if caller is None:
            assert key is not None, "a session is a caller or an error"
            caller = await self.house.keys.look_up(key)
        flight = self.flight
        flight.tenant, flight.key_id = caller.tenant, caller.key_id
        flight.lap("auth")
        return caller

    def _session(self, headers: list[Header]) -> Caller:
        found = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        session = session_caller(found.get("cookie", ""), self.house.secret)
        caller = self.house.keys.by_id(session.key_id) if session is not None else None
        if caller is None:
            raise no_key()
        if not same_origin(found):
            raise Forbidden("A session works only from the page itself.", hint="Use an API key: `Authorization: Bearer KEY`.")
        return caller

    async def body(self) -> bytes:
        """The whole body, at most `server.max_body_bytes`. Raises BodyTooLarge, ClientGone."""
        limit = self.house.max_body_bytes
        for name, value in self.scope["headers"]:
            if name == b"content-length" and int(value) > limit:
                raise self._too_large(limit)
        message = await self._receive()
        body: bytes = message.get("body", b"")
        if message.get("more_body"):
            parts = [body]
            size = len(body)
            while message.get("more_body"):
                message = await self._receive()
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit:
                    raise self._too_large(limit)
            body = b"".join(parts)
        if message["type"] == "http.disconnect":
            raise ClientGone("The client left while it sent its request.")
        if len(body) > limit:
            raise self._too_large(limit)
        self.flight.request_sha256 = hashlib.sha256(body).hexdigest()
        self.flight.lap("read")
        return body

    def _too_large(self, limit: int) -> BodyTooLarge:
        return BodyTooLarge(
            f"The body is larger than {limit} bytes.", hint="Send less, or ask the operator to raise server.max_body_bytes."
        )

    def new_ask(self, caller: Caller) -> Ask:
        self.ask = Ask(self.flight, caller, Deadline(self.house.deadline_s))
        return self.ask

    def watch(self) -> None:
        """From now on the request is cancelled when the client leaves: only a task that awaits `receive` sees it go."""
        if self.superseded_by:
            raise Superseded(self.superseded_by)
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task(loop)
        watcher = loop.create_task(self._watch())  # ends with the connection or the response
        watcher.add_done_callback(_retrieve)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.done and self._task is not None:
            self.gone = True
            self._task.cancel()

    def expire(self) -> None:
        """Cancel the request where its deadline has passed."""
        if self.ask is not None and self._task is not None and not self.done and not self.expired and self.ask.deadline.passed():
            self.expired = True
            self._task.cancel()

    # -- out

    async def json(self, status: int, body: bytes, headers: Sequence[Header] = ()) -> None:
        """The whole answer, and a line's end for whoever reads it in a terminal. The flight is booked before the bytes leave."""
        body += b"\n"
        self.flight.lap("respond")
        self._book(self.flight.end, status)
        self.started = self.done = True
        headers = [JSON_TYPE, (b"x-request-id", self.flight.id.encode()), *headers]
        if self._cycle is not None and write_whole(self._cycle, status, headers, body):
            return
        headers.append((b"content-length", b"%d" % len(body)))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    def start_stream(self, piece: bytes, headers: Sequence[Header] = ()) -> Awaitable[None] | None:
        """The head and the first piece of a stream; as `write`."""
        self.started = True
        self.status = 200
        headers = [*SSE_HEADERS, (b"x-request-id", self.flight.id.encode()), *headers]
        if self._cycle is not None and write_head(self._cycle, 200, headers, piece):
            return None
        head = self._offer({"type": "http.response.start", "status": 200, "headers": headers})
        return self.write(piece) if head is None else self._write_after(head, piece)

    def write(self, piece: bytes) -> Awaitable[None] | None:
        """One piece of a stream, at once. None, or what to await until the client's buffer has room again: a slow reader slows the
        engine, not our memory."""
        if self._cycle is not None and write_piece(self._cycle, piece):
            return None
        return self._offer({"type": "http.response.body", "body": piece, "more_body": True})

    def _offer(self, message: dict[str, Any]) -> Awaitable[None] | None:
        """Run `send` as far as it goes without waiting, which is nearly always to its end: a token leaves in the turn that read it."""
        sending = cast(Coroutine[Any, Any, None], self._send(message))
        try:
            waits_for = sending.send(None)
        except StopIteration:
            return None
        return _Rest(sending, waits_for)

    async def _write_after(self, head: Awaitable[None], piece: bytes) -> None:
        await head
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end_stream(self, last: bytes) -> None:
        """The last bytes; the flight is booked before they leave."""
        self._book(self.flight.end, 200)
        self.done = True
        if self._cycle is None or not write_last(self._cycle, last):
            await self._send({"type": "http.response.body", "body": last})

    # -- whatever happened

    def converse(self, *, barge_in: bool = False) -> None:
        """Take part in the conversation that the request names, if it names one; with barge-in, cut what runs in it. `barge_in`: what holds
        where the request does not say. Raises BadRequest for a name that cannot be one."""
        said = named_conversation(self.scope["headers"])
        if said is None:
            return
        name, wanted = said
        flight = self.flight
        self._conversation = key = Key(flight.tenant, flight.key_id, name)
        if cut := self.house.conversations.enter(key, self, barge_in=barge_in if wanted is None else wanted):
            flight.decide("barge_in", superseded=cut)

    def supersede(self, by: str) -> bool:
        """Cut this run for the newer one whose trace_id is `by`. False where it has ended, or is ending, for another reason."""
        if self.done or self.gone or self.expired or self.superseded_by:
            return False
        self.superseded_by = by
        if self._task is not None:  # else it has not begun to run, and `watch` ends it
            self._task.cancel()
        return True

    async def run(self, route: Callable[[Exchange], Awaitable[None]]) -> None:
        """Walk a route; every way out ends in a booked flight."""
        running = self.house.running
        running.add(self)
        try:
            await route(self)
        except TidegateError as error:
            await self._fail(error)
        except asyncio.CancelledError:
            if not self.gone and not self.expired and not self.superseded_by:  # the server is stopping
                self._book("error", self.status or 503)
                raise
            assert self._task is not None, "only a watched request is ended by us"
            self._task.uncancel()
            if self.gone:
                self._book("client_gone", 499)
            elif self.superseded_by:
                await self._fail(Superseded(self.superseded_by))
            else:
                seconds = self.house.deadline_s
                await self._fail(DeadlineExceeded(f"The request took longer than {seconds:.0f} s.", hint="Ask for less, or raise server.deadline_s."))
        except Exception:  # the last door: whatever it is, the client gets a trace_id and the log gets the traceback
            log.exception("unexpected error in %s, trace_id %s", self.path, self.flight.id)
            await self._fail(TidegateError("Something went wrong inside Tidegate.", hint="Give the operator this trace_id."))
        finally:
            running.discard(self)
            if self._conversation is not None:
                self.house.conversations.leave(self._conversation, self)

    async def _fail(self, error: TidegateError) -> None:
        flight = self.flight
        flight.error_code = error.public_code[:MOST_NAME_CHARS]
        for kind, end in _ENDS:
            if isinstance(error, kind):
                flight.end = end
                break
        else:
            flight.end = "refused" if error.http_status == 429 and not flight.engine else "error"
        status = error.http_status
        if isinstance(error, ClientGone) or self.done:
            self._book(flight.end, 499)
        elif self.started:  # the head is out: an error event says what happened, and no [DONE] follows
            flight.decide("failed_in_stream", status=status, code=error.public_code)
            await self.end_stream(self.error_event(error))
        else:
            await self.json(status, error_bytes(error, flight.id), error_headers(error))

    def error_event(self, error: TidegateError) -> bytes:
        body = error_body(error, self.flight.id)
        body["error"]["status"] = error.http_status
        if self.ask is not None and self.ask.shows_usage != "never":
            body["usage"] = usage_fields(self.flight.usage)
        prefix = b"event: error\n" if self.flight.capability else b""
        return prefix + b"data: " + msgspec.json.encode(body) + b"\n\n"

    def _book(self, end: End, status: int) -> None:
        """Make the record and give it to every listener, once."""
        if self.done:
            return
        self.done = True
        flight, ask = self.flight, self.ask
        kept: KeptText | None = None
        if ask is not None:
            answer = "".join(ask.text)
            if answer:
                flight.answer_chars = len(answer)
                flight.answer_sha256 = hashlib.sha256(answer.encode("utf-8", "surrogatepass")).hexdigest()
            if ask.caller.keep:
                kept = self._keep(ask, answer)
                flight.kept = kept is not None
        if end not in CLEAN_ENDS and not flight.error_code:
            flight.error_code = end
        record = flight.finish(end, status, __version__)
        for sink in self.house.sinks:
            sink.finished(record, kept)

    def _keep(self, ask: Ask, answer: str) -> KeptText | None:
        call = ask.call
        text = {"input": ask.input, "call": call.body if call else None, "answer": answer}
        expires_unix_s = time.time_ns() / 1e9 + ask.caller.ttl_s
        try:
            return KeptText(self.flight.id, ask.caller.tenant, expires_unix_s, self.house.seal(self.flight.id, text))
        except Exception as error:  # noqa: BLE001 - the answer and its flight must leave, whatever is wrong with the copy of their text
            why = error.message if isinstance(error, TidegateError) else type(error).__name__
            log.error("the text of flight %s could not be kept: %s", self.flight.id, why)
            return None


class _Rest:
    """The rest of a coroutine that was begun outside a task and has come to wait for something."""

    __slots__ = ("_coroutine", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._waits_for
        while True:
            try:
                value = yield waits_for
            except BaseException as error:  # noqa: BLE001 - a cancel belongs to the coroutine, as in any await
                resume = partial(self._coroutine.throw, error)
            else:
                resume = partial(self._coroutine.send, value)
            try:
                waits_for = resume()
            except StopIteration:
                return


def _retrieve(task: asyncio.Task[None]) -> None:
    # A connection that breaks while it is watched has nothing more to tell; the request's own task has noticed by then.
    if not task.cancelled():
        task.exception()


async def asking(exchange: Exchange) -> Caller:
    """A caller that may ask models."""
    return need_data(await exchange.caller())
