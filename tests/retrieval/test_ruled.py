"""Tables by their lines: closed cells, merged cells, what lines leave open, and drawings."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.retrieval import ruled
from tidegate.retrieval.aligned import Rule, Word

#: The width and height of a cell.
WIDE, HIGH = 100.0, 20.0


def lines(rows: int, cols: int, without: tuple[tuple[str, int, int], ...] = ()) -> tuple[list[Rule], list[Rule]]:
    """A grid's lines piece by piece; `without`: ("across" or "down", row, col) of pieces that are not drawn."""
    across = [
        (col * WIDE, (col + 1) * WIDE, row * HIGH)
        for row, col in itertools.product(range(rows + 1), range(cols)) if ("across", row, col) not in without
    ]  # fmt: skip
    down = [
        (row * HIGH, (row + 1) * HIGH, col * WIDE)
        for row, col in itertools.product(range(rows), range(cols + 1)) if ("down", row, col) not in without
    ]  # fmt: skip
    return across, down


def word(text: str, row: float, col: float) -> Word:
    """In the middle of a place of the grid."""
    x, y = (col + 0.5) * WIDE, (row + 0.5) * HIGH
    return Word(text, x - 20, y - 5, x + 20, y + 5)


def words(*rows: str) -> list[Word]:
    return [word(text, row, col) for row, line in enumerate(rows) for col, text in enumerate(line.split("|")) if text]


def grids(drawn: tuple[list[Rule], list[Rule]], found: list[Word]) -> list[list[list[str]]]:
    return [table.grid() for table in ruled.find(*drawn, found, 1)]


def test_lines_close_cells() -> None:
    """What stands between lines is a cell; outside of them nothing belongs to the table."""
    found = [*words("Plan|Limit", "Gold|2400", "Silver|900"), word("Text below the table", 4, 0)]
    assert grids(lines(3, 2), found) == [[["Plan", "Limit"], ["Gold", "2400"], ["Silver", "900"]]]


def test_a_missing_line_makes_one_cell_of_two() -> None:
    """Over two columns and over two rows; it counts for each place that it covers."""
    drawn = lines(3, 3, (("down", 0, 2), ("across", 2, 0)))
    found = [word("Plan", 0, 0), word("Limits", 0, 1.5), *words("", "|dental|2400", "|glasses|320"), word("Gold", 1.5, 0)]
    assert grids(drawn, found) == [[["Plan", "Limits", "Limits"], ["Gold", "dental", "2400"], ["Gold", "glasses", "320"]]]


def test_what_is_open_is_no_cell() -> None:
    """Where the border is missing the text stays outside, and the rest is a table."""
    found = words("Plan|Limit|open", "Gold|2400|open", "Silver|900|open")
    drawn = lines(3, 3, tuple(("down", row, 3) for row in range(3)))
    assert grids(drawn, found) == [[["Plan", "Limit"], ["Gold", "2400"], ["Silver", "900"]]]


def test_lines_that_nearly_meet_meet() -> None:
    """Double lines, gaps and ends that fall short by two points are as people see them."""
    across, down = lines(2, 2)
    moved = [(begin + 1.5, end - 1.5, place + 1.0 * (at % 2)) for at, (begin, end, place) in enumerate((*across, *across))]
    found = words("Plan|Limit", "Gold|2400")
    assert grids((moved, [(begin + 2, end - 2, place) for begin, end, place in down]), found) == [[["Plan", "Limit"], ["Gold", "2400"]]]


def test_rows_that_no_line_parts_are_told_by_their_figures() -> None:
    """Ruled every two rows only: each line of figures is a row, with a place of its own."""
    drawn = lines(3, 3, (("across", 2, 0), ("across", 2, 1), ("across", 2, 2)))
    (table,) = ruled.find(*drawn, words("State|2015|2014", "Alabama|18,870|23,022", "Alaska|209|3,062"), 1)
    assert table.grid() == [["State", "2015", "2014"], ["Alabama", "18,870", "23,022"], ["Alaska", "209", "3,062"]]
    assert [box.top for box in table.boxes] == [0.0, 25.0, 45.0]


def test_a_label_of_two_lines_stays_one_row() -> None:
    """A wrapped cell without figures on every line is no reason to cut a row."""
    drawn = lines(3, 3, (("across", 2, 0), ("across", 2, 1), ("across", 2, 2)))
    (table,) = ruled.find(*drawn, words("State|2015|2014", "District of|18,870|23,022", "Columbia||"), 1)
    assert table.grid()[1:] == [["District of Columbia", "18,870", "23,022"]]


@pytest.mark.parametrize(
    ("drawn", "found"),
    [((*lines(1, 1),), words("Boxed text")), ((*lines(4, 4),), words("|||x")), (([], []), words("a|b"))],
    ids=["frame", "empty", "none"],
)
def test_a_frame_a_picture_and_no_lines_are_no_table(drawn: tuple[list[Rule], list[Rule]], found: list[Word]) -> None:
    """One cell is a frame around a text; a grid that is nearly empty is a drawing."""
    assert ruled.find(*drawn, found, 1) == []


def test_lines_that_do_not_part_the_cells_make_no_table() -> None:
    """Where rows are framed but columns are parted by white, the words are left to those who look at white."""
    across, down = lines(4, 2)
    found = [Word(str(n), 10 + 30.0 * n, row * HIGH + 5, 20 + 30.0 * n, row * HIGH + 15) for row in range(4) for n in range(6)]
    assert ruled.find(across, down, found, 1) == []


def test_a_drawing_is_left_alone() -> None:
    """A grid of too many places is graph paper."""
    many = [(0.0, 9_000.0, 5.0 * at) for at in range(500)]
    assert ruled.find(many, many, [Word("a", 1, 1, 2, 2)], 1) == []


def test_a_page_of_a_hundred_columns_is_read_in_time() -> None:
    """A hostile page costs seconds, not minutes: ten thousand cells, each drawn line by line."""
    pieces = [(4.0 * col, 4.0 * col + 3.9, 4.0 * row) for row in range(101) for col in range(100)]
    found = [Word("1", 4.0 * col + 1, 4.0 * row + 1, 4.0 * col + 2, 4.0 * row + 2) for row in range(100) for col in range(100)]
    (table,) = ruled.find(pieces, pieces, found, 1)
    assert (table.width, table.height) == (100, 100)


stretch = st.tuples(st.floats(0, 500), st.floats(0, 500), st.floats(0, 500)).map(lambda line: (min(line[:2]), max(line[:2]), line[2]))
a_word = st.builds(word, st.sampled_from(["Plan", "1,200", "x"]), st.floats(0, 20), st.floats(0, 4))


@given(st.lists(stretch, max_size=25), st.lists(stretch, max_size=25), st.lists(a_word, max_size=30))
def test_any_lines_give_whole_tables_or_none(across: list[Rule], down: list[Rule], found: list[Word]) -> None:
    """However lines cross: no two cells of a table cover one place, each row has a box, and no word is told twice."""
    tables = ruled.find(across, down, found, 1)
    for table in tables:
        places = [
            (row, col) for cell in table.cells for row in range(cell.row, cell.row + cell.rows) for col in range(cell.col, cell.col + cell.cols)
        ]
        assert len(places) == len(set(places))
        assert len(table.boxes) == table.height
    told = sum(len(cell.text.split()) for table in tables for cell in table.cells)
    assert told <= len(found) * max(1, len(tables))
