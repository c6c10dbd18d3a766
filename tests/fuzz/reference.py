"""Server-sent events as the WHATWG's text says them, character by character: slow, and plain enough to be read against it.

https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation, on bytes.
"""

from __future__ import annotations


def lines_of(stream: bytes) -> list[bytes]:
    """The lines that are ended; one BOM at the very beginning is none of them."""
    if stream.startswith(b"\xef\xbb\xbf"):
        stream = stream[3:]
    lines: list[bytes] = []
    line = bytearray()
    at = 0
    while at < len(stream):
        byte = stream[at]
        at += 1
        if byte in (0x0A, 0x0D):
            if byte == 0x0D and stream[at : at + 1] == b"\n":
                at += 1
            lines.append(bytes(line))
            line.clear()
        else:
            line.append(byte)
    return lines


def events_of(stream: bytes) -> list[tuple[bytes, bytes, bytes]]:
    """(data, event, last event id) of each event that is dispatched."""
    events: list[tuple[bytes, bytes, bytes]] = []
    data, kind, last_id = b"", b"", b""
    for line in lines_of(stream):
        if line == b"":
            if data:
                events.append((data[:-1], kind, last_id))
            data, kind = b"", b""
            continue
        if line[0:1] == b":":
            continue
        if b":" in line:
            at = line.index(b":")
            field, value = line[:at], line[at + 1 :]
            if value[0:1] == b" ":
                value = value[1:]
        else:
            field, value = line, b""
        if field == b"event":
            kind = value
        elif field == b"data":
            data += value + b"\n"
        elif field == b"id" and b"\0" not in value:
            last_id = value
    return events
