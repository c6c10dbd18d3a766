"""Reading order: every box once, columns one after the other, and no page is too much."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from tidegate.retrieval.layout import reading_order


class Place(NamedTuple):
    x0: float
    top: float
    x1: float
    bottom: float


numbers = st.floats(0, 800)
places = st.builds(lambda x, y, wide, high: Place(x, y, x + wide, y + high), numbers, numbers, st.floats(0, 300), st.floats(0, 30))


@given(st.lists(places, max_size=60))
def test_every_box_is_read_once(boxes: list[Place]) -> None:
    """However boxes lie, overlap or repeat: none is lost, none is read twice."""
    assert sorted(reading_order(boxes)) == sorted(boxes)


@given(st.integers(2, 4), st.integers(4, 12), st.randoms())
def test_columns_are_read_one_after_the_other(columns: int, lines: int, draw: object) -> None:
    """Of any number of columns, each is read from top to bottom before the next one begins, in whatever order the file draws them."""
    ordered = [Place(150.0 * col, 100 + 14.0 * line, 150.0 * col + 130, 110 + 14.0 * line) for col in range(columns) for line in range(lines)]
    shuffled = list(ordered)
    draw.shuffle(shuffled)  # type: ignore[attr-defined]
    assert reading_order(shuffled) == ordered


def test_what_sticks_out_of_its_column_parts_nothing() -> None:
    """A line that begins or ends a hair inside the white between two columns stays in its own: the other column is not broken off there."""
    columns = [[Place(left, 100 + 14.0 * line, left + 130, 110 + 14.0 * line) for line in range(8)] for left in (50.0, 190.0)]
    columns[0][3] = columns[0][3]._replace(x1=183.0)
    columns[1][5] = columns[1][5]._replace(x0=187.0)
    assert reading_order([*columns[1], *columns[0]]) == [*columns[0], *columns[1]]


def test_a_page_of_ten_thousand_boxes_is_read() -> None:
    """A hostile page is read in time: were it read in cubic time, this test would run into its time-out."""
    boxes = [Place(7.0 * (at % 100), 3.0 * (at // 100), 7.0 * (at % 100) + 5, 3.0 * (at // 100) + 2) for at in range(10_000)]
    assert len(reading_order(boxes)) == 10_000
