"""Server-sent events out of bytes, right for any chunking.

Follows https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation with two differences: the text stays
bytes (the JSON decoder that comes next judges the UTF-8), and what is pending is bounded, because an engine is not always a friend.
"""

from __future__ import annotations

import msgspec

from tidegate.core.errors import EngineError

_BOM = b"\xef\xbb\xbf"


class Event(msgspec.Struct, gc=False):
    """One event. `event` is empty where the stream named none; `id` is the last id the stream gave, on this event or before it."""

    data: bytes
    event: bytes = b""
    id: bytes = b""


class SseParser:
    """Feed it bytes as they come; it gives the events that they complete.

    An event ends at a blank line; what is pending when the stream ends is no event (`pending` says whether there is something).
    """

    __slots__ = ("_clean", "_data", "_event", "_fresh", "_id", "_max", "_size", "_skip_lf", "_tail")

    def __init__(self, max_event_bytes: int = 4 << 20) -> None:
        self._max = max_event_bytes
        self._tail = bytearray()  # an unfinished line
        self._data: list[bytes] = []  # data lines of the unfinished event
        self._size = 0  # bytes in _data
        self._event = b""
        self._id = b""
        self._skip_lf = False  # the last byte was a CR that ended a line: an LF right after it belongs to it
        self._fresh = True  # no line was seen yet: a BOM may come
        self._clean = True  # between two events: nothing of another one is kept

    @property
    def pending(self) -> bool:
        return bool(self._tail or self._data)

    def plain(self, data: bytes) -> list[bytes] | None:
        """The events' data, where `data` is nothing but whole events of one data line each, as it nearly always is; else None: `feed` it."""
        # a byte is looked for as its number: as bytes it costs bytes.__contains__ an exception inside
        if not self._clean or 13 in data or not data.startswith(b"data: ") or not data[-1] == 10 == data[-2] or len(data) > self._max:
            return None
        self._fresh = False
        data = data[6:-2]
        if 10 not in data:
            return [data]
        payloads = data.split(b"\n\ndata: ")
        return payloads if data.count(10) == 2 * len(payloads) - 2 else None

    def feed(self, data: bytes) -> list[Event]:
        """The events that `data` completes, in order. Raises EngineError where a line or an event outgrows its bound."""
        payloads = self.plain(data)
        if payloads is not None:
            return [Event(payload, b"", self._id) for payload in payloads]
        self._clean = False
        events = self._feed(data)
        self._clean = not (self._tail or self._data or self._event or self._skip_lf)
        return events

    def _feed(self, data: bytes) -> list[Event]:
        if self._skip_lf and data:
            self._skip_lf = False
            if data[0] == 10:
                data = data[1:]
        if self._tail:
            self._tail += data
            if 10 not in data and 13 not in data:
                self._bound(len(self._tail))
                return []
            data = bytes(self._tail)
            self._tail.clear()
        events: list[Event] = []
        if 13 in data:
            self._feed_any_line_end(data, events)
            return events
        at = 0
        end = len(data)
        while at < end:
            line_end = data.find(b"\n", at)
            if line_end < 0:
                self._bound(end - at)
                self._tail += data[at:]
                break
            # An event of one data line. Everything else goes line by line.
            if data.startswith(b"\n", line_end + 1) and data.startswith(b"data: ", at) and not self._data and not self._event:
                self._bound(line_end - at)
                self._fresh = False
                events.append(Event(data[at + 6 : line_end], b"", self._id))
                at = line_end + 2
                continue
            self._line(data[at:line_end], events)
            at = line_end + 1
        return events

    def _feed_any_line_end(self, data: bytes, events: list[Event]) -> None:
        # bytes.splitlines knows exactly CR, LF and CRLF
        lines = data.splitlines(keepends=True)
        last = lines[-1]
        if last[-1] == 13:
            self._skip_lf = True
        elif last[-1] != 10:
            self._bound(len(last))
            self._tail += lines.pop()
        for line in lines:
            self._line(line.rstrip(b"\r\n"), events)

    def _line(self, line: bytes, events: list[Event]) -> None:
        self._bound(len(line))
        if self._fresh:
            self._fresh = False
            line = line.removeprefix(_BOM)
        if not line:
            if self._data:
                events.append(Event(b"\n".join(self._data), self._event, self._id))
                self._data = []
                self._size = 0
            self._event = b""
            return
        field, _, value = line.partition(b":")
        if value.startswith(b" "):
            value = value[1:]
        if field == b"data":
            self._size += len(value) + 1
            self._bound(self._size)
            self._data.append(value)
        elif field == b"event":
            self._event = value
        elif field == b"id" and 0 not in value:
            self._id = value
        # a comment has an empty field name; `retry` and unknown fields are for browsers

    def _bound(self, size: int) -> None:
        if size > self._max:
            raise EngineError(
                f"The engine sent an event larger than {self._max} bytes.", hint="Raise max_event_bytes of this engine if that is meant."
            )
