"""Hedging: where the first token does not come in time, another instance is asked the same, and whoever speaks first is heard; the other is let go.

As in J. Dean and L. A. Barroso, The Tail at Scale (CACM 56, 2013). Off by default, bounded by a budget, and never once a token was told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from tidegate.core.ask import EngineCall
from tidegate.core.ports import Engine

T = TypeVar("T")


class Second(NamedTuple):
    """Who is asked the same, and what; `over` is to be called once one of the two is over, and gives back the slot that the second one took."""

    engine: Engine
    call: EngineCall
    over: Callable[[], None]


class Lost(Exception):
    """Another was first."""


async def first_of(
    one: Coroutine[Any, Any, T], other: Callable[[], tuple[Coroutine[Any, Any, T], Callable[[], None]] | None], after_s: float,
    won: Callable[[], bool] = lambda: False,
) -> T:
    """The result of `one`, or, where it neither ended nor `won` within `after_s`, of whichever of the two ends well first; the error of the first
    where both fail. Both are over when this returns, also where it is cancelled. `other` gives the second one, and what is to be called once one
    of the two is over.
    """
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(one)]
    try:
        await asyncio.wait(tasks, timeout=after_s)
        if not tasks[0].done() and not won():
            second = other()
            if second is not None:
                tasks.append(loop.create_task(second[0]))
                for task in tasks:
                    task.add_done_callback(lambda _, over=second[1]: over())  # type: ignore[misc]
        pending = set(tasks)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.cancelled() and task.exception() is None:
                    return task.result()
                if not task.cancelled() and won() and not isinstance(task.exception(), Lost):
                    return task.result()  # who was heard decides, also by failing
        return next((task for task in tasks if not task.cancelled() and not isinstance(task.exception(), Lost)), tasks[0]).result()
    finally:
        await _let_go(tasks)


async def _let_go(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


#: Takes a batch of chunks; see `core.ports.EngineStream.relay`.
Take = Callable[[list[Any]], Awaitable[None] | None]


class Race:
    """Who of several streams spoke first."""

    __slots__ = ("winner",)

    def __init__(self) -> None:
        self.winner: object = None

    def won(self) -> bool:
        """Whether anybody spoke."""
        return self.winner is not None

    def runner(self, who: object, take: Take, wins: Callable[[], None]) -> Take:
        """What takes the batches of `who`: `wins` is called with its first one, if nobody was before; else the batch is dropped and Lost raised."""

        def heard(batch: list[Any]) -> Awaitable[None] | None:
            if self.winner is not who:
                if self.winner is not None:
                    raise Lost
                self.winner = who
                wins()
            return take(batch)

        return heard
