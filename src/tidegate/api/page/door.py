"""The door counts failed knocks: ten wrong keys from one address within five minutes, and it stays shut for a while."""

from __future__ import annotations

import time
from collections import OrderedDict, deque

MOST_FAILURES = 10
WINDOW_S = 300.0
_MOST_ADDRESSES = 4096


class Door:
    """Failed logins per client address. Bounded: the address that failed longest ago is forgotten first."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, deque[int]] = OrderedDict()

    def wait_s(self, address: str) -> float:
        """Seconds until this address may try again; 0 where it may now."""
        failures = self._failures.get(address)
        if failures is None:
            return 0.0
        window_ns = int(WINDOW_S * 1e9)
        now_ns = time.perf_counter_ns()
        while failures and now_ns - failures[0] >= window_ns:
            failures.popleft()
        if len(failures) < MOST_FAILURES:
            return 0.0
        return (failures[0] + window_ns - now_ns) / 1e9

    def failed(self, address: str) -> None:
        failures = self._failures.setdefault(address, deque(maxlen=MOST_FAILURES))
        failures.append(time.perf_counter_ns())
        self._failures.move_to_end(address)
        if len(self._failures) > _MOST_ADDRESSES:
            self._failures.popitem(last=False)

    def opened(self, address: str) -> None:
        self._failures.pop(address, None)
