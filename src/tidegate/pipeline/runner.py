"""Walks the stages of a request, each within its share of the time that is left."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from tidegate.core.ask import Ask
from tidegate.core.errors import DeadlineExceeded
from tidegate.core.ports import Stage


class Step(NamedTuple):
    """A stage and the seconds it may take; None: until the request's deadline, which the api enforces."""

    stage: Stage
    budget_s: float | None


async def run(ask: Ask, steps: Sequence[Step]) -> None:
    """Walk all steps in order. Raises what a stage raises, and DeadlineExceeded that names the stage whose time ran out."""
    for stage, budget_s in steps:
        if budget_s is None:  # a timer per stage costs as much as the rest of the walk
            await stage(ask)
            continue
        allowed_s = min(ask.deadline.left_s(), budget_s)
        try:
            async with asyncio.timeout(allowed_s) as scope:
                await stage(ask)
        except TimeoutError:
            if not scope.expired():  # somebody else's time-out is not ours to rename
                raise
            raise DeadlineExceeded(
                f"The stage {stage.name!r} did not finish within {allowed_s:.1f} s.",
                hint="Raise its budget in capability.toml or tidegate.toml, or server.deadline_s, or look at the flight to see where the time went.",
                stage=stage.name,
            ) from None
