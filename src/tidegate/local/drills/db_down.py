"""The database hangs: connections are accepted, and nothing answers on them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from tidegate.local.scene import Scene

SUMMARY = "The database is stopped with all its processes (SIGSTOP): it hangs, which is harder to bear than a refused connection."


@contextlib.asynccontextmanager
async def broken(scene: Scene) -> AsyncIterator[None]:
    """Stopped, not killed: a database is not to be damaged by a drill."""
    await scene.switch.freeze(scene.part("postgres"))
    yield
