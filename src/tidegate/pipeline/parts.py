"""What stages may use. app/ fills it; a stage takes what it needs in its `build`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tidegate.admission.gate import Gate
from tidegate.core.ask import Ask
from tidegate.core.ports import Engine, TokenCounter
from tidegate.core.search import Filter
from tidegate.engines.cause import Cause
from tidegate.pipeline.control import Ban
from tidegate.retrieval.search import Searched, Steps

if TYPE_CHECKING:
    from tidegate.pipeline.retry import Retries


class Engines(Protocol):
    """Finds the engine that serves a public model name."""

    def find(self, model: str | None, ask: Ask | None = None) -> tuple[Engine, str]:
        """The engine for a request, and its own name for the model. Raises NotFound that lists the known models, and EngineError where none may be
        asked."""
        ...

    def instances(self, model: str | None, ask: Ask | None = None) -> Sequence[tuple[Engine, str]]:
        """All engines that may be asked for the model, with their own names for it, the best first. Raises as `find` does."""
        ...

    def another(self, model: str | None, ask: Ask, tried: Sequence[Engine], cause: Cause, *, free: bool = False) -> tuple[Engine, str] | None:
        """One that was not tried yet and that may do better, where the last of `tried` failed by `cause`; None where there is none. `free`: only one
        with a free slot."""
        ...

    def blame(self, engine: Engine) -> None:
        """A call of this engine was given up because it took longer than its caller could wait."""
        ...


class Searcher(Protocol):
    """Finds passages. Raises StoreDown."""

    async def find(self, question: str, *, k: int, wanted: Filter, collection: str, steps: Steps, ask: Ask) -> Searched: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """The services of neighbour rooms. `search` is None where no store is configured; `ban` is what tidegate.toml's [guard] says."""

    engines: Engines
    search: Searcher | None = None
    ban: Ban = field(default_factory=Ban)
    max_resumes: int = 2
    resume_wait_s: float = 10.0
    #: The budget of retries that all share; None: one of its own for each stage.
    retries: Retries | None = None
    #: Counts tokens as the engines do; None where nobody can.
    counter: TokenCounter | None = None
    #: Where calls beside a request wait for a slot; None: nothing waits.
    gate: Gate | None = None
