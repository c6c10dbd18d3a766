"""A response written straight to uvicorn's connection: one formatted head, one write, no coroutine.

ASGI's two messages cost more than the rest of a short answer: each is a dict, a coroutine and a check of every header. What is done here is
what `RequestResponseCycle.send` does, on its own fields; uvicorn's version is pinned, and `cycle_of` finds out at every request whether
there is such a cycle to write to. Where there is none, callers use ASGI instead.

HTTP/1.0 knows no chunks: a stream to such a client is plain bytes until the connection closes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from tidegate.api.connection import Corked
from tidegate.api.turn import Turn

Header = tuple[bytes, bytes]

#: Stands where uvicorn keeps the bytes of a body that are still to come, for a body that ends with the connection.
_UNTIL_CLOSE = -1


def cycle_of(send: Any) -> RequestResponseCycle | None:
    """uvicorn's object behind an ASGI `send`, where that may be written to directly: a method whose response has a body."""
    cycle = getattr(send, "__self__", None)
    if type(cycle) is Turn:
        return cycle
    if type(cycle) is not RequestResponseCycle or cycle.scope["method"] == "HEAD":
        return None
    return cycle


def write_whole(cycle: RequestResponseCycle, status: int, headers: Iterable[Header], body: bytes) -> bool:
    """The whole response. False: nothing was written, use ASGI."""
    if not _may_begin(cycle):
        return False
    _put(cycle)(b"%b%bcontent-length: %d\r\n\r\n%b" % (STATUS_LINE[status], _lines(cycle, headers), len(body), body))
    _complete(cycle)
    return True


def write_head(cycle: RequestResponseCycle, status: int, headers: Iterable[Header], piece: bytes) -> bool:
    """The head of a stream and its first piece. False: nothing was written, use ASGI."""
    if not _may_begin(cycle):
        return False
    if cycle.scope["http_version"] == "1.1":
        cycle.chunked_encoding = True
        _put(cycle)(b"%b%btransfer-encoding: chunked\r\n\r\n%b" % (STATUS_LINE[status], _lines(cycle, headers), _chunk(piece)))
    else:
        cycle.chunked_encoding = cycle.keep_alive = False
        cycle.expected_content_length = _UNTIL_CLOSE
        _put(cycle)(b"%b%b\r\n%b" % (STATUS_LINE[status], _lines(cycle, headers), piece))
    return True


def write_piece(cycle: RequestResponseCycle, piece: bytes) -> bool:
    """A piece of a stream that `write_head` began. False: it was not written: the client reads slowly, or left, or ASGI began the response."""
    if cycle.flow.write_paused or cycle.disconnected:
        return False
    if cycle.chunked_encoding:  # one call fewer than by _put and _chunk, for each event
        transport: Any = cycle.transport
        put = transport.pass_on if type(transport) is Corked else transport.write
        put(b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b"")
    elif cycle.expected_content_length == _UNTIL_CLOSE:
        _put(cycle)(piece)
    else:
        return False
    return True


def write_last(cycle: RequestResponseCycle, piece: bytes) -> bool:
    """The last piece, and the end of the stream. False: nothing was written, as with `write_piece`."""
    if cycle.flow.write_paused or cycle.disconnected:
        return False
    if cycle.chunked_encoding:
        _put(cycle)(_chunk(piece) + b"0\r\n\r\n")
    elif cycle.expected_content_length == _UNTIL_CLOSE:
        _put(cycle)(piece)
    else:
        return False
    _complete(cycle)
    return True


def _put(cycle: RequestResponseCycle) -> Callable[[bytes], None]:
    """What writes to the client at once: a head that has its body with it need not wait for it."""
    transport: Any = cycle.transport
    # no cast: the type in it would be made anew for each event
    put: Callable[[bytes], None] = transport.pass_on if type(transport) is Corked else transport.write
    return put


def _chunk(piece: bytes) -> bytes:
    """HTTP's chunk; b"" for an empty piece, because an empty chunk is the end."""
    return b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""


def _may_begin(cycle: RequestResponseCycle) -> bool:
    if cycle.flow.write_paused or cycle.disconnected or cycle.response_started:
        return False
    cycle.response_started = True
    cycle.waiting_for_100_continue = False
    return True


#: uvicorn's own headers, which it makes anew once a second, and their lines.
_default: tuple[list[Header], bytes] = ([], b"")


def _default_lines(headers: list[Header]) -> bytes:
    global _default
    if headers is not _default[0]:
        _default = headers, b"".join([b"%b: %b\r\n" % header for header in headers])
    return _default[1]


def _lines(cycle: RequestResponseCycle, headers: Iterable[Header]) -> bytes:
    lines = _default_lines(cycle.default_headers) + b"".join([b"%b: %b\r\n" % header for header in headers])
    return lines if cycle.keep_alive else lines + b"connection: close\r\n"


def _complete(cycle: RequestResponseCycle) -> None:
    cycle.response_complete = True
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()
