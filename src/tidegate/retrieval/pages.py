"""What the pages of a document say about each other: running headers and footers, contents, a cover, tables that go on overleaf."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence

import msgspec

from tidegate.core.document import Box
from tidegate.retrieval.loaded import Part
from tidegate.retrieval.pdf_text import Frame, Line
from tidegate.retrieval.tables import Table

#: Lines in the outer share of a page may be running headers and footers, and its first and last lines where they are a page's number.
MARGIN_SHARE, EDGE_LINES = 0.08, 2
#: They stand on so many pages at least, and on so large a share of them: left and right pages may have their own; or on so many, in a long
#: document, for a chapter may have its own.
RUNNING_PAGES, RUNNING_SHARE, RUNNING_ENOUGH = 3, 0.3, 6
#: A cover has fewer characters than this, and none of a longer paragraph.
COVER_CHARS, COVER_LINE_CHARS = 1_200, 120
#: A document has a cover from so many pages on.
COVER_PAGES = 4
#: Entries of a page of contents at least, the share of its rows that end in a page number, and of those that do not go back.
CONTENTS_ENTRIES, CONTENTS_SHARE, CONTENTS_RISING = 4, 0.4, 0.85
_NUMBER = re.compile(r"\W*(?:page|p\.|第|seite)?\s*(?:\d{1,4}|[ivxlc]{1,6})\s*(?:(?:of|/|页 ?共|页，共)\s*\d{1,4})?\s*页?\W*", re.IGNORECASE)
_CONTENTS = re.compile(r"(?:table of )?contents|index|目\s*录|目\s*次", re.IGNORECASE)
_ENTRY = re.compile(r"\D.*?(?:[.…·_]{3,}|(?:\. ?){3,}|\s)\s*(\d{1,4})")
_LEADERS = re.compile(r"[.…·_]{4,}|(?:\. ){3,}")


class Item(msgspec.Struct):
    """A line of text, or a table, at its place on a page."""

    x0: float
    top: float
    x1: float
    bottom: float
    line: Line | None = None
    table: Table | None = None
    part: Part = "body"

    @property
    def text(self) -> str:
        return self.line.text if self.line else ""

    @property
    def upright(self) -> bool:
        """A text that runs up or down the page, as in its margin."""
        return self.line is not None and self.line.upright


class Page(msgspec.Struct):
    """`number` counts from 1. `read`: the page turned so that its text stands upright, to which the items' places belong."""

    number: int
    items: list[Item]
    read: Frame
    frame: Frame

    @property
    def height(self) -> float:
        return self.read.height

    def shown(self, box: Box) -> Box:
        """Where a box of this page's items stands on the page as it is shown."""
        x0, top, x1, bottom = box[1:] if self.read == self.frame else self.frame.shown(*self.read.in_file(*box[1:]))
        return Box(self.number, round(x0, 1), round(top, 1), round(x1, 1), round(bottom, 1))


def drop_running(pages: Sequence[Page], notes: list[str]) -> None:
    """Leave out headers and footers that repeat, figures aside, and say which."""
    keys = [_running_keys(page) for page in pages]
    seen = Counter(key for of_page in keys for key in set(of_page.values()))
    least = max(RUNNING_PAGES, min(RUNNING_SHARE * len(pages), RUNNING_ENOUGH))
    running = {key for key, times in seen.items() if times >= least}
    for page, of_page in zip(pages, keys, strict=True):
        page.items = [item for at, item in enumerate(page.items) if of_page.get(at) not in running]
    notes.extend(f"A running header or footer on {seen[key]} pages was left out: {key!r}." for key in sorted(running))


def _running_keys(page: Page) -> dict[int, str]:
    """By place among the page's items, what would be the same on another page."""
    lines = [at for at, item in enumerate(page.items) if item.line]
    lines.sort(key=lambda at: page.items[at].top)
    inside = _without_tables(page, lines)
    edge = {*inside[:EDGE_LINES], *inside[-EDGE_LINES:]}
    margin = MARGIN_SHARE * page.height
    keys = {}
    for at in lines:
        item = page.items[at]
        outside = item.bottom <= margin or item.top >= page.height - margin
        if outside or item.upright or (at in edge and _NUMBER.fullmatch(item.text.strip())):
            keys[at] = re.sub(r"\d+|\b[ivxlc]+\b", "#", item.text)
    return keys


def _without_tables(page: Page, lines: list[int]) -> list[int]:
    """Lines with a table further out on both sides are inside the page."""
    tables = [item for item in page.items if item.table]
    first, last = min((item.top for item in tables), default=page.height), max((item.bottom for item in tables), default=0.0)
    above = [at for at in lines if page.items[at].bottom <= first + 1]
    below = [at for at in lines if page.items[at].top >= last - 1]
    return lines if not tables else [*above[:EDGE_LINES], *below[-EDGE_LINES:]]


def mark_cover(pages: Sequence[Page], body_size: float) -> None:
    if len(pages) >= COVER_PAGES and pages[0].number == 1 and _is_cover(pages[0], body_size):
        for item in pages[0].items:
            item.part = "cover"


def contents(rows: Sequence[str], pages: int, *, titled: bool = False) -> tuple[int, int] | None:
    """First and last row of a table of contents: most rows between them name something and end in a page's number, the numbers rise, and
    there is a title above or dots before the numbers. `titled`: the page before is one. None where there is none."""
    entries = {at: int(found.group(1)) for at, row in enumerate(rows) if (found := _ENTRY.fullmatch(row.strip()))}
    entries = {at: number for at, number in entries.items() if number <= 2 * pages + 50}
    if len(entries) < CONTENTS_ENTRIES:
        return None
    first, last = min(entries), max(entries)
    rising = sum(low <= high for low, high in itertools.pairwise(entries.values())) / (len(entries) - 1)
    titles = [at for at, row in enumerate(rows[:first]) if _CONTENTS.fullmatch(row.strip())]
    dotted = sum(bool(_LEADERS.search(rows[at])) for at in entries) >= 0.5 * len(entries)
    if rising < CONTENTS_RISING or len(entries) < CONTENTS_SHARE * (last - first + 1) or not (titled or titles or dotted):
        return None
    return min([first, *titles[-1:]]), last


def _is_cover(page: Page, body_size: float) -> bool:
    texts = [item.line for item in page.items if item.line]
    if not texts or any(item.table or item.part != "body" for item in page.items):
        return False
    short = sum(len(line.text) for line in texts) <= COVER_CHARS and all(len(line.text) <= COVER_LINE_CHARS for line in texts)
    return short and max(line.size for line in texts) > 1.3 * body_size


def body_size(pages: Sequence[Page]) -> float:
    """The size of most of the text."""
    sizes = Counter[float]()
    for page in pages:
        for item in page.items:
            if item.line:
                sizes[item.line.size] += len(item.text)
    return sizes.most_common(1)[0][0] if sizes else 0.0
