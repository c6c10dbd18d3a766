"""How much work a request is, how long it will have a slot, and how long one will wait: measured by length class, and by the pace of the lane.

What a request **costs** is told in prompt tokens: those of its prompt, and ANSWER_COST for each token of its answer. By its cost a flow is
charged and has its order, and it is settled with the true tokens. How long answers are is learnt by length class: the half octave of the
prompt's tokens and that of the most that may be answered, for each sort of request (a capability, or /v1). A class without measurements begins
with those of its sort, and that with those of the lane.

How long a slot is held is cost times **pace**. An engine works on many requests together: a short prompt waits inside it for long ones to be read, so
the time of one request says as much about the others. Two measurements tell the pace of a full lane: its throughput (slots times the
time between two ends, by what ended) and the slot times of those that filled it. Where the mix of requests changes the truth lies between
them: the pace is their geometric mean, and how far each is from it is the **doubt**, a factor of at least 1. Newcomers have its benefit;
booked places are laid out with it against them.

The wait is that of list scheduling: the slot time ahead, what is left of the running included, spread over the slots; less about half a slot time,
because the first of several slots is free earlier than their mean.

Pure: no clock of its own, no I/O.
"""

from __future__ import annotations

import math

#: What a token of the answer costs, in prompt tokens: between the ratios of a busy GPU (about 14, by the time that it works) and of a small CPU.
ANSWER_COST = 20
#: What is thought before anything was measured: tokens of an answer, and the slot time of a prompt token.
ANSWER_TOKENS = 256.0
TOKEN_NS = 1_000_000.0
#: A class's mean is over about its newest this many answers, the pace over so many ends.
_NEWEST = 48
_PACE_NEWEST = 64
_KEPT = 1 - 1 / _PACE_NEWEST
#: Ends before a measurement of the pace is believed.
_ENOUGH = 8
#: Answers that the mean of the parent counts for, where a class begins.
_PRIOR = 1
#: Classes that are held; what comes beyond is told by the lane.
_MOST_CLASSES = 4096
#: What is beyond is a mistake of a clock or of a caller, not a slot time: a day.
MOST_NS = 86_400_000_000_000
_MOST_TOKENS = 1 << 40


class LengthClass:
    """Requests of one length: the mean tokens of their `answer`, over the `seen` newest."""

    __slots__ = ("answer", "parent", "seen")

    def __init__(self, parent: LengthClass | None) -> None:
        self.parent = parent
        self.answer: float = parent.answer if parent is not None else ANSWER_TOKENS
        self.seen = 0

    def learn(self, answer_tokens: float) -> None:
        """A request has ended with so many."""
        self.seen = seen = self.seen + 1
        parent = self.parent
        if parent is None:
            self.answer += (answer_tokens - self.answer) / (seen if seen < _NEWEST else _NEWEST)
            return
        self.answer += (answer_tokens - self.answer) / (_PRIOR + (seen if seen < _NEWEST else _NEWEST))
        if seen < _NEWEST or seen % 4 == 0:  # what is above needs not each
            parent.learn(answer_tokens)


class ServiceTimes:
    """What one lane has measured. `pace_ns`: slot time for a cost of 1; `doubt`: how far its two measurements are from it, as a factor."""

    def __init__(self) -> None:
        self.pace_ns = TOKEN_NS
        self.doubt = 1.0
        self._lane = LengthClass(None)
        self._sorts: dict[str, LengthClass] = {}
        self._classes: dict[tuple[str, int, int], LengthClass] = {}
        #: Slot time and cost of the newest (sums that fade), and how many: of throughput while full, of those that filled the lane, of all.
        self._full_ns = self._full_cost = self._last_ns = self._last_cost = self._all_ns = self._all_cost = 0.0
        self._fulls = self._lasts = self._ends = 0

    def learn(self, length_class: LengthClass, answer_tokens: int, cost: float, took_ns: int, full_ns: int, took_last: bool) -> None:
        """A request of this class and cost has ended. `full_ns`: slot time since the end before it, where the lane was full all the while, else 0;
        `took_last`: it had filled the lane when it began."""
        length_class.learn(answer_tokens)
        self._ends = ends = self._ends + 1
        if full_ns:
            self._fulls += 1
            self._full_ns = self._full_ns * _KEPT + full_ns
            self._full_cost = self._full_cost * _KEPT + cost
        if took_last:
            self._lasts += 1
            self._last_ns = self._last_ns * _KEPT + took_ns
            self._last_cost = self._last_cost * _KEPT + cost
        elif self._lasts < _ENOUGH:
            self._all_ns = self._all_ns * _KEPT + took_ns
            self._all_cost = self._all_cost * _KEPT + cost
        if ends < _PACE_NEWEST or ends % 4 == 0:  # it changes slowly
            self._tell_pace()

    def _tell_pace(self) -> None:
        if self._lasts < _ENOUGH:
            if self._all_cost:  # it was hardly ever full
                self.pace_ns = self._all_ns / self._all_cost
            return
        last = self._last_ns / self._last_cost
        full = self._full_ns / self._full_cost if self._fulls >= _ENOUGH else last
        self.pace_ns = math.sqrt(last * full)
        self.doubt = math.sqrt(last / full if last > full else full / last)

    def length_class(self, sort: str, prompt_tokens: int, answer_tokens: int) -> LengthClass:
        """The class of a request; `answer_tokens`: the most that may be answered, 0 where that is not told."""
        key = (
            sort, _HALF_OCTAVES[prompt_tokens] if 0 <= prompt_tokens < 4096 else half_octave(prompt_tokens),
            _HALF_OCTAVES[answer_tokens] if 0 <= answer_tokens < 4096 else half_octave(answer_tokens),
        )  # fmt: skip
        found = self._classes.get(key)
        return found if found is not None else self._open(key)

    def _open(self, key: tuple[str, int, int]) -> LengthClass:
        if len(self._classes) >= _MOST_CLASSES:
            return self._lane
        parent = self._sorts.get(key[0])
        if parent is None:
            parent = self._sorts[key[0]] = LengthClass(self._lane)
        made = LengthClass(parent)
        if parent.seen:
            self._classes[key] = made  # until its sort has been measured, a class has nothing to begin with
        return made


def half_octave(tokens: int) -> int:
    """The number of the half octave: 64 to 95 is one, 96 to 127 the next, 128 to 191 the one after. 0 and 1 (and less) are the first."""
    if tokens < 2:
        return 0
    bits = tokens.bit_length()
    return bits << 1 | (tokens >> (bits - 2)) & 1


_HALF_OCTAVES = [half_octave(tokens) for tokens in range(4096)]


def cost_of(prompt_tokens: int, answer_tokens: float) -> float:
    """What so many tokens cost, at least 1. Below 0 counts as 0, and absurd numbers as very large ones."""
    if not 0 <= prompt_tokens <= _MOST_TOKENS:
        prompt_tokens = 0 if prompt_tokens < 0 else _MOST_TOKENS
    if not 0 <= answer_tokens <= _MOST_TOKENS:
        answer_tokens = 0 if answer_tokens < 0 else _MOST_TOKENS
    return prompt_tokens + ANSWER_COST * answer_tokens or 1.0


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
    """The forecast wait for a slot. `left`: slot time of the `running` that is left; `mean_ns`: their mean predicted slot time; `ahead`: slot time of
    those that wait ahead. All in nanoseconds."""
    if running < slots:
        return 0
    wait = (left + ahead) / slots - mean_ns * (slots - 1) / (2 * slots)
    least = left / (slots * (slots + 1))  # the first of several
    return int(wait if wait > least else least)
