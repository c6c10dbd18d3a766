"""Processes that die in the middle of what they write into memory that others share."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from typing import Any


class Dying:
    """Words whose process dies before one of its writes."""

    def __init__(self, words: Any, after: int) -> None:
        self.words = words
        self.after = after

    def __getitem__(self, at: Any) -> Any:
        return self.words[at]

    def __setitem__(self, at: int, value: int) -> None:
        if self.after == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.after -= 1
        self.words[at] = value


def in_child(work: Callable[[], None]) -> int:
    """Run it in a forked process; its exit code, below 0 for a signal, 70 for an exception."""
    gc.freeze()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    gc.unfreeze()
    return code
