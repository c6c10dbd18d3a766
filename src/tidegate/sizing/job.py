"""One request of a simulation: what it asks, and when each thing happened to it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Job:
    """`prompt` and `output` are tokens; `output` is the truth, known to the engine model and to the clairvoyant policy alone, and `predicted` is
    what a predictor of answer lengths would say; `told` is what the caller says its answer may be at most, 0 for nothing. `cached` of the prompt's
    tokens the engine need not read. `guessed` is for how long the gateway takes the prompt before the engine has counted it, 0 for its true length.
    All times are of the virtual clock, in ns; a time that has not come is -1.

    `asked_ns` is when it first came and `came_ns` when it came last, after a refusal; `tries` counts its comings.
    """

    number: int
    tenant: str
    prompt: int
    output: int
    predicted: float
    told: int
    asked_ns: int
    came_ns: int
    counted: bool = True
    cached: int = 0
    guessed: int = 0
    tries: int = 0
    refused: bool = False
    started_ns: int = -1
    first_ns: int = -1
    done_ns: int = -1

    @property
    def reads(self) -> int:
        """Prompt tokens that the engine reads for it."""
        return self.prompt - self.cached

    @property
    def wait_s(self) -> float:
        """From its last coming to its slot."""
        return (self.started_ns - self.came_ns) / 1e9

    @property
    def ttft_s(self) -> float:
        """Time to first token, from its last coming."""
        return (self.first_ns - self.came_ns) / 1e9
