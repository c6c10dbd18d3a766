"""Tables without ruled lines, found by how words stand below each other.

A page's words become rows, a row's words become segments parted by wide gaps. A run of rows with two or more segments is a table where strips
of white part its columns, and what stands in them is short or figures: two columns of running text are no table.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterator, Sequence

import msgspec

from tidegate.core.document import Box
from tidegate.retrieval.tables import Cell, Table, headed, is_figure, is_sign, is_year, lines_of, tidy

#: A horizontal line: x0, x1, y.
Rule = tuple[float, float, float]


class Word(msgspec.Struct):
    """A word at its place: points from the top left corner of the page as it is shown."""

    text: str
    x0: float
    top: float
    x1: float
    bottom: float


class Segment(msgspec.Struct):
    """Words of a row with no wide gap between them."""

    text: str
    x0: float
    x1: float


class Row(msgspec.Struct):
    """Words that stand on one line."""

    segments: list[Segment]
    top: float
    bottom: float

    @property
    def x0(self) -> float:
        return self.segments[0].x0

    @property
    def x1(self) -> float:
        return self.segments[-1].x1


#: Gaps inside a cell are narrower than this share of the font's size; those of justified text reach two thirds.
SEGMENT_GAP = 0.8
#: Wider ones are never those of justified text.
WIDE_GAP = 1.5
#: A currency's sign may stand so far from its figure, in shares of the font's size: at the other edge of a wide column.
SIGN_GAP = 20.0
#: A strip of white between columns, in points and in shares of the font's size.
STRIP_GAP = 0.12
#: Rows of a table at least; one with fewer is read as lines.
TABLE_ROWS = 3
#: Further apart than so many line heights, rows belong to different things.
ROW_GAP = 2.2
#: A header may stand so many line heights above the figures that it names.
HEADER_GAP = 6.0
#: Rows with one segment that may stand between rows of a table: names of groups, wrapped labels.
LONE_ROWS = 3
#: A header may stand so far to the left and right of the figures below it, in points.
HEADER_ASIDE = 30.0
#: Of a table's rows, as many may have a word in a strip of white (titles across).
CROSSING_SHARE = 0.12
#: Beyond so many words a page is not searched: it is no page that people read.
MAX_WORDS = 20_000
#: A longer text over several columns is a sentence, not the name of a group.
ACROSS_CHARS = 60
#: Pieces of a rule this near to each other are one; those of two columns are further apart. In points.
RULE_GAP = 1.5
#: A header's rule stands so far below it at most, in line heights.
RULE_BELOW = 0.7
#: Mean characters of a cell that is running text.
PROSE_CHARS = 45
_ENUMERATION = re.compile(
    r"[•●○▪■◦·*–—-]|\(?[0-9a-zA-Z]{1,3}[.)]|\(?[ivx]+\)|[一二三四五六七八九十]+[、.]|（[一二三四五六七八九十]+）|\d+(?:\.\d+)+\.?"
)
_LEADERS = re.compile(r"[.…·_]{4,}|(?:\. ){3,}")


def find(words: Sequence[Word], rules: Sequence[Rule] = (), page: int = 1) -> list[Table]:
    """The page's tables from top to bottom. `rules`: horizontal lines; a header is parted where one runs through it."""
    if len(words) > MAX_WORDS:
        return []
    rows = _rows([word for word in words if not _is_upright(word)])
    tables: list[Table] = []
    for table in (table for block in _blocks(rows) for table in _tables(block, rows, rules, page)):
        last = tables[-1] if tables else None
        if last and table.box.top - last.box.bottom < HEADER_GAP * (rows[0].bottom - rows[0].top) and (whole := headed(last, table)):
            tables[-1] = whole
        else:
            tables.append(table)
    return tables


def head(words: Sequence[Word], columns: Sequence[tuple[float, float]]) -> list[Cell]:
    """The cells of a header above columns that are known, level by level from the top."""
    return _apart(_head_cells(_rows(words), columns, ()))


def text_of(words: Sequence[Word]) -> str:
    """The words of one cell, line by line, as one text."""
    return lines_of([" ".join(segment.text for segment in row.segments) for row in _rows(words)])


