"""How a scripted engine behaves where the prompt orders nothing: latency curves, slots, words, and a bounded context."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidegate.bench.script import Request
from tidegate.bench.steps import Speeds
from tidegate.core.errors import BadRequest, SettingsError

#: Tokens of context that a scripted engine claims where none are set; then it refuses no prompt.
CLAIMED_CONTEXT = 8192
_CURVE = re.compile(r"(\d+(?:\.\d+)?)(?:~(\d+(?:\.\d+)?))?")


@dataclass(frozen=True, slots=True)
class Curve:
    """A time in milliseconds: always `median_ms`, or lognormal around it, where `sigma` is the deviation of the logarithm."""

    median_ms: float = 0.0
    sigma: float = 0.0

    def draw(self, chance: random.Random) -> float:
        """One time, in ms."""
        return self.median_ms * chance.lognormvariate(0.0, self.sigma) if self.sigma else self.median_ms


def curve(said: str) -> Curve:
    """`20`: always 20 ms. `20~0.5`: lognormal with the median 20 ms and a sigma of 0.5. Raises SettingsError."""
    found = _CURVE.fullmatch(said.strip())
    if found is None:
        raise SettingsError(f"{said!r} is no time.", hint="20 is always 20 ms; 20~0.5 is lognormal with the median 20 ms and a sigma of 0.5.")
    return Curve(float(found[1]), float(found[2] or 0))


def read_words(file: Path) -> tuple[str, ...]:
    """The words of a text, each with the blank before it, to be said in turn. Raises SettingsError."""
    try:
        words = tuple(f" {word}" for word in file.read_text("utf-8").split())
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file} cannot be read: {error}.", hint="Name a text file in UTF-8.") from None
    if not words:
        raise SettingsError(f"{file} holds no words.", hint="Name a text file with words in it.")
    return words


@dataclass(slots=True)
class Behaviour:
    """What holds for every request unless its prompt orders otherwise. `slots`: answers at the same time, the others wait in order; 0: any number.
    `context`: tokens beyond which a prompt is refused; 0: none is. `speeds`: tokens come by steps that all answers share, not by the curves. The same
    seed and the same order of requests give the same times.
    """

    first: Curve = Curve()
    between: Curve = Curve()
    words: tuple[str, ...] = ()
    slots: int = 0
    context: int = 0
    seed: int = 0
    speeds: Speeds | None = None
    _asked: int = field(default=0, init=False)

    def apply(self, request: Request, body: dict[str, Any]) -> Request:
        """The request as this engine answers it: its stop strings end it, and what the prompt leaves open is filled in.

        Raises BadRequest for a prompt that is longer than the context.
        """
        tokens = len(request.prompt.split()) if request.prompt_ids is None else len(request.prompt_ids)
        if self.context and tokens > self.context:
            raise BadRequest(f"This model's maximum context length is {self.context} tokens. However, you requested {tokens} tokens.")
        self._asked += 1
        orders = request.orders
        if self.words and orders.answer is None and orders.word is None and request.prompt_ids is None:
            request.words = [self.words[number % len(self.words)] for number in range(len(request.words))]
        stops = body.get("stop")
        request.words, stopped = until_stop(request.words, [stops] if isinstance(stops, str) else stops if isinstance(stops, list) else [])
        if stopped:
            request.finish = "stop"
        if self.speeds is not None and not orders.first_ms and not orders.between_ms:
            request.in_steps = True
            return request
        chance = random.Random(f"{self.seed}/{self._asked}")  # noqa: S311 - times to try things with, no secrets
        orders.first_ms = orders.first_ms or self.first.draw(chance)
        if not orders.between_ms and self.between.median_ms:
            request.gaps = [self.between.draw(chance) for _ in request.words[1:]]
        return request


def until_stop(words: list[str], stops: list[Any]) -> tuple[list[str], bool]:
    """The tokens before the first stop string, the last perhaps cut, and whether there was one."""
    text = "".join(words)
    at = min((found for stop in stops if isinstance(stop, str) and stop and (found := text.find(stop)) >= 0), default=-1)
    if at < 0:
        return words, False
    return list(_first(words, at)), True


def _first(words: list[str], characters: int) -> Iterator[str]:
    for word in words:
        if characters <= 0:
            return
        yield word[:characters]
        characters -= len(word)
