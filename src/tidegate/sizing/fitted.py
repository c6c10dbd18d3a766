"""An engine's speeds, fitted to the flights that a gateway has recorded.

Flights of streamed answers tell when each token came, so they tell the steps that the engine took: tokens of several requests that came together
are of one step. The speeds are sought with which the engine model's steps are least wrong: the mean over all of the absolute logarithm of model over
truth, so that a step that was disturbed counts for little. The search goes up and down in the logarithms of three times, with steps that are halved.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tidegate.core.errors import SettingsError
from tidegate.sizing.engine_model import Speed
from tidegate.sizing.traces import Arrival

#: Steps without which a fit says nothing.
LEAST = 50
#: Tokens that come within so many seconds are of one step, where they are of different requests.
SAME_STEP_S = 0.004
#: A step that took less is two writes of one.
_LEAST_S = 2e-4
#: Most steps that are looked at, evenly chosen.
_MOST = 5000
#: By what share a step is longer where all streams run, at least.
_NO_SLOWER = 1e-4
#: The first and the last step of the search: factors of 2.7 and of 1.01.
_FIRST, _LAST = 1.0, 0.01


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the engine: when it began and ended, how many streams had a token, and how many prompt tokens were read to their end in it."""

    began_s: float
    ended_s: float
    streams: int
    reads: int

    def due_s(self, speed: Speed) -> float:
        """How long it should have taken."""
        return (speed.step_s(self.streams) if self.streams else 0.0) + self.reads / speed.prefill


@dataclass(frozen=True, slots=True)
class Fit:
    """The `speed`, to how many `steps` it was fitted, and the median by which the model's steps are wrong with it, as a factor less one."""

    speed: Speed
    steps: int
    wrong: float


def steps(arrivals: Sequence[Arrival], chunk: int) -> list[Step]:
    """The steps that the tokens of these requests tell, in order. A step began when the one before it ended, or when a prompt came to an idle engine.
    Prompts of more than a chunk take several steps of which no token tells: they are left out."""
    tokens = sorted((at_s, number, place) for number, one in enumerate(arrivals) if one.served for place, at_s in enumerate(one.served.tokens_s))
    found: list[Step] = []
    ended_s, last = -math.inf, 0
    while last < len(tokens):
        first, last = last, _end_of_step(tokens, last)
        group = tokens[first:last]
        firsts = [arrivals[number] for _, number, place in group if not place]
        began_s = ended_s
        if len(firsts) == len(group):  # nothing ran before
            began_s = max(ended_s, min(one.served.started_s for one in firsts if one.served is not None))
        reads = sum(one.prompt - one.cached for one in firsts)
        ended_s = group[0][0]
        if reads <= chunk and _LEAST_S < ended_s - began_s < math.inf:
            found.append(Step(began_s, ended_s, len(group) - len(firsts), reads))
    return found


def _end_of_step(tokens: list[tuple[float, int, int]], first: int) -> int:
    """One behind the last token that is of the same step as this one."""
    requests = {tokens[first][1]}
    for place in range(first + 1, len(tokens)):
        at_s, number, _ = tokens[place]
        if at_s - tokens[place - 1][0] > SAME_STEP_S or number in requests:
            return place
        requests.add(number)
    return len(tokens)


def fit(arrivals: Sequence[Arrival], speed: Speed) -> Fit:
    """`speed` with prefill, decode and half as they fit best. Raises SettingsError where the arrivals tell too few steps."""
    told = steps(arrivals, speed.chunk)
    if len(told) < LEAST:
        raise SettingsError(
            f"This trace tells {len(told)} steps of an engine; a fit takes {LEAST}.",
            hint="Record more streamed answers: tidegate flights --limit 500 --json. Whole answers and other formats tell no times of tokens.",
        )
    told = told[:: -(-len(told) // _MOST)]
    most = max(2, *(step.streams for step in told))
    times = _Times(1 / speed.prefill, speed.step_s(1), speed.step_s(most))
    best = _wrong(told, times.speed(speed, most))
    move = _FIRST
    while move > _LAST:
        tried = [times.moved(place, way * move) for place in range(len(times)) for way in (1, -1)]
        wrongs = [_wrong(told, one.speed(speed, most)) for one in tried]
        least = min(wrongs)
        if least < best:
            times, best = tried[wrongs.index(least)], least
        else:
            move /= 2
    found = times.speed(speed, most)
    return Fit(found, len(told), math.expm1(statistics.median(_errors(told, found))))


class _Times(NamedTuple):
    """What is sought: seconds of a prompt token, of a step of one stream and of one of the most streams that were seen. Each is told by steps of its
    own, where `decode` and `half` would have to be right together."""

    token_s: float
    one_s: float
    most_s: float

    def moved(self, place: int, by: float) -> _Times:
        token_s, one_s, most_s = (time_s * math.exp(by) if number == place else time_s for number, time_s in enumerate(self))
        # A step of more streams is not a shorter one: the time that moves takes the other along.
        return _Times(token_s, min(one_s, most_s) if place == 2 else one_s, max(one_s, most_s))

    def speed(self, plain: Speed, most: int) -> Speed:
        slower = max(self.most_s / self.one_s - 1, _NO_SLOWER)
        return replace(plain, prefill=1 / self.token_s, decode=1 / self.one_s, half=(most - 1) / slower)


def _wrong(told: list[Step], speed: Speed) -> float:
    return statistics.fmean(_errors(told, speed))


def _errors(told: list[Step], speed: Speed) -> list[float]:
    return [abs(math.log(max(step.due_s(speed), _LEAST_S) / (step.ended_s - step.began_s))) for step in told]
