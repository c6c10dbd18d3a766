"""A table as a grid of cells: tidied, headers found, joined over pages, and written as Markdown or as records of a benchmark."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import msgspec

from tidegate.core.document import Box
from tidegate.retrieval.flow import join_lines
from tidegate.retrieval.loaded import markdown_table

#: A column that holds nothing but these belongs to the figures beside it: currency signs to those on its right, the rest to those on its left.
_BEFORE_FIGURES = re.compile(r"(?:US|HK|A|C)?[$€£¥￥]|EUR|USD|CNY|RMB|GBP|\(")
_BEHIND_FIGURES = re.compile(r"[%％)]|\)%")
#: A cell with a figure in it and next to nothing else; a dash stands for one.
_FIGURE = re.compile(
    r"(?:[$€£¥￥]|US\$)?\s*[(+−–-]?\s*(?:[$€£¥￥]|US\$)?\s*\d(?:[\d\s,.'’:/%％–-]*\d)?"
    r"\s*(?:%|％|\)|x|bn|m|k|pts|euros?|EUR|USD|RMB|CNY|years?|months?|days?|元|万|亿|年|天|倍)*\s*|[-–—−*]|\.{2,3}|…|n/?a|N/?A"
)
_YEAR = re.compile(r"(?:19|20)\d\d(?:[/–-]\d{2,4})?")


#: Headers are no higher.
MAX_HEADER = 6


#: A cell over more than this share of the columns may be the table's title.
TITLE_SHARE = 0.8


class Cell(msgspec.Struct):
    """Text at a place of the grid; `rows` and `cols`: how many it covers."""

    text: str
    row: int
    col: int
    rows: int = 1
    cols: int = 1


class Table(msgspec.Struct):
    """`boxes`: where each row of the grid stands. `header`: rows from the top that name the columns, 0 where it is not known yet."""

    cells: list[Cell]
    boxes: list[Box]
    header: int = 0

    @property
    def box(self) -> Box:
        """Around all rows on the first row's page."""
        return around(box for box in self.boxes if box.page == self.boxes[0].page)

    @property
    def width(self) -> int:
        return max((cell.col + cell.cols for cell in self.cells), default=0)

    @property
    def height(self) -> int:
        return max((cell.row + cell.rows for cell in self.cells), default=0)

    def grid(self) -> list[list[str]]:
        """Rows of texts, each of one length; a merged cell is repeated in each place that it covers, so that every row stands for itself."""
        width = self.width
        grid = [[""] * width for _ in range(self.height)]
        for cell in self.cells:
            for row in range(cell.row, cell.row + cell.rows):
                for col in range(cell.col, cell.col + cell.cols):
                    grid[row][col] = cell.text
        return grid

    def markdown(self) -> str:
        """One header row: the names above each other are written as one, "Three months > 2023"; a title over all stands
        before the first."""
        grid = self.grid()
        head = max(1, self.header)
        titles = [row for row in range(head) if self.is_title(row)]
        titles = titles if len(titles) < head else []
        names = [
            " > ".join(dict.fromkeys(text for row, text in enumerate(column) if text and row not in titles))
            for column in zip(*grid[:head], strict=True)
        ]
        names[0] = " > ".join(filter(None, (*(grid[row][-1] or grid[row][1] for row in titles), names[0])))
        return markdown_table([names, *grid[head:]])

    def is_title(self, row: int) -> bool:
        """Whether one cell over all columns but the first is all there is: it names the table or its unit, not a column."""
        cells = [cell for cell in self.cells if cell.row <= row < cell.row + cell.rows]
        width = self.width
        return len(cells) == 1 and width > 2 and cells[0].cols >= min(width - 1, TITLE_SHARE * width)

    def line_boxes(self) -> list[Box]:
        """One for the header and one for each row below it, as `markdown` writes them."""
        head = max(1, self.header)
        return [around(self.boxes[:head]), *self.boxes[head:]]


def around(boxes: Iterable[Box]) -> Box:
    """The smallest box around boxes of one page."""
    pages, x0, top, x1, bottom = zip(*boxes, strict=True)
    return Box(pages[0], min(x0), min(top), max(x1), max(bottom))


def is_figure(text: str) -> bool:
    """A number, a year, an amount, a dash."""
    return _FIGURE.fullmatch(text.strip()) is not None


def is_year(text: str) -> bool:
    """2023, 2023/24."""
    return _YEAR.fullmatch(text.strip()) is not None


def is_sign(text: str) -> bool:
    """A currency's sign alone."""
    return _BEFORE_FIGURES.fullmatch(text.strip()) is not None


def tidy(table: Table) -> Table | None:
    """The table without empty rows and columns, signs joined to their figures, header rows counted; None where what is left is no table."""
    table = _without_empty(_join_signs(table))
    if table.width < 2 or table.height < 2 or len(table.cells) < 3:
        return None
    table.header = min(table.header, table.height - 1) or header_rows(table)
    return table


