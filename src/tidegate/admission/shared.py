"""A book in memory that all workers of a machine share, each change of it whole or not at all, whoever dies when.

The memory is made before the fork, and a robust mutex guards it (core/memory.py). Every run has an entry in its worker's part of the memory: which
words were changed, by how much, and what they held before. So a change that a death broke off is undone by whoever gets the lock next, and what a
dead worker's runs had reserved comes back by `reclaim`.

    words   head | records | one region of entries for each worker
    entry   how many changes count, how many are noted, then for each: the word, what is taken off again, what it held before
"""

from __future__ import annotations

import errno
import logging
import mmap
import secrets
import struct
from collections.abc import Sequence

from tidegate.admission.book import (
    HEAD,
    LOW,
    MOST_DEBT,
    RECORD,
    TOUCHED,
    WHO,
    Book,
    Full,
    Units,
    Way,
    Words,
    idle,
    may_draw,
    refuse,
)
from tidegate.core.errors import LimitsDown, SettingsError
from tidegate.core.memory import MUTEX_BYTES, Mutex

log = logging.getLogger(__name__)

#: Words of the head (see book.py): the entry that is being changed, below 0 where it is being ended; records that were ever used.
_CHANGING, _RECORDS = 1, 2
_NOBODY = -1
_ENTRY = 2 + 3 * 12  # a run has at most three seats and nine rates
#: Writes the notes of that many changes with one call.
_NOTES = [struct.Struct(f"={1 + 3 * count}q").pack_into for count in range(13)]
_ENTRIES = 32_768  # runs of one worker at the same time: more than it can have connections
_PROBES = 128
_WAIT_NS = 1_000_000_000
_CEILING = 1 << 62


