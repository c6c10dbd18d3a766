"""Memory that the workers of a machine share: words made before the fork, and a lock that no death leaves held.

The lock is a robust mutex of POSIX threads (IEEE Std 1003.1-2024, pthread_mutexattr_setrobust), which tells the next owner that the last one died
with it. What is kept here has to be whole after any prefix of the writes that are made under the lock; who needs more keeps a record of what it
changes (admission/shared.py).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tidegate.core.errors import SettingsError

Words = memoryview
MUTEX_BYTES = 128
#: How long `Shared` waits for its lock. What it guards is a few writes; but its owner may be anyone, and have to wait for a processor.
_PATIENCE_NS = 250_000_000


class Mutex:
    """A robust mutex between processes. Every wait is a try: a call that sleeps would hold Python's own lock."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        """In `memory`, MUTEX_BYTES from `offset`. Raises OSError, AttributeError where there is none."""
        # The C library without giving up Python's lock: a try does not wait, and that would cost more than it does.
        libc = ctypes.PyDLL(None)
        mutex = (ctypes.c_char * MUTEX_BYTES).from_buffer(memory, offset)
        attributes = (ctypes.c_char * MUTEX_BYTES)()
        shared = robust = 1  # PTHREAD_PROCESS_SHARED and PTHREAD_MUTEX_ROBUST, in glibc and musl
        for done in (
            libc.pthread_mutexattr_init(attributes), libc.pthread_mutexattr_setpshared(attributes, shared),
            libc.pthread_mutexattr_setrobust(attributes, robust), libc.pthread_mutex_init(mutex, attributes),
        ):
            if done:
                raise OSError(done, os.strerror(done))
        self.mutex = ctypes.byref(mutex)
        self.trylock: Callable[[Any], int] = libc.pthread_mutex_trylock
        self.unlock: Callable[[Any], int] = libc.pthread_mutex_unlock
        self._consistent = libc.pthread_mutex_consistent

    def wait(self, got: int, patience_ns: int) -> int:
        """After a try that gave `got`, which was not 0: until it is 0, or EOWNERDEAD, after which `repaired` is to be called. Raises TimeoutError
        where the owner does not give it back, OSError where the lock is broken."""
        until_ns, tries = time.perf_counter_ns() + patience_ns, 0
        while got == errno.EBUSY:
            tries += 1
            if tries < 64:
                os.sched_yield()
            elif time.perf_counter_ns() < until_ns:
                time.sleep(0.000_05)  # the owner is not running: let it
            else:
                raise TimeoutError("it is held by a worker that does not run")
            got = self.trylock(self.mutex)
        if got not in (0, errno.EOWNERDEAD):
            raise OSError(got, os.strerror(got))
        return got

    def repaired(self) -> None:
        """What it guards is whole again."""
        self._consistent(self.mutex)


class Own:
    """Words of one process, in the place of shared ones: nobody else is there to lock out."""

    #: Which of how many workers this process is.
    worker, workers = 0, 1

    def __init__(self, count: int) -> None:
        self.bytes: bytearray | mmap.mmap = bytearray(8 * count)
        self.words: Words = memoryview(self.bytes).cast("q")

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None


class Shared(Own):
    """To be made before the fork; each worker then says `join`. `with memory:` raises TimeoutError, OSError where the lock is not to be had."""

    def __init__(self, count: int, workers: int) -> None:
        """Raises SettingsError where this system has no robust mutexes or not enough memory."""
        self.workers = workers
        size = 8 * count
        try:
            # Only what is touched takes memory.
            self.bytes = memory = mmap.mmap(-1, size + MUTEX_BYTES, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
            self._lock = Mutex(memory, size)
        except (OSError, AttributeError) as error:
            raise SettingsError(f"Memory that {workers} workers share cannot be made: {error}.", hint="Set server.workers to 1.") from None
        self._try, self._unlock, self._mutex = self._lock.trylock, self._lock.unlock, self._lock.mutex
        self.words = memoryview(memory)[:size].cast("q")

    def join(self, worker: int) -> None:
        """This process is the worker with this number, from now on."""
        self.worker = worker

    def __enter__(self) -> None:
        if (got := self._try(self._mutex)) and self._lock.wait(got, _PATIENCE_NS):
            self._lock.repaired()  # any prefix of the dead owner's writes is whole

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._unlock(self._mutex)
