"""A histogram that is cheap to add to: fixed bounds, one bisect, one addition."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

REQUEST_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
PART_BOUNDS_S = (0.00001, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)
GAP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

FORECAST_BOUNDS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    """Counts per bucket over bounds in nanoseconds, and the sum. A value on a bound belongs below it, as Prometheus' `le` says."""

    __slots__ = ("_bounds", "bounds_ns", "counts", "sum_ns")

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self.bounds_ns = [round(bound * 1e9) for bound in bounds_s]
        self._bounds = np.array(self.bounds_ns, dtype=np.int64)
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum_ns = 0

    def add(self, value_ns: int) -> None:
        """One value."""
        self.counts[bisect_left(self.bounds_ns, value_ns)] += 1
        self.sum_ns += value_ns

    def add_all(self, values_ns: npt.NDArray[np.signedinteger[Any]]) -> None:
        """Many values at once; as `add` for each, but a thousand cost what fifty cost one by one."""
        per_bucket = np.bincount(np.searchsorted(self._bounds, values_ns, side="left"), minlength=len(self.counts))
        self.counts = [have + int(new) for have, new in zip(self.counts, per_bucket, strict=True)]
        self.sum_ns += int(values_ns.sum())

    def merge(self, other: Histogram) -> None:
        """Adds what another of the same bounds counted."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.sum_ns += other.sum_ns

    def buckets(self) -> list[tuple[str, float]]:
        """Prometheus' cumulative buckets: (upper bound in seconds as text, count up to it)."""
        out: list[tuple[str, float]] = []
        total = 0
        for bound_ns, count in zip(self.bounds_ns, self.counts, strict=False):
            total += count
            out.append((f"{bound_ns / 1e9:g}", float(total)))
        return [*out, ("+Inf", float(total + self.counts[-1]))]