class SharedBook(Book):
    """To be made before the fork; each worker then says `join`."""

    counts_all: bool = True

    def __init__(self, most: int, workers: int) -> None:
        """Raises SettingsError where this system has no robust mutexes or not enough memory."""
        self.name = secrets.token_hex(8)
        self._slots = most + most // 3  # a table that is nearly full is slow to look through
        first = HEAD + self._slots * RECORD
        self._regions = [first + worker * _ENTRIES * _ENTRY for worker in range(workers)]
        size = (first + workers * _ENTRIES * _ENTRY) * 8
        try:
            # Only what is touched takes memory.
            self._memory = mmap.mmap(-1, size + MUTEX_BYTES, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
            self._lock = Mutex(self._memory, size)
            self._try, self._unlock, self._mutex = self._lock.trylock, self._lock.unlock, self._lock.mutex
        except (OSError, AttributeError) as error:
            raise SettingsError(
                f"Memory that {workers} workers share for their limits cannot be made: {error}.",
                hint="Set server.workers to 1, or lower limits.most_subjects.",
            ) from None
        self.words: Words = memoryview(self._memory)[:size].cast("q")
        self._free: list[int] = []
        self._late: list[tuple[Way, Units, Units, int]] = []
        self._at: dict[int, int] = {}

    def join(self, worker: int) -> None:
        """This process is the worker with this number, from now on."""
        region = self._regions[worker]
        self._free = [region + entry * _ENTRY for entry in range(_ENTRIES - 1, -1, -1)]

    def reclaim(self, worker: int) -> int:
        """The worker with this number is dead: what its runs had reserved comes back. Returns how many they were."""
        words, found = self.words, 0
        region = self._regions[worker]
        self._enter()
        try:
            words[_CHANGING] = 0  # what was made is undone here, not by a repair
            for entry in range(region, region + _ENTRIES * _ENTRY, _ENTRY):
                if not words[entry + 1]:  # entries are taken in order, and this one never was
                    break
                if count := words[entry]:
                    for word in range(entry + 2, entry + 2 + 3 * count, 3):
                        words[words[word]] -= words[word + 1]
                    words[entry] = 0
                    found += 1
        finally:
            self._unlock(self._mutex)
        return found

    # -- records: open addressing, so that all processes find them in the same place

    def seat(self, who: int, now: int) -> int:
        """See Book."""
        words = self.words
        self._enter()
        try:
            at = self._find(who, now)
            if words[at + WHO] != who:
                if not words[at + WHO]:
                    words[_RECORDS] += 1
                words[at + WHO] = _NOBODY  # until it is whole; 0 would end the search for records behind it
                for offset in range(1, RECORD):
                    words[at + offset] = 0
                words[at + WHO] = who
            words[at + TOUCHED] = now
        finally:
            self._unlock(self._mutex)
        return at

    def _find(self, who: int, now: int) -> int:
        """The record of `who`, else one that may become it. Raises Full."""
        words, place, found = self.words, who % self._slots, 0
        for _ in range(_PROBES):
            at = HEAD + place * RECORD
            here = words[at]
            if here == who:
                return at
            if not here:
                return found or at
            if not found and idle(words, at, now):
                found = at
            place = place + 1 if place + 1 < self._slots else 0
        if found:
            return found
        raise Full

    def count(self) -> int:
        """Records that were ever taken: they are used again, not given back."""
        return self.words[_RECORDS]

    # -- taking

    def take(self, way: Way, units: Units, now: int) -> int:
        """See Book. Also raises LimitsDown where the lock is not to be had."""
        words = self.words
        noted: list[int] = []
        changes: list[tuple[int, int]] = []
        if got := self._try(self._mutex):
            self._wait(got)
        try:
            for who, at, used, most in way[0]:
                running = words[used]
                if words[at] != who or (most and running >= most):
                    refuse(words, way, units, now)
                noted += used, 1, running
                changes.append((used, running + 1))
            for word, kind, price, depth, most, _, _ in way[1]:
                before = words[word]
                wanted = units[kind]
                cost = (wanted if wanted < most else most) * price
                full_at = (before if before > now else now) + cost
                if full_at > now + depth:
                    refuse(words, way, units, now)
                noted += word, cost, before
                changes.append((word, full_at))
            return self._commit(noted, changes)
        finally:
            self._unlock(self._mutex)

    def draw(self, way: Way, units: Units, now: int) -> tuple[int, bool]:
        """See Book, and `take`."""
        words, due = self.words, False
        noted: list[int] = []
        changes: list[tuple[int, int]] = []
        if got := self._try(self._mutex):
            self._wait(got)
        try:
            for who, at, used, most in way[0]:
                running = words[used]
                if words[at] != who or most:
                    due = may_draw(words, way, units, now) or due
                noted += used, 1, running
                changes.append((used, running + 1))
                words[at + TOUCHED] = now
            for word, kind, price, _, most, at, _ in way[1]:
                held = words[word]
                wanted = units[kind]
                cost = (wanted if wanted < most else most) * price
                left = held + cost
                if left <= words[at + LOW + kind]:
                    due = may_draw(words, way, units, now) or due
                noted += word, cost, held
                changes.append((word, left))
            return self._commit(noted, changes), due
        finally:
            self._unlock(self._mutex)

    def _commit(self, noted: list[int], changes: list[tuple[int, int]]) -> int:
        """Make `changes`, of words to values. `noted`: for each its word, what is taken off again, and what it held."""
        if not self._free:
            raise LimitsDown(f"More than {_ENTRIES} requests run in one worker.", hint="Raise server.workers.", retry_after_s=1.0)
        words, count = self.words, len(changes)
        entry = self._free.pop()
        _NOTES[count](self._memory, entry * 8 + 8, count, *noted)
        words[_CHANGING] = entry
        for word, value in changes:
            words[word] = value
        words[entry] = count
        return entry

    def settle(self, way: Way, reserved: Units, used: Units, entry: int) -> None:
        """See Book. Where the lock is not to be had the run is over all the same: it is booked with the next that gets it."""
        words, at = self.words, entry + 4
        changes: list[tuple[int, int]] = []
        try:
            if got := self._try(self._mutex):
                self._wait(got)
        except LimitsDown as error:
            log.error("a run could not be settled yet: %s", error.message)
            self._late.append((way, reserved, used, entry))
            return
        try:
            for _, _, word, _ in way[0]:
                words[at] = before = words[word]
                at += 3
                changes.append((word, before - 1))
            for word, kind, price, _, most, _, _ in way[1]:
                words[at] = before = words[word]
                at += 3
                held = reserved[kind]
                more = (used[kind] - (held if held < most else most)) * price
                if more:
                    changes.append((word, before + more if more < MOST_DEBT else min(before + MOST_DEBT, _CEILING)))
            words[_CHANGING] = -entry
            for word, value in changes:
                words[word] = value
            words[entry] = 0
        finally:
            self._unlock(self._mutex)
        self._free.append(entry)
        if self._late:
            self.settle(*self._late.pop())

    def add(self, at: int, changes: Sequence[tuple[int, int]], settings: Sequence[tuple[int, int]]) -> None:
        """See Book."""
        self._enter()
        try:
            super().add(at, changes, settings)
        finally:
            self._unlock(self._mutex)

    def give(self, at: int, keep: Sequence[int]) -> list[int]:
        """See Book."""
        self._enter()
        try:
            return super().give(at, keep)
        finally:
            self._unlock(self._mutex)

    def fell_back(self) -> None:
        """See Book."""
        self._enter()
        try:
            super().fell_back()
        finally:
            self._unlock(self._mutex)

    # -- the lock

    def _enter(self) -> None:
        """Raises LimitsDown where a worker has held the lock for a second: it was stopped with it."""
        if got := self._try(self._mutex):
            self._wait(got)

    def _wait(self, got: int) -> None:
        """After a try that did not simply give the lock."""
        try:
            died = self._lock.wait(got, _WAIT_NS) == errno.EOWNERDEAD
        except TimeoutError:
            raise LimitsDown(
                "The memory in which workers share their limits is held by a worker that does not run.",
                hint="Look for a stopped worker process; try again shortly.", retry_after_s=1.0,
            ) from None
        except OSError as error:
            raise LimitsDown(f"The lock of the workers' limits is broken: {error.strerror}.", hint="Restart the gateway.") from None
        if died:
            try:
                self._repair()
            finally:
                self._lock.repaired()

    def _repair(self) -> None:
        """A worker died with the lock: if it was in the middle of a change, everything as it was before. A change that was made has left its
        entry in force, and one that ended a run has left it empty."""
        words, changing = self.words, self.words[_CHANGING]
        entry = abs(changing)
        if changing and bool(words[entry]) == (changing < 0):
            for word in range(entry + 2, entry + 2 + 3 * words[entry + 1], 3):
                words[words[word]] = words[word + 2]
        words[_CHANGING] = 0
