"""A retry is a new plan, made from the recorded cause: another instance, one that fits, or none; and there are never more of them than a share of the
requests, so that a fleet in trouble is not asked twice as much as one that is well.
"""

from __future__ import annotations

from contextlib import suppress

from tidegate.core.ask import Ask, EngineCall
from tidegate.core.errors import TidegateError
from tidegate.core.memory import Own
from tidegate.core.ports import Engine
from tidegate.engines.cause import cause_of
from tidegate.pipeline.parts import Engines
from tidegate.pipeline.settings import GenerationSettings

#: Words of the memory in which the budgets of new plans and of hedges are kept.
WORDS = 2
#: One of a kind: a budget is counted in whole parts of it, which workers can add up.
_ONE = 1_000_000


class Budget:
    """So many of a kind as `ratio` times the requests, and `burst` more at a time: a token bucket that requests fill (Finagle's RetryBudget).

    In any stretch of time, at most `burst` + `ratio` * requests are taken, by all workers together: what is missing from the full bucket stands in a
    word that they share, in parts of `_ONE`. What a worker's requests fill is put in one by one where it came to a whole one, so that a request costs
    no lock.
    """

    __slots__ = ("_at", "_due", "_filled", "_memory", "_most", "_words")

    def __init__(self, ratio: float, burst: float, memory: Own | None = None, at: int = 0) -> None:
        """`at`: the word, 0 at first."""
        self._filled, self._most = round(ratio * _ONE), round(burst * _ONE)
        self._memory = memory if memory is not None else Own(1)
        self._words, self._at = self._memory.words, at
        self._due = 0

    def request(self) -> None:
        """A request came."""
        self._due = due = self._due + self._filled
        if due >= _ONE:
            if self._words[self._at]:
                with suppress(OSError), self._memory:
                    self._words[self._at], self._due = max(0, self._words[self._at] - due), 0
            else:
                self._due = 0

    @property
    def has_one(self) -> bool:
        """Whether one is left."""
        return self._missing() + _ONE <= self._most

    def take(self) -> bool:
        """Take one; False where none is left."""
        with suppress(OSError), self._memory:
            missing = self._missing() + _ONE
            if missing <= self._most:
                self._words[self._at], self._due = missing, 0
                return True
        return False

    def _missing(self) -> int:
        return max(0, self._words[self._at] - self._due)


class Retries:
    """How often, and by what budget, calls are made anew or twice: one for all workers."""

    def __init__(self, settings: GenerationSettings | None = None, memory: Own | None = None) -> None:
        """`memory`: WORDS of it, where there are other workers."""
        settings = settings if settings is not None else GenerationSettings.model_validate({})
        self.most = settings.max_retries
        memory = memory if memory is not None else Own(WORDS)
        self.budget = Budget(settings.retry_ratio, settings.retry_burst if settings.max_retries else 0.0, memory, 0)
        self.try_share = settings.try_share
        self.hedge_after_s = settings.hedge_after_s
        # at least one at a time: else a small ratio would never come to a whole one
        self.hedges = Budget(settings.hedge_ratio, 1.0 if settings.hedge_ratio else 0.0, memory, 1)

    def request(self) -> None:
        """A request came."""
        self.budget.request()
        if self.hedge_after_s:
            self.hedges.request()


class Plan:
    """The plans of one request, after its first one failed."""

    __slots__ = ("_ask", "_engines", "_made", "_model", "_retries", "_tried")

    def __init__(self, engines: Engines, retries: Retries, model: str | None, ask: Ask) -> None:
        """`model`: the public name, None for the default."""
        self._engines = engines
        self._retries = retries
        self._model = model
        self._ask = ask
        self._tried: list[Engine] = []
        self._made = 0

    def is_there(self, engine: Engine) -> bool:
        """Whether somebody else could be asked, were `engine` given up now because it says nothing."""
        return (
            self._made < self._retries.most and self._retries.budget.has_one
            and self._engines.another(self._model, self._ask, [*self._tried, engine], "stalled") is not None
        )  # fmt: skip

    def next(self, engine: Engine, call: EngineCall, error: TidegateError) -> tuple[Engine, EngineCall]:
        """`engine` failed with `error` before anything was told: who is asked now, and what. Raises `error` where there is no other plan.

        An instance is asked once. One that could not be reached was sent nothing, so passing on to the next is no retry and costs no budget.
        """
        cause, flight = cause_of(error), self._ask.flight
        if cause == "none" or self._ask.deadline.passed():
            raise error
        self._tried.append(engine)
        if cause != "down" and self._made >= self._retries.most:
            raise error
        found = self._engines.another(self._model, self._ask, self._tried, cause)
        if found is None:
            raise error
        if cause != "down":
            if not self._retries.budget.take():
                flight.decide("retry_refused", cause=cause, engine=engine.name, why="budget")
                raise error
            self._made += 1
        other, own_name = found
        flight.decide("replanned", cause=cause, engine=engine.name, next=other.name)
        flight.engine = other.name
        return other, call if own_name == call.model else EngineCall(call.kind, own_name, call.body)
