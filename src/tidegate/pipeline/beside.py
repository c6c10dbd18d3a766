"""Asks a model for many small answers beside a request: what a reranker needs that has the engine judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidegate.admission.gate import Gate
from tidegate.core.ask import DEFAULT, Ask, EngineCall
from tidegate.core.errors import TidegateError
from tidegate.core.ports import EngineAnswer
from tidegate.pipeline.parts import Engines
from tidegate.pipeline.spread import Spread

#: Calls of one request at the same time.
PARALLEL = 4
#: Characters of a token, about, to reserve a place by.
_CHARS_PER_TOKEN = 3


class Beside:
    """Each call waits for a place at the gate as any request does, but for one at a time that has the request's own. Tokens are booked on the
    request (`spend_aside`)."""

    def __init__(self, engines: Engines, gate: Gate | None = None) -> None:
        self._engines = engines
        self._gate = gate

    async def __call__(self, model: str, bodies: Sequence[dict[str, Any]], ask: Ask) -> list[EngineAnswer | None]:
        """One answer each, in their order; None where an engine gave none. Raises the last error where none gave any. Cancelling it cancels all."""
        answers: list[EngineAnswer | None] = [None] * len(bodies)
        failed: list[TidegateError] = []

        async def one(at: int) -> None:
            aside = ask.beside("/beside", EngineCall("chat", model, bodies[at]))
            try:
                engine, own = self._engines.find(None if model == DEFAULT else model, aside)
                answer = answers[at] = await engine.whole(EngineCall("chat", own, bodies[at]), aside.flight)
                ask.spend_aside(answer.usage)
            except TidegateError as error:
                failed.append(error)

        def tokens(at: int) -> int:
            return sum(len(message["content"]) for message in bodies[at]["messages"]) // _CHARS_PER_TOKEN

        most = max((body["max_tokens"] for body in bodies), default=0)
        await Spread(range(len(bodies)), one, tokens).run(PARALLEL, ask, self._gate, model, most)
        if failed and all(answer is None for answer in answers):
            raise failed[-1]
        return answers
