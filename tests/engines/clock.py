"""The time that a fleet reads, in a test's hand."""

from __future__ import annotations

from types import ModuleType

from tidegate.engines import fleet, member, routing

S = 1_000_000_000
#: Where the fleet reads the module `time`.
READERS: tuple[ModuleType, ...] = (fleet, member, routing)


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now_ns = 1000 * S

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def time_ns(self) -> int:
        return self.now_ns

    def pass_s(self, seconds: float) -> None:
        self.now_ns += int(seconds * S)
