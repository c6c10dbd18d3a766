"""Tables with ruled lines, found by the cells that the lines close.

Lines become a grid; places of the grid with no line between them are one cell, so merged cells come out by themselves; what is open to the
outside is none. Where the lines do not part what white parts (a header in colours, rows ruled now and then), the words do.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from tidegate.core.document import Box
from tidegate.retrieval import aligned
from tidegate.retrieval.aligned import Rule, Word
from tidegate.retrieval.tables import Cell, Table, is_figure, tidy

#: Lines nearer to each other than this are one, and a gap of this size in a line is none, in points.
SNAP = 3.0
#: Shorter ones are letters or dots.
SHORTEST = 3.0
#: Of a table's cells, as many may hold words that stand far apart; with more, its lines do not part its cells.
TORN_SHARE = 0.15
#: Of the places of a grid, as many have a word at least; a frame around a picture has none.
FILLED_SHARE = 0.3
#: Beyond so many places a grid is a drawing.
MAX_PLACES = 50_000


class Grid(msgspec.Struct):
    """Lines that touch each other: where they stand, and which of them cover which stretch."""

    xs: list[float]
    ys: list[float]
    #: Of a line's stretches, those that are drawn: across[y][x] from xs[x] to xs[x + 1], down[x][y] from ys[y] to ys[y + 1].
    across: list[list[bool]]
    down: list[list[bool]]


def find(horizontal: Sequence[Rule], vertical: Sequence[Rule], words: Sequence[Word], page: int) -> list[Table]:
    """The page's ruled tables. Lines as (begin, end, place): x0, x1, y across; top, bottom, x down."""
    tables = []
    for grid in _grids(_merged(horizontal), _merged(vertical)):
        table = _table(grid, words, page)
        if table is not None:
            tables.append(table)
    return tables


def _merged(lines: Sequence[Rule]) -> list[Rule]:
    """Lines that lie on each other, or nearly, as one."""
    groups: list[list[Rule]] = []
    for line in sorted(lines, key=lambda line: line[2]):
        if groups and line[2] - groups[-1][-1][2] <= SNAP:
            groups[-1].append(line)
        else:
            groups.append([line])
    merged: list[Rule] = []
    for group in groups:
        place = sum(line[2] for line in group) / len(group)
        begin, end = float("-inf"), float("-inf")
        for line in sorted(group):
            if line[0] > end + SNAP:
                if end - begin >= SHORTEST:
                    merged.append((begin, end, place))
                begin = line[0]
            end = max(end, line[1]) if begin != line[0] or end > line[0] - SNAP else line[1]
        if end - begin >= SHORTEST:
            merged.append((begin, end, place))
    return merged


def _grids(across: list[Rule], down: list[Rule]) -> list[Grid]:
    """Lines that touch belong together."""
    parent = list(range(len(across) + len(down)))

    def root(at: int) -> int:
        while parent[at] != at:
            parent[at] = parent[parent[at]]
            at = parent[at]
        return at

    ys = [line[2] for line in across]  # sorted: they were merged in this order
    for at, (top, bottom, x) in enumerate(down, len(across)):
        for other in range(bisect_right(ys, top - SNAP), bisect_right(ys, bottom + SNAP)):
            if across[other][0] - SNAP <= x <= across[other][1] + SNAP:
                parent[root(at)] = root(other)
    together: defaultdict[int, tuple[list[Rule], list[Rule]]] = defaultdict(lambda: ([], []))
    for at, line in enumerate((*across, *down)):
        together[root(at)][at >= len(across)].append(line)
    return [grid for lines in together.values() if (grid := _grid(*lines))]


def _grid(across: list[Rule], down: list[Rule]) -> Grid | None:
    xs, ys = sorted({line[2] for line in down}), sorted({line[2] for line in across})
    if len(xs) < 3 or len(ys) < 3 or len(xs) * len(ys) > MAX_PLACES:
        return None
    return Grid(xs, ys, _drawn(across, ys, xs), _drawn(down, xs, ys))


def _drawn(lines: list[Rule], places: list[float], stops: list[float]) -> list[list[bool]]:
    at_place: defaultdict[float, list[Rule]] = defaultdict(list)
    for line in lines:
        at_place[line[2]].append(line)
    return [
        [any(begin - SNAP <= low and high <= end + SNAP for begin, end, _ in at_place[place]) for low, high in itertools.pairwise(stops)]
        for place in places
    ]


def _table(grid: Grid, words: Sequence[Word], page: int) -> Table | None:
    inside: defaultdict[tuple[int, int], list[Word]] = defaultdict(list)
    cells = {place: cell for cell in _cells(grid) for place in _places(cell)}
    for word in words:
        row, col = bisect_right(grid.ys, (word.top + word.bottom) / 2) - 1, bisect_right(grid.xs, (word.x0 + word.x1) / 2) - 1
        if (cell := cells.get((row, col))) is not None:
            inside[cell.row, cell.col].append(word)
    if sum(len(_places(cells[place])) for place in inside) < FILLED_SHARE * (len(grid.xs) - 1) * (len(grid.ys) - 1):
        return None
    if sum(map(_is_wide, inside.values())) > TORN_SHARE * len(inside):
        return None
    for place, of_cell in inside.items():
        cells[place].text = aligned.text_of(of_cell)
    boxes = [Box(page, *(round(side, 1) for side in (grid.xs[0], top, grid.xs[-1], bottom))) for top, bottom in itertools.pairwise(grid.ys)]
    table = tidy(Table([cells[place] for place in inside], boxes))
    return _opened(table, grid, list(itertools.chain(*inside.values()))) if table is not None else None


