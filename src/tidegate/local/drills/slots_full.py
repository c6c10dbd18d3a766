"""The engine is full: others have all its slots, and more of them wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx

from tidegate.local.scene import Scene

SUMMARY = "Twice as many long answers as the engine has slots run beside: every slot is taken, and a queue waits."
_MOST = 64
_PROMPT = "Tell a long story about the sea, with every detail that you know."
_BODY = {"messages": [{"role": "user", "content": _PROMPT}], "max_tokens": 1500, "stream": True}


@contextlib.asynccontextmanager
async def broken(scene: Scene) -> AsyncIterator[None]:
    """Real requests through the gateway. When they are let go their connections close, which frees the slots, also where the drill is killed."""
    full = asyncio.Event()
    count = min(2 * scene.slots, _MOST)
    told = [0]
    async with httpx.AsyncClient(base_url=scene.url, headers={"authorization": f"Bearer {scene.key}"}, timeout=None) as client:  # noqa: S113 - cancelled
        fillers = [asyncio.create_task(_fill(client, scene, told, full)) for _ in range(count)]
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(full.wait(), 30.0)
            yield
        finally:
            for filler in fillers:
                filler.cancel()
            await asyncio.gather(*fillers, return_exceptions=True)


async def _fill(client: httpx.AsyncClient, scene: Scene, told: list[int], full: asyncio.Event) -> None:
    """One answer behind the other. `told`: how many have begun."""
    while True:
        begun = False
        with contextlib.suppress(httpx.HTTPError):
            async with client.stream("POST", "/v1/chat/completions", json={**_BODY, "model": scene.model}) as answer:
                async for _ in answer.aiter_raw():
                    if answer.status_code != 200:
                        break
                    if not begun:
                        begun = True
                        told[0] += 1
                        if told[0] >= scene.slots:
                            full.set()
        if begun:
            told[0] -= 1
        else:
            await asyncio.sleep(0.1)  # refused: the queue is full, which is what we are here for
            full.set()
