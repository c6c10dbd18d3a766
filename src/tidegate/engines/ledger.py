"""What all workers know of an instance together: its breaker, what it asked for by `Retry-After`, and how much it is given.

Words of shared memory (core/memory.py), or of this process alone where it is the only one. What decides is changed under the memory's lock, in an
order in which any prefix of the writes is a state that makes sense, so a worker that dies in the middle leaves nothing broken. What only adds up
over workers is written by each in words of its own, without the lock; those of a worker that died are cleared by `clear`.

    memory  the number of the newest change of any instance | a record for each instance
    record  see the names below, then by worker: probes, load, outcomes
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from contextlib import suppress

from tidegate.core.memory import Own

#: A breaker's outcomes are counted in this many buckets of its window.
BUCKETS = 10
#: Words of a record. `STATE`: which of breaker.py's; `ERA`: grows with each state; `UNTIL`: while open; `CLOSED`: when it closed last; `TIMES`:
#: openings in a row; `PASSED`: good probes; `HELD`, `BUSY`: until when it asked not to be asked, or comes last; `LIFE`: how often it came
#: back; `STATUS`, `CODE`: its words for not to be asked.
STATE, ERA, UNTIL, CLOSED, TIMES, PASSED, HELD, BUSY, LIFE, STATUS, CODE = range(11)
_CODE_BYTES = 32
_OF_ALL = CODE + _CODE_BYTES // 8
#: Words of a worker's outcomes: the era that they are of, the newest bucket, then good ones and bad ones by bucket.
OF_ERA, NEWEST, GOOD, BAD = 0, 1, 2, 2 + BUCKETS
_OUTCOMES = 2 + 2 * BUCKETS
_OF_WORKER = 2 + _OUTCOMES
#: A worker's load is one word: requests above this bit, tokens below it.
TOKEN_BITS = 40
TOKENS = (1 << TOKEN_BITS) - 1


def words_for(instances: int, workers: int, tenants: int = 0) -> int:
    """Words that so many instances take. `tenants`: how many have slots of their own."""
    return 1 + instances * _record(workers, tenants)


def _record(workers: int, tenants: int) -> int:
    return _OF_ALL + workers * (_OF_WORKER + tenants)


class Ledger:
    """The record of one instance. `loads`: the words of all workers for that; `used`: for each tenant's own slots; `probes`: where theirs
    for these begin; `outcomes`: where this one's do."""

    __slots__ = ("all_outcomes", "at", "loads", "memory", "outcomes", "probes", "used", "words", "worker", "workers")

    def __init__(self, memory: Own | None = None, number: int = 0, tenants: int = 0) -> None:
        """`number`: of the instance in this memory."""
        if memory is None:
            memory = Own(words_for(1, 1, tenants))
        self.memory = memory
        self.words = memory.words
        self.worker, self.workers = memory.worker, memory.workers
        self.at = 1 + number * _record(self.workers, tenants)
        self.probes = self.at + _OF_ALL
        first = self.probes + self.workers
        self.loads = self.words[first : first + self.workers]
        first += self.workers
        self.used = [self.words[first + tenant * self.workers :][: self.workers] for tenant in range(tenants)]
        first += tenants * self.workers
        self.all_outcomes = range(first, first + self.workers * _OUTCOMES, _OUTCOMES)
        self.outcomes = first + self.worker * _OUTCOMES

    def changed(self) -> None:
        """All workers are to look anew. Under the lock."""
        self.words[0] += 1

    def hold(self, until_ns: int, status: int, code: str) -> None:
        """It asked not to be asked before this instant. Under the lock."""
        if until_ns > self.words[self.at + HELD]:
            told = code.encode("ascii", "replace")[:_CODE_BYTES]
            struct.pack_into(f"={_CODE_BYTES}s", self.memory.bytes, 8 * (self.at + CODE), told)
            self.words[self.at + STATUS] = status
            self.words[self.at + HELD] = until_ns
            self.changed()

    @property
    def held(self) -> tuple[int, str]:
        """Status and code with which it asked that."""
        first = 8 * (self.at + CODE)
        return self.words[self.at + STATUS], bytes(self.memory.bytes[first : first + _CODE_BYTES]).rstrip(b"\0").decode("ascii")


def clear(memory: Own, instances: int, worker: int, tenants: int = 0) -> None:
    """The worker with this number is dead, or begins: nothing of it is under way."""
    with suppress(OSError), memory:
        for number in range(instances):
            ledger = Ledger(memory, number, tenants)
            for used in ledger.used:
                used[worker] = 0
            ledger.words[ledger.probes + worker] = ledger.loads[worker] = 0
            ledger.changed()


def ledgers(names: Iterable[str], memory: Own | None, tenants: int = 0) -> dict[str, Ledger]:
    """One for each instance, in this order; each in memory of its own where there is no other worker."""
    return {name: Ledger(memory, number if memory is not None else 0, tenants) for number, name in enumerate(names)}
