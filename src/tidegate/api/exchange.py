"""One request and its response on a hot route: reads, answers, notices when the client leaves, and books the flight whatever happens."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tidegate import __version__
from tidegate.admission.gate import Gate
from tidegate.api.auth import KeyRing, need_data, no_key, presented_key
from tidegate.api.client import SSE_HEADERS as SSE_HEADERS
from tidegate.api.client import Client, Room
from tidegate.api.client import Header as Header
from tidegate.api.client import Receive as Receive
from tidegate.api.client import Send as Send
from tidegate.api.conversations import Conversations, Key, named_conversation
from tidegate.api.errors import error_body, error_bytes, error_headers
from tidegate.api.events import usage_fields
from tidegate.api.notes import note_headers
from tidegate.api.page.session import same_origin, session_caller
from tidegate.api.peers import Peers
from tidegate.api.replay import KeptStream, KeptStreams, Reader
from tidegate.api.response import write_last, write_piece, write_whole
from tidegate.api.settings import LeavePolicy, StreamSettings
from tidegate.api.turn import Turn
from tidegate.api.whereabouts import Whereabouts
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
    ResumedElsewhere,
    SlowReader,
    StoreDown,
    Superseded,
    TidegateError,
)
from tidegate.core.flight import Flight
from tidegate.core.ports import FlightSink, KeptText

log = logging.getLogger(__name__)

Scope = dict[str, Any]
Seal = Callable[[str, dict[str, Any]], bytes]

#: Characters of a name that a caller made up (a path, a model) that a flight keeps: flights wait in memory by the hundred.
MOST_NAME_CHARS = 200
#: Seconds between two looks at what time brings.
LOOK_S = 0.25
WAITING = b": waiting for the engine\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
JSON_TYPE: Header = (b"content-type", b"application/json")
#: What says how a body is sent: it is sent anew to another worker.
_OF_THE_BODY = frozenset({b"content-length", b"transfer-encoding", b"expect"})
_ENDS: list[tuple[type[TidegateError], End]] = [
    (ClientGone, "client_gone"), (ResumedElsewhere, "client_gone"),
    (EngineCut, "cut"), (EngineStalled, "stalled"), (EngineEmpty, "empty"), (EngineError, "error"),
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
    streams: StreamSettings = field(default_factory=StreamSettings)
    head_wait_s: float = 2.0
    keepalive_s: float = 15.0
    #: Where requests wait for a slot; None: nothing waits.
    gate: Gate | None = None
    #: Of a gateway with several workers: the others, and what each of them has.
    peers: Peers | None = None
    whereabouts: Whereabouts | None = None
    running: set[Exchange] = field(default_factory=set)
    kept: KeptStreams = field(init=False)
    #: Whether a /v1 stream may have a policy for leaving other than `cancel`: only then somebody can come back.
    stays: bool = field(init=False)
    conversations: Conversations = field(init=False)

    def __post_init__(self) -> None:
        self.kept = KeptStreams(self.streams, self.whereabouts)
        self.conversations = Conversations(self.whereabouts)
        if self.peers is not None:
            self.peers.cut = self.conversations.cut

    async def keep_time(self) -> None:
        """Looks after everything that takes its time: deadlines, heads that wait, keep-alive comments, slow readers, kept streams. Runs until
        cancelled. One look for all, a few times a second, costs less than a timer for each."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._look()

    def _look(self) -> None:
        now_ns = time.perf_counter_ns()
        for exchange in list(self.running):
            try:
                exchange.look(now_ns)
            except Exception:  # the last door: one request takes nobody else's deadline along
                log.exception("unexpected error in a look at %s, trace_id %s", exchange.path, exchange.flight.id)
        self.kept.look(asyncio.get_running_loop().time())


