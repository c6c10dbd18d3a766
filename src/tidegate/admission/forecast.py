"""How long a request will have a slot, and how long one will wait for it: by its cost, and by the pace of the lane.

What a request **costs** is told in prompt tokens: those of its prompt, and for each token of its answer what that costs in prompt tokens (see
speeds.py). By its cost a flow is charged and has its order, and it is settled with the true tokens. How long answers are is learnt (see answers.py)
for each sort of request: a capability, or /v1, and the half octave of the most that may be answered. What has no measurements begins with those
of its sort, and that with those of the lane.

How long a slot is held is cost times **pace**. An engine works on many requests together: a short prompt waits inside it for long ones to be read, so
the time of one request says as much about the others. Three measurements tell the pace of a full lane: its throughput (slots times the time between
two ends, by what ended), the shares that those had of it behind whom nobody could begin, and the speeds of its engines. A lane that was hardly ever
full has the times of all its requests in place of the first two, and the speeds say how much slower it will be. Where the mix of requests
changes they differ, and the truth lies between them: the pace is their geometric mean, and how far the slowest is from it is the **doubt**, a factor
of at least 1. Newcomers have its benefit; booked places are laid out with it against them.

The wait is that of list scheduling: the slot time ahead, what is left of the running included, spread over the slots; less about half a slot time,
because the first of several slots is free earlier than their mean.

Pure: no clock of its own, no I/O.
"""

from __future__ import annotations

import math

from tidegate.admission.answers import Answers, half_octave

#: What is thought before anything was measured: the slot time of a prompt token.
TOKEN_NS = 1_000_000.0
#: The pace is over about so many ends.
_PACE_NEWEST = 64
_KEPT = 1 - 1 / _PACE_NEWEST
#: Ends before a measurement of the pace is believed.
_ENOUGH = 8
#: Sorts of answers that are held; what comes beyond is told by the lane.
_MOST_SORTS = 1024
#: What is beyond is a mistake of a clock or of a caller, not a slot time: a day.
MOST_NS = 86_400_000_000_000
_MOST_TOKENS = 1 << 40


class Paced:
    """Slot time, and the tokens that were done in it: sums that fade. `count`: how many requests are in them."""

    __slots__ = ("_answers", "_prompts", "_time_ns", "count")

    def __init__(self) -> None:
        self._time_ns = self._prompts = self._answers = 0.0
        self.count = 0

    def add(self, time_ns: float, prompt_tokens: int, answer_tokens: int) -> None:
        self.count += 1
        self._time_ns = self._time_ns * _KEPT + time_ns
        self._prompts = self._prompts * _KEPT + prompt_tokens
        self._answers = self._answers * _KEPT + answer_tokens

    def pace_ns(self, answer_cost: float) -> float:
        """Slot time for a cost of 1."""
        return self._time_ns / (self._prompts + answer_cost * self._answers or 1.0)


class ServiceTimes:
    """What one lane has measured. `pace_ns`: slot time for a cost of 1; `doubt`: how far its two measurements are from it, as a factor."""

    def __init__(self) -> None:
        self.pace_ns = TOKEN_NS
        self.doubt = 1.0
        self._lane = Answers(None)
        self._sorts: dict[str, Answers] = {}
        self._answers: dict[tuple[str, int], Answers] = {}
        #: Of the newest: of throughput while requests waited, of those behind whom nobody could begin, of all.
        self._full, self._last, self._all = Paced(), Paced(), Paced()
        self._ends = 0

    def learn(
        self, prompt_tokens: int, answer_tokens: int, answer_cost: float, engine_ns: float, took_ns: int, share_ns: int, full_ns: int, took_last: bool
    ) -> None:
        """A request of so many tokens has ended. `answer_cost` and `engine_ns`: what a token of the answer costs, and the slot time of a prompt token
        by the engines' speeds, 0 where that is not known; `share_ns`: its share of the engines, as slot time of a full lane; `full_ns`: slot time
        since the end before it, where requests waited all the while, else 0; `took_last`: nobody could begin behind it."""
        self._ends = ends = self._ends + 1
        if full_ns:
            self._full.add(full_ns, prompt_tokens, answer_tokens)
        if took_last:
            self._last.add(share_ns, prompt_tokens, answer_tokens)
        elif self._last.count < _ENOUGH:
            self._all.add(took_ns, prompt_tokens, answer_tokens)
        if ends < _PACE_NEWEST or ends % 4 == 0:  # it changes slowly
            self._tell_pace(answer_cost, engine_ns)

    def _tell_pace(self, answer_cost: float, engine_ns: float) -> None:
        if self._last.count >= _ENOUGH:
            measured = [self._last.pace_ns(answer_cost)]
            if self._full.count >= _ENOUGH:
                measured.append(self._full.pace_ns(answer_cost))
        elif self._all.count:  # it was hardly ever full: fewer run together than will, so this one is too fast
            measured = [self._all.pace_ns(answer_cost)]
        else:
            return
        if engine_ns:
            measured.append(engine_ns)
        self.pace_ns = pace_ns = math.prod(measured) ** (1 / len(measured))
        self.doubt = max(max(measured) / pace_ns, 1.0)

    def answers(self, sort: str, most_tokens: int) -> Answers:
        """How long the answers of this sort are; `most_tokens`: the most that may be answered, 0 where that is not told."""
        key = (sort, half_octave(most_tokens) if most_tokens > 0 else -1)
        found = self._answers.get(key)
        return found if found is not None else self._open(key)

    def _open(self, key: tuple[str, int]) -> Answers:
        if len(self._answers) >= _MOST_SORTS:
            return self._lane
        parent = self._sorts.get(key[0])
        if parent is None:
            parent = self._sorts[key[0]] = Answers(self._lane)
        made = self._answers[key] = Answers(parent)
        return made


def cost_of(prompt_tokens: int, answer_tokens: float, answer_cost: float) -> float:
    """What so many tokens cost, at least 1. Below 0 counts as 0, and absurd numbers as very large ones."""
    if not 0 <= prompt_tokens <= _MOST_TOKENS:
        prompt_tokens = 0 if prompt_tokens < 0 else _MOST_TOKENS
    if not 0 <= answer_tokens <= _MOST_TOKENS:
        answer_tokens = 0 if answer_tokens < 0 else _MOST_TOKENS
    return prompt_tokens + answer_cost * answer_tokens or 1.0


def bounded_ns(time_ns: float) -> int:
    """A slot time within a microsecond and a day."""
    return 1000 if time_ns < 1000 else int(time_ns) if time_ns < MOST_NS else MOST_NS


def left_ns(predicted_ns: int, age_ns: int) -> int:
    """What is left of the slot times of those that run: the rest of what was predicted for them, and half of it where they are old (of slot times
    without spread half is left on average, of exponential ones all: a mean that has been outlived says little)."""
    rest = predicted_ns - age_ns
    half = predicted_ns >> 1
    return rest if rest > half else half


def wait_ns(slots: int, running: int, mean_ns: float, left: float, ahead: float) -> int:
    """The forecast wait for a slot where nobody can begin now. `left`: slot time of the `running` that is left; `mean_ns`: their mean predicted slot
    time; `ahead`: slot time of those that wait ahead. All in nanoseconds."""
    first, least = first_ns(slots, running, mean_ns, left)
    wait = first + ahead / slots
    return int(wait if wait > least else least)


def first_ns(slots: int, running: int, mean_ns: float, left: float) -> tuple[float, float]:
    """The wait behind nobody, but for what waits ahead spread over the slots, and the least that any is."""
    return left / slots - mean_ns * (running - 1) / (2 * slots), left / (slots * (running + 1))  # the first of several
