"""What stages may use. app.py fills it; a stage takes what it needs in its `build`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from tidegate.core.ask import Passage
from tidegate.core.ports import Engine
from tidegate.pipeline.control import Ban


class Engines(Protocol):
    """Finds the engine that serves a public model name."""

    def find(self, model: str | None) -> tuple[Engine, str]:
        """The engine and its own name for the model. Raises NotFound that lists the known models, EngineNotAdmitted."""
        ...

    def instances(self, model: str | None) -> list[tuple[Engine, str]]:
        """All engines that may be asked for the model, with their own names for it, the best first. Raises as `find` does."""
        ...


class Searcher(Protocol):
    """Finds passages. Raises StoreDown."""

    async def find(self, question: str, *, k: int, tags: dict[str, str], collection: str) -> list[Passage]: ...

    async def index_version(self, collection: str) -> str: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """The services of neighbour rooms. `search` is None where no store is configured; `ban` is what tidegate.toml's [guard] says."""

    engines: Engines
    search: Searcher | None = None
    ban: Ban = field(default_factory=Ban)
    max_resumes: int = 2
    resume_wait_s: float = 10.0
