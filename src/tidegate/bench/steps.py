"""An engine's time for the scripted engine: it works in steps that all its answers share, as engines with continuous batching do.

A step gives every answer that has begun one token, and beside that it reads up to `chunk` tokens of prompts, the oldest first. It takes
(1 + (b - 1) / half) / decode seconds for b answers, and 1 / prefill more for each token of a prompt. What comes during a step is part of the next.
Those are the keys and the times of the engine model of `tidegate simulate`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tidegate.core.errors import SettingsError
from tidegate.core.plugins import nearest

#: A speed beyond it is a mistake.
MOST = 1e9


@dataclass(frozen=True, slots=True)
class Speeds:
    """`prefill`: prompt tokens a second; `decode`: tokens a second of one answer alone; with `half` more answers each has half of it."""

    prefill: float = 25_000.0
    decode: float = 140.0
    half: float = 60.0
    chunk: int = 2048


def parse(said: str) -> Speeds:
    """From `prefill=2000,decode=60,half=8,chunk=256`; what is not said is as usual. Raises SettingsError."""
    found: dict[str, Any] = {}
    for pair in filter(None, (one.strip() for one in said.split(","))):
        key, _, text = (part.strip() for part in pair.partition("="))
        if key not in Speeds.__dataclass_fields__:
            raise SettingsError(f"--speeds does not know {key!r}.", hint=nearest(key, Speeds.__dataclass_fields__))
        if key in found:
            raise SettingsError(f"--speeds says {key} twice in {said!r}.", hint="Say it once.")
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        least = 1 if key == "chunk" else 0.01
        if not least <= number <= MOST or (key == "chunk" and number != int(number)):
            whole = "a whole number" if key == "chunk" else "a number"
            raise SettingsError(f"--speeds says {key}={text[:40]}.", hint=f"{key} is {whole} from {least:g} to {MOST:g}.")
        found[key] = int(number) if key == "chunk" else number
    return Speeds(**found)


class Clock(Protocol):
    """What is needed of an event loop."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], Any]) -> Any: ...


class Turn:
    """An answer in the engine: prompt tokens that are `left` to read, and what is called with each of its tokens."""

    __slots__ = ("left", "on_token")

    def __init__(self, left: int, on_token: Callable[[], None]) -> None:
        self.left = left
        self.on_token = on_token


class Steps:
    """The steps of one engine; they go on while anything is there to do."""

    def __init__(self, speeds: Speeds, clock: Clock) -> None:
        self._speeds = speeds
        self._clock = clock
        self._reading: deque[Turn] = deque()
        self._answers: list[Turn] = []
        self._at_work = False
        self._due_s = 0.0
        #: What the step at work gives a token, and what it reads.
        self._given: list[Turn] = []
        self._read: list[tuple[Turn, int]] = []

    def enter(self, prompt_tokens: int, on_token: Callable[[], None]) -> Turn:
        """A prompt to read; `on_token` is called when its answer has its first token and with each one after that, until `leave`."""
        turn = Turn(prompt_tokens, on_token)
        self._reading.append(turn)
        if not self._at_work:
            self._due_s = self._clock.time()
            self._begin()
        return turn

    def leave(self, turn: Turn) -> None:
        """The answer has ended, or nobody wants it any more."""
        if turn in self._answers:
            self._answers.remove(turn)
        elif turn in self._reading:
            self._reading.remove(turn)

    def _begin(self) -> None:
        self._at_work = bool(self._answers or self._reading)
        if not self._at_work:
            return
        speeds, room = self._speeds, self._speeds.chunk
        self._given, self._read = list(self._answers), []
        for turn in self._reading:
            tokens = min(turn.left, room)
            self._read.append((turn, tokens))
            room -= tokens
            if not room:
                break
        streams = len(self._given)
        took_s = (1 + (streams - 1) / speeds.half) / speeds.decode if streams else 0.0
        # By the instants at which steps were due: a late wake-up does not slow the engine down.
        self._due_s += took_s + (speeds.chunk - room) / speeds.prefill
        self._clock.call_at(self._due_s, self._end)

    def _end(self) -> None:
        begun = []
        for turn, tokens in self._read:
            turn.left -= tokens
            if not turn.left and turn in self._reading:  # else its client left
                self._reading.remove(turn)
                self._answers.append(turn)
                begun.append(turn)
        for turn in (*self._given, *begun):
            if turn in self._answers:
                turn.on_token()
        self._begin()
