"""Watches one answer while it is told: lets go what is certain, holds back what may become a term or a trigger, and says when it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tidegate.core.chunk import Chunk
from tidegate.guard.escapes import Unescaped
from tidegate.guard.terms import Hit, Scan, Terms
from tidegate.pipeline.bare import Bare, texts_in
from tidegate.pipeline.control import Control, Trigger
from tidegate.pipeline.told import Told

#: A piece that is longer is let go in two where its end is held: of a shorter one, a token or two, nothing leaves before all may.
LONG_PIECE = 32


@dataclass(slots=True)
class Stop:
    """The generation stops here. The answer so far is cut to `chars` characters. Either `trigger` fired, or the term number `term` was said; of that,
    `forbid` is what the model said of it from the cut on, and `aside` is true where it stood in reasoning or in a tool call."""

    chars: int
    term: int = -1
    forbid: str = ""
    aside: bool = False
    trigger: Trigger | None = None


class _Aside:
    """A text beside the answer: the reasoning, or the arguments of one tool call."""

    __slots__ = ("fed", "scan", "unescaped")

    def __init__(self, terms: Terms, *, is_json: bool) -> None:
        self.scan = Scan(terms)
        self.unescaped = Unescaped() if is_json else None
        self.fed = 0

    def feed(self, text: str) -> Hit | None:
        if self.unescaped is not None:
            text = self.unescaped.feed(text)
        self.fed += len(text)
        return self.scan.feed(text)

    def free(self, at: int) -> bool:
        return self.scan.free >= at and (self.unescaped is None or not self.unescaped.open)


#: A chunk waits for no text but the answer.
_NONE: Sequence[tuple[_Aside, int]] = ()


class Watch:
    """Of one answer. Chunks leave in their order; `out` takes those that may leave now.

    The answer, the reasoning and each tool call are texts of their own: a term does not reach from one into another.
    """

    __slots__ = ("_asides", "_bare", "_control", "_held", "_ids", "_only_terms", "_reasoning", "_scan", "_starts", "_told", "sent")

    def __init__(self, control: Control, told: Told) -> None:
        self._control = control
        self._told = told
        self._scan = Scan(control.terms) if control.terms is not None else None
        self._starts = Scan(control.starts) if control.starts is not None else None
        self._bare = Bare() if self._scan is not None else None
        self._only_terms = self._scan is not None and not control.triggers
        self._ids: list[tuple[int, int]] = []  # the last token ids, each with where its piece begins
        #: What waits: chunk, where its text ends in the answer (0: it has none there), and which places of which other text must be free.
        self._held: list[tuple[Chunk, int, Sequence[tuple[_Aside, int]]]] = []
        self._asides: dict[str, _Aside] = {}
        self._reasoning = False
        #: Characters of the answer that have left.
        self.sent = 0

    def take(self, chunk: Chunk, out: list[Chunk], *, own: bool = False) -> Stop | None:
        """The next chunk; the text of an answer's chunk was added to `told` before. After a Stop, call `resume` before the next.

        `own`: the text is ours, and fires no trigger.
        """
        text = chunk.text
        if chunk.raw is not None and self._bare is not None:
            bare, beside = self._bare.check(chunk)
            if not bare or (beside and any(self._holds_term(one) for one in beside)):
                chunk.raw = None  # what nobody looked at does not leave: the event is made anew, of what was
        held = self._held
        if (
            self._only_terms and chunk.kind == "text" and text and chunk.finish is None and not self._reasoning
            and (not held or not self._asides)
        ):  # fmt: skip
            scan = self._scan
            assert scan is not None
            end = self._told.chars
            hit = scan.feed(text)
            if hit is None and scan.free == end:  # nearly always
                if held:
                    for one, _, _ in held:
                        out.append(one)
                    held.clear()
                self.sent = end
                out.append(chunk)
                return None
            held.append((chunk, end, _NONE))
            if hit is not None:
                return self._stopped(self._banned(hit))
            self._release(scan.free, out)
            return None
        if chunk.kind == "text" and text:
            end = self._told.chars
            if self._reasoning:
                self._reasoning = False
                if self._settle("reasoning"):
                    return self._stop_aside()
            scan, starts = self._scan, self._starts
            hit = scan.feed(text) if scan is not None else None
            fired = None
            if starts is not None:
                if own:
                    self._starts = Scan(starts.terms, end)
                else:
                    fired = starts.feed(text)
            by_ids = self._match_ids(chunk, end - len(text)) if self._control.by_ids else None
            free = self._free(end)
            if hit is None and fired is None and by_ids is None and chunk.finish is None:
                if free == end and not self._held:
                    self.sent = end
                    out.append(chunk)
                    return None
                self._held.append((chunk, end, _NONE))
                self._release(free, out)
                return None
            self._held.append((chunk, end, _NONE))
            stop = self._first(hit, fired, by_ids)
            if stop is None:
                stop = self._end_of_text()
            if stop is not None:
                return self._stopped(stop)
            self._release(self._free(end), out)
            return None
        if chunk.kind == "reasoning" and text and self._scan is not None:
            self._reasoning = True
            return self._take_aside(chunk, [("reasoning", text)], out)
        if chunk.tools and self._scan is not None:
            pieces = [(f"tool {tool.index}", tool.arguments) for tool in chunk.tools if tool.arguments]
            pieces += [(f"name {tool.index}", tool.name) for tool in chunk.tools if tool.name]
            return self._take_aside(chunk, pieces, out)
        self._held.append((chunk, 0, _NONE))
        if chunk.finish is not None:
            if any(self._settle(name) for name in self._asides):
                return self._stop_aside()
            stop = self._end_of_text()
            if stop is not None:
                return self._stopped(stop)
        self._release(self._free(self._told.chars), out)
        return None

    def finish(self, out: list[Chunk]) -> Stop | None:
        """The engine said all, whether it told so or not."""
        return self.take(Chunk(0, "notice", finish="stop"), out)

    def resume(self) -> None:
        """The answer was cut, and goes on from what is left of it."""
        told, control = self._told, self._control
        self._ids.clear()
        if self._scan is not None and control.terms is not None:
            # What may be part of a term lies within the longest term's length; unseen characters between are few in fact.
            self._scan = _primed(control.terms, told, max(0, min(self.sent, told.chars) - 4 * control.terms.longest - 64))
        if control.starts is not None:
            self._starts = _primed(control.starts, told, min(self.sent, told.chars))

    # --

    def _free(self, end: int) -> int:
        """Characters of the answer that are part of nothing that is watched for."""
        free = end if self._scan is None else self._scan.free
        if self._starts is not None and self._starts.free < free:
            free = self._starts.free
        if self._ids and self._ids[0][1] < free:
            free = self._ids[0][1]
        return free

    def _release(self, free: int, out: list[Chunk]) -> None:
        held = self._held
        gone = 0
        for chunk, end, asides in held:
            if end > free:
                begin = end - len(chunk.text)
                if len(chunk.text) > LONG_PIECE and free > begin:
                    out.append(Chunk(chunk.at_ns, "text", chunk.text[: free - begin]))
                    self.sent = free
                    held[gone] = (_rest_of(chunk, free - begin), end, asides)
                break
            if asides and not all(aside.free(at) for aside, at in asides):
                break
            if end:
                self.sent = end
            out.append(chunk)
            gone += 1
        if gone:
            del held[:gone]

    def _end_of_text(self) -> Stop | None:
        hit = self._scan.finish() if self._scan is not None else None
        if self._starts is not None:
            self._starts.finish()
        self._ids.clear()
        return None if hit is None else self._banned(hit)

    def _first(self, hit: Hit | None, fired: Hit | None, by_ids: Stop | None) -> Stop | None:
        """Of all that was found, what begins first; at the same place the ban."""
        found: list[tuple[int, int, Stop]] = []
        if hit is not None:
            found.append((hit.start, 0, self._banned(hit)))
        if fired is not None:
            trigger = self._control.by_text[fired.term]
            found.append((fired.start, 1, Stop(fired.end if trigger.keep else fired.start, trigger=trigger)))
        if by_ids is not None:
            found.append((by_ids.chars, 1, by_ids))
        return min(found, key=lambda one: one[:2])[2] if found else None

    def _banned(self, hit: Hit) -> Stop:
        cut = max(hit.start, self.sent)
        if cut > self.sent and self._told.between(cut - 1, cut) == " ":
            cut -= 1  # go on from before the blank: it is part of the next token in most vocabularies
        return Stop(cut, hit.term, self._told.between(cut, hit.end))

    def _stopped(self, stop: Stop) -> Stop:
        """What lies behind the cut is gone; what lies before it waits, for it may be part of another term."""
        kept: list[tuple[Chunk, int, Sequence[tuple[_Aside, int]]]] = []
        for chunk, end, asides in self._held:
            if not end or end <= stop.chars:
                if chunk.finish is None and chunk.kind != "usage":  # that end is none any more
                    kept.append((chunk, end, asides))
                continue
            begin = end - len(chunk.text)
            if begin < stop.chars:
                kept.append((Chunk(chunk.at_ns, "text", chunk.text[: stop.chars - begin]), stop.chars, asides))
        self._held = kept
        return stop

    # -- texts beside the answer

    def _take_aside(self, chunk: Chunk, pieces: list[tuple[str, str]], out: list[Chunk]) -> Stop | None:
        assert self._control.terms is not None
        waits: list[tuple[_Aside, int]] = []
        for name, text in pieces:
            aside = self._asides.get(name)
            if aside is None:
                aside = self._asides[name] = _Aside(self._control.terms, is_json=name.startswith("tool"))
            hit = aside.feed(text)
            if hit is not None:
                return self._stop_aside(hit)
            waits.append((aside, aside.fed))
        self._held.append((chunk, 0, waits))
        if chunk.finish is not None and any(self._settle(name) for name in self._asides):
            return self._stop_aside()
        self._release(self._free(self._told.chars), out)
        return None

    def _settle(self, name: str) -> bool:
        aside = self._asides.get(name)
        if aside is None:
            return False
        if aside.unescaped is not None:
            aside.unescaped.open = ""
        return aside.scan.finish() is not None

    def _stop_aside(self, hit: Hit | None = None) -> Stop:
        self._held.clear()
        self._asides.clear()  # they are over
        return Stop(self.sent, -1 if hit is None else hit.term, aside=True)

    def holds_term_beside(self, raw: bytes) -> bool:
        """Whether a term stands in any text of an engine's whole answer, its log-probabilities and whatever else it tells."""
        return self._scan is not None and any(self._holds_term(text) for text in texts_in(msgspec.json.decode(raw)))

    def _holds_term(self, text: str) -> bool:
        terms = self._control.terms
        assert terms is not None
        if terms.glance.clears(text):
            return False
        scan = Scan(terms)
        return scan.feed(text) is not None or scan.finish() is not None

    # -- token ids

    def _match_ids(self, chunk: Chunk, begin: int) -> Stop | None:
        """Whether a trigger's ids are complete; `_ids` is left with the longest beginning of one that the ids end with."""
        if chunk.token_ids is None:
            self._ids.clear()
            return None
        for one in chunk.token_ids:
            self._ids.append((one, begin))
            ids = [known for known, _ in self._ids]
            for trigger in self._control.by_ids:
                size = len(trigger.token_ids)
                if tuple(ids[-size:]) == trigger.token_ids:
                    at = begin + len(chunk.text) if trigger.keep else self._ids[-size][1]
                    self._ids.clear()
                    return Stop(max(at, self.sent), trigger=trigger)
            while ids and not any(trigger.token_ids[: len(ids)] == tuple(ids) for trigger in self._control.by_ids):
                ids.pop(0)
                self._ids.pop(0)
        return None


def _rest_of(chunk: Chunk, at: int) -> Chunk:
    return Chunk(chunk.at_ns, "text", chunk.text[at:], finish=chunk.finish, usage=chunk.usage)


def _primed(terms: Terms, told: Told, begin: int) -> Scan:
    """A scan that has seen the end of what was told. What is found there was judged before, or lies across the cut and is no longer whole."""
    while True:
        scan = Scan(terms, begin)
        hit = scan.feed(told.between(begin, told.chars)) if begin < told.chars else None
        if hit is None:
            return scan
        begin = hit.start + 1
