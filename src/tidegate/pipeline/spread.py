"""Several calls beside one request: one at a time in the slot that the request has already, the others in slots of their own.

Those others wait at the gate as any request does, with the caller's tenant and class, so that nobody's turn is taken. Where there is no room for
them the first does all, and no request waits for a slot of which it holds the last itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Generic, TypeVar

from tidegate.admission.gate import Gate, Place
from tidegate.core.ask import Ask
from tidegate.core.errors import Busy, DeadlineExceeded

T = TypeVar("T")


class Spread(Generic[T]):
    """Things to be done for `ask` with calls of one model. `run` once."""

    def __init__(self, things: Iterable[T], do: Callable[[T], Awaitable[None]], tokens: Callable[[T], int]) -> None:
        """`do` makes the call for one thing; `tokens` tells about how many its prompt has."""
        self._waiting = deque(things)
        self._do = do
        self._tokens = tokens
        self._queued: set[asyncio.Task[None]] = set()

    async def run(self, parallel: int, ask: Ask, gate: Gate | None, model: str, answer_tokens: int) -> None:
        """Returns when all is done, at most `parallel` things at the same time. `model`: whose slots are waited for. What `do` raises first is raised
        and ends the rest, as a cancel does."""

        def enter(tokens: int) -> Place | None:
            return None if gate is None else gate.enter(
                model, ask.caller, prompt_tokens=tokens, answer_tokens=answer_tokens, capability=ask.capability, deadline_ns=ask.deadline.at_ns
            )

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._go_on())
                for _ in range(min(parallel, len(self._waiting)) - 1):
                    group.create_task(self._beside(enter))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _go_on(self) -> None:
        while self._waiting:
            await self._next()

    async def _next(self) -> None:
        thing = self._waiting.popleft()
        if not self._waiting:
            for task in self._queued:  # nothing is left for those that wait for a slot
                task.cancel()
        await self._do(thing)

    async def _beside(self, enter: Callable[[int], Place | None]) -> None:
        while self._waiting:
            tokens = self._tokens(self._waiting[0])
            try:
                place = enter(tokens)
            except (Busy, DeadlineExceeded):
                return
            try:
                if place is not None and place.waits:
                    await self._turn(place)
                if place is not None and place.error is not None:
                    return
                if self._waiting:
                    await self._next()
            finally:
                if place is not None and place.counts:
                    place.leave(tokens)

    async def _turn(self, place: Place) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place.on_turn = partial(_wake, woken)
        task = asyncio.current_task()
        assert task is not None
        self._queued.add(task)
        try:
            await woken
        finally:
            self._queued.discard(task)


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