def header_rows(table: Table) -> int:
    """Rows from the top that name columns: titles, as many as the highest cell of the first row, one more below a cell that covers several
    columns, but none with figures (years aside) in a later column, save the first."""
    grid = table.grid()
    titles = next((row for row in range(min(MAX_HEADER, table.height)) if not table.is_title(row)), 0)
    rows = titles + max((cell.rows for cell in table.cells if cell.row == titles and cell.rows < MAX_HEADER), default=1)
    wide = any(1 < cell.cols < table.width and cell.row + cell.rows == rows for cell in table.cells)
    rows = min(rows + wide, table.height - 1)
    for at, row in enumerate(grid[titles:rows], titles):
        if any(is_figure(text) and not is_year(text) for text in row[1:]):
            rows = at
            break
    while rows > 1 and not any(grid[rows - 1][1:]):  # the name of a group of rows
        rows -= 1
    return max(1, rows)


def _join_signs(table: Table) -> Table:
    """A column of "$" or "%" becomes part of the column of figures beside it. In linear time: a sheet may have thousands of columns."""
    width = table.width
    own: dict[int, list[str]] = {}
    for cell in table.cells:
        if cell.cols == 1 and (text := cell.text.strip()):
            own.setdefault(cell.col, []).append(text)
    into: list[int] = []  # the column that each becomes a part of
    while len(into) < width:
        at, texts, next_free = len(into), own.get(len(into), []), into[-1] + 1 if into else 0
        if texts and at + 1 < width and all(map(_BEFORE_FIGURES.fullmatch, texts)):
            into += [next_free, next_free]
        elif texts and at > 0 and all(map(_BEHIND_FIGURES.fullmatch, texts)):
            into.append(next_free - 1)
        else:
            into.append(next_free)
    return _merged_columns(table, into) if into and into[-1] < width - 1 else table


def _merged_columns(table: Table, into: list[int]) -> Table:
    """Each column becomes a part of the one that is named for it; cells that meet there become one."""
    by_place: dict[tuple[int, int], Cell] = {}
    for cell in sorted(table.cells, key=lambda cell: (cell.row, cell.col)):
        col = into[cell.col]
        moved = Cell(cell.text, cell.row, col, cell.rows, into[cell.col + cell.cols - 1] - col + 1)
        twin = by_place.get((moved.row, col))
        if twin is None:
            by_place[moved.row, col] = moved
        else:
            twin.text = " ".join(filter(None, (twin.text, moved.text)))
            twin.cols = max(twin.cols, moved.cols)
            twin.rows = max(twin.rows, moved.rows)
    return msgspec.structs.replace(table, cells=list(by_place.values()))


def _without_empty(table: Table) -> Table:
    filled = [cell for cell in table.cells if cell.text.strip()]
    rows = sorted({cell.row for cell in filled})
    cols = sorted({cell.col for cell in filled})
    kept = []
    for cell in filled:
        row, col = bisect_left(rows, cell.row), bisect_left(cols, cell.col)
        down, over = bisect_left(rows, cell.row + cell.rows) - row, bisect_left(cols, cell.col + cell.cols) - col
        kept.append(Cell(cell.text, row, col, down, over))
    return msgspec.structs.replace(table, cells=kept, boxes=[table.boxes[row] for row in rows])


def headed(header: Table, body: Table) -> Table | None:
    """One table of a header and the figures below it, where they were found apart. None where the upper one has figures of its own."""
    figures = any(is_figure(cell.text) and not is_year(cell.text) for cell in header.cells if cell.col)
    begins = any(is_figure(cell.text) and not is_year(cell.text) for cell in body.cells if cell.col and cell.row == 0)
    if figures or not begins or header.width != body.width:
        return None
    moved = [msgspec.structs.replace(cell, row=cell.row + header.height) for cell in body.cells]
    return Table([*header.cells, *moved], [*header.boxes, *body.boxes], header.height)


def joined(last: Table, following: Table) -> Table | None:
    """One table of two that stand on pages in a row, where the second goes on with the first: as many columns, and either the same header
    again (it is left out) or none, at about the same places. None where they are two tables."""
    if last.width != following.width:
        return None
    upper, lower = last.grid(), following.grid()
    head = last.header
    again = upper[:head] == lower[:head]
    if not again:
        one, other = last.boxes[-1], following.box
        aside = max(abs(one.x0 - other.x0), abs(one.x1 - other.x1)) > 0.05 * (one.x1 - one.x0)
        if aside or _names_columns(lower[0], upper):
            return None
    skip = head if again else 0
    moved = [
        Cell(cell.text, max(cell.row, skip) - skip + last.height, cell.col, cell.rows - max(0, skip - cell.row), cell.cols)
        for cell in following.cells
        if cell.row + cell.rows > skip
    ]
    return msgspec.structs.replace(last, cells=[*last.cells, *moved], boxes=[*last.boxes, *following.boxes[skip:]])


def _names_columns(row: Sequence[str], above: list[list[str]]) -> bool:
    """A row of words where the table above has figures is another table's header; without a label, it is one the more likely."""
    body = above[1:]
    share = 0.8 if row[0] else 0.5
    for at, text in enumerate(row):
        figures = [is_figure(line[at]) for line in body if line[at]]
        if at and text and not is_figure(text) and figures and sum(figures) > share * len(figures):
            return True
    return False


def lines_of(texts: Sequence[str]) -> str:
    """Lines of one cell as one text."""
    return join_lines(line.strip() for line in texts if line.strip())