def widest(words: Sequence[Word]) -> int:
    """The most gaps on one line that are wider than any between two words of a text."""
    return max(
        sum(after.x0 - before.x1 > WIDE_GAP * (row.bottom - row.top) for before, after in itertools.pairwise(row.segments)) for row in _rows(words)
    )


class Line(msgspec.Struct):
    """What stands on one line, by the columns that it stands in."""

    texts: dict[int, str]
    top: float
    bottom: float


def lines(words: Sequence[Word], columns: Sequence[tuple[float, float]]) -> list[Line]:
    """The lines of words over columns that are known, from top to bottom."""
    found = []
    for row in _rows(words):
        texts: dict[int, str] = {}
        for word in sorted((word for word in words if row.top <= _middle(word) <= row.bottom), key=lambda word: word.x0):
            at = _nearest(Segment(word.text, word.x0, word.x1), columns)
            texts[at] = f"{texts[at]} {word.text}" if at in texts else word.text
        found.append(Line(texts, row.top, row.bottom))
    return found


def _rows(words: Sequence[Word]) -> list[Row]:
    lines: list[list[Word]] = []
    for word in sorted(words, key=_middle):
        if lines and _middle(word) - _middle(lines[-1][0]) < 0.4 * min(_height(word), _height(lines[-1][0])):
            lines[-1].append(word)
        else:
            lines.append([word])
    return [_row(line) for line in lines]


def row_texts(words: Sequence[Word]) -> list[tuple[str, float, float]]:
    """What stands on each line of the page from top to bottom, with its top and bottom."""
    rows = _rows(words) if len(words) <= MAX_WORDS else []
    return [(" ".join(segment.text for segment in row.segments), row.top, row.bottom) for row in rows]


def _is_upright(word: Word) -> bool:
    """Text that runs up or down the page is in no row."""
    return len(word.text) > 2 and _height(word) > 2 * (word.x1 - word.x0)


def _middle(word: Word) -> float:
    return (word.top + word.bottom) / 2


def _height(word: Word) -> float:
    return word.bottom - word.top


def _row(words: list[Word]) -> Row:
    words.sort(key=lambda word: word.x0)
    size = statistics.median(_height(word) for word in words)
    segments = [Segment(words[0].text, words[0].x0, words[0].x1)]
    for word in words[1:]:
        last = segments[-1]
        gap = word.x0 - last.x1
        if is_sign(last.text) and is_figure(word.text) and gap < SIGN_GAP * size:  # "$     13,507"
            parted = False
        else:
            parted = gap > SEGMENT_GAP * size or _parts(last, word, gap / size)
        if parted:
            segments.append(Segment(word.text, word.x0, word.x1))
        else:
            last.text += (" " if gap > 0.1 * size else "") + word.text
            last.x1 = max(last.x1, word.x1)
    return Row(segments, min(word.top for word in words), max(word.bottom for word in words))


def _parts(last: Segment, word: Word, gap: float) -> bool:
    """Two figures side by side are two cells, however close, "1 000" is one; and a sign of a currency begins the cell of its figure."""
    return (gap > 0.32 and is_figure(last.text) and is_figure(word.text)) or (gap > 0.3 and is_sign(word.text))


