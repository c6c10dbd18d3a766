"""What was told of an answer so far, over all its runs: can be cut at any character to what one goes on from."""

from __future__ import annotations

from tidegate.core.ask import Said


class Told:
    """Pieces of text, and the ids of their tokens where the engine tells them. `text` may be a list that others read too."""

    __slots__ = ("_ids", "_parts", "chars", "text")

    def __init__(self, text: list[str] | None = None) -> None:
        self.text: list[str] = [] if text is None else text
        self._ids: list[list[int] | None] = []
        #: Tokens of pieces without ids that are not one token: those of ours, and what is left of a piece that was cut.
        self._parts: dict[int, int] = {}
        #: Characters of all text.
        self.chars = 0

    def add(self, text: str, ids: list[int] | None) -> None:
        """A piece of an engine's answer. Without ids it counts as one token."""
        self.text.append(text)
        self._ids.append(ids)
        self.chars += len(text)

    def insert(self, text: str) -> None:
        """Text that no engine made: it counts no tokens."""
        self._parts[len(self._ids)] = 0
        self.add(text, None)

    def spread(self, tokens: int) -> None:
        """The one piece that there is took so many tokens."""
        self._parts[len(self._ids) - 1] = tokens

    @property
    def tokens(self) -> int:
        """Tokens that engines made of what is there: exact where they told all ids."""
        return sum(self._count(place) for place in range(len(self._ids)))

    @property
    def exact(self) -> bool:
        """Whether every piece that an engine made has its ids."""
        return all(ids is not None or not self._count(place) for place, ids in enumerate(self._ids))

    def _count(self, place: int) -> int:
        ids = self._ids[place]
        return self._parts.get(place, 1) if ids is None else len(ids)

    def between(self, begin: int, end: int) -> str:
        """Some of the text, by characters."""
        pieces: list[str] = []
        at = self.chars
        for text in reversed(self.text):
            at -= len(text)
            if at < end:
                pieces.append(text[max(0, begin - at) : end - at])
            if at <= begin:
                break
        return "".join(reversed(pieces))

    def cut(self, chars: int) -> Said:
        """Forget all after the first `chars` characters; what is left, to go on from.

        Ids of tokens that made no text at the cut (the first bytes of a character) go too: nobody saw them.
        """
        while self.text and (self.chars > chars or not self.text[-1]):
            place = len(self._ids) - 1
            count = self._count(place)
            text = self.text.pop()
            self._ids.pop()
            self._parts.pop(place, None)
            self.chars -= len(text)
            if text and self.chars < chars:
                kept = text[: chars - self.chars]
                self.text.append(kept)
                self._ids.append(None)  # a piece in two: which tokens are whose is not known
                self._parts[place] = 0 if not count else max(1, round(count * len(kept) / len(text)))
                self.chars = chars
        said: list[int] | None = []
        for one in self._ids:
            if one is None:
                said = None
                break
            assert said is not None
            said.extend(one)
        return Said("".join(self.text), self.tokens, said)
