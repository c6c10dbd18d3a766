"""The figures at the top of the page: a fold over /health and the newest flights. Every name is optional: what is absent is not shown.

Names read: `status`, `why`, `requests_in_flight`, `engines.{name}.{up,admitted}`, `embedder.up`, `database.{up,round_trip_ms}`,
`limits.{shared,means}`, `budgets.{profile,first_token_s,retrieve_s,forecast_s}`, `spool.{records_waiting,bytes,max_bytes,near}`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tidegate.api.page import words
from tidegate.api.page.waterfall import quantile
from tidegate.core.chunk import CLEAN_ENDS
from tidegate.core.errors import TidegateError
from tidegate.core.flight import FlightRecord

#: How many of the newest flights the times are taken from.
RECENT = 200
#: The budgets, as the page calls them.
_TIMES = (("first token", "first_token_s"), ("search", "retrieve_s"), ("wait", "forecast_s"))
_FRESH_S = 1.0
_PATIENCE_S = 1.5


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure: `tone` is good, warn, bad or empty (no judgement)."""

    name: str
    value: str
    note: str = ""
    tone: str = ""


class HealthReader:
    """Asks for health at most once a second, however many pages look, and never waits long for it."""

    def __init__(self, ask: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._ask = ask
        self._known: dict[str, Any] = {}
        self._until_ns = 0
        self._one = asyncio.Lock()

    async def read(self) -> dict[str, Any]:
        """The body of /health; `{"status": "unknown"}` where it did not come in time."""
        async with self._one:
            if time.perf_counter_ns() >= self._until_ns:
                try:
                    async with asyncio.timeout(_PATIENCE_S):
                        self._known = await self._ask()
                except (TimeoutError, TidegateError, OSError):
                    self._known = {"status": "unknown"}
                self._until_ns = time.perf_counter_ns() + int(_FRESH_S * 1e9)
            return self._known


def reasons(health: dict[str, Any]) -> list[str]:
    """Why the status is not ok, a sentence each."""
    return [str(why) for why in health.get("why") or ()]


def figures(health: dict[str, Any], recent: Sequence[FlightRecord]) -> list[Figure]:
    """What the head of the page shows, in order."""
    return [*_status(health), *_times(recent), *_parts(health), *_budgets(health), *_spool(health)]


def _status(health: dict[str, Any]) -> list[Figure]:
    status = str(health.get("status", "unknown"))
    tone = {"ok": "good", "degraded": "warn", "unknown": "warn"}.get(status, "bad")
    found = [Figure("Status", status, tone=tone)]
    if "requests_in_flight" in health:
        found.append(Figure("In flight", f"{health['requests_in_flight']:,}"))
    return found


def _times(recent: Sequence[FlightRecord]) -> list[Figure]:
    """Of successful flights alone: a refusal is quick, and would flatter."""
    clean = [flight for flight in recent if flight.end in CLEAN_ENDS]
    whole = [flight.whole_ns for flight in clean]
    first = [flight.first_token_ns for flight in clean if flight.first_token_ns]
    return [_pair("First token", first), _pair("Whole answer", whole)]


def _pair(name: str, values_ns: Sequence[int]) -> Figure:
    note = f"P95 {words.span(quantile(values_ns, 0.95))}" if values_ns else "no answers yet"
    return Figure(name, words.span(quantile(values_ns, 0.5)), note)


def _parts(health: dict[str, Any]) -> list[Figure]:
    found = []
    engines = health.get("engines") or {}
    if engines:
        down = [name for name, figures in engines.items() if not figures.get("up")]
        refused = [name for name, figures in engines.items() if figures.get("admitted") is False and name not in down]
        names = ", ".join(engines) if len(engines) < 3 else f"{len(engines)} engines"
        value = "down" if down else "not admitted" if refused else "up"
        found.append(Figure("Engine", value, ", ".join([*down, *refused]) or names, "bad" if down or refused else "good"))
    for key, name in (("embedder", "Embedder"), ("database", "Database"), ("qdrant", "Qdrant")):
        if part := health.get(key):
            up, took_ms = bool(part.get("up")), part.get("round_trip_ms")
            note = f"answers in {words.ms(took_ms * 1e6)} ms" if up and took_ms else ""
            found.append(Figure(name, "up" if up else "down", note, "good" if up else "bad"))
    return [*found, *_limits(health), *_recall(health)]


def _limits(health: dict[str, Any]) -> list[Figure]:
    """Only where several machines share them."""
    shared = (health.get("limits") or {}).get("shared")
    if shared is None:
        return []
    return [Figure("Limits", "shared", "by all machines", "good") if shared else Figure("Limits", "alone", str(health["limits"]["means"]), "warn")]


def _recall(health: dict[str, Any]) -> list[Figure]:
    """Of searches by the graph of neighbours that were done again by comparing everything."""
    told = health.get("recall") or {}
    found, passages = (sum(one[name] for one in told.values()) for name in ("found", "passages"))
    if not passages:
        return []
    return [Figure("Recall", f"{found / passages:.1%}", f"of {passages:,} sampled passages")]


def _budgets(health: dict[str, Any]) -> list[Figure]:
    """The profile in force, and its values."""
    budgets = health.get("budgets")
    if not budgets:
        return []
    times = ", ".join(f"{name} {budgets[key]:g} s" for name, key in _TIMES if key in budgets)
    return [Figure("Budgets", str(budgets.get("profile", "–")), times)]


def _spool(health: dict[str, Any]) -> list[Figure]:
    spool = health.get("spool")
    if not spool:
        return []
    waiting, used, bound = spool.get("records_waiting"), spool.get("bytes"), spool.get("max_bytes")
    value = "–" if waiting is None else f"{waiting:,}" if waiting else "empty"
    notes = ["waiting"] if waiting else []
    if used and bound:
        notes.append(f"{words.percent(used / bound)} full")
    return [Figure("Spool", value, ", ".join(notes), "warn" if spool.get("near") else "")]
