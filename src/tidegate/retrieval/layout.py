"""Boxes on a page in the order in which people read them: columns are read one after the other, whatever spans them parts them.

A column-first relative of the X-Y cut (Nagy and Seth, "Hierarchical representation of optically scanned documents", ICPR 1984).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Box(Protocol):
    """Points (1/72 inch) from the top left corner of the page as it is shown."""

    @property
    def x0(self) -> float: ...
    @property
    def x1(self) -> float: ...
    @property
    def top(self) -> float: ...
    @property
    def bottom(self) -> float: ...


B = TypeVar("B", bound=Box)

#: A white strip at least this wide, free over most lines, parts two columns; word spaces are narrower.
GUTTER_PT = 9.0
#: Lines that a column has at least; fewer are the cells of a row.
COLUMN_LINES = 4
#: Of the lines of the shorter column, as many may span the gutter (titles, wide captions).
SPANNING_SHARE = 0.5
#: Real pages need about three.
MAX_DEPTH = 12
#: Strips that are tried on one level, so that a page of ten thousand boxes stays cheap.
MAX_STRIPS = 200


def reading_order(boxes: Sequence[B], depth: int = 0) -> list[B]:
    """All boxes, each once."""
    strip = _gutter(boxes) if depth < MAX_DEPTH else None
    if strip is None:
        return _by_rows(boxes)
    spanning = sorted((box for box in boxes if _crosses(box, strip)), key=lambda box: box.top)
    ordered: list[B] = []
    rest = [box for box in boxes if not _crosses(box, strip)]
    for wide in spanning:
        above = [box for box in rest if _middle(box) < _middle(wide)]
        rest = [box for box in rest if _middle(box) >= _middle(wide)]
        ordered += [*_columns(above, strip, depth), wide]
    return ordered + _columns(rest, strip, depth)


def _columns(boxes: Sequence[B], strip: float, depth: int) -> list[B]:
    left = [box for box in boxes if box.x1 <= strip + GUTTER_PT / 2]
    right = [box for box in boxes if box.x1 > strip + GUTTER_PT / 2]
    return reading_order(left, depth + 1) + reading_order(right, depth + 1)


def _gutter(boxes: Sequence[B]) -> float | None:
    """The left edge of the strip that parts the most evenly, or None where nothing looks like columns."""
    edges = sorted({round(box.x1 + 0.05, 1) for box in boxes})
    best, most = None, 0.0
    for edge in edges[:: len(edges) // MAX_STRIPS + 1]:
        left = [box for box in boxes if box.x1 <= edge]
        right = [box for box in boxes if box.x0 >= edge + GUTTER_PT]
        shorter, spanning = min(len(left), len(right)), len(boxes) - len(left) - len(right)
        if shorter >= COLUMN_LINES and spanning <= SPANNING_SHARE * shorter and shorter - spanning > most and _side_by_side(left, right):
            best, most = edge, float(shorter - spanning)
    return best


def _side_by_side(left: Sequence[B], right: Sequence[B]) -> bool:
    top = max(min(box.top for box in left), min(box.top for box in right))
    bottom = min(max(box.bottom for box in left), max(box.bottom for box in right))
    shorter = min(max(box.bottom for box in side) - min(box.top for box in side) for side in (left, right))
    return bottom - top > 0.5 * shorter


def _crosses(box: Box, strip: float) -> bool:
    """Whether it runs over the middle of the strip: what merely sticks out into it belongs to its own column."""
    return box.x0 < strip + GUTTER_PT / 2 < box.x1


def _middle(box: Box) -> float:
    return (box.top + box.bottom) / 2


def _by_rows(boxes: Sequence[B]) -> list[B]:
    """Top to bottom; what stands on one line, left to right."""
    rows: list[list[B]] = []
    for box in sorted(boxes, key=_middle):
        if rows and _middle(box) - _middle(rows[-1][0]) < 0.4 * (box.bottom - box.top):
            rows[-1].append(box)
        else:
            rows.append([box])
    return [box for row in rows for box in sorted(row, key=lambda box: box.x0)]
