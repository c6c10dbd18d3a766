"""Word documents (docx): headings by their styles, paragraphs, lists, tables with merged cells.

Deleted text and what repeats on every page (headers, footers) is no text of the document.
"""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import msgspec

from tidegate.core.document import Box
from tidegate.core.errors import DocumentUnreadable
from tidegate.retrieval.loaded import Block, Bounds, Loaded, Part
from tidegate.retrieval.ooxml import Package
from tidegate.retrieval.tables import Cell, Table, tidy

SUFFIXES = (".docx",)

_BODY = "word/document.xml"
_HEADING = re.compile(r"heading (\d)", re.IGNORECASE)
#: Elements whose content is not shown, or stands there a second time for older programs.
_HIDDEN = {"Fallback", "del", "moveFrom", "instrText", "delText", "pPrChange", "rPrChange", "tblPrChange", "tcPrChange"}
#: Columns that one cell may cover.
_MAX_SPAN = 200
#: Word has nine levels of a list.
_MAX_LIST_DEPTH = 8


class Style(msgspec.Struct):
    """A paragraph style: what it says itself, and the style that it is based on."""

    name: str = ""
    base: str = ""
    outline: int | None = None


class Paragraph(msgspec.Struct):
    text: list[str]
    style: str = ""
    outline: int | None = None
    listed: bool = False
    depth: int = 0


class Grid(msgspec.Struct):
    """A table while it is read. `above`: the cell that each column's next cell goes on with, where it is merged downwards."""

    cells: list[Cell]
    above: dict[int, Cell]
    row: int = -1
    col: int = 0
    span: int = 1
    merge: str | None = None
    texts: list[str] = []


def load(path: str, bounds: Bounds) -> Loaded:
    """Raises DocumentUnreadable: broken, encrypted, a trap."""
    with closing(Package(path, bounds)) as package:
        if _BODY not in package:
            raise DocumentUnreadable("The file is an archive, but no Word document (it has no word/document.xml).", hint="Save it as .docx again.")
        body = _Body(_styles(package))
        package.parse(_BODY, body.start, body.end, body.text)
        title = package.title()
        notes = [
            f"The {what} of the document were left out." for what, name in (("footnotes", "word/footnotes.xml"), ("endnotes", "word/endnotes.xml"))
            if package.text_of(name, "t")
        ]  # fmt: skip
    if body.vanished:
        notes.append(f"{body.vanished} characters of hidden text were left out.")
    if not title:
        title = next((block.text for block in body.blocks if block.kind == "heading"), Path(path).stem)
    return Loaded(title, body.blocks, {}, notes)


def _styles(package: Package) -> dict[str, Style]:
    styles: dict[str, Style] = {}
    current = Style()

    def start(element: str, attributes: dict[str, str]) -> None:
        nonlocal current
        value = attributes.get("val", "")
        if element == "style":
            current = styles.setdefault(attributes.get("styleId", ""), Style())
        elif element == "name":
            current.name = value
        elif element == "basedOn":
            current.base = value
        elif element == "outlineLvl" and value.isdigit():
            current.outline = int(value)

    if "word/styles.xml" in package:
        package.parse("word/styles.xml", start, lambda _: None, lambda _: None)
    return styles


