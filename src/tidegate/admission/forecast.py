"""How long a request will take, and how long one will wait: service times measured by length class, and the wait that follows from them.

A length class is the half octave of the prompt's tokens and that of the most tokens that may be answered, for each sort of request (a capability,
or /v1). A class learns how its requests' true times compare with a plain guess by tokens; a class without measurements has the factor of
its sort, and that of the lane. So what is known of short prompts says something about long ones before the first long one came, and
what a class takes that is not in its tokens (answers that are much shorter than they might be) is in its factor.

The wait for the next slot of several is that of list scheduling: the work ahead, what is left of the running included, spread over the slots; less
about half a service time, because the first of several slots is free earlier than their mean.

Pure: no clock of its own, no I/O.
"""

from __future__ import annotations

#: The plain guess: nanoseconds of a slot for a token of the prompt and for one of the answer, and the tokens of an answer whose bound is not
#: told. Only their ratio matters after the first requests.
PROMPT_TOKEN_NS = 1_000_000
ANSWER_TOKEN_NS = 20_000_000
ANSWER_TOKENS = 256
#: A class's factor is the mean of its newest this many requests, about.
_NEWEST = 48
#: Requests that the factor of the parent counts for, where a class begins.
_PRIOR = 1
#: Classes that are held; what comes beyond is told by the lane's factor.
_MOST_CLASSES = 4096
#: What is beyond is a mistake of a clock or of a caller, not a service time: a day.
_MOST_NS = 86_400_000_000_000
_MOST_TOKENS = 1 << 40


class LengthClass:
    """How requests of one length compare with the plain guess: `factor`, a mean over the `seen` newest."""

    __slots__ = ("factor", "parent", "seen")

    def __init__(self, parent: LengthClass | None) -> None:
        self.parent = parent
        self.factor: float = parent.factor if parent is not None else 1.0
        self.seen = 0

    def learn(self, factor: float) -> None:
        """A request took `factor` times the plain guess."""
        seen = self.seen
        if seen < _NEWEST:
            self.seen = seen = seen + 1
        parent = self.parent
        if parent is None:
            self.factor += (factor - self.factor) / seen
        else:
            self.factor += (factor - self.factor) / (seen + _PRIOR)
            parent.learn(factor)


class ServiceTimes:
    """Length classes of one lane, and what they predict."""

    def __init__(self) -> None:
        self.lane = LengthClass(None)
        self._sorts: dict[str, LengthClass] = {}
        self._classes: dict[tuple[str, int, int], LengthClass] = {}

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
            return self.lane
        parent = self._sorts.get(key[0])
        if parent is None:
            parent = self._sorts[key[0]] = LengthClass(self.lane)
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


def guess_ns(prompt_tokens: int, answer_tokens: int) -> int:
    """The plain guess for what a request takes. Below 0 counts as 0, and absurd numbers as very large ones."""
    if not 0 <= prompt_tokens <= _MOST_TOKENS:
        prompt_tokens = 0 if prompt_tokens < 0 else _MOST_TOKENS
    if not 0 < answer_tokens <= _MOST_TOKENS:
        answer_tokens = ANSWER_TOKENS if answer_tokens <= 0 else _MOST_TOKENS
    return prompt_tokens * PROMPT_TOKEN_NS + answer_tokens * ANSWER_TOKEN_NS


def bounded_ns(work_ns: float) -> int:
    """A prediction within a microsecond and a day."""
    return 1000 if work_ns < 1000 else int(work_ns) if work_ns < _MOST_NS else _MOST_NS


def left_ns(work_ns: int, elapsed_ns: int) -> int:
    """What is left of a request that runs: the rest of what was predicted, and a quarter of its age where it has outlived that (the mean rest of
    heavy-tailed times grows with age)."""
    rest = work_ns - elapsed_ns
    age = elapsed_ns >> 2
    return rest if rest > age else age


def wait_ns(slots: int, running: int, mean_ns: float, left: float, ahead: float) -> int:
    """The forecast wait for a slot. `left`: work of the `running` that is left; `mean_ns`: their mean predicted work; `ahead`: work that waits
    ahead. All in nanoseconds of a slot."""
    if running < slots:
        return 0
    wait = (left + ahead) / slots - mean_ns * (slots - 1) / (2 * slots)
    least = left / (slots * (slots + 1))  # the first of several
    return int(wait if wait > least else least)
