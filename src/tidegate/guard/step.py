"""What a scan for terms remembers of a piece of text: a piece that was met before, with nothing live, is not looked at again."""

from __future__ import annotations

from typing import NamedTuple

from tidegate.guard.parted import EMPHASIS, readings
from tidegate.guard.road import Road

#: Characters remembered of one step: blanks, signs and the alphabet.
MOST_ENDS = 64


class Tail(NamedTuple):
    """A prefix of terms that a text ends with, and the way on from it. `begins`: no word goes on to where it begins; `parted`: its letters are
    parted, or may be."""

    text: str
    road: Road
    begins: bool
    parted: bool

    def dies(self, norm: str) -> bool:
        """Whether what follows makes no term of it, nor may."""
        rest = self.text + norm
        road = self.road
        far = road.longest_prefix(rest)
        if far == len(rest):
            return False
        size = len(self.text)
        if far > size and far >= road.lengths[0]:
            for length in road.lengths:
                if size < length <= far and road.number_of(rest[:length], None) is not None:
                    return False
        if not self.parted and not (road.parted and not EMPHASIS.isdisjoint(rest[: far + 1])):
            return True
        return not any(reading.lives(road) or any(end > size for end, _ in reading.terms(road)) for reading in readings(rest, self.begins, road))


_NONE_YET: frozenset[str] = frozenset()


class Step:
    """What one more piece leads a scan to: all that the next piece has to know, wherever in a text it is."""

    __slots__ = ("alive", "ends", "first", "held", "next", "norm", "open", "open_len", "sized", "spans", "tails", "window")

    def __init__(self, next: dict[str, Step]) -> None:
        #: The steps from here on, once no tail lives any more.
        self.next = next
        self.tails: tuple[Tail, ...] = ()
        #: Characters that no tail goes on with, as they were met.
        self.ends: set[str] | frozenset[str] = _NONE_YET
        #: The piece's own normal form, its first character, and how many characters the piece has; -1 where it has to be looked at each time.
        self.norm = self.first = ""
        self.sized = 0
        #: Characters of the text, up to its end, that may become part of a term.
        self.held = 0
        # The scan's own state, from the window's beginning and from the text's end on.
        self.window = self.open = ""
        self.open_len = 0
        self.alive: tuple[int, ...] = ()
        self.spans: tuple[tuple[int, int], ...] = ((0, 0),)

    def ends_with(self, then: Step) -> bool:
        """Whether the next piece makes no term of any tail, nor may."""
        first, ends = then.first, True
        for tail in self.tails:
            size = len(tail.text)
            if tail.parted or (first in EMPHASIS and tail.road.parted) or tail.road.longest_prefix(tail.text + first) > size:
                ends = False
                if not tail.dies(then.norm):
                    return False
        if ends and len(self.ends) < MOST_ENDS:
            self.ends = {*self.ends, first}
        return True


#: Of a step that cannot be made.
NO_STEP = Step({})
NO_STEP.sized = -1
