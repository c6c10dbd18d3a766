"""What is simulated: the load and the engine, as `--what-if slots=24,burst=2000` says them, and the requests that follow from it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, get_type_hints

from tidegate.core.errors import SettingsError
from tidegate.core.plugins import nearest
from tidegate.sizing.engine_model import Speed
from tidegate.sizing.job import Job
from tidegate.sizing.traces import Arrival, Trace

#: How much of what the engine can do is asked of it before a burst.
WARM_LOAD = 0.8
#: The smallest and largest value of each key, and what it is.
KEYS: dict[str, tuple[float, float, str]] = {
    "slots": (1, 100_000, "answers at the same time"),
    "prefill": (0.1, 1e9, "prompt tokens that the engine reads in a second, all slots together"),
    "decode": (0.01, 1e6, "tokens per second of one stream alone"),
    "half": (0.1, 1e6, "with so many more streams each has half that speed"),
    "chunk": (1, 1e7, "prompt tokens that are read in one step beside running streams"),
    "requests": (1, 1e6, "at most so many requests of the trace, from its beginning"),
    "burst": (0, 1e6, "so many requests at one instant, with lengths drawn from the trace; 0: the trace's own times"),
    "warm": (0, 1e5, "so many requests before a burst, at four fifths of what the engine can do; they are not counted"),
    "rate": (0, 1e6, "requests per second, as a Poisson process, in place of the trace's own times; 0: the trace's own"),
    "speed": (0.001, 1e6, "the trace's own times, so many times as fast"),
    "slo": (0.001, 1e6, "seconds within which the first token should come"),
    "tenants": (1, 10_000, "tenants, where the trace names none"),
    "flood": (0.001, 1e6, "the first tenant sends so many times as much as each other"),
    "returns": (0, 1, "share of refused clients that come back when they were told to"),
    "noise": (0, 10, "how wrong predicted answer lengths are: deviation of the logarithm"),
    "told": (0, 1, "1: callers say at most how many tokens they want, twice the predicted length; 0: they say nothing"),
}


@dataclass(frozen=True, slots=True)
class Scenario:
    """One what-if; the keys are described in `KEYS`."""

    slots: int = 16
    prefill: float = 25_000.0
    decode: float = 140.0
    half: float = 60.0
    chunk: int = 2048
    requests: int = 10_000
    burst: int = 0
    warm: int = 256
    rate: float = 0.0
    speed: float = 1.0
    slo: float = 3.0
    tenants: int = 4
    flood: float = 1.0
    returns: float = 1.0
    noise: float = 0.6
    told: int = 0

    @property
    def engine(self) -> Speed:
        return Speed(self.slots, self.prefill, self.decode, self.half, self.chunk)


def parse(said: str, usual: Scenario | None = None) -> Scenario:
    """From `slots=24,burst=2000`; what is not said is as in `usual`. Raises SettingsError for a key that is not known, is said twice, or has no such
    value."""
    kinds = get_type_hints(Scenario)
    found: dict[str, Any] = {}
    for pair in filter(None, (one.strip() for one in said.split(","))):
        key, _, text = (part.strip() for part in pair.partition("="))
        if key not in KEYS:
            raise SettingsError(f"--what-if does not know {key!r}.", hint=nearest(key, KEYS))
        if key in found:
            raise SettingsError(f"--what-if says {key} twice in {said!r}.", hint="For several scenarios, say --what-if several times.")
        found[key] = _value(key, text, kinds[key])
    return replace(usual or Scenario(), **found)


def _value(key: str, text: str, kind: type) -> float | int:
    least, most, what = KEYS[key]
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not least <= number <= most or (kind is int and number != int(number)):
        whole = "a whole number" if kind is int else "a number"
        raise SettingsError(f"--what-if says {key}={text[:40]}.", hint=f"{key} is {whole} from {least:g} to {most:g}: {what}.")
    return int(number) if kind is int else number


def differences(scenario: Scenario) -> str:
    """What is not as usual in it, as `--what-if` says it."""
    plain = Scenario()
    pairs = [(field.name, getattr(scenario, field.name)) for field in fields(scenario) if getattr(scenario, field.name) != getattr(plain, field.name)]
    return ",".join(f"{name}={value:g}" for name, value in pairs)


def make_jobs(trace: Trace, scenario: Scenario, seed: int) -> list[Job]:
    """The requests of a scenario in order of coming; the same seed makes the same ones. Raises SettingsError where nothing says when they come."""
    chance = random.Random(f"{seed}/jobs")  # noqa: S311 - a simulation, no secrets
    names = [f"tenant-{number}" for number in range(1, scenario.tenants + 1)]
    sums = list(accumulate([scenario.flood, *[1.0] * (scenario.tenants - 1)]))
    jobs: list[Job] = []
    for at_s, one, counted in _timed(trace, scenario, chance):
        at_ns = round(at_s * 1e9)
        tenant = one.tenant or chance.choices(names, cum_weights=sums)[0]
        predicted = one.output * chance.lognormvariate(0.0, scenario.noise)
        told = max(one.output, math.ceil(2 * predicted)) if scenario.told else 0
        jobs.append(Job(len(jobs), tenant, one.prompt, one.output, predicted, told, at_ns, at_ns, counted, one.cached))
    return jobs


def _timed(trace: Trace, scenario: Scenario, chance: random.Random) -> Iterator[tuple[float, Arrival, bool]]:
    """(second, request, whether it counts)"""
    if scenario.burst:
        at_s = 0.0
        for one in _sample(trace.arrivals, scenario.warm, chance):
            yield at_s, one, False
            at_s += chance.expovariate(WARM_LOAD / scenario.engine.busy_s(one.prompt - one.cached, one.output))
        for one in _sample(trace.arrivals, scenario.burst, chance):
            yield at_s, one, True
    elif scenario.rate:
        at_s = 0.0
        for one in trace.arrivals:
            at_s += chance.expovariate(scenario.rate)
            yield at_s, one, True
    elif not trace.timed:
        raise SettingsError(f"This trace ({trace.format}) has lengths but no times.", hint="Say when requests come: --what-if burst=2000 or rate=5.")
    else:
        for one in trace.arrivals:
            yield one.at_s / scenario.speed, one, True


def _sample(arrivals: tuple[Arrival, ...], count: int, chance: random.Random) -> list[Arrival]:
    """So many of them, in random order: each at most once while there are enough."""
    drawn: list[Arrival] = []
    while len(drawn) < count:
        drawn += chance.sample(arrivals, min(count - len(drawn), len(arrivals)))
    return drawn
