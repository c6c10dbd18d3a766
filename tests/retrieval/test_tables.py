"""Grids of cells: headers, signs, tables that go on overleaf."""

from __future__ import annotations

import pytest

from tidegate.core.document import Box
from tidegate.retrieval.tables import Cell, Table, headed, is_figure, joined, tidy


def table(*rows: str, page: int = 1, x0: float = 72.0, header: int = 0) -> Table:
    """A table of its rows' words; one row is 10 points high."""
    cells = [Cell(text, row, col) for row, line in enumerate(rows) for col, text in enumerate(line.split("|")) if text]
    boxes = [Box(page, x0, 100.0 + 10 * row, x0 + 400, 110.0 + 10 * row) for row in range(len(rows))]
    made = tidy(Table(cells, boxes, header))
    assert made is not None
    return made


@pytest.mark.parametrize("text", ["1,234.50", "(65)", "$ 13,507", "-16.55%", "—", "12 years", "3.80% - 4.95%", "1 000", "4,755,785.11", "£7bn", "…"])
def test_figures_are_told(text: str) -> None:
    """Amounts, shares, ranges and the dash that stands for nothing."""
    assert is_figure(text)


@pytest.mark.parametrize("text", ["Total", "Note 4", "", "31 December", "a1", "31,", "Q3 2023"])
def test_words_are_no_figures(text: str) -> None:
    """A number inside words names something."""
    assert not is_figure(text)


def test_a_header_repeated_overleaf_is_left_out() -> None:
    """The second page's rows follow the first's; each row stands on its own page."""
    whole = joined(table("Age|Gold", "18|1.50", "19|1.60"), table("Age|Gold", "20|1.70", page=2))
    assert whole is not None
    assert whole.grid() == [["Age", "Gold"], ["18", "1.50"], ["19", "1.60"], ["20", "1.70"]]
    assert [(box.page, box.top) for box in whole.boxes] == [(1, 100.0), (1, 110.0), (1, 120.0), (2, 110.0)]


def test_rows_without_a_header_go_on_overleaf() -> None:
    """A table that is cut by the end of a page is one table, though its header is not said again."""
    whole = joined(table("Age|Gold", "18|1.50"), table("19|1.60", "20|1.70", page=2))
    assert whole is not None
    assert whole.grid()[1:] == [["18", "1.50"], ["19", "1.60"], ["20", "1.70"]]


@pytest.mark.parametrize(
    "following",
    [table("Age|Silver|Gold", "18|1.50|2", page=2), table("Plan|Limit", "A|700", page=2), table("19|1.60", "20|1.70", page=2, x0=200.0)],
    ids=["columns", "names", "place"],
)
def test_another_table_stays_another(following: Table) -> None:
    """Other columns, other names above figures, or another place on the page: nothing is joined."""
    assert joined(table("Age|Gold", "18|1.50", "20|1.50"), following) is None


def test_names_without_a_label_begin_another_table_overleaf() -> None:
    """Though a remark stands among the figures above: another year's figures never follow under this year's names."""
    upper = table("Debt|2023|2022", "bonds|7|8", "shares|9|9", "other|see note|see note")
    assert joined(upper, table("|July 2023|July 2022", "cash|7|8", page=2)) is None


def test_a_cell_over_two_rows_survives_the_joint() -> None:
    """A header of two rows with a merged cell is recognised overleaf and left out whole."""
    head = [Cell("Age", 0, 0, 2), Cell("Plan", 0, 1, 1, 2), Cell("Silver", 1, 1), Cell("Gold", 1, 2)]
    boxes = [[Box(page, 0.0, 10.0 * row, 9.0, 10.0 * row + 9) for row in range(3)] for page in (1, 2)]
    parts = [tidy(Table([*head, Cell(str(n), 2, 0), Cell("1.50", 2, 1), Cell("2.50", 2, 2)], boxes[n - 1])) for n in (1, 2)]
    assert parts[0] is not None
    assert parts[1] is not None
    assert parts[0].header == 2
    whole = joined(parts[0], parts[1])
    assert whole is not None
    assert whole.markdown().split("\n") == ["| Age | Plan > Silver | Plan > Gold |", "|---|---|---|", "| 1 | 1.50 | 2.50 |", "| 2 | 1.50 | 2.50 |"]


def test_a_header_that_was_found_apart_is_put_above_its_figures() -> None:
    """A wide gap below the names of columns does not cost the figures their names."""
    whole = headed(table("Ministry|Plan|Page", "Total|Revenue|No."), table("Coal|550.00|40", "Posts|513.30|53"))
    assert whole is not None
    assert whole.markdown().split("\n")[0] == "| Ministry > Total | Plan > Revenue | Page > No. |"
    assert headed(table("Age|Gold", "18|1.50"), table("19|1.60", "20|1.70")) is None, "a table with figures is no header"


def test_what_stands_over_all_columns_is_said_once() -> None:
    """A title or a unit over all columns of figures is no part of each column's name."""
    cells = [Cell("Q1", 0, 1), Cell("Q2", 0, 2), Cell("Q3", 0, 3), Cell("(in millions)", 1, 1, 1, 3), Cell("Cost", 2, 0)]
    cells += [Cell(str(n), 2, n) for n in (1, 2, 3)]
    assert Table(cells, [Box(1, 0.0, 0.0, 1.0, 1.0)] * 3, 2).markdown().split("\n")[0] == "| (in millions) | Q1 | Q2 | Q3 |"


def test_the_name_of_a_group_is_no_header() -> None:
    """A label without figures right below the header belongs to the rows below it."""
    assert table("Item|2023|2022", "Assets:||", "Cash|5|4").header == 1


def test_columns_of_signs_join_their_figures() -> None:
    """A ruled table may give "$" and "%" columns of their own: they are none."""
    assert table("Item|$|5|7|%", "Sum|$|6|8|%").grid() == [["Item", "$ 5", "7 %"], ["Sum", "$ 6", "8 %"]]


@pytest.mark.parametrize(("columns", "width"), [(["5"], 40_001), (["$", "5"], 40_001), (["5", "%"], 40_001)], ids=["figures", "before", "behind"])
def test_a_wide_table_is_tidied_in_linear_time(columns: list[str], width: int) -> None:
    """Were the time the square of the number of columns, this test would run into its time-out."""
    row = "|".join(["x", *columns * (40_000)])
    assert table(row, row).width == width


def test_what_has_one_column_or_one_row_is_no_table() -> None:
    """A frame around a text is read as text."""
    box = [Box(1, 0.0, 0.0, 9.0, 9.0)] * 3
    assert tidy(Table([Cell("a", 0, 0), Cell("b", 1, 0), Cell("c", 2, 0)], box)) is None
    assert tidy(Table([Cell("a", 0, 0), Cell("b", 0, 1), Cell("c", 0, 2)], box)) is None
