"""Waiting for what another thread or process does: it sets no event of ours, so it is looked at, within a bound that only a fault reaches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

BOUND_S = 30.0


async def until(condition: Callable[[], object], what: str = "it", within_s: float = BOUND_S) -> None:
    """Returns when the condition is true; fails where that does not happen."""
    end_ns = time.perf_counter_ns() + int(within_s * 1e9)
    while not condition():
        assert time.perf_counter_ns() < end_ns, f"{what} did not happen within {within_s:g} s"
        await asyncio.sleep(0.002)


def until_blocking(condition: Callable[[], object], what: str = "it", within_s: float = BOUND_S) -> None:
    """The same where no event loop runs."""
    end_ns = time.perf_counter_ns() + int(within_s * 1e9)
    while not condition():
        assert time.perf_counter_ns() < end_ns, f"{what} did not happen within {within_s:g} s"
        time.sleep(0.01)
