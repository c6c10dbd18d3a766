"""PDF: text and geometry by PDFium, tables by their lines and by how words are aligned, pictures of text by OCR where that is set.

A page without text is noted (scan, or empty); a document without any is refused. Coordinates here are points from the top left corner of
the page as it is shown, rotation applied.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pypdfium2
import pypdfium2.raw as pdfium

from tidegate.core.document import Box
from tidegate.core.errors import DocumentUnreadable
from tidegate.retrieval import aligned, front_matter, ocr, pages, pdf_text, ruled
from tidegate.retrieval.aligned import Word
from tidegate.retrieval.flow import compounds, goes_on, join_lines
from tidegate.retrieval.layout import reading_order
from tidegate.retrieval.loaded import Block, Bounds, Loaded, Part
from tidegate.retrieval.pages import Item, Page
from tidegate.retrieval.pdf_text import Drawn, Frame, Line
from tidegate.retrieval.tables import Table, around, joined

SUFFIXES = (".pdf",)

#: Of the file's time, as much may be gone when OCR begins its last page.
OCR_SHARE = 0.9
#: A page with fewer characters and pictures over this share of it is a scan.
SCAN_CHARS, SCAN_SHARE = 20, 0.5
#: Lines this much larger than the body's are headings.
HEADING_RATIO = 1.15
#: Longer ones are a text in large print.
HEADING_CHARS = 160
#: A table of contents stands on one of so many pages, or in the first quarter.
CONTENTS_PAGES = 4
#: A shorter text that a page breaks off is a line of its own.
OVERLEAF_CHARS = 60
#: The format came out in June 1993; a file that says that it was made before has no clock.
FIRST_PDF_UNIX_S = 739_000_000
#: What begins with one is an item of a list.
_BULLET = re.compile(r"[•●○▪■◦‣⁃➢✓]\s")
#: Of the lines, as many may be bold where bold lines are headings.
BOLD_SHARE = 0.25


def load(path: str, bounds: Bounds) -> Loaded:
    """Raises DocumentUnreadable: encrypted, broken, too many pages, no text."""
    notes: list[str] = []
    with closing(_open(path)) as document:
        read = list(_pages(document, bounds, notes))
        title, made = (_said(document, name).strip() for name in ("Title", "CreationDate"))
    if not read:
        raise DocumentUnreadable("The PDF holds no text: " + " ".join(notes[:3]), hint=ocr.HINT)
    pages.drop_running(read, notes)
    size = pages.body_size(read)
    pages.mark_cover(read, size)
    blocks = _blocks(read, size)
    return Loaded(title or _first_heading(blocks) or Path(path).stem, blocks, {}, notes, _made_unix_s(made))


def _said(document: Any, name: str) -> str:
    """What the file says of itself; "" where it says nothing, or what are no characters."""
    try:
        return str(document.get_metadata_value(name))
    except UnicodeDecodeError:
        return ""


def _made_unix_s(stamp: str) -> float | None:
    """When the PDF was made, as it says itself: `D:YYYYMMDDHHmmSS+HH'mm'` (ISO 32000-1, 7.9.4), UTC without a zone. None where it says nothing, or
    what cannot be: before there were PDFs, or after now."""
    found = re.match(r"D:(\d{4})(\d\d)(\d\d)(?:(\d\d)(\d\d)(\d\d)?)?(?:Z|([+-]\d\d)'?(\d\d)?)?", stamp)
    if found is None:
        return None
    year, month, day, hour, minute, second, zone, zone_minute = found.groups(default="00")
    try:
        made = front_matter.unix_s(f"{year}-{month}-{day}T{hour}:{minute}:{second}{zone if zone != '00' else '+00'}:{zone_minute}")
    except (ValueError, OverflowError):
        return None
    return made if FIRST_PDF_UNIX_S < made < time.time_ns() / 1e9 else None


def pages_of(path: str, bounds: Bounds) -> Iterator[Page]:
    """Its pages as they are found, tables apart, before anything is made of them: for those who measure. Raises DocumentUnreadable."""
    with closing(_open(path)) as document:
        yield from _pages(document, bounds, [])


def _pages(document: Any, bounds: Bounds, notes: list[str]) -> Iterator[Page]:
    ends_ns = time.perf_counter_ns() + int(OCR_SHARE * bounds.seconds * 1e9)
    count = len(document)
    if count == 0:
        raise DocumentUnreadable("The PDF has no pages.", hint="Export it again.")
    if count > bounds.max_pages:
        hint = "Split it, or raise retrieval.max_pages."
        raise DocumentUnreadable(f"The PDF has {count} pages, more than {bounds.max_pages}.", hint=hint)
    reader = _Reader(document, bounds, ends_ns, notes)
    yield from (page for number in range(1, count + 1) if (page := reader.page(number)))


def _open(path: str) -> Any:
    try:
        return pypdfium2.PdfDocument(path)
    except pypdfium2.PdfiumError as error:
        if error.err_code == pdfium.FPDF_ERR_PASSWORD:
            hint = "Save a copy without the password."
            raise DocumentUnreadable("The PDF is encrypted and opens only with a password.", hint=hint) from None
        raise DocumentUnreadable(f"The PDF is broken: {error}", hint="Export or download it again.") from None


class _Reader:
    """Reads one page after the other."""

    def __init__(self, document: Any, bounds: Bounds, ends_ns: int, notes: list[str]) -> None:
        self._document = document
        self._bounds = bounds
        self._ends_ns = ends_ns
        self._notes = notes
        #: The last page of contents.
        self._last_contents = 0

    def page(self, number: int) -> Page | None:
        """One page, or None where it has no text; a note says why."""
        try:
            page = self._document[number - 1]
        except pypdfium2.PdfiumError as error:
            self._notes.append(f"Page {number} is broken and was left out: {error}")
            return None
        with closing(page):
            shown = Frame.of(page)
            frame = pdf_text.upright(page, shown)
            lines = pdf_text.lines(page, frame)
            drawn = pdf_text.drawn(page, frame)
            chars = sum(len(line.text) for line in lines)
            if chars < SCAN_CHARS and drawn.pictures >= SCAN_SHARE:
                lines, frame = self._read_picture(page, number, shown)
                drawn = Drawn()
            elif not chars:
                self._notes.append(f"Page {number} is empty.")
            if not lines:
                return None
        if (unknown := sum(line.text.count("\ufffd") for line in lines)) > 0.1 * chars > 0:
            self._notes.append(f"Page {number}: {unknown} of {chars} characters have no meaning in the file's fonts and are shown as \ufffd.")
        words = [word for line in lines for word in line.words]
        listed = self._contents(number, words)
        words = [word for word in words if not (listed and listed[0] <= word.top and word.bottom <= listed[1])]
        if drawn.paths > pdf_text.DRAWING_PATHS:
            self._notes.append(f"Page {number} is a drawing of {drawn.paths} lines: they were not searched for tables.")
            drawn.across, drawn.down = [], []
        tables = ruled.find(drawn.across, drawn.down, words, number)
        aside = {id(word) for line in lines if line.upright for word in line.words}
        words = [word for word in words if id(word) not in aside and not any(_inside(word, table.box) for table in tables)]
        tables += aligned.find(words, drawn.across, number)
        items = _items(lines, tables)
        for item in items:
            if listed and item.top >= listed[0] - 1 and item.bottom <= listed[1] + 1:
                item.part = "contents"
        return Page(number, items, frame, shown)

    def _contents(self, number: int, words: list[Word]) -> tuple[float, float] | None:
        """From where to where the page is a table of contents, which is looked for at the beginning of a document only."""
        count = len(self._document)
        if number > max(CONTENTS_PAGES, count // 4):
            return None
        rows = aligned.row_texts(words)
        found = pages.contents([text for text, _, _ in rows], count, titled=self._last_contents == number - 1 > 0)
        if found is None:
            return None
        self._last_contents = number
        self._notes.append(f"A table of contents on page {number} makes no passages.")
        return rows[found[0]][1], rows[found[1]][2]

    def _read_picture(self, page: Any, number: int, frame: Frame) -> tuple[list[Line], Frame]:
        """The lines of a scan, and how the page was turned for it."""
        if self._bounds.ocr == "off":
            self._notes.append(f"Page {number} is a picture (a scan) and was not read.")
            return [], frame
        left_s = (self._ends_ns - time.perf_counter_ns()) / 1e9
        read = ocr.read(page, frame, self._bounds.ocr_languages, left_s)
        self._notes.append(f"Page {number} is a picture (a scan): {read.note}.")
        return read.lines, frame.turned(180 if read.turned else 0)


def _inside(word: Word, box: Box) -> bool:
    x, y = (word.x0 + word.x1) / 2, (word.top + word.bottom) / 2
    return box.x0 - 1 <= x <= box.x1 + 1 and box.top - 1 <= y <= box.bottom + 1


def _items(lines: Sequence[Line], tables: Sequence[Table]) -> list[Item]:
    """Tables, and lines of the words that are in none."""
    boxes = [table.box for table in tables]
    items = [Item(*box[1:], table=table) for box, table in zip(boxes, tables, strict=True)]
    outside = []
    for line in lines:
        words = [word for word in line.words if not any(_inside(word, box) for box in boxes)]
        if words:
            outside.append(line if len(words) == len(line.words) else pdf_text.line_of(words, line.size, line.bold, line.upright))
    for line in pdf_text.whole(outside):
        line.words = []  # memory stays constant over the pages
        items.append(Item(line.x0, line.top, line.x1, line.bottom, line=line))
    return items


def _blocks(read: Sequence[Page], size: float) -> list[Block]:
    levels = _Levels(read, size)
    blocks: list[Block] = []
    table: Table | None = None  # the last block, where it is one
    broken: dict[float, int] = {}  # by the size of its print, the last paragraph since a heading or a table: it may go on behind footnotes
    hyphened = compounds(item.text for page in read for item in page.items)
    for page in read:
        across = [item for item in page.items if not item.upright]
        for group in _paragraphs([*reading_order(across), *(item for item in page.items if item.upright)]):
            found, part = group[0].table, group[0].part
            if found is not None:
                found.boxes = [page.shown(box) for box in found.boxes]
                whole = joined(table, found) if table and table.boxes[-1].page == page.number - 1 else None
                if whole is not None:
                    blocks.pop()
                table = whole or found
                broken.clear()
                blocks.append(Block(table.markdown(), "table", boxes=table.line_boxes(), part=part))
                continue
            lines = [item.line for item in group if item.line]
            text = join_lines((line.text for line in lines), hyphened)
            box = page.shown(around(Box(page.number, item.x0, item.top, item.x1, item.bottom) for item in group))
            table = None
            if group[0].upright:
                blocks.append(Block(text, boxes=[box], part=part))
                continue
            if level := levels.of(lines, text):
                broken.clear()
                blocks.append(Block(text, "heading", level, [box], part))
                continue
            at = broken.get(lines[0].size)
            if at is not None and _overleaf(blocks[at], text, part) and (at == len(blocks) - 1 or _elsewhere(blocks[at].boxes[-1], box)):
                blocks[at] = Block(join_lines([blocks[at].text, text], hyphened), boxes=[*blocks[at].boxes, box], part=part)
            else:
                broken[lines[0].size] = len(blocks)
                blocks.append(Block(text, boxes=[box], part=part))
    return blocks


def _overleaf(last: Block, text: str, part: Part) -> bool:
    """Whether a paragraph that begins a page, or a column, is the rest of the one before it."""
    return last.kind == "paragraph" and last.part == part and len(last.text) > OVERLEAF_CHARS and goes_on(last.text, text)


def _elsewhere(last: Box, box: Box) -> bool:
    """On another page, or in the next column."""
    return box.page != last.page or box.top < last.bottom


class _Levels:
    """Which lines are headings: those in larger print by their size; and bold ones, where few lines are bold."""

    def __init__(self, read: Sequence[Page], size: float) -> None:
        lines = [item.line for page in read for item in page.items if item.line]
        sizes = {line.size for line in lines if line.size >= HEADING_RATIO * size and size}
        self._sizes = sorted(sizes, reverse=True)
        self._bold = 0 < sum(line.bold for line in lines) <= BOLD_SHARE * len(lines)
        self._body = size

    def of(self, lines: Sequence[Line], text: str) -> int:
        """1 to 6; 0 for what is none."""
        if len(text) > HEADING_CHARS or text.endswith((".", "。", ";", "；", ",", "，")) or not any(map(str.isalpha, text)):
            return 0
        if lines[0].size in self._sizes:
            return min(6, self._sizes.index(lines[0].size) + 1)
        if self._bold and all(line.bold and line.size >= self._body for line in lines) and not text.endswith((":", "：")):
            return min(6, len(self._sizes) + 1)
        return 0


def _paragraphs(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Lines that follow each other as closely as lines on this page do, in one size; a table stands alone."""
    group: list[Item] = []
    height = statistics.median([item.bottom - item.top for item in items if item.line] or [0.0])
    leading = statistics.median([gap for gap in map(_gap, items, items[1:]) if 0 < gap < 2 * height] or [0.0])
    for item in items:
        if group and not _follows(group[-1], item, height, leading):
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def _gap(last: Item, item: Item) -> float:
    return item.top - last.bottom


def _follows(last: Item, item: Item, height: float, leading: float) -> bool:
    if last.line is None or item.line is None or last.part != item.part or _BULLET.match(item.text):
        return False
    if abs(last.line.size - item.line.size) > 0.5 or last.line.bold != item.line.bold:
        return False
    return -height <= _gap(last, item) <= min(1.3 * leading + 1.0, 1.5 * height) and item.x0 <= last.x1


def _first_heading(blocks: list[Block]) -> str:
    return next((block.text for block in blocks if block.kind == "heading"), "")
