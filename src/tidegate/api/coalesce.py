"""Merges events that wait for a slow reader: deltas of the same kind in a row become one event with all their text."""

from __future__ import annotations

from typing import Any

import msgspec

_encode = msgspec.json.encode
_decode = msgspec.json.decode
#: Members of a delta that are text and grow piece by piece.
_GROWING = ("content", "reasoning_content", "reasoning", "refusal")
_DATA = b"data: "


class Coalesced:
    """Events that wait, merged as they come: each is read once. `size`: about the bytes that they have, and never fewer than wait in memory.

    The same stream in fewer events. Two events are merged only where nothing but their text tells them apart (the newer usage stands for both), so
    that what a merge would lose, as log-probabilities, stays as it came.
    """

    __slots__ = ("_events", "_last", "size")

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._last: _Delta | None = None
        self.size = 0

    def add(self, events: bytes) -> None:
        """The next events, whole ones."""
        for event in events.split(b"\n\n"):
            if not event:
                continue
            delta, last = _read(event), self._last
            if delta is not None and last is not None and delta.frame == last.frame:
                last.text.append(delta.text[0])
                last.whole = delta.whole
                last.holder = delta.holder
                self.size += len(delta.text[0].encode("utf-8", "surrogatepass"))
                continue
            self._end_last()
            self._last = delta
            if delta is None:
                self._events.append(event)
            self.size += len(event) + 2

    def take(self) -> bytes:
        """All of them, and none is left."""
        self._end_last()
        events = b"".join([event + b"\n\n" for event in self._events])
        self._events.clear()
        self.size = 0
        return events

    def _end_last(self) -> None:
        if self._last is not None:
            self._events.append(self._last.event())
            self._last = None


def coalesce(events: bytes) -> bytes:
    """The same events, merged."""
    merged = Coalesced()
    merged.add(events)
    return merged.take()


class _Delta:
    """An event that adds text: everything but the text (`frame`), and where the text stands."""

    __slots__ = ("frame", "holder", "name", "prefix", "raw", "text", "whole")

    def __init__(self, raw: bytes, prefix: bytes, whole: dict[str, Any], holder: dict[str, Any], name: str) -> None:
        self.raw = raw
        self.prefix = prefix
        self.whole = whole
        self.holder = holder
        self.name = name
        self.text: list[str] = [holder[name]]
        usage = whole.pop("usage", None)
        holder[name] = None
        self.frame = prefix + _encode(whole)
        if usage is not None:
            whole["usage"] = usage

    def event(self) -> bytes:
        if len(self.text) == 1:
            return self.raw  # nothing was merged: it leaves as it came
        self.holder[self.name] = "".join(self.text)
        return self.prefix + _DATA + _encode(self.whole)


def _read(event: bytes) -> _Delta | None:
    """None for an event that does not add text, or of a shape we do not know."""
    prefix = b"event: token\n" if event.startswith(b"event: token\n") else b""
    if not event.startswith(_DATA, len(prefix)):
        return None
    data = event[len(prefix) + len(_DATA) :]
    try:
        whole = _decode(data)
        if isinstance(whole.get("text"), str):
            return _Delta(event, prefix, whole, whole, "text")
        [choice] = whole["choices"]
        holder = choice.get("delta", choice)
        names = [name for name in ("text", *_GROWING) if isinstance(holder.get(name), str)]
        return _Delta(event, prefix, whole, holder, names[0]) if len(names) == 1 and choice.get("finish_reason") is None else None
    except (msgspec.MsgspecError, UnicodeDecodeError, AttributeError, KeyError, TypeError, ValueError):
        return None
