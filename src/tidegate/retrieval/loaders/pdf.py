"""PDF: text and geometry by PDFium; pages with ruled lines also go to pdfplumber, which finds their tables.

A page without text is noted (scan, or empty); a document without any is refused. Coordinates here are points from the top left corner of
the page as it is shown, rotation applied.
"""

from __future__ import annotations

import ctypes
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pypdfium2
import pypdfium2.raw as pdfium

from tidegate.core.errors import DocumentUnreadable
from tidegate.retrieval.flow import join_lines
from tidegate.retrieval.layout import reading_order
from tidegate.retrieval.loaded import Block, Bounds, Loaded, markdown_table

SUFFIXES = (".pdf",)

#: From this many path objects on a page is taken for one with ruled lines: two rules above and below a text are no table.
TABLE_PATHS = 8
#: Beyond this many a page is a drawing or a map, and looking for tables would take minutes.
DRAWING_PATHS = 20_000
#: Finding tables may use this share of the file's time; then tables are read as lines of text, and a note says so.
TABLES_SHARE = 0.5
#: A page with fewer characters and pictures over this share of it is a scan.
SCAN_CHARS, SCAN_SHARE = 20, 0.5
#: Lines this much larger than the body's are headings.
HEADING_RATIO = 1.15
#: Longer ones are a text in large print.
HEADING_CHARS = 160
#: Lines in the outer share of a page that repeat on half of the pages are running headers and footers.
MARGIN_SHARE = 0.08

# PDFium's own signs: it puts U+FFFE where a word was hyphenated at a line's end, and U+0002 where older fonts do so.
_HYPHENS = {0xFFFE, 0x2, 0xAD}


class Line(msgspec.Struct):
    """A line of text, or a whole table, at its place."""

    text: str
    x0: float
    top: float
    x1: float
    bottom: float
    size: float = 0.0
    table: bool = False


class Page(msgspec.Struct):
    """`number` counts from 1; `width` and `height` in points."""

    number: int
    width: float
    height: float
    lines: list[Line]


def load(path: str, bounds: Bounds) -> Loaded:
    """Raises DocumentUnreadable: encrypted, broken, too many pages, no text."""
    with closing(_open(path)) as document, closing(Tables(path, bounds.seconds * TABLES_SHARE)) as tables:
        count = len(document)
        if count == 0:
            raise DocumentUnreadable("The PDF has no pages.", hint="Export it again.")
        if count > bounds.max_pages:
            hint = "Split it, or raise retrieval.max_pages."
            raise DocumentUnreadable(f"The PDF has {count} pages, more than {bounds.max_pages}.", hint=hint)
        notes: list[str] = []
        pages = [page for number in range(1, count + 1) if (page := _page(document, number, tables, notes))]
        if not any(page.lines for page in pages):
            hint = "If it is a scan, run it through OCR first (ocrmypdf)."
            raise DocumentUnreadable("The PDF holds no text: " + " ".join(notes[:3]), hint=hint)
        _drop_running(pages, notes)
        blocks = _blocks(pages)
        title = str(document.get_metadata_dict().get("Title", "")).strip()
    return Loaded(title or _first_heading(blocks) or Path(path).stem, blocks, {}, notes + tables.notes)


def _open(path: str) -> Any:
    try:
        return pypdfium2.PdfDocument(path)
    except pypdfium2.PdfiumError as error:
        if error.err_code == pdfium.FPDF_ERR_PASSWORD:
            hint = "Save a copy without the password."
            raise DocumentUnreadable("The PDF is encrypted and opens only with a password.", hint=hint) from None
        raise DocumentUnreadable(f"The PDF is broken: {error}", hint="Export or download it again.") from None


def _page(document: Any, number: int, tables: Tables, notes: list[str]) -> Page | None:
    """One page, or None where it has no text; a note says why."""
    try:
        page = document[number - 1]
    except pypdfium2.PdfiumError as error:
        notes.append(f"Page {number} is broken and was left out: {error}")
        return None
    with closing(page):
        frame = Frame.of(page)
        lines = _lines(page, frame)
        chars = sum(len(line.text) for line in lines)
        paths, picture_share = _objects(page)
        if chars < SCAN_CHARS and picture_share >= SCAN_SHARE:
            notes.append(f"Page {number} is a picture (a scan) and was not read.")
            return None
        if not chars:
            notes.append(f"Page {number} is empty.")
            return None
        if (unknown := sum(line.text.count("\ufffd") for line in lines)) > 0.1 * chars:
            notes.append(f"Page {number}: {unknown} of {chars} characters have no meaning in the file's fonts and are shown as \ufffd.")
        if paths >= TABLE_PATHS:
            lines = tables.put_into(lines, number, paths)
        return Page(number, frame.width, frame.height, lines)


