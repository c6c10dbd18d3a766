"""The embedder hangs: connections are accepted, and no vector comes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from tidegate.local.scene import Scene

SUMMARY = "The embedder is stopped (SIGSTOP): no question gets a vector."


@contextlib.asynccontextmanager
async def broken(scene: Scene) -> AsyncIterator[None]:
    """Stopped, not killed: a new one would be there within a second."""
    await scene.switch.freeze(scene.part("embedder"))
    yield
