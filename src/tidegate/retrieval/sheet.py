"""Rows and columns of a sheet as blocks: what blank rows part is a table of its own, what stands alone is a text."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Mapping

from tidegate.core.document import Box
from tidegate.core.errors import DocumentUnreadable
from tidegate.retrieval.loaded import Block
from tidegate.retrieval.tables import Cell, Table, tidy

#: Places of a table at most, blank ones counted: a cell at the far corner makes a sheet of billions.
MAX_PLACES = 20_000_000

#: The texts of a row by their columns.
Row = dict[int, str]


def blocks(rows: Mapping[int, Row], merged: Mapping[tuple[int, int], tuple[int, int]] | None = None) -> Iterator[Block]:
    """`rows`: those with a text, by their numbers. `merged`: by (row, column), how many rows and columns a cell covers where it covers
    several. Raises DocumentUnreadable."""
    region: dict[int, Row] = {}
    for number in sorted(rows):
        if region and number - 1 not in region:
            yield from _region(region, merged or {})
            region = {}
        region[number] = rows[number]
    yield from _region(region, merged or {})


def _region(rows: dict[int, Row], merged: Mapping[tuple[int, int], tuple[int, int]]) -> Iterator[Block]:
    """Titles above a table and lists in one column are texts."""
    lone = [number for number, _ in itertools.takewhile(lambda row: len(row[1]) == 1, rows.items())]
    yield from (Block(text) for number in lone for text in rows[number].values())
    kept = list(rows)[len(lone) :]
    columns = sorted({col for number in kept for col in rows[number]})
    if not kept:
        return
    if len(kept) * len(columns) > MAX_PLACES:
        raise DocumentUnreadable(
            f"A sheet has a table of {len(kept)} rows and {len(columns)} columns, more than {MAX_PLACES} places.", hint="Split it."
        )
    cells = []
    for row, number in enumerate(kept):
        for col, text in sorted(rows[number].items()):
            high, wide = merged.get((number, col), (1, 1))
            down = sum(other < number + high for other in kept[row : row + high])
            over = sum(col <= other < col + wide for other in columns) if wide > 1 else 1
            cells.append(Cell(text, row, bisect_left(columns, col), down, over))
    table = tidy(Table(cells, [Box(1, 0.0, 0.0, 0.0, 0.0)] * len(kept)))
    if table is not None:
        yield Block(table.markdown(), "table")
    else:
        yield from (Block(cell.text) for cell in cells)