def _blocks(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Runs of rows that may be a table: from a row with several segments to another one."""
    run: list[Row] = []
    lone = 0
    for row in rows:
        height = row.bottom - row.top
        if run and (row.top - run[-1].bottom > ROW_GAP * height or lone > LONE_ROWS):
            yield from _trimmed(run)
            run, lone = [], 0
        if len(row.segments) > 1:
            run.append(row)
            lone = 0
        elif run:
            run.append(row)
            lone += 1
    yield from _trimmed(run)


def _trimmed(run: list[Row]) -> Iterator[list[Row]]:
    while run and len(run[-1].segments) == 1:
        run.pop()
    if sum(len(row.segments) > 1 for row in run) >= TABLE_ROWS:
        yield run


def _tables(block: list[Row], rows: Sequence[Row], rules: Sequence[Rule], page: int) -> Iterator[Table]:
    columns = _columns(block)
    if len(columns) < 2:
        return
    across = next((at for at, row in enumerate(block) if _is_across(row, columns)), None)
    again = _second_header(block, rules) if across is None else None
    if across is not None or again is not None:  # a sentence between two tables, or the header of another one
        parts = (block[:across], block[across + 1 :]) if across is not None else (block[:again], block[again:])
        for part in parts:
            for run in _trimmed(part):
                yield from _tables(run, rows, rules, page)
        return
    while block and not any(_span(segment, columns)[1] for segment in block[-1].segments):
        block.pop()
    while block and all(_span(segment, columns) == (0, 0) for segment in block[0].segments):
        block.pop(0)
    if len(block) < TABLE_ROWS or not _is_table(block, columns):
        return
    _take_header(block, rows, columns)
    x0, x1 = min(row.x0 for row in block), max(row.x1 for row in block)
    cells, groups, depth = _cells(block, columns, rules)
    boxes = [Box(page, round(x0, 1), round(block[group[0]].top, 1), round(x1, 1), round(block[group[-1]].bottom, 1)) for group in groups]
    if (table := tidy(Table(cells, boxes, depth))) is not None:
        yield table


def _is_across(row: Row, columns: Sequence[tuple[float, float]]) -> bool:
    """A sentence over most of the columns, and no figures beside it."""
    if len(row.segments) == 1 and row.segments[0].text.endswith((":", "：", ".", "。")):
        return len(row.segments[0].text) > ACROSS_CHARS and _span(row.segments[0], columns)[1] > 0
    spans = [_span(segment, columns) for segment in row.segments if len(segment.text) > ACROSS_CHARS]
    wide = any(2 * (last - first) >= len(columns) - 1 and last > first for first, last in spans)
    return wide and not any(is_figure(segment.text) for segment in row.segments[1:])  # the first may be a footnote's mark


def _second_header(block: Sequence[Row], rules: Sequence[Rule]) -> int | None:
    """Where rows that name columns follow rows of figures: another table begins, though nothing parts the two. Such a row has neither a label
    nor a figure, and a rule below one of its names."""
    figures = [row for row in block if _has_figures(row)]
    labels = [row.segments[0].x1 for row in figures if not is_figure(row.segments[0].text)]
    if not labels:
        return None
    edge, left = statistics.median(labels), min(row.segments[1].x0 for row in figures)
    names = [row.x0 > edge and all(_names(segment, left) for segment in row.segments) for row in block]
    begun = False
    for at, row in enumerate(block):
        begun = begun or _has_figures(row)
        if not (begun and names[at]):
            continue
        below = [rule for rule in _whole_rules(rules, row.bottom, RULE_BELOW * (row.bottom - row.top)) if rule[0] > edge]
        if any(x0 <= (segment.x0 + segment.x1) / 2 <= x1 for segment in row.segments for x0, x1, _ in below):
            return next(first for first in range(at, 0, -1) if not names[first - 1])
    return None


def _names(segment: Segment, left: float) -> bool:
    """Whether it may be the name of a column of figures, which begin at `left`."""
    return (segment.x0 + segment.x1) / 2 >= left and (is_year(segment.text) or not is_figure(segment.text))


def _has_figures(row: Row) -> bool:
    return any(is_figure(segment.text) and not is_year(segment.text) for segment in row.segments[1:])


def _whole_rules(rules: Sequence[Rule], top: float, height: float) -> list[Rule]:
    """Rules that begin at `top` or up to `height` below it, each drawn in pieces as one. From top to bottom."""
    whole: list[Rule] = []
    for x0, x1, y in sorted((rule for rule in rules if top - 3 < rule[2] < top + height), key=lambda rule: (round(rule[2]), rule[0])):
        last = whole[-1] if whole else None
        if last and round(last[2]) == round(y) and x0 - last[1] <= RULE_GAP:
            whole[-1] = (last[0], max(last[1], x1), last[2])
        else:
            whole.append((x0, x1, y))
    return whole


def _columns(block: Sequence[Row]) -> list[tuple[float, float]]:
    """The columns' extents: between strips of white that nearly no row with several segments crosses."""
    several = [row for row in block if any(is_figure(segment.text) and not is_year(segment.text) for segment in row.segments[1:])]
    if not several:
        several = [row for row in block if len(row.segments) > 1]
    size = statistics.median(row.bottom - row.top for row in several)
    allowed = int(CROSSING_SHARE * len(several))
    segments = [segment for row in several for segment in row.segments]
    edges = sorted([(segment.x0, 1) for segment in segments] + [(segment.x1, -1) for segment in segments])
    columns: list[tuple[float, float]] = []
    depth, begin = 0, None
    for x, step in edges:
        before = depth
        depth += step
        if before <= allowed < depth:
            begin = x
        elif depth <= allowed < before and begin is not None:
            if columns and begin - columns[-1][1] < STRIP_GAP * size:
                columns[-1] = (columns[-1][0], x)
            else:
                columns.append((begin, x))
    return columns


def _is_table(block: Sequence[Row], columns: Sequence[tuple[float, float]]) -> bool:
    filled = [_by_column(row, columns) for row in block if len(row.segments) > 1]
    by_column = [[cells[at] for cells in filled if at in cells] for at in range(len(columns))]
    later = [text for texts in by_column[1:] for text in texts]
    figures = sum(map(is_figure, later)) / max(1, len(later))
    if sum(bool(_LEADERS.search(text)) for texts in by_column for text in texts) > 0.3 * len(block):
        return False
    if len(later) < len(filled) * 0.6 * min(2, len(columns) - 1):
        return False
    if figures >= (0.4 if len(columns) > 2 else 0.5):
        return True
    if by_column[0] and sum(bool(_ENUMERATION.fullmatch(text)) for text in by_column[0]) > 0.5 * len(by_column[0]):
        return False
    long = [statistics.mean(map(len, texts)) > PROSE_CHARS for texts in by_column if texts]
    short = sum(len(text) <= 25 for text in later) / max(1, len(later))
    return len(columns) >= 3 and not any(long[1:]) and short >= 0.8


def _by_column(row: Row, columns: Sequence[tuple[float, float]]) -> dict[int, str]:
    cells: dict[int, str] = {}
    for segment in row.segments:
        at = _nearest(segment, columns)
        cells[at] = f"{cells[at]} {segment.text}" if at in cells else segment.text
    return cells


def _nearest(segment: Segment, columns: Sequence[tuple[float, float]]) -> int:
    return max(range(len(columns)), key=lambda at: _overlap(segment, columns[at]))


def _overlap(segment: Segment, column: tuple[float, float]) -> float:
    """How far they overlap; negative: how far they are apart."""
    return min(segment.x1, column[1]) - max(segment.x0, column[0])


def _take_header(block: list[Row], rows: Sequence[Row], columns: Sequence[tuple[float, float]]) -> None:
    """Rows just above that stand over the later columns name them; so does a segment over the first beside them."""
    at = next(n for n, row in enumerate(rows) if row is block[0])
    left, right = columns[1][0] - HEADER_ASIDE, columns[-1][1] + HEADER_ASIDE
    groups: list[Row] = []  # names of groups, which may stand between a header and the first row
    while at > 0:
        row = rows[at - 1]
        over = [segment for segment in row.segments if segment.x0 >= left or _is_over(segment, columns)]
        stub = [segment for segment in row.segments if segment not in over]
        if (groups or block)[0].top - row.bottom > 1.5 * (row.bottom - row.top) or (over and over[-1].x1 > right) or _has_figures(row):
            return
        if len(stub) > 1 or (stub and stub[0].x1 > columns[1][0]) or (len(row.segments) == 1 and _is_title(row, block[0], columns)):
            return
        if over:
            block[:0] = [row, *groups]
            groups = []
        elif groups or not _has_figures(block[0]):
            return
        else:
            groups = [row]
        at -= 1


def _is_over(segment: Segment, columns: Sequence[tuple[float, float]]) -> bool:
    """Whether it begins to the left of the figures because it stands over several columns of them."""
    first, last = _span(segment, columns)
    return segment.x0 > columns[0][1] and 0 < first < last


def _is_title(row: Row, below: Row, columns: Sequence[tuple[float, float]]) -> bool:
    """Centred over the whole table, and not the first line of a name of a column."""
    left, right = columns[0][0], columns[-1][1]
    goes_on = below.top - row.bottom < 0.5 * (row.bottom - row.top) and any(
        segment.x0 - 2 <= row.x0 and row.x1 <= segment.x1 + 2 for segment in below.segments[-len(columns) + 1 :]
    )
    return abs((row.x0 + row.x1) / 2 - (left + right) / 2) < 0.05 * (right - left) and not goes_on


def _cells(block: list[Row], columns: Sequence[tuple[float, float]], rules: Sequence[Rule]) -> tuple[list[Cell], list[list[int]], int]:
    """The cells; for each row of the grid the rows of words that it is made of; and how many rows of the grid are the header's."""
    placed = [[(segment.text, *_span(segment, columns)) for segment in row.segments] for row in block]
    head = _head_rows(placed)
    cells = _head_cells(block[:head], columns, rules)
    depth = max((cell.row + cell.rows for cell in cells), default=0)
    groups = [list(range(head))] * depth + [[head + at for at in group] for group in _grouped(block[head:], placed[head:], rules)]
    for number, group in enumerate(groups[depth:], depth):
        texts: dict[tuple[int, int], list[str]] = {}
        for at in group:
            for text, first, last in placed[at]:
                texts.setdefault((first, last), []).append(text)
        cells += [Cell(lines_of(lines), number, first, 1, last - first + 1) for (first, last), lines in texts.items()]
    return _apart(cells), groups, depth


def _head_cells(head: Sequence[Row], columns: Sequence[tuple[float, float]], rules: Sequence[Rule]) -> list[Cell]:
    """Lines over the same columns with nothing between them are one cell; a cell is a level below what stands over its columns, and as deep
    as what stands beside it."""
    found: list[_Head] = []
    bottom = max((row.bottom + RULE_BELOW * (row.bottom - row.top) for row in head), default=0.0)
    for row in head:
        begun = len(found)
        for text, first, last in _spread(row, columns, _whole_rules(rules, row.bottom, bottom - row.bottom)):
            above = [other for other in found if other.first <= last and first <= other.last]
            same = above[-1] if above else None
            ruled = same and any(same.bottom - 2 < y < row.top + 2 and x0 < columns[last][1] and x1 > columns[first][0] for x0, x1, y in rules)
            if same and (same.first, same.last) == (first, last) and row.top - same.bottom < 0.6 * (row.bottom - row.top) and not ruled:
                same.lines.append(text)
                same.bottom = row.bottom
            else:
                level = max((other.level + 1 for other in above), default=0)
                found.append(_Head([text], first, last, level, row.bottom))
        for cell in found[begun:]:
            cell.level = max(other.level for other in found[begun:])
    depth = max((cell.level + 1 for cell in found), default=0)
    cells = []
    for cell in found:
        below = [other.level for other in found if other.level > cell.level and other.first <= cell.last and cell.first <= other.last]
        cells.append(Cell(lines_of(cell.lines), cell.level, cell.first, min(below, default=depth) - cell.level, cell.last - cell.first + 1))
    return cells


class _Head(msgspec.Struct):
    lines: list[str]
    first: int
    last: int
    level: int
    bottom: float


def _apart(cells: list[Cell]) -> list[Cell]:
    """Where two cells claim one place, the later one gives way, and its text goes to the other where nothing is left for it."""
    taken: dict[tuple[int, int], Cell] = {}
    kept: list[Cell] = []
    for cell in sorted(cells, key=lambda cell: (cell.row, cell.cols, cell.col)):
        run = [col for col in range(cell.col, cell.col + cell.cols) if (cell.row, col) not in taken]
        if not run:
            taken[cell.row, cell.col].text += f" {cell.text}"
            continue
        run = [col for at, col in enumerate(run) if col == run[0] + at]
        rows = [cell.row]
        while rows[-1] + 1 < cell.row + cell.rows and not any((rows[-1] + 1, col) in taken for col in run):
            rows.append(rows[-1] + 1)
        cell.col, cell.cols, cell.rows = run[0], len(run), len(rows)
        kept.append(cell)
        taken.update(((row, col), cell) for row in rows for col in run)
    return kept


def _span(segment: Segment, columns: Sequence[tuple[float, float]], share: float = 0.0) -> tuple[int, int]:
    """First and last column that the segment lies over, by more than a hair and more than `share` of the column."""
    over = [at for at, column in enumerate(columns) if _overlap(segment, column) > max(1.5, share * (column[1] - column[0]))]
    return (over[0], over[-1]) if over else (_nearest(segment, columns),) * 2


def _head_rows(placed: Sequence[Sequence[tuple[str, int, int]]]) -> int:
    """Rows before the first one that has a figure (a year is none), without the labels of groups that come last."""
    later = [[text for text, first, _ in row if first > 0] for row in placed]
    head = next((at for at, texts in enumerate(later) if any(is_figure(text) and not is_year(text) for text in texts)), 1)
    while head > 1 and not later[head - 1]:
        head -= 1
    return head


def _spread(row: Row, columns: Sequence[tuple[float, float]], rules: Sequence[Rule] = ()) -> list[tuple[str, int, int]]:
    """A header's segments over the columns that they stand over: "Three months" over its two years. The rule below a segment says which;
    where there is none, it is centred over them. `rules`: those below the row, from top to bottom."""
    spans = [_span(segment, columns, 0.3) for segment in row.segments]
    middles = [(segment.x0 + segment.x1) / 2 for segment in row.segments]
    placed = []
    for at, segment in enumerate(row.segments):
        first, last = spans[at]
        if (ruled := _ruled(segment, row, columns, rules)) is not None:
            first, last = ruled
        elif first > 0:
            nearest = [col for col, column in enumerate(columns) if col and _is_nearest((column[0] + column[1]) / 2, at, middles)]
            floor = 1 if at == 0 else max(spans[at - 1][1] + 1, min(nearest, default=1))
            ceiling = len(columns) - 1 if at + 1 == len(middles) else min(spans[at + 1][0] - 1, max(nearest, default=len(columns)))
            options = [
                (abs((columns[a][0] + columns[b][1]) / 2 - middles[at]), a - b, a, b)
                for a in range(max(floor, 1), first + 1)
                for b in range(last, ceiling + 1)
            ]
            near = [option for option in options if option[0] <= min(options)[0] + 3.0] if options else []
            if near:
                _, _, first, last = min(near, key=lambda option: (option[0] > min(options)[0] + 3.0, round(option[0]), option[1]))
        placed.append((segment.text, first, last))
    return placed


def _ruled(segment: Segment, row: Row, columns: Sequence[tuple[float, float]], rules: Sequence[Rule]) -> tuple[int, int] | None:
    """The columns over which the next rule below runs; None where there is none, or none of this segment alone."""
    middle = (segment.x0 + segment.x1) / 2
    x0, x1, _ = next(((x0, x1, y) for x0, x1, y in rules if x0 <= middle <= x1), (0.0, 0.0, 0.0))
    if x0 <= columns[0][0] or any(other is not segment and x0 <= (other.x0 + other.x1) / 2 <= x1 for other in row.segments):
        return None
    over = [at for at, column in enumerate(columns) if at and x0 - 2 <= (column[0] + column[1]) / 2 <= x1 + 2]
    return (over[0], over[-1]) if over else None


def _is_nearest(x: float, at: int, middles: Sequence[float]) -> bool:
    """Whether none of the others is nearer to `x`."""
    return abs(middles[at] - x) <= min(abs(other - x) for other in middles)


def _grouped(block: Sequence[Row], placed: Sequence[Sequence[tuple[str, int, int]]], rules: Sequence[Rule]) -> list[list[int]]:
    """Rows of words that are one row of the table: labels that go on in the next line."""
    pitch = statistics.median([low.top - high.top for high, low in itertools.pairwise(block)] or [0.0])
    groups: list[list[int]] = []
    for at, row in enumerate(placed):
        above = placed[at - 1] if at else []
        last, this = block[max(0, at - 1)], block[at]
        ruled = any(last.bottom - 2 < y < this.top + 2 and x0 < this.x1 and x1 > this.x0 for x0, x1, y in rules)
        if above and not ruled and _continues(above, row, tight=this.top - last.top < 0.85 * pitch):
            groups[-1].append(at)
        else:
            groups.append([at])
    return groups


def _continues(above: Sequence[tuple[str, int, int]], row: Sequence[tuple[str, int, int]], *, tight: bool) -> bool:
    """Whether the row is the rest of the label above it. `tight`: they stand closer than the table's rows do."""
    if not row or row[0][1] > 0 or above[0][1] > 0:
        return False
    small = row[0][0][:1].islower()
    if len(row) == 1:  # the figures stand in the label's first line
        return small
    return len(above) == 1 and not above[0][0].rstrip().endswith((":", "：")) and (small or tight)
