"""The second look: a reranker's order for what was found, or the order as it was where the reranker fails or takes too long."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from tidegate.core.ask import Ask
from tidegate.core.errors import TidegateError
from tidegate.core.plugins import load, names
from tidegate.core.ports import EngineAnswer, Reranker
from tidegate.core.search import Found
from tidegate.retrieval.settings import RetrievalSettings

log = logging.getLogger(__name__)

PACKAGE = "tidegate.retrieval.rerankers"
#: In the place of a reranker's name: the fused order stands.
OFF = "off"
#: A reranker that failed or was slow is left alone for so long: each question would lose its share of the time.
REST_NS = 5_000_000_000


class Asks(Protocol):
    """Asks a model the bodies of calls beside a request, some at the same time. One answer each, in their order; None where none came."""

    async def __call__(self, model: str, bodies: Sequence[dict[str, Any]], ask: Ask) -> list[EngineAnswer | None]: ...


@dataclass(frozen=True, slots=True)
class RerankerParts:
    """What a reranker may use. `asks`: None where no engine can be asked, on the command line."""

    settings: RetrievalSettings
    asks: Asks | None = None


def known_rerankers() -> list[str]:
    return [OFF, *names(PACKAGE)]


def open_rerankers(wanted: Iterable[str], parts: RerankerParts) -> dict[str, Second]:
    """Those that are named, each once. Raises SettingsError for an unknown name, and for one whose settings are not there."""
    return {name: Second(load(PACKAGE, name).build(parts)) for name in sorted(set(wanted) - {OFF})}


class Judged(NamedTuple):
    """`order`: places of the passages, best first; `scores`: the reranker's, in this order, [] where it gave none, and `why` not."""

    order: list[int]
    scores: list[float]
    why: str = ""


class Second:
    """A reranker that is asked within a time, and never makes a search fail."""

    def __init__(self, reranker: Reranker) -> None:
        self.reranker = reranker
        self._rests_until_ns = 0

    async def judge(self, question: str, found: Found, seconds: float, ask: Ask | None = None) -> Judged:
        """Equal scores keep the order that they had."""
        as_found = list(range(len(found.passages)))
        if time.perf_counter_ns() < self._rests_until_ns:
            return Judged(as_found, [], "resting")
        try:
            async with asyncio.timeout(seconds):
                scores = await self.reranker.scores(question, found, ask)
            fits = len(scores) == len(as_found) and all(map(math.isfinite, scores))
        except TimeoutError:
            return Judged(as_found, [], self._rest("slow"))
        except TidegateError as error:
            return Judged(as_found, [], self._rest(error.code))
        except Exception:  # it may be anybody's plug-in, or choke on what a server says: the search goes on all the same
            log.exception("unexpected error in the reranker %s", self.reranker.name)
            return Judged(as_found, [], self._rest("internal_error"))
        if not fits:
            return Judged(as_found, [], self._rest("wrong_scores"))
        order = sorted(as_found, key=lambda at: -scores[at])
        return Judged(order, [scores[at] for at in order])

    def _rest(self, why: str) -> str:
        self._rests_until_ns = time.perf_counter_ns() + REST_NS
        return why

    async def close(self) -> None:
        await self.reranker.close()
