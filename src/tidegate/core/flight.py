"""The flight record: the memory of one request.

A flight is written while the request runs and read only after it ended. Its time is a waterfall: `lap(part)` says "the time since the last lap
belonged to this part", so every nanosecond between the first byte in and the last byte handed over has exactly one owner and the parts add up
to the whole by construction. An append is a list append of a small tuple: no lock, no I/O.
"""

from __future__ import annotations

import os
import time
from time import perf_counter_ns
from typing import Any

import msgspec

from tidegate.core.chunk import End, Usage

#: A part of the waterfall: name and duration in nanoseconds.
Lap = tuple[str, int]
#: A decision: nanoseconds since the flight began, what was decided, and the facts it rests on (never prompt or answer text).
Decision = tuple[int, str, dict[str, Any]]


class FlightRecord(msgspec.Struct, omit_defaults=True):
    """A finished flight as it is spooled, stored, shown and folded. No prompt or answer text: digests and counts.

    Durations and offsets are nanoseconds. `laps` add up to `whole_ns`; `token_ns` are offsets from the beginning, one per event that carried
    text. `http_status` is what the client saw, or 499 where it left.
    """

    id: str
    began_unix_ns: int
    whole_ns: int
    laps: list[Lap]
    route: str
    end: End
    http_status: int
    tenant: str = ""
    key_id: str = ""
    capability: str = ""
    model: str = ""
    engine: str = ""
    stream: bool = False
    decisions: list[Decision] = []
    token_ns: list[int] = []
    usage: Usage = Usage(exact=False)
    first_token_ns: int = 0
    error_code: str = ""
    request_sha256: str = ""
    answer_sha256: str = ""
    answer_chars: int = 0
    prompt_version: str = ""
    prompt_sha256: str = ""
    index_version: str = ""
    passage_ids: list[str] = []
    kept: bool = False
    #: The spool was near its bound: token stamps were left out to save room.
    thinned: bool = False
    version: str = ""


_random: list[str] = []
os.register_at_fork(after_in_child=_random.clear)  # a child must not draw its parent's ids


def new_flight_id(unix_ns: int) -> str:
    """A 32-digit hex id that sorts by time: 48 bits of milliseconds, then 80 random bits. It is also the `trace_id` of errors."""
    if not _random:
        drawn = os.urandom(10 * 256).hex()  # one system call for 256 ids
        _random.extend(drawn[i : i + 20] for i in range(0, len(drawn), 20))
    return f"{unix_ns // 1_000_000:012x}{_random.pop()}"


class Flight:
    """One request while it runs. Rooms append facts; nobody reads it before it ended."""

    # Defaults of the class: what a request never sets costs it nothing.
    end: End = "error"
    http_status = 0
    tenant = key_id = capability = model = engine = ""
    stream = False
    usage = Usage(exact=False)
    first_token_ns = 0
    error_code = request_sha256 = answer_sha256 = ""
    answer_chars = 0
    prompt_version = prompt_sha256 = index_version = ""
    kept = False

    def __init__(self, route: str, began_ns: int = 0) -> None:
        now_ns = perf_counter_ns()
        self.route = route
        self.began_ns = self.last_ns = began_ns = began_ns or now_ns
        self.began_unix_ns = unix_ns = time.time_ns() - (now_ns - began_ns)
        self.id = new_flight_id(unix_ns)
        self.laps: list[Lap] = []
        self.decisions: list[Decision] = []
        self.token_ns: list[int] = []
        self.passage_ids: list[str] = []

    def lap(self, part: str, at_ns: int | None = None) -> None:
        """The time since the last lap belonged to `part`. `at_ns`: a monotonic (`perf_counter_ns`) instant taken elsewhere, e.g. at the socket."""
        if not at_ns:
            at_ns = perf_counter_ns()
        last_ns = self.last_ns
        if at_ns > last_ns:
            self.laps.append((part, at_ns - last_ns))
            self.last_ns = at_ns
        else:  # a stamp taken before the last lap closed: that time is already owned
            self.laps.append((part, 0))

    def decide(self, what: str, **facts: Any) -> None:
        """Note a decision and the facts it rests on. Ids, counts, scores and hashes only: never prompt or answer text."""
        self.decisions.append((time.perf_counter_ns() - self.began_ns, what, facts))

    def token(self, at_ns: int) -> None:
        """An event that carried text was read from the engine at `at_ns`."""
        at_ns -= self.began_ns
        if not self.token_ns:
            self.first_token_ns = at_ns
        self.token_ns.append(at_ns)

    @property
    def ended(self) -> bool:
        """Whether the record is made: what is noted now would be in none."""
        return bool(self.laps) and self.laps[-1][0] == "close"

    def finish(self, end: End, http_status: int, version: str = "") -> FlightRecord:
        """Close the flight: what is left of the time goes to `close`, and the record is made. Called once, at the end, whatever happened."""
        self.end = end
        self.http_status = http_status
        self.lap("close")
        return FlightRecord(
            self.id, self.began_unix_ns, self.last_ns - self.began_ns, self.laps, self.route, end, http_status, self.tenant, self.key_id,
            self.capability, self.model, self.engine, self.stream, self.decisions, self.token_ns, self.usage, self.first_token_ns,
            self.error_code, self.request_sha256, self.answer_sha256, self.answer_chars, self.prompt_version, self.prompt_sha256,
            self.index_version, self.passage_ids, self.kept, False, version,
        )
