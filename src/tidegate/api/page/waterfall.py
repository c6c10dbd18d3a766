"""The geometry of a flight's time, as SVG numbers: bars to scale, ticks, and the gaps between tokens. Pure arithmetic, no markup."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.api.page.rooms import room_of
from tidegate.core.flight import FlightRecord, Lap

#: Width of every drawing: percent of it, so that SVG stretches the bars and leaves the letters alone.
WIDTH = 100.0
#: Bars thinner than this could not be seen, so they are drawn this wide; the figures beside them are exact.
_THINNEST = 0.3
_MOST_GAPS = 400


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle: `x` and `width` of WIDTH."""

    x: float
    width: float
    room: str


@dataclass(frozen=True, slots=True)
class Part:
    """All laps of one name: where they lie, and their sum. `share` is of the whole, 0 to 1."""

    name: str
    room: str
    bars: list[Bar]
    sum_ns: int
    share: float
    times: int


@dataclass(frozen=True, slots=True)
class Tick:
    x: float
    ms: float


@dataclass(frozen=True, slots=True)
class Gap:
    """The pause before a token. `x`: where it ended, of WIDTH; `height`: how long it was, 0 to 100; `stall`: far longer than usual."""

    x: float
    height: float
    ms: float
    stall: bool


@dataclass(frozen=True, slots=True)
class Rhythm:
    """The pauses between tokens of one answer. `per_s`: tokens per second after the first."""

    gaps: list[Gap]
    count: int
    p50_ms: float
    p95_ms: float
    max_ms: float
    stalls: int
    per_s: float
    span_ms: float
    merged: int


def parts(record: FlightRecord) -> list[Part]:
    """One part per lap name, in the order in which they first happened. Their sums add up to the sum of the laps."""
    whole = max(record.whole_ns, 1)
    bars: dict[str, list[Bar]] = {}
    sums: dict[str, int] = {}
    times: dict[str, int] = {}
    at_ns = 0
    for name, lap_ns in record.laps:
        _draw(bars.setdefault(name, []), at_ns / whole, lap_ns / whole, room_of(name))
        sums[name] = sums.get(name, 0) + lap_ns
        times[name] = times.get(name, 0) + 1
        at_ns += lap_ns
    return [Part(name, room_of(name), drawn, sums[name], sums[name] / whole, times[name]) for name, drawn in bars.items()]


def strip(laps: Sequence[Lap], whole_ns: int) -> list[Bar]:
    """The whole flight in one line: neighbours of one room are one bar."""
    whole = max(whole_ns, 1)
    bars: list[Bar] = []
    at_ns = 0
    for name, lap_ns in laps:
        _draw(bars, at_ns / whole, lap_ns / whole, room_of(name), thinnest=0.0)
        at_ns += lap_ns
    return [bar for bar in bars if bar.width >= 0.1]


def _draw(bars: list[Bar], start: float, share: float, room: str, thinnest: float = _THINNEST) -> None:
    x, width = start * WIDTH, max(share * WIDTH, thinnest)
    if bars and bars[-1].room == room and x - (bars[-1].x + bars[-1].width) < 0.05:
        last = bars.pop()
        bars.append(Bar(last.x, round(max(x + width - last.x, last.width), 3), room))
    else:
        bars.append(Bar(round(min(x, WIDTH - width), 3), round(width, 3), room))


def ticks(whole_ns: int, about: int = 5) -> list[Tick]:
    """Round instants across the whole, beginning with 0."""
    whole_ms = whole_ns / 1e6
    if whole_ms <= 0:
        return [Tick(0.0, 0.0)]
    step = _round_step(whole_ms / about)
    return [Tick(round(n * step / whole_ms * WIDTH, 3), n * step) for n in range(int(whole_ms / step) + 1)]


def _round_step(rough: float) -> float:
    """The next 1, 2 or 5 times a power of ten at or above `rough`."""
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def rhythm(record: FlightRecord) -> Rhythm | None:
    """The gaps between tokens; None with fewer than two. A stall is a gap above four times the median and above 50 ms.

    Above _MOST_GAPS gaps, neighbours share a bar that shows the longest of them.
    """
    stamps = record.token_ns
    if len(stamps) < 2:
        return None
    gaps_ms = [(after - before) / 1e6 for before, after in itertools.pairwise(stamps)]
    ordered = sorted(gaps_ms)
    p50, longest = _quantile(ordered, 0.5), ordered[-1]
    stall_ms = max(4 * p50, 50.0)
    span = max(stamps[-1] - stamps[0], 1)
    merged = -(-len(gaps_ms) // _MOST_GAPS)
    drawn = []
    for first in range(0, len(gaps_ms), merged):
        group = gaps_ms[first:first + merged]
        peak = max(group)
        at = stamps[first + group.index(peak) + 1]
        drawn.append(Gap(round((at - stamps[0]) / span * WIDTH, 3), round(peak / (longest or 1) * 100, 2), peak, peak > stall_ms))
    return Rhythm(
        drawn, len(stamps), p50, _quantile(ordered, 0.95), longest, sum(gap > stall_ms for gap in gaps_ms),
        len(gaps_ms) / (span / 1e9), span / 1e6, merged,
    )


def _quantile(ordered: Sequence[float], q: float) -> float:
    """Nearest rank; `ordered` is not empty."""
    return ordered[min(len(ordered) - 1, max(0, math.ceil(q * len(ordered)) - 1))]


def quantile(values: Sequence[float], q: float) -> float | None:
    """Nearest-rank quantile; None of nothing."""
    return _quantile(sorted(values), q) if values else None
