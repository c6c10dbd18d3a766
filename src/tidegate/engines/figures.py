"""What /health and the page tell of an engine: its figures, asked for within a bound, and those among its Prometheus metrics."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Mapping
from typing import Any

from tidegate.core.errors import TidegateError

#: Seconds that a question for figures may take in all: /health must answer while an engine is ill.
FIGURES_S = 1.5
_NAME = re.compile(rb"[\w:]*")


async def up_or_why(label: str, asking: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """`up` and the figures, or why there are none, as `core.ports.Engine.figures` promises: it never raises, and takes FIGURES_S at most."""
    try:
        async with asyncio.timeout(FIGURES_S):
            return {"up": True, **await asking}
    except TimeoutError:
        return {"up": False, "why": f"{label} did not answer within {FIGURES_S:g} s."}
    except TidegateError as error:
        return {"up": False, "why": error.message}
    except Exception as error:  # noqa: BLE001 - the port promises that it never raises, and an engine can answer anything
        return {"up": False, "why": f"{label} answers what cannot be read: {error!r}"[:300]}


async def all_told(*asking: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """The figures of several questions together; those of a question that failed are left out."""
    figures: dict[str, Any] = {}
    for found in await asyncio.gather(*asking, return_exceptions=True):
        if isinstance(found, dict):
            figures.update(found)
    return figures


def in_metrics(exposition: bytes, counts: Mapping[bytes, str], shares: Mapping[bytes, str] | None = None) -> dict[str, float]:
    """The figures that metrics give, by our names: counts of several engine processes are added up, of shares the largest counts.

    Raises ValueError where a value is no number.
    """
    shares = shares or {}
    figures: dict[str, float] = {}
    for line in exposition.splitlines():
        metric = line[: _NAME.match(line).end()]  # type: ignore[union-attr]  # it matches everything, if only with nothing
        if name := counts.get(metric):
            figures[name] = figures.get(name, 0.0) + _value(line, metric)
        elif name := shares.get(metric):
            figures[name] = max(figures.get(name, 0.0), _value(line, metric))
    return figures


def _value(line: bytes, metric: bytes) -> float:
    """Behind the name and the labels; a time may follow it."""
    return float(line[len(metric) :].rpartition(b"}")[2].strip().partition(b" ")[0])