class Exchange(Client):
    """`flight` begins when the request's head was read. Routes call `body`, `caller`, then answer once by `json` or `start_stream` and on."""

    # Defaults of the class: what a request never sets costs it nothing.
    ask: Ask | None = None
    done = expired = False
    on_socket = False  # a message on a WebSocket: it always streams
    superseded_by = ""  # the trace_id of the message that cut this one
    opening: Callable[[], Sequence[Header]] | None = None  # what makes a stream's headers, where its head need not wait for ever
    kept: KeptStream | None = None  # the stream of this run, where it is kept
    reader: Reader | None = None  # this client, as a reader of a kept stream
    drain_tokens = _drained_at = 0
    _task: asyncio.Task[Any] | None = None
    _conversation: Key | None = None

    def __init__(self, house: House, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(receive, send, house.streams)
        self.house = house
        self.scope = scope
        self._fast = cycle = self._cycle  # where a piece may be written at once: not to a stream that is kept
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes]  # by lower-case names
        if type(cycle) is Turn:
            self.headers = cycle.headers
            self.flight = Flight(self.path, cycle.began_ns)
            self.flight.lap("read")
        else:
            self.headers = dict(scope["headers"])
            self.flight = Flight(self.path[:MOST_NAME_CHARS])

    # -- in

    def need_post(self) -> None:
        if self.scope["method"] != "POST":
            raise MethodNotAllowed(f"{self.path} takes POST, not {self.scope['method']}.", hint="Send a POST with a JSON body.")

    async def caller(self) -> Caller:
        """Who asks: an API key, or the page's session for requests of the page itself."""
        key = presented_key(self.headers)
        caller = self._session() if key is None else self.house.keys.known(key)
        if caller is None:
            assert key is not None, "a session is a caller or an error"
            caller = await self.house.keys.look_up(key)
        flight = self.flight
        flight.tenant, flight.key_id = caller.tenant, caller.key_id
        flight.lap("auth")
        return caller

    def _session(self) -> Caller:
        found = {name.decode("latin-1"): value.decode("latin-1") for name, value in self.headers.items()}
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
        cycle = self._cycle
        if type(cycle) is Turn and (whole := cycle.whole_body()) is not None:
            if len(whole) > limit:
                raise self._too_large(limit)
            self.flight.request_sha256 = hashlib.sha256(whole).hexdigest()
            return whole
        if int(self.headers.get(b"content-length", 0)) > limit:
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
        """From now on the request is told when its client leaves, and ends as its policy says. Raises ClientGone where it has left already."""
        if self.superseded_by:
            raise Superseded(self.superseded_by)
        cycle = self._cycle
        self._task = (cycle.task if type(cycle) is Turn else None) or asyncio.current_task()
        connection = self._connection
        if connection is None:  # another server, or a socket: only a task that awaits `receive` sees the client go
            watcher = asyncio.get_running_loop().create_task(self._watch())  # ends with the connection or the response
            watcher.add_done_callback(_retrieve)
        elif connection.transport.is_closing():
            raise ClientGone("The client left before its request was answered.")
        else:
            connection.answering = self
            connection.flow.resume_reading()  # a large body pauses it, and a socket that is not read does not tell that the client left

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.left()

    def left(self) -> None:
        """The client left. Its run is cancelled, unless its policy says otherwise."""
        if self.gone:
            return
        self.gone = True
        if self._cycle is not None:
            self._cycle.disconnected = True
        reader = self.reader
        if reader is not None:
            reader.leave()
        if self.done or self._task is None or (reader is not None and self.kept is None):
            return
        flight = self.flight
        if self.kept is not None and self.started:  # before the head it has no id to come back with
            flight.decide("client_left", policy="keep", tokens=len(flight.token_ns))
        elif self.drain_tokens and flight.engine:  # before an engine was asked there is nothing to drain, and a place in the queue to free
            flight.decide("client_left", policy="drain", tokens=len(flight.token_ns))
            self._drained_at = len(flight.token_ns) + self.drain_tokens
        else:
            self._task.cancel()

    def stay(self, policy: LeavePolicy, drain_tokens: int) -> None:
        """What a stream does when its client leaves, where that is not `cancel`. To be called after `watch`, before the first event."""
        if policy == "drain":
            self.drain_tokens = drain_tokens
        elif policy == "keep" and self._connection is not None and self.ask is not None:
            self.kept = self.house.kept.open(self.flight.id, self.ask.caller, self)
            if self.kept is None:
                self.flight.decide("not_kept", why="streams.replay_streams are held already")
            else:
                self.reader = self.kept.reader
                self._fast = None

    def expire(self) -> None:
        """Cancel the request where its deadline has passed."""
        if self.ask is not None and self._task is not None and not self.done and not self.expired and self.ask.deadline.passed():
            self.expired = True
            self._task.cancel()

    def look(self, now_ns: int) -> None:
        """What time brings: called a few times a second."""
        self.expire()
        cycle = self._cycle
        if cycle is None or self._task is None or self.gone:
            if self._drained_at and len(self.flight.token_ns) >= self._drained_at and self._task is not None and not self.done:
                self._task.cancel()  # also where nothing of it is written yet
            return
        if cycle.flow.write_paused:
            self._look_at_slow_reader(cycle, now_ns)
        elif self.done:
            return
        elif not self.started:
            if self.opening is not None and now_ns - self.flight.began_ns > self.house.head_wait_s * 1e9:
                self._open(WAITING, self.opening())
        elif self.wrote or not self._since_ns:
            self.wrote = False
            self._since_ns = now_ns
        elif now_ns - self._since_ns > self.house.keepalive_s * 1e9:
            self._since_ns = now_ns
            write_piece(cycle, KEEP_ALIVE)

    def _look_at_slow_reader(self, cycle: RequestResponseCycle, now_ns: int) -> None:
        """Give a client up that has not read a byte for too long: where that is the policy, and where only this client is waited for."""
        streams = self.house.streams
        unread_ns = self._unread_for_ns(cycle, now_ns)
        if unread_ns > streams.slow_reader_s * 1e9 and (streams.slow_reader == "drop" or self.done or self.reader is not None):
            if not self.done and self.kept is None:
                self.flight.error_code = SlowReader.code
            self.flight.decide("slow_reader", unread_bytes=self._unread, waited_s=round(unread_ns / 1e9, 3))
            self.left()
            cycle.transport.abort()

    # -- out

    async def json(self, status: int, body: bytes, headers: Sequence[Header] = ()) -> None:
        """The whole answer, and a line's end for whoever reads it in a terminal. The flight is booked before the bytes leave."""
        body += b"\n"
        self.flight.lap("respond")
        self._book(self.flight.end, status)
        self.started = self.done = True
        if self.ask is not None and self.ask.notes:
            headers = [*headers, *note_headers(self.ask.notes)]
        headers = [JSON_TYPE, (b"x-request-id", self.flight.id.encode()), *headers]
        if self._cycle is not None and write_whole(self._cycle, status, headers, body):
            return
        headers.append((b"content-length", b"%d" % len(body)))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    def start_stream(self, piece: bytes, headers: Sequence[Header] = ()) -> Awaitable[None] | None:
        """The head and the first piece of a stream; as `write`. A piece is whole events."""
        if self.ask is not None and self.ask.notes:
            headers = [*headers, *note_headers(self.ask.notes)]
        if self.kept is None:
            return self._open(piece, headers)
        if not self.started:
            self._open(b"", headers)
        return self.kept.add(piece)

    def write(self, piece: bytes) -> Awaitable[None] | None:
        """One piece of a stream, at once. None, or what to await until the client's buffer has room again: a slow reader slows the
        engine, not our memory."""
        self.wrote = True
        if self._fast is not None and write_piece(self._fast, piece):
            return None
        return self._write_otherwise(piece)

    def _write_otherwise(self, piece: bytes) -> Awaitable[None] | None:
        """To a stream that is kept, to a client that left or reads slowly, or by ASGI."""
        if self.kept is not None:
            return self.kept.add(piece)
        if self.gone:
            if len(self.flight.token_ns) >= self._drained_at:
                raise ClientGone("The client left, and the tokens that its policy grants have been read.")
            return None
        if self._cycle is None:
            return self._offer_piece(piece)
        if self.house.streams.slow_reader == "coalesce" and self._hold(piece):
            return None
        return Room(self, piece)

    async def end_stream(self, last: bytes) -> None:
        """The last bytes; the flight is booked before they leave."""
        if self.kept is not None:
            await self._end_kept(self.kept, last)
            return
        if self.gone:
            self._book("client_gone", 499)
            return
        self._book(self.flight.end, 200)
        await self._close(last)

    def has_room(self) -> None:
        """The client reads on."""
        self._since_ns = 0
        if self.reader is not None:
            self.reader.push()
        elif self._held and self._cycle is not None:
            write_piece(self._cycle, self._take_held())

    # -- kept streams

    def read(self, kept: KeptStream, after: int) -> Reader:
        """Give this client the events of a kept stream that come after number `after`. Raises ResumeLost, BadRequest."""
        reader = kept.attach(self, after)
        self.reader = reader
        self._open(b"", [(b"x-tidegate-resumes", kept.id.encode())])
        reader.push()
        return reader

    async def _end_kept(self, kept: KeptStream, last: bytes) -> None:
        """The run is over. Its own client, where it is still there, reads what is left."""
        self._book(self.flight.end, 499 if self.gone else 200)
        kept.finish(last, self.flight.end)
        assert self.reader is not None
        if await self.reader.done == "end" and self._cycle is not None:
            write_last(self._cycle, b"")

    def give_up(self) -> None:
        """Nobody came back for a kept stream: cancel its run."""
        if not self.done and self._task is not None:
            self.gone = True
            self._task.cancel()

    def client_taken(self) -> None:
        """A newer reader took the stream over: this client is told so, and the run goes on."""
        self.gone = True
        cycle = self._cycle
        if cycle is None or cycle.response_complete or cycle.disconnected:
            return
        if not write_last(cycle, self.error_event(taken_over())):
            cycle.disconnected = True
            cycle.transport.abort()

    # -- whatever happened

    def converse(self, *, barge_in: bool = False) -> Awaitable[None] | None:
        """Take part in the conversation that the request names, if it names one; with barge-in, cut what runs in it. `barge_in`: what holds
        where the request does not say. None, or what to await until other workers have cut it too. Raises BadRequest for a name that cannot be
        one."""
        said = named_conversation(self.headers)
        if said is None:
            return None
        name, wanted = said
        flight = self.flight
        self._conversation = key = Key(flight.tenant, flight.key_id, name)
        conversations = self.house.conversations
        cut = conversations.enter(key, self, barge_in=barge_in if wanted is None else wanted)
        number, workers = conversations.elsewhere(key, self)
        if workers and self.house.peers is not None:
            return self._cut_elsewhere(self.house.peers, workers, key, number, cut)
        if cut:
            flight.decide("barge_in", superseded=cut)
        return None

    async def _cut_elsewhere(self, peers: Peers, workers: list[int], key: Key, number: int, cut: list[str]) -> None:
        flight = self.flight
        cut = cut + await peers.cut_in(workers, key, number, flight.id)
        flight.lap("barge_in")
        if cut:
            flight.decide("barge_in", superseded=cut)

    async def hand_over(self, worker: int, body: bytes) -> bool:
        """Give this client's connection to another worker, with the request. False where that worker does not take it. Raises StoreDown where the
        connection cannot go."""
        peers, connection = self.house.peers, self._connection
        if peers is None or connection is None or not connection.hold():
            raise StoreDown(
                "The stream is kept by another worker, and this connection cannot go there while more than this request is on it.",
                hint="Send the request once more, on a connection of its own.", retry_after_s=0.1,
            )
        if not await peers.hand_over(worker, connection.transport.get_extra_info("socket").fileno(), self._as_sent(body)):
            connection.flow.resume_reading()
            return False
        connection.let_go()
        return True

    def _as_sent(self, body: bytes) -> bytes:
        """This request in bytes again."""
        scope = self.scope
        target = scope.get("raw_path") or self.path.encode()
        if query := scope.get("query_string"):
            target += b"?" + query
        headers = [header for header in scope["headers"] if header[0] not in _OF_THE_BODY]
        if body:
            headers.append((b"content-length", b"%d" % len(body)))
        lines = [b"%b %b HTTP/%b" % (scope["method"].encode(), target, scope["http_version"].encode()), *(b"%b: %b" % one for one in headers)]
        return b"\r\n".join([*lines, b"", body])

    def supersede(self, by: str) -> bool:
        """Cut this run for the newer one whose trace_id is `by`. False where it has ended, or is ending, for another reason."""
        if self.done or self.expired or self.superseded_by or (self.gone and self.kept is None):
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
        except HandedOver:
            self.done = True  # whoever goes on with it books it
        except TidegateError as error:
            await self._fail(error)
        except asyncio.CancelledError:
            if not self.gone and not self.expired and not self.superseded_by:  # the server is stopping
                self._book("error", self.status or 503)
                raise
            assert self._task is not None, "only a watched request is ended by us"
            self._task.uncancel()
            if self.superseded_by:
                await self._fail(Superseded(self.superseded_by))
            elif not self.expired or (self.gone and self.kept is None):
                self._book("client_gone", 499)
            else:
                seconds = self.house.deadline_s
                await self._fail(DeadlineExceeded(f"The request took longer than {seconds:.0f} s.", hint="Ask for less, or raise server.deadline_s."))
        except Exception:  # the last door: whatever it is, the client gets a trace_id and the log gets the traceback
            log.exception("unexpected error in %s, trace_id %s", self.path, self.flight.id)
            await self._fail(TidegateError("Something went wrong inside Tidegate.", hint="Give the operator this trace_id."))
        finally:
            running.discard(self)
            if not self.done:
                self._book("error", self.status or 500)
            if self.kept is not None:
                self._forget_kept(self.kept)
            if self._conversation is not None:
                self.house.conversations.leave(self._conversation, self)

    def _forget_kept(self, kept: KeptStream) -> None:
        if not kept.ended:
            self.house.kept.drop(kept, remember=self.started)
        kept.run = None  # what is kept is the events, not the request

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


class HandedOver(Exception):
    """The client went to another worker with its request; here it is over."""


def _retrieve(task: asyncio.Task[None]) -> None:
    # A connection that breaks while it is watched has nothing more to tell; the request's own task has noticed by then.
    if not task.cancelled():
        task.exception()


def taken_over() -> ResumedElsewhere:
    return ResumedElsewhere("A newer reader took this stream over.", hint="Only one client reads a stream: the one that came last.")


async def asking(exchange: Exchange) -> Caller:
    """A caller that may ask models."""
    return need_data(await exchange.caller())