class Frame(msgspec.Struct, frozen=True):
    """From the file's own coordinates (from the bottom left, not rotated) to the page as it is shown."""

    left: float
    bottom: float
    right: float
    top: float
    rotation: int

    @classmethod
    def of(cls, page: Any) -> Frame:
        left, bottom, right, top = page.get_mediabox()
        return cls(left, bottom, right, top, page.get_rotation())

    @property
    def width(self) -> float:
        return self.right - self.left if self.rotation in (0, 180) else self.top - self.bottom

    @property
    def height(self) -> float:
        return self.top - self.bottom if self.rotation in (0, 180) else self.right - self.left

    def shown(self, x0: float, y0: float, x1: float, y1: float) -> tuple[float, float, float, float]:
        """x0, top, x1, bottom."""
        if self.rotation == 90:
            return y0 - self.bottom, x0 - self.left, y1 - self.bottom, x1 - self.left
        if self.rotation == 180:
            return self.right - x1, y0 - self.bottom, self.right - x0, y1 - self.bottom
        if self.rotation == 270:
            return self.top - y1, self.right - x1, self.top - y0, self.right - x0
        return x0 - self.left, self.top - y1, x1 - self.left, self.top - y0


def _lines(page: Any, frame: Frame) -> list[Line]:
    with closing(page.get_textpage()) as textpage:
        raw = textpage.raw
        codes = [pdfium.FPDFText_GetUnicode(raw, at) for at in range(textpage.count_chars())]
        found = []
        for start, end in _line_ranges(codes):
            text = _text(codes[start:end])
            if text and (box := _box(raw, start, end, frame)):
                found.append(Line(text, *box, size=round(pdfium.FPDFText_GetFontSize(raw, start) * 2) / 2))
        return found


