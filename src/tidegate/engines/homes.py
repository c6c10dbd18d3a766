"""Where prefixes went before, for all workers: a table of one word for each, in memory that they share.

A word is written whole, so there is no lock. Of two prefixes that fall on the same place the newer one stays. A word names the instance and which of
its lives it is: one that came back has an empty KV cache, and what went there before is nobody's home any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from tidegate.core.memory import Words
from tidegate.engines.ledger import LIFE

if TYPE_CHECKING:
    from tidegate.engines.member import Member

#: Places of one model's table, and instances that it can tell apart.
PLACES = 1 << 14
MOST_INSTANCES = 255
_TAG_BITS = 46  # with the place, all of a key that has 60 bits
_TAG = (1 << _TAG_BITS) - 1


class Homes:
    """As a dict from the hash of a prefix to an entry (a member, and its own name for the model) of this route. Hashes that agree in their last 60
    bits are taken for one: once in 10^18 a request goes where another's prefix lies, and that costs it the prefix only."""

    def __init__(self, words: Words, entries: Sequence[tuple[Member, str]]) -> None:
        """`words`: PLACES of them, 0 at first."""
        self._words = words
        self._entries = [entries[0], *entries]  # number 0 is nobody
        self._numbers = {id(entry[0]): number for number, entry in enumerate(entries, 1)}
        # where the lives of each stand, by number
        self._ledger = entries[0][0].ledger.words
        self._lives = [entry[0].ledger.at + LIFE for entry in self._entries]

    def __len__(self) -> int:
        return 0  # it never grows

    def get(self, key: int) -> tuple[Member, str] | None:
        """Its home, where that is known and has not been away since."""
        word = self._words[key % PLACES]
        number = word & 0xFF
        if not number or word >> 16 != key // PLACES & _TAG or word >> 8 & 0xFF != self._ledger[self._lives[number]] & 0xFF:
            return None
        return self._entries[number]

    def __setitem__(self, key: int, entry: tuple[Member, str]) -> None:
        number = self._numbers[id(entry[0])]
        self._words[key % PLACES] = (key // PLACES & _TAG) << 16 | (self._ledger[self._lives[number]] & 0xFF) << 8 | number

    def setdefault(self, key: int, entry: tuple[Member, str]) -> None:
        """Its home, unless it has one."""
        if self.get(key) is None:
            self[key] = entry


def came_back(member: Member) -> None:
    """All that went there before has no home any more, for all workers."""
    ledger = member.ledger
    with suppress(OSError), ledger.memory:
        ledger.words[ledger.at + LIFE] += 1
