"""Who has used how much: a record of words for each subject, in this process.

Rates are kept as the generic cell rate algorithm keeps them (ITU-T I.371, "virtual scheduling"): one word, the instant at which the bucket
will be full again. It is a token bucket (Turner 1986) without a refill to compute: a unit's price is time, `period / limit`. Instants are whole
nanoseconds of the monotonic clock, so what is given back is exactly what was taken. A price is rounded up: a full bucket holds its limit to the
unit, and refills too slowly by less than one part in `price`, never too fast.

A record is `RECORD` words from `at`: who it is (0: nobody), requests that run, three instants, and what a lease of this machine's holds (see
leases.py). A record whose buckets are full and of which nothing runs is as good as none: it is given to the next who comes, so memory is bounded.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, MutableSequence, Sequence
from typing import NamedTuple, NoReturn, Union

SECOND = 1_000_000_000
#: A debt is not booked beyond this: 4.5 years.
MOST_DEBT = 1 << 61
#: A record that was asked for is kept until it can have been used: those of a key and its tenant must not take each other's place.
_NEW = SECOND
#: A lease that nobody drew from for this long may be lost with its record.
_FORGOTTEN = 600 * SECOND

#: What is counted by time.
REQUESTS, TOKENS, MONEY = range(3)

# The words of a record.
WHO, USED, FULL_AT = 0, 1, 2
LEFT = 5  # three: units leased and not spent; below 0 they are owed
DRY = 8  # three: no use in asking for units before this instant
READY = 11  # three: when the units are expected that were asked for
SLOTS, SLOTS_DRY, SLOTS_UNTIL = 14, 15, 16  # leased slots, as DRY, and the end of their lease
FRESH = 17  # three: units that were there after the last renewal: the difference to LEFT was spent since
ASKED, TOUCHED, BEAT = 20, 21, 22  # no renewal in the background before; last drawn from; last renewed
LOW = 23  # three: a renewal is due below
RECORD = 26

#: The words before the first record.
HEAD = 16
FALLBACKS = 0  # requests decided without the count of all machines


class Full(Exception):
    """There is no record for one more."""


class Short(Exception):
    """A limit is used up. `row`: of the rates, or -1 - n for the n-th seat; `wait`: nanoseconds until it passes, 0 where nobody knows."""

    def __init__(self, row: int, wait: int) -> None:
        self.row = row
        self.wait = wait


class Moved(Exception):
    """A record of the way is another's now."""


class Unleased(Exception):
    """Not enough is leased, and nobody knows that there is no more: the store has to be asked."""


class Seat(NamedTuple):
    """A subject in a book: `who` is its digest, `used` the word that counts what runs, `most` of which may run; 0: no limit."""

    who: int
    at: int
    used: int
    most: int


class Row(NamedTuple):
    """One rate of a subject. A unit adds `price` to `word`. The bucket holds `depth`, and nobody has to find more than `most` units in it. Of
    leased units `word` is how many are left, and the price is -1."""

    word: int
    kind: int
    price: int
    depth: int
    most: int
    at: int
    limit: int


#: What one run takes, and from where: seats, rows, and the rows whose count is only known at the run's end. Plain tuples, not named ones: they
#: are unpacked for every request, and a named one costs twice as much.
Way = tuple[
    tuple[tuple[int, int, int, int], ...],
    tuple[tuple[int, int, int, int, int, int, int], ...],
    tuple[tuple[int, int, int, int, int, int, int], ...],
]
#: Requests, tokens and money.
Units = tuple[int, int, int]
NONE: Units = (0, 0, 0)
#: The words of a book: a list, or memory that is shared.
Words = Union[MutableSequence[int], "memoryview[int]"]


def digest(kind: str, name: str) -> int:
    """63 bits that stand for a subject: names of any length, from anybody, in one word. Never 0."""
    return int.from_bytes(hashlib.blake2b(f"{kind}\0{name}".encode("utf-8", "surrogatepass"), digest_size=8).digest()) >> 1 | 1


