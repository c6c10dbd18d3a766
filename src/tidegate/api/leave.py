"""Leaving and coming back: which policy a stream has for a client that leaves, and the ways back to a stream that was kept."""

from __future__ import annotations

from tidegate.api.exchange import Exchange, HandedOver, asking, taken_over
from tidegate.api.replay import Position, lost, position
from tidegate.core.ask import Caller
from tidegate.core.errors import BadRequest, ClientGone, MethodNotAllowed, NotFound

LEAVE = b"x-tidegate-leave"
LAST_EVENT_ID = b"last-event-id"
#: The route under which kept streams are read: `GET /v1/streams/TRACE_ID`.
STREAMS = "/v1/streams"


def stay_as_asked(exchange: Exchange) -> None:
    """Give a /v1 stream the operator's policy, or the one that its caller chooses from what the operator allows. Raises BadRequest."""
    streams = exchange.house.streams
    policy = streams.leave
    chosen = exchange.headers.get(LEAVE)
    if chosen is not None:
        allowed = sorted({policy, *streams.callers_may})
        policy = next((name for name in allowed if name.encode() == chosen), policy)
        if policy.encode() != chosen:
            raise BadRequest(f"The header {LEAVE.decode()} is none of: {', '.join(allowed)}.", hint="Leave it out.", param=LEAVE.decode())
    exchange.stay(policy, streams.drain_tokens)


def resumes(exchange: Exchange) -> Position | None:
    """Where a request wants to go on reading, by its `Last-Event-ID`; None where it is a new one. Raises BadRequest."""
    if exchange.on_socket:
        return None  # a socket's headers are those of its handshake, not of this message
    said = exchange.headers.get(LAST_EVENT_ID)
    return position(said) if said else None


async def resume(exchange: Exchange, caller: Caller, at: Position, body: bytes = b"") -> None:
    """Read on in a kept stream, to its end, or hand the client over to the worker that keeps it. `body`: of this request. Raises NotFound,
    ResumeLost, ResumedElsewhere, ClientGone, StoreDown, HandedOver."""
    kept = exchange.house.kept.find(at.stream, caller)
    if isinstance(kept, int):
        if await exchange.hand_over(kept, body):
            raise HandedOver
        raise lost()
    flight = exchange.flight
    flight.stream = True
    flight.model, flight.capability = kept.flight.model, kept.flight.capability
    exchange.watch()
    reader = exchange.read(kept, at.after)
    flight.decide("resumed", of=at.stream, after=at.after)
    outcome = await reader.done
    flight.lap("replay")
    if outcome == "gone":
        raise ClientGone("The client left again.")
    if outcome == "taken":
        raise taken_over()
    flight.end = kept.end
    await exchange.end_stream(b"")


async def streams_route(exchange: Exchange) -> None:
    """`GET /v1/streams/TRACE_ID`: a kept stream from its beginning, or after `Last-Event-ID`."""
    exchange.flight.route = STREAMS
    if exchange.scope["method"] != "GET":
        raise MethodNotAllowed(f"{STREAMS}/TRACE_ID takes GET.", hint="Send a GET, with `Last-Event-ID` where you have some of the stream.")
    caller = await asking(exchange)
    stream = exchange.path.removeprefix(STREAMS).strip("/")
    at = resumes(exchange) or Position(stream, 0)
    if at.stream != stream:
        raise NotFound("`Last-Event-ID` is of another stream than the path.", hint="The id of a stream stands before the dot.", param="last-event-id")
    await resume(exchange, caller, at)
