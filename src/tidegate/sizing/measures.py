"""What a simulation is judged by: waits, first tokens, goodput, fairness, starvation, and whether `Retry-After` was kept."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from tidegate.sizing.engine_model import Speed
from tidegate.sizing.job import Job
from tidegate.sizing.scenario import Scenario

#: Who waits this many times the SLO is called starved.
STARVED = 10


@dataclass(slots=True)
class Measures:
    """Figures of one policy. Seconds are of the virtual clock; NaN where nobody was admitted.

    `good`: requests whose first token came within the SLO of their first asking; goodput is those as a share of all (DistServe, Zhong et al. 2024);
    `good_later`: those who came back and then were within the SLO. Waits and first tokens are of the admitted, from their last coming.
    `jain` is Jain's index of the tenants' `shares`, see `shares`. `returned`: comings after a refusal, `passed` those that were not refused again.
    """

    asked: int
    admitted: int
    refused: int
    good: int
    good_later: int
    wait_s: dict[str, float]
    ttft_s: dict[str, float]
    longest_wait_s: float
    starved: int
    jain: float
    returned: int
    passed: int
    took_s: float
    #: By tenant: what it got in time, over what it was due.
    shares: dict[str, float]
    #: Sorted times to first token of the admitted, for the plot.
    ttfts_s: list[float] = field(repr=False, default_factory=list)

    @property
    def goodput(self) -> float:
        """Share of all requests."""
        return self.good / self.asked

    @property
    def kept(self) -> float:
        """Share of those who came back that then passed; NaN where nobody came back."""
        return self.passed / self.returned if self.returned else math.nan

    def within(self, seconds: float) -> float:
        """Share of all requests whose first token came within so many seconds."""
        return bisect_right(self.ttfts_s, seconds) / self.asked

    def as_json(self) -> dict[str, Any]:
        """Plain figures; what is NaN is null."""
        plain = {name: getattr(self, name) for name in self.__slots__ if name != "ttfts_s"} | {"goodput": self.goodput, "kept": self.kept}
        return {name: _plain(value) for name, value in plain.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value


def measure(jobs: Sequence[Job], scenario: Scenario) -> Measures:
    """The figures of finished jobs. Raises ValueError where one is neither answered nor refused: a request was lost."""
    lost = [job.number for job in jobs if job.done_ns < 0 and not job.refused]
    if lost:
        raise ValueError(f"requests {lost[:10]} were neither answered nor refused")
    answered = [job for job in jobs if job.done_ns >= 0]
    waits = sorted(job.wait_s for job in answered)
    ttfts = sorted(job.ttft_s for job in answered)
    within = [job for job in answered if job.ttft_s <= scenario.slo]
    good = [job for job in within if job.tries == 1]
    returned = sum(job.tries - 1 for job in jobs)
    had = _shares(jobs, good, scenario.engine)
    return Measures(
        len(jobs), len(answered), len(jobs) - len(answered), len(good), len(within) - len(good), _quantiles(waits), _quantiles(ttfts),
        waits[-1] if waits else math.nan, sum(wait_s > STARVED * scenario.slo for wait_s in waits), jain(had.values()), returned,
        sum(job.tries > 1 and job.done_ns >= 0 for job in jobs),
        (max((job.done_ns for job in answered), default=0) - min(job.asked_ns for job in jobs)) / 1e9, had, ttfts,
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """By nearest rank: a value that was measured, not one between two."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def _quantiles(ordered: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}": quantile(ordered, percent / 100) for percent in (50, 95, 99)}


def _shares(jobs: Sequence[Job], good: Sequence[Job], speed: Speed) -> dict[str, float]:
    wanted: dict[str, float] = {}
    for job in jobs:
        wanted[job.tenant] = wanted.get(job.tenant, 0.0) + speed.alone_s(job.reads, job.output)
    got = dict.fromkeys(wanted, 0.0)
    for job in good:
        got[job.tenant] += speed.alone_s(job.reads, job.output)
    return dict(zip(wanted, shares(list(got.values()), list(wanted.values())), strict=True))


def shares(got: Sequence[float], wanted: Sequence[float]) -> list[float]:
    """What each tenant got over its max-min fair share of what all got: 1 where everybody had its share. Who wanted less than an equal share is due
    what it wanted, and the others share what that leaves. NaN for who was due nothing."""
    return [part / due if due > 0 else math.nan for part, due in zip(got, max_min(sum(got), wanted), strict=True)]


def jain(values: Iterable[float]) -> float:
    """Jain's index (Jain, Chiu and Hawe 1984): 1 where all are equal, 1/n where one has all. Without those that are NaN."""
    known = [value for value in values if not math.isnan(value)]
    squares = sum(value * value for value in known)
    return sum(known) ** 2 / (len(known) * squares) if squares else math.nan


def max_min(whole: float, wanted: Sequence[float]) -> list[float]:
    """`whole` dealt out by max-min fairness: the smallest wishes are filled first, and nobody gets more than it wants."""
    due = [0.0] * len(wanted)
    left = whole
    for place, number in enumerate(order := sorted(range(len(wanted)), key=wanted.__getitem__)):
        due[number] = min(wanted[number], left / (len(order) - place))
        left -= due[number]
    return due


def most_in_time(jobs: Sequence[Job], speed: Speed, slo_s: float) -> int:
    """An upper bound of `good` for requests that come at one instant, whatever the policy knows: k can be in time only if

    - the k shortest prompts can be read by then at full speed, and
    - all but the last `slots` of them can have left their slots by then: the k - slots shortest stays, at the speed of a stream that is alone, fit
      into slots x SLO.
    """
    read = accumulate(sorted(job.reads / speed.prefill for job in jobs))
    stays = accumulate(sorted(speed.alone_s(job.reads, job.output) for job in jobs))
    by_reading = sum(seconds <= slo_s for seconds in read)
    by_slots = speed.slots + sum(seconds <= slo_s * speed.slots for seconds in stays)
    return min(len(jobs), by_reading, by_slots)