class Book:
    """Records in a list of this process."""

    #: Whether every run is counted in its records, also where that is no limit.
    counts_all: bool = False

    def __init__(self, most: int) -> None:
        #: A machine among others, as long as this book is there.
        self.name = secrets.token_hex(8)
        self._most = most
        #: Called when a record is given to another: what leads to it is no longer good.
        self.on_move: Callable[[], None] = lambda: None
        self._list = [0] * HEAD
        self.words: Words = self._list
        self._at: dict[int, int] = {}
        self._hand = HEAD

    # -- records

    def seat(self, who: int, now: int) -> int:
        """Where the record of `who` is; a new one where there is none. Raises Full."""
        at = self._at.get(who)
        if at is None:
            at = self._at[who] = self._room(now)
            self._list[at : at + RECORD] = [who] + [0] * (RECORD - 1)
        self._list[at + TOUCHED] = now
        return at

    def _room(self, now: int) -> int:
        words = self._list
        if len(words) < HEAD + self._most * RECORD:
            words.extend([0] * RECORD)
            return len(words) - RECORD
        for _ in range(256):  # a clock's hand, so that a full book costs each newcomer the same
            at = self._hand
            self._hand = at + RECORD if at + RECORD < len(words) else HEAD
            if idle(words, at, now):
                del self._at[words[at]]
                self.on_move()
                return at
        raise Full

    def count(self) -> int:
        """Records that are taken."""
        return len(self._at)

    # -- taking

    def take(self, way: Way, units: Units, now: int) -> int:
        """Reserve a run: one place in each seat, `units` in each row; all or nothing. Returns where it is noted. Raises Short, Moved."""
        words = self.words
        for _, _, used, most in way[0]:
            running = words[used]
            if most and running >= most:
                self._give_back(way, units, used)
                refuse(words, way, units, now)
            words[used] = running + 1
        for word, kind, price, depth, most, _, _ in way[1]:
            full_at = words[word]
            wanted = units[kind]
            full_at = (full_at if full_at > now else now) + (wanted if wanted < most else most) * price
            if full_at > now + depth:
                self._give_back(way, units, word)
                refuse(words, way, units, now)
            words[word] = full_at
        return 0

    def _give_back(self, way: Way, units: Units, until: int) -> None:
        """What was taken before the word that refused."""
        for _, _, used, _ in way[0]:
            if used == until:
                return
            self.words[used] -= 1
        for word, kind, price, _, most, _, _ in way[1]:
            if word == until:
                return
            self.words[word] -= min(units[kind], most) * price

    def draw(self, way: Way, units: Units, now: int) -> tuple[int, bool]:
        """As `take`, from what is leased; True where a renewal is due. Raises Short, Unleased, Moved."""
        words, due = self.words, may_draw(self.words, way, units, now)
        for _, at, used, _ in way[0]:
            words[used] += 1
            words[at + TOUCHED] = now
        for word, kind, _, _, most, at, _ in way[1]:
            words[word] -= min(units[kind], most)
            words[at + TOUCHED] = now
        return 0, due

    def settle(self, way: Way, reserved: Units, used: Units, entry: int) -> None:
        """A run is over that took `reserved` and used `used`."""
        words = self.words
        for _, _, running, _ in way[0]:
            words[running] -= 1
        for word, kind, price, _, most, _, _ in way[2] if used[0] else way[1]:
            held = reserved[kind]
            words[word] += (used[kind] - (held if held < most else most)) * price

    def add(self, at: int, changes: Sequence[tuple[int, int]], settings: Sequence[tuple[int, int]]) -> None:
        """Add to words of the record at `at`, and set others of it; how leases are written down."""
        words = self.words
        for offset, more in changes:
            words[at + offset] += more
        for offset, value in settings:
            words[at + offset] = value

    def give(self, at: int, keep: Sequence[int]) -> list[int]:
        """Take what is leased beyond `keep` out of the record, by kind, so that it can go back: below 0 where units are owed."""
        words, given = self.words, []
        for kind in range(3):
            left = words[at + LEFT + kind]
            give = left if left < 0 else max(0, left - keep[kind])
            words[at + LEFT + kind] = left - give
            given.append(give)
        return given

    @property
    def fallbacks(self) -> int:
        """Requests that were decided without the count of all machines."""
        return self.words[FALLBACKS]

    def fell_back(self) -> None:
        """Count a request that was decided without the count of all machines."""
        self.words[FALLBACKS] += 1


def idle(words: Words, at: int, now: int) -> bool:
    """Nothing runs, all is full again, and no lease is left: nobody would notice a new record in its place."""
    if words[at + USED] or any(words[at + FULL_AT + kind] > now for kind in range(3)) or now - words[at + TOUCHED] < _NEW:
        return False
    leased = words[at + SLOTS] or any(words[at + LEFT + kind] for kind in range(3))
    return not leased or now - words[at + TOUCHED] > _FORGOTTEN


def refuse(words: Words, way: Way, units: Units, now: int) -> NoReturn:
    """Raises Short for the limit that is to be waited for longest, or Moved."""
    late, worst = 0, None
    for place, (who, at, used, most) in enumerate(way[0]):
        if words[at] != who:
            raise Moved
        if most and words[used] >= most:
            worst = -1 - place
    for index, (word, kind, price, depth, most, _, _) in enumerate(way[1]):
        over = max(words[word], now) + min(units[kind], most) * price - now - depth
        if over > late:
            late, worst = over, index
    assert worst is not None, "refused without a limit"
    raise Short(worst, late)


def may_draw(words: Words, way: Way, units: Units, now: int) -> bool:
    """Whether a renewal is due behind this draw. Raises Moved; Short where it is known that no more can be leased, else Unleased."""
    due = False
    for place, (who, at, used, most) in enumerate(way[0]):
        if words[at] != who:
            raise Moved
        if most:
            room = words[at + SLOTS] - words[used]
            if room <= 0 or words[at + SLOTS_UNTIL] <= now:
                raise Short(-1 - place, 0) if words[at + SLOTS_DRY] > now else Unleased
            if room == 1 and words[at + ASKED] <= now and words[at + SLOTS_DRY] <= now:
                due = True
    for index, (word, kind, _, _, most, at, _) in enumerate(way[1]):
        left = words[word] - min(units[kind], most)
        if left < 0:
            raise Short(index, max(words[at + READY + kind], words[at + DRY + kind]) - now) if words[at + DRY + kind] > now else Unleased
        if left <= words[at + LOW + kind] and words[at + ASKED] <= now:
            due = True
    return due
