"""The engine becomes slow: it computes a tenth of the time."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from tidegate.local.scene import Scene

SUMMARY = "The engine runs 30 ms and stands 270 ms, in turns: ten times as slow."
_RUN_MS, _STOP_MS = 30.0, 270.0


@contextlib.asynccontextmanager
async def broken(scene: Scene) -> AsyncIterator[None]:
    """Slow, not dead: connections are accepted, and tokens drip."""
    await scene.switch.slow(scene.part("engine"), _RUN_MS, _STOP_MS)
    yield