class _Body:
    """Takes the body's elements, gives blocks."""

    def __init__(self, styles: dict[str, Style]) -> None:
        self.blocks: list[Block] = []
        self._styles = styles
        self._paragraphs: list[Paragraph] = []
        self._grids: list[Grid] = []
        self._hidden = 0
        self._in_text = self._vanished = False
        #: Characters of text that is formatted as hidden: no reader sees it.
        self.vanished = 0
        self._list: list[str] = []

    def start(self, element: str, attributes: dict[str, str]) -> None:
        if self._hidden or element in _HIDDEN:
            self._hidden += 1
            return
        value = attributes.get("val", "")
        paragraph = self._paragraphs[-1] if self._paragraphs else None
        grid = self._grids[-1] if self._grids else None
        match element:
            case "p":
                self._paragraphs.append(Paragraph([]))
            case "t":
                self._in_text = True
            case "tbl":
                self._end_list()
                self._grids.append(Grid([], {}, texts=[]))
            case "tab" | "br" | "cr" | "noBreakHyphen" if paragraph:
                paragraph.text.append({"tab": " ", "noBreakHyphen": "-"}.get(element, "\n"))
            case "pStyle" if paragraph:
                paragraph.style = value
            case "outlineLvl" if paragraph and value.isdigit():
                paragraph.outline = int(value)
            case "numPr" if paragraph:
                paragraph.listed = True
            case "ilvl" if paragraph and value.isdigit():
                paragraph.depth = min(_MAX_LIST_DEPTH, int(value))
            case "r":
                self._vanished = False
            case "vanish":
                self._vanished = value not in ("0", "false", "off")
            case "tr" if grid:
                grid.row, grid.col = grid.row + 1, 0
            case "tc" if grid:
                grid.span, grid.merge, grid.texts = 1, None, []
            case "gridSpan" if grid and value.isdigit():
                grid.span = max(1, min(_MAX_SPAN, int(value)))
            case "gridBefore" if grid and value.isdigit():
                grid.col += min(_MAX_SPAN, int(value))
            case "vMerge" if grid:
                grid.merge = value or "continue"

    def text(self, text: str) -> None:
        if not (self._in_text and not self._hidden and self._paragraphs):
            return
        if self._vanished:
            self.vanished += len(text)
        else:
            self._paragraphs[-1].text.append(text)

    def end(self, element: str) -> None:
        if self._hidden:
            self._hidden -= 1
            return
        match element:
            case "t":
                self._in_text = False
            case "p" if self._paragraphs:
                self._end_paragraph(self._paragraphs.pop())
            case "tc" if self._grids:
                self._end_cell(self._grids[-1])
            case "tbl" if self._grids:
                self._end_table(self._grids.pop())
            case "body":
                self._end_list()

    def _end_paragraph(self, paragraph: Paragraph) -> None:
        text = "\n".join(" ".join(line.split()) for line in "".join(paragraph.text).split("\n")).strip()
        if not text:
            return
        if self._grids:
            self._grids[-1].texts.append(text)
            return
        if paragraph.listed and not self._level(paragraph):
            self._list.append("  " * paragraph.depth + f"- {text}")
            return
        self._end_list()
        part: Part = "contents" if self._named(paragraph.style).lower().startswith("toc ") else "body"
        if level := self._level(paragraph):
            self.blocks.append(Block(" ".join(text.split()), "heading", level, part=part))
        else:
            self.blocks.append(Block(text, part=part))

    def _named(self, style: str) -> str:
        return self._styles.get(style, Style()).name or style

    def _level(self, paragraph: Paragraph) -> int:
        """1 to 6 for a heading, by the paragraph's style or those that it is based on; 0 for others."""
        if paragraph.outline is not None:
            return 0 if paragraph.outline > 8 else min(6, paragraph.outline + 1)
        style, seen = paragraph.style, set[str]()
        while style and style not in seen:
            seen.add(style)
            found = self._styles.get(style, Style())
            name = found.name or style
            if heading := _HEADING.fullmatch(name):
                return min(6, max(1, int(heading.group(1))))
            if name.lower() == "title":
                return 1
            if found.outline is not None:
                return 0 if found.outline > 8 else min(6, found.outline + 1)
            style = found.base
        return 0

    def _end_list(self) -> None:
        if self._list:
            self.blocks.append(Block("\n".join(self._list)))
            self._list = []

    def _end_cell(self, grid: Grid) -> None:
        above = grid.above.get(grid.col)
        if grid.merge == "continue" and above is not None:
            above.rows = grid.row - above.row + 1
        elif grid.row >= 0:
            cell = Cell(" ".join(" ".join(grid.texts).split()), grid.row, grid.col, 1, grid.span)
            grid.cells.append(cell)
            grid.above[grid.col] = cell
        grid.texts = []
        grid.col += grid.span

    def _end_table(self, grid: Grid) -> None:
        if self._grids:  # a table inside a cell is part of the cell's text
            self._grids[-1].texts += [cell.text for cell in grid.cells if cell.text]
            return
        table = tidy(Table(grid.cells, [Box(1, 0.0, 0.0, 0.0, 0.0)] * (grid.row + 1)))
        if table is not None:
            self.blocks.append(Block(table.markdown(), "table"))
        else:
            self.blocks += [Block(cell.text) for cell in grid.cells if cell.text]
