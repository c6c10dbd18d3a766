"""A child dies with its parent: the kernel sends it a signal when the parent is gone, however it went (PR_SET_PDEATHSIG)."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1

# Loaded here, not in the forked child: nothing may be imported or allocated there that another thread's lock could guard.
_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent_pid: int, with_signal: signal.Signals) -> None:
    """Ask the kernel for `with_signal` when the parent dies. A parent that is gone already counts: then this process ends at once.

    The kernel's "parent" is the *thread* that forked, so children are started from a thread that lives as long as they should.
    A change of user clears the request: call this after it.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, int(with_signal), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(0)  # the parent died between fork and prctl: its signal will never come


def leash(with_signal: signal.Signals) -> Callable[[], None]:
    """For subprocess's `preexec_fn`, which runs after the change of user: ties the child to the process that calls this."""
    parent_pid = os.getpid()
    return lambda: die_with(parent_pid, with_signal)