def _places(cell: Cell) -> list[tuple[int, int]]:
    return list(itertools.product(range(cell.row, cell.row + cell.rows), range(cell.col, cell.col + cell.cols)))


def _cells(grid: Grid) -> list[Cell]:
    """What has lines all around and none inside. What is no rectangle, as a title that runs on beside a header, is cut into such."""
    rows, cols = len(grid.ys) - 1, len(grid.xs) - 1
    seen: set[tuple[int, int]] = set()
    cells = []
    for start in itertools.product(range(rows), range(cols)):
        if start in seen:
            continue
        region, is_closed = _region(grid, start)
        seen |= region
        if is_closed:
            cells += _rectangles(region)
    return cells


def _rectangles(region: set[tuple[int, int]]) -> list[Cell]:
    """Runs of places in a row, those of the same columns below each other as one."""
    open_cells: dict[tuple[int, int], Cell] = {}
    cells = []
    for row, places in itertools.groupby(sorted(region), key=lambda place: place[0]):
        runs: list[list[int]] = []
        for _, col in places:
            if runs and runs[-1][1] == col - 1:
                runs[-1][1] = col
            else:
                runs.append([col, col])
        last, open_cells = open_cells, {}
        for first, end in runs:
            cell = last.get((first, end)) or Cell("", row, first, 0, end - first + 1)
            if not cell.rows:
                cells.append(cell)
            cell.rows += 1
            open_cells[first, end] = cell
    return cells


def _region(grid: Grid, start: tuple[int, int]) -> tuple[set[tuple[int, int]], bool]:
    """The places that are reached from one without crossing a line, and whether there is no way out of the grid."""
    rows, cols = len(grid.ys) - 1, len(grid.xs) - 1
    region, reached, is_closed = {start}, [start], True
    while reached:
        row, col = reached.pop()
        steps = (
            (row - 1, col, grid.across[row][col]), (row + 1, col, grid.across[row + 1][col]),
            (row, col - 1, grid.down[col][row]), (row, col + 1, grid.down[col + 1][row]),
        )  # fmt: skip
        for *place, is_drawn in steps:
            there = (place[0], place[1])
            if is_drawn or there in region:
                continue
            if not (0 <= there[0] < rows and 0 <= there[1] < cols):
                is_closed = False
            else:
                region.add(there)
                reached.append(there)
    return region, is_closed


def _opened(table: Table, grid: Grid, words: list[Word]) -> Table:
    """The table with rows apart that no line parts: headers that are parted by colour or white alone, and rows ruled only now and then."""
    columns = list(itertools.pairwise(grid.xs))
    if len(columns) != table.width:
        return table
    by_row: list[list[Word]] = [[] for _ in table.boxes]
    tops = [box.top for box in table.boxes]
    for word in words:
        by_row[max(0, bisect_right(tops, (word.top + word.bottom) / 2) - 1)].append(word)
    cells_of: defaultdict[int, list[Cell]] = defaultdict(list)
    for cell in table.cells:
        cells_of[cell.row].append(cell)
    open_rows = [any(cell.cols > 1 for cell in cells_of[row]) and _is_wide(by_row[row]) for row in range(table.height)]
    top = next((row for row, is_open in enumerate(open_rows) if not (is_open or table.is_title(row))), 0)
    top = top if any(open_rows[:top]) else 0
    head = aligned.head(list(itertools.chain(*by_row[:top])), columns) if top else []
    depth = max((cell.row + cell.rows for cell in head), default=0)
    if len(head) < table.width:
        head, top, depth = [], 0, 0
    lines = [aligned.lines(of_row, columns) if row >= (top or table.header) else [] for row, of_row in enumerate(by_row)]
    parts = [len(of_row) if _are_rows(of_row) else 1 for of_row in lines]
    starts, height = list(itertools.accumulate(parts[top:], initial=depth)), table.height
    cells, boxes = head, [table.boxes[0]] * depth
    for row, box in enumerate(table.boxes[top:], top):
        start = starts[row - top]
        boxes += [box] if parts[row] == 1 else [Box(box.page, box.x0, round(line.top, 1), box.x1, round(line.bottom, 1)) for line in lines[row]]
        for cell in cells_of[row]:
            if cell.rows == cell.cols == 1 and parts[row] > 1:
                cells += [Cell(line.texts[cell.col], start + at, cell.col) for at, line in enumerate(lines[row]) if cell.col in line.texts]
            else:
                cells.append(msgspec.structs.replace(cell, row=start, rows=starts[min(row + cell.rows, height) - top] - start))
    return Table(cells, boxes, depth or table.header)


def _are_rows(lines: list[aligned.Line]) -> bool:
    """Whether the lines inside one ruled row are rows: every one of them has figures, in the same two columns at least."""
    figures = [{col for col, text in line.texts.items() if col and is_figure(text)} for line in lines]
    return len(lines) > 1 and len(set.intersection(*figures)) >= 2


def _is_wide(words: list[Word]) -> bool:
    """Whether there are two wide gaps on a line."""
    return len(words) > 2 and aligned.widest(words) > 1
