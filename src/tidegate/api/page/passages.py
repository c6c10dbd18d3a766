"""The passages that a request read: what its flight noted of them, and what the store holds of them now.

A passage's id names its text, so what is shown is what was read. Places and file are read in one statement: they are of one version of the
document, and a picture is asked for by the file's digest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tidegate.core.document import Box, PagePicture, StoredPassage
from tidegate.core.errors import NotFound, TidegateError
from tidegate.core.flight import FlightRecord
from tidegate.core.ports import FileStore
from tidegate.core.search import Leg

#: Of a passage that stands on more pages, the first ones are shown.
MOST_PAGES = 4
#: What people read for a leg.
_LEGS: dict[Leg, str] = {"vector": "by nearness", "words": "by words"}


@dataclass(frozen=True, slots=True)
class ReadPassage:
    """The passage number `n` of a request. `ranks`: a leg's name and where it had the passage. `now`: None where it is not stored any more, or
    nobody could say."""

    n: int
    id: str
    score: float | None
    ranks: list[tuple[str, int]]
    now: StoredPassage | None = None

    @property
    def pages(self) -> list[int]:
        """Where it stands, in its own order; without places, the page that it begins on."""
        if self.now is None:
            return []
        return list(dict.fromkeys(box.page for box in self.now.boxes)) or ([self.now.page] if self.now.page else [])

    @property
    def pictured(self) -> bool:
        """Whether there is something to draw."""
        return self.now is not None and bool(self.now.boxes) and self.now.file_sha256 is not None

    def places(self, page: int) -> list[Box]:
        """Its boxes on a page."""
        return [box for box in self.now.boxes if box.page == page] if self.now is not None else []


@dataclass(frozen=True, slots=True)
class Sheet:
    """A page with the passage's places on it, or why it cannot be shown."""

    page: int
    places: list[Box]
    picture: PagePicture | None = None
    problem: TidegateError | None = None


def noted(flight: FlightRecord) -> list[ReadPassage]:
    """What the flight itself says."""
    facts = _retrieved(flight)
    scores = _each(facts.get("scores"), flight)
    legs = {name: _each(facts.get(leg), flight) for leg, name in _LEGS.items()}
    return [
        ReadPassage(
            n + 1, id, scores[n] if isinstance(scores[n], float | int) else None,
            [(name, int(stand[n][0])) for name, stand in legs.items() if isinstance(stand[n], list | tuple) and stand[n]],
        )
        for n, id in enumerate(flight.passage_ids)
    ]  # fmt: skip


async def read(files: FileStore | None, flight: FlightRecord) -> list[ReadPassage]:
    """With what the store holds of each. Raises StoreDown."""
    passages = noted(flight)
    collection = _retrieved(flight).get("collection")
    if not passages or files is None or not isinstance(collection, str):
        return passages
    found = {one.id: one for one in await files.stored_passages(collection, flight.passage_ids)}
    return [ReadPassage(one.n, one.id, one.score, one.ranks, found.get(one.id)) for one in passages]


def without(passage: ReadPassage, flight: FlightRecord, files: FileStore | None) -> tuple[str, str]:
    """Why there is no picture of a passage, and what to do, in plain sentences; empty where there is one."""
    if passage.now is None:
        if "collection" not in _retrieved(flight):
            return "This passage is a part of what the request itself brought along.", "It is kept nowhere."
        if files is None:
            return "Passages are kept outside the database here.", "Look at the document itself."
        return "This passage is no longer in its collection.", "Its document was changed or removed since."
    if not passage.now.boxes:
        return ("This document has no pages that could be shown." if not passage.now.page else "Where it stands on its page is not known."), ""
    if passage.now.file_sha256 is None:
        return "The file of this document is not kept.", "With `retrieval.keep_files`, ingest it again."
    return "", ""


def on_page(passage: ReadPassage, page: str) -> int:
    """A page's number as it stands in an address. Raises NotFound where the passage does not stand there."""
    number = int(page) if page.isascii() and page.isdigit() and len(page) < 10 else 0
    if number not in passage.pages:
        standing = ", ".join(map(str, passage.pages)) or "no page"
        raise NotFound(f"This passage does not stand on page {page[:20]}.", hint=f"It stands on {standing}.")
    return number


def _retrieved(flight: FlightRecord) -> dict[str, Any]:
    """The facts of the last search, which found the passages."""
    return next((facts for _, what, facts in reversed(flight.decisions) if what == "retrieved"), {})


def _each(facts: Any, flight: FlightRecord) -> list[Any]:
    """One for each passage; None where the flight does not say."""
    fits = isinstance(facts, list | tuple) and len(facts) >= len(flight.passage_ids)
    return list(facts)[: len(flight.passage_ids)] if fits else [None] * len(flight.passage_ids)
