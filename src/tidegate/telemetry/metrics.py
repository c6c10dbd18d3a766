"""Counts finished flights: a fold into plain dicts and lists, told by exposition.py at a scrape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec
import numpy as np

from tidegate.core.flight import FlightRecord
from tidegate.core.ports import KeptText
from tidegate.telemetry.histogram import FORECAST_BOUNDS_S, GAP_BOUNDS_S, PART_BOUNDS_S, REQUEST_BOUNDS_S, Histogram

#: Distinct values of one label; what comes after is counted under OTHER, so that no caller can grow the metrics without bound.
MAX_NAMES = 64
OTHER = "other"
#: Flights that wait before they are counted together: many at once cost a quarter of one by one.
FOLD_FLIGHTS = 256
#: Token stamps that wait before the gaps between them are counted, which does not take the flights along: a few flights cost as much as many.
FOLD_STAMPS = 1024
#: Token stamps that waiting flights may hold.
HELD_STAMPS = 32 * FOLD_STAMPS


class Names:
    """The values that one label may take: learnt until there are `limit`, then OTHER."""

    __slots__ = ("_limit", "known")

    def __init__(self, known: Iterable[str] = (), limit: int = MAX_NAMES) -> None:
        self.known = set(known)
        self._limit = limit

    def label(self, name: str, learn: bool = True) -> str:
        """`name` where it is known or may be learnt, else OTHER. The empty name ("none") is always itself."""
        if not name or name in self.known:
            return name
        if not learn or len(self.known) >= self._limit:
            return OTHER
        self.known.add(name)
        return name


class Series:
    """All that is counted for one combination of labels of a request."""

    __slots__ = ("count", "first_token", "whole")

    def __init__(self) -> None:
        self.count = 0
        self.whole = Histogram(REQUEST_BOUNDS_S)
        self.first_token = Histogram(REQUEST_BOUNDS_S)


#: Route, capability, model, end, HTTP status.
Key = tuple[str, str, str, str, int]


#: A histogram's counts per bucket, and its sum in nanoseconds.
Told = tuple[list[int], int]


class Counted(msgspec.Struct, array_like=True):
    """What one process counted, without the names that are the same in all."""

    series: list[tuple[Key, int, Told, Told]]
    parts: dict[str, Told]
    tokens: tuple[list[int], list[int]]
    errors: dict[str, int]
    thinned: int
    gaps: Told
    forecasts: dict[str, Told] = {}
    steps: list[tuple[str, str, int]] = []
    recall: dict[str, tuple[int, int]] = {}


def _told(histogram: Histogram) -> Told:
    return histogram.counts, histogram.sum_ns


def _add(histogram: Histogram, told: Told) -> None:
    counts, sum_ns = told
    histogram.counts = [mine + theirs for mine, theirs in zip(histogram.counts, counts, strict=True)]
    histogram.sum_ns += sum_ns


class Metrics:
    """A FlightSink that counts. Its attributes are read by the exposition, in the same event loop: no lock.

    `capabilities` and `models`, and the routes that `know_routes` names, are labels from the start; others are learnt from flights that
    were not refused, so that a name that a caller made up never becomes a label.
    """

    def __init__(self, *, capabilities: Iterable[str] = (), models: Iterable[str] = ()) -> None:
        self._series: dict[Key, Series] = {}
        self._parts: dict[str, Histogram] = {}
        #: By exactness: prompt, completion and cached tokens.
        self._tokens = {True: [0, 0, 0], False: [0, 0, 0]}
        self._errors: dict[str, int] = {}
        self._thinned = 0
        self._gaps = Histogram(GAP_BOUNDS_S)
        self._forecasts: dict[str, Histogram] = {}
        self._steps: dict[tuple[str, ...], int] = defaultdict(int)
        #: By collection: passages that a search had, of those that comparing everything gave.
        self._recall: dict[str, list[int]] = {}
        self._waiting: list[FlightRecord] = []
        self._held_stamps = 0
        self._stamps: list[list[int]] = []  # of flights that wait, or waited
        self._waiting_stamps = 0
        self._capabilities, self._models = Names(capabilities), Names(models)
        self._routes, self._part_names, self._codes, self._collections = Names(), Names(), Names(), Names()

    def alike(self) -> Metrics:
        """One that has counted nothing, and knows the same names."""
        made = Metrics(capabilities=self._capabilities.known, models=self._models.known)
        made._routes, made._part_names, made._codes = Names(self._routes.known), Names(self._part_names.known), Names(self._codes.known)
        return made

    def know_routes(self, routes: Iterable[str]) -> None:
        """Routes that are labels also while only refused requests came."""
        self._routes = Names(routes)

    def finished(self, record: FlightRecord, kept: KeptText | None = None) -> None:
        """Counts one flight, soon: when somebody asks, or when enough of them wait."""
        waiting = self._waiting
        waiting.append(record)
        stamps = record.token_ns
        if len(stamps) > 1:
            self._stamps.append(stamps)
            self._waiting_stamps += len(stamps)
            self._held_stamps += len(stamps)
        if len(waiting) >= FOLD_FLIGHTS or self._held_stamps > HELD_STAMPS:
            self._fold()
        elif self._waiting_stamps > FOLD_STAMPS:
            self._fold_gaps()

    # -- what is counted

    @property
    def series(self) -> dict[Key, Series]:
        """Requests, by their labels."""
        self._fold()
        return self._series

    @property
    def parts(self) -> dict[str, Histogram]:
        """Times that a part of the waterfall owned, by its name."""
        self._fold()
        return self._parts

    @property
    def tokens(self) -> dict[bool, list[int]]:
        """Prompt, completion and cached tokens, by whether they are exact."""
        self._fold()
        return self._tokens

    @property
    def errors(self) -> dict[str, int]:
        """Requests that carried an error, by its code."""
        self._fold()
        return self._errors

    @property
    def thinned(self) -> int:
        """Flights without token stamps because the spool was near its bound."""
        self._fold()
        return self._thinned

    def gaps(self) -> Histogram:
        """The times between tokens."""
        self._fold()
        return self._gaps

    @property
    def forecasts(self) -> dict[str, Histogram]:
        """How far forecast waits were off, of requests that waited: `late` where they waited longer than forecast, else `early`."""
        self._fold()
        return self._forecasts

    @property
    def steps(self) -> dict[tuple[str, ...], int]:
        """Steps down the ladders: capability, and the rung that a step led to."""
        self._fold()
        return self._steps

    @property
    def recall(self) -> dict[str, list[int]]:
        """Searches that were done a second time by comparing everything: passages that the search had had, of those that this gave, by collection."""
        self._fold()
        return self._recall

    def _fold(self) -> None:
        """Count what waits."""
        waiting, self._waiting, self._held_stamps = self._waiting, [], 0
        if not waiting:
            return
        laps: dict[str, list[int]] = defaultdict(list)
        for record in waiting:
            key = (record.route, record.capability, record.model, record.end, record.http_status)
            series = self._series.get(key) or self._open(record)
            series.count += 1
            if record.end != "refused":
                series.whole.add(record.whole_ns)
            if record.first_token_ns:
                series.first_token.add(record.first_token_ns)
            for part, spent_ns in record.laps:
                laps[part].append(spent_ns)
            usage = record.usage
            tokens = self._tokens[usage.exact]
            tokens[0] += usage.prompt_tokens
            tokens[1] += usage.completion_tokens
            tokens[2] += usage.cached_tokens
            if record.error_code:
                self._count_error(record.error_code)
            for _, what, facts in record.decisions:
                if what == "queued":
                    self._count_forecast(facts["waited_s"] - facts["forecast_s"])
                elif what == "stepped_down":
                    self._steps[self._capabilities.label(record.capability), facts["to"]] += 1
                elif what == "recall":
                    self._count_recall(facts["collection"], facts["found"], facts["of"])
            if record.thinned:
                self._thinned += 1
        for part, spent in laps.items():
            (self._parts.get(part) or self._open_part(part)).add_all(np.array(spent, dtype=np.int64))
        self._fold_gaps()

    def _fold_gaps(self) -> None:
        """Count the gaps between the tokens that wait."""
        stamps, self._stamps, self._waiting_stamps = self._stamps, [], 0
        if stamps:
            self._gaps.add_all(np.concatenate([np.diff(np.array(each, dtype=np.int64)) for each in stamps]))

    def counted(self) -> Counted:
        """All that was counted, as it travels to another process."""
        return Counted(
            [(key, series.count, _told(series.whole), _told(series.first_token)) for key, series in self.series.items()],
            {part: _told(histogram) for part, histogram in self.parts.items()},
            (self.tokens[True], self.tokens[False]), self.errors, self.thinned, _told(self.gaps()),
            {side: _told(histogram) for side, histogram in self.forecasts.items()},
            [(capability, to, count) for (capability, to), count in self.steps.items()],
            {collection: (found, of) for collection, (found, of) in self.recall.items()},
        )

    def add(self, other: Counted) -> None:
        """Add what another process counted."""
        for key, count, whole, first_token in other.series:
            series = self._series.setdefault(key, Series())
            series.count += count
            _add(series.whole, whole)
            _add(series.first_token, first_token)
        for part, told in other.parts.items():
            _add(self._parts.setdefault(part, Histogram(PART_BOUNDS_S)), told)
        for exact, counts in zip((True, False), other.tokens, strict=True):
            self._tokens[exact] = [mine + theirs for mine, theirs in zip(self._tokens[exact], counts, strict=True)]
        for code, count in other.errors.items():
            self._errors[code] = self._errors.get(code, 0) + count
        self._thinned += other.thinned
        _add(self._gaps, other.gaps)
        for side, told in other.forecasts.items():
            _add(self._forecasts.setdefault(side, Histogram(FORECAST_BOUNDS_S)), told)
        for capability, to, count in other.steps:
            self._steps[capability, to] += count
        for collection, (found, of) in other.recall.items():
            self._count_recall(collection, found, of)

    def _open(self, record: FlightRecord) -> Series:
        # A name that became OTHER comes here each time: to remember it would let made-up names fill the memory.
        learn = record.end != "refused"
        key = (
            self._routes.label(record.route, learn), self._capabilities.label(record.capability, learn),
            self._models.label(record.model, learn), record.end, record.http_status,
        )
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = Series()
        return series

    def _open_part(self, part: str) -> Histogram:
        return self._parts.setdefault(self._part_names.label(part), Histogram(PART_BOUNDS_S))

    def _count_forecast(self, error_s: float) -> None:
        side = "late" if error_s > 0 else "early"
        self._forecasts.setdefault(side, Histogram(FORECAST_BOUNDS_S)).add(round(abs(error_s) * 1e9))

    def _count_recall(self, collection: str, found: int, of: int) -> None:
        counts = self._recall.setdefault(self._collections.label(collection), [0, 0])
        counts[0] += found
        counts[1] += of

    def _count_error(self, code: str) -> None:
        code = self._codes.label(code)
        self._errors[code] = self._errors.get(code, 0) + 1
