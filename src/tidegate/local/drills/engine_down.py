"""The engine dies, and stays dead: connections are refused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator

from tidegate.local.process import Process
from tidegate.local.scene import Scene

SUMMARY = "The engine is killed (SIGKILL), and its successors are held before they listen."
PART = "engine"


@contextlib.asynccontextmanager
async def broken(scene: Scene) -> AsyncIterator[None]:
    """The supervisor starts a new engine at once; that one is stopped, and goes on with its start when the drill is over."""
    process = scene.part(PART)
    held = asyncio.create_task(_hold_successors(scene, process))
    try:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        yield
    finally:
        held.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await held


async def _hold_successors(scene: Scene, process: Process) -> None:
    while True:
        process = await scene.newer(PART, process)
        await scene.switch.freeze(process)