def _line_ranges(codes: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for at, code in enumerate(codes):
        if code in (10, 13):
            if at > start:
                yield start, at
            start = at + 1
        elif code in _HYPHENS:  # the line ends here, and its hyphen stays with it
            yield start, at + 1
            start = at + 1
    if start < len(codes):
        yield start, len(codes)


def _text(codes: Iterable[int]) -> str:
    """UTF-16 units to text; NUL and lone surrogates, which no database stores, become U+FFFD."""
    units = b"".join((ord("-") if code in _HYPHENS else code or 0xFFFD).to_bytes(2, "little") for code in codes if code <= 0xFFFF)
    text = units.decode("utf-16-le", "replace")
    return " ".join("".join(char if char.isprintable() or char.isspace() else "\ufffd" for char in text).split())


def _box(raw: Any, start: int, end: int, frame: Frame) -> tuple[float, float, float, float] | None:
    left, top, right, bottom = (ctypes.c_double() for _ in range(4))
    boxes = [
        (left.value, bottom.value, right.value, top.value)
        for at in range(pdfium.FPDFText_CountRects(raw, start, end - start))
        if pdfium.FPDFText_GetRect(raw, at, left, top, right, bottom)
    ]
    if not boxes:
        return None
    return frame.shown(min(b[0] for b in boxes), min(b[1] for b in boxes), max(b[2] for b in boxes), max(b[3] for b in boxes))


def _objects(page: Any) -> tuple[int, float]:
    """How many path objects a page has, and the share of it that pictures cover (1.0 at most)."""
    paths, covered = 0, 0.0
    width, height = page.get_size()
    for item in page.get_objects(max_depth=4):
        if item.type == pdfium.FPDF_PAGEOBJ_PATH:
            paths += 1
        elif item.type == pdfium.FPDF_PAGEOBJ_IMAGE:
            x0, y0, x1, y1 = item.get_bounds()
            covered += max(0.0, x1 - x0) * max(0.0, y1 - y0)
    return paths, min(1.0, covered / (width * height or 1.0))


class Tables:
    """Finds ruled tables with pdfplumber, opened at the first page that may have one. `notes`: what could not be looked at."""

    def __init__(self, path: str, seconds: float) -> None:
        self._path = path
        self._left_s = seconds
        self._document: Any = None
        self._late: list[int] = []
        self._notes: list[str] = []

    @property
    def notes(self) -> list[str]:
        if not self._late:
            return self._notes
        pages = f"{self._late[0]} to {self._late[-1]}"
        return [*self._notes, f"Tables on pages {pages} were read as lines of text: finding them took too long."]

    def put_into(self, lines: list[Line], number: int, paths: int) -> list[Line]:
        """The page's lines with those inside a table replaced by the table."""
        if paths > DRAWING_PATHS:
            self._notes.append(f"Page {number} is a drawing of {paths} lines: it was not searched for tables.")
            return lines
        if self._left_s <= 0:
            self._late.append(number)
            return lines
        began_ns = time.perf_counter_ns()
        try:
            found = list(self._find(number))
        except Exception as error:  # noqa: BLE001 - pdfminer raises whatever a malformed file makes it raise; the page's text is still good
            self._notes.append(f"Page {number} could not be searched for tables ({type(error).__name__}): they were read as lines of text.")
            return lines
        finally:
            self._left_s -= (time.perf_counter_ns() - began_ns) / 1e9
        kept = [line for line in lines if not any(_inside(line, table) for table in found)]
        return kept + found

    def _find(self, number: int) -> Iterator[Line]:
        if self._document is None:
            import pdfplumber  # 60 MB and half a second: only for files that may have tables

            self._document = pdfplumber.open(self._path)
        page = self._document.pages[number - 1]
        try:
            for table in page.find_tables():
                if rows := _table_rows(table):
                    x0, top, x1, bottom = table.bbox
                    yield Line(markdown_table(rows), x0, top, x1, bottom, table=True)
        finally:
            page.close()  # drops the page's parsed objects: memory stays constant over the pages

    def close(self) -> None:
        if self._document is not None:
            self._document.close()


def _table_rows(table: Any) -> list[list[str]]:
    """Cell texts with merged cells repeated in each place they cover; [] for a frame around text and for text that fonts do not explain."""
    texts = table.extract()
    if len(texts) < 2 or len(texts[0]) < 2:
        return []
    pairs = [pair for row, line in zip(table.rows, texts, strict=True) for pair in zip(row.cells, line, strict=True)]
    by_box = {cell: text or "" for cell, text in pairs if cell}
    middles = [_column_middle(table, at) for at in range(len(texts[0]))]
    rows = []
    for row in table.rows:
        middle = (row.bbox[1] + row.bbox[3]) / 2
        rows.append([by_box[cell] if cell else _covering(by_box, middles[at], middle) for at, cell in enumerate(row.cells)])
    filled = [cell for row in rows for cell in row if cell.strip()]
    if len(filled) < 0.3 * len(rows) * len(rows[0]) or any("(cid:" in cell for cell in filled):
        return []
    return [[join_lines(cell.split("\n")) for cell in row] for row in rows if any(cell.strip() for cell in row)]


def _column_middle(table: Any, at: int) -> float:
    narrowest = min((row.cells[at] for row in table.rows if row.cells[at]), key=lambda cell: cell[2] - cell[0], default=None)
    return (narrowest[0] + narrowest[2]) / 2 if narrowest else -1.0


def _covering(by_box: dict[tuple[float, float, float, float], str], x: float, y: float) -> str:
    return next((text for (x0, top, x1, bottom), text in by_box.items() if x0 <= x <= x1 and top <= y <= bottom), "")


def _inside(line: Line, table: Line) -> bool:
    x, y = (line.x0 + line.x1) / 2, (line.top + line.bottom) / 2
    return table.x0 <= x <= table.x1 and table.top <= y <= table.bottom


def _drop_running(pages: list[Page], notes: list[str]) -> None:
    """Leave out headers and footers that repeat (page numbers aside), and say which."""
    seen = Counter(key for page in pages for key in {_running_key(line, page) for line in page.lines} - {None})
    running = {key for key, times in seen.items() if times >= max(3, len(pages) / 2)}
    for page in pages:
        page.lines = [line for line in page.lines if _running_key(line, page) not in running]
    notes.extend(f"A running header or footer on {seen[key]} pages was left out: {key!r}." for key in sorted(filter(None, running)))


def _running_key(line: Line, page: Page) -> str | None:
    margin = MARGIN_SHARE * page.height
    if line.table or (margin < line.top and line.bottom < page.height - margin):
        return None
    return re.sub(r"\d+", "#", line.text)


def _blocks(pages: list[Page]) -> list[Block]:
    sizes = Counter[float]()
    for page in pages:
        for line in page.lines:
            sizes[line.size] += len(line.text) * (not line.table)
    body = sizes.most_common(1)[0][0]
    heading_sizes = sorted((size for size in sizes if size >= HEADING_RATIO * body), reverse=True)
    blocks: list[Block] = []
    for page in pages:
        for group in _paragraphs(reading_order(page.lines)):
            text, size = join_lines(line.text for line in group), group[0].size
            if group[0].table:
                blocks.append(Block(group[0].text, "table", page=page.number))
            elif size in heading_sizes and len(text) <= HEADING_CHARS and not text.endswith((".", "。", ";", "；", ",", "，")):
                blocks.append(Block(text, "heading", min(6, heading_sizes.index(size) + 1), page.number))
            else:
                blocks.append(Block(text, page=page.number))
    return blocks


def _paragraphs(lines: Sequence[Line]) -> Iterator[list[Line]]:
    """Lines that follow each other as closely as lines on this page do, in one size; a table stands alone."""
    group: list[Line] = []
    height = statistics.median([line.bottom - line.top for line in lines if not line.table] or [0.0])
    leading = statistics.median([gap for gap in map(_gap, lines, lines[1:]) if 0 < gap < 2 * height] or [0.0])
    for line in lines:
        if group and not _follows(group[-1], line, height, leading):
            yield group
            group = []
        group.append(line)
    if group:
        yield group


def _gap(last: Line, line: Line) -> float:
    return line.top - last.bottom


def _follows(last: Line, line: Line, height: float, leading: float) -> bool:
    if last.table or line.table or abs(last.size - line.size) > 0.5:
        return False
    return -height <= _gap(last, line) <= min(1.3 * leading + 1.0, 1.5 * height) and line.x0 <= last.x1


def _first_heading(blocks: list[Block]) -> str:
    return next((block.text for block in blocks if block.kind == "heading"), "")
