"""Tables without lines: found by how words stand, with headers and wrapped labels; running text is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.retrieval import aligned
from tidegate.retrieval.aligned import Word

#: Width of a letter and height of a line in these pages, in points.
LETTER, LINE = 5.0, 10.0


def page(*rows: str, pitch: float = 14.0) -> list[Word]:
    """Words as a typewriter sets them: a column of the text is a place on the page."""
    words = []
    for at, row in enumerate(rows):
        start = None
        for col, char in enumerate(row + " "):
            if char != " " and start is None:
                start = col
            elif char == " " and start is not None:
                top = 100 + at * pitch
                words.append(Word(row[start:col], start * LETTER, top, col * LETTER, top + LINE))
                start = None
    return words


def grids(words: list[Word]) -> list[list[list[str]]]:
    return [table.grid() for table in aligned.find(words)]


STATEMENT = page(
    "                             Three months ended      Six months ended  ",
    "                              June 30,  June 30,    June 30,  June 30, ",
    "(in millions)                     2023      2022        2023      2022 ",
    "Revenue                     $   13,507   $ 6,704    $ 20,699  $ 14,992 ",
    "Operating expenses:                                                    ",
    "  Research and                                                         ",
    "  development                    2,040     1,824       3,916     3,443 ",
    "  Selling                          622       (92)      1,253      —    ",
    "Total                       $   16,169   $ 8,436    $ 25,868  $ 18,435 ",
)


def test_a_statement_without_lines_is_a_table() -> None:
    """Currency signs stand with their figures, a heading over two columns counts for both, a name of a group is a row of its own."""
    ((names, *rows),) = [table.markdown().split("\n") for table in aligned.find(STATEMENT)]
    assert names == (
        "| (in millions) | Three months ended > June 30, 2023 | Three months ended > June 30, 2022 "
        "| Six months ended > June 30, 2023 | Six months ended > June 30, 2022 |"
    )
    assert rows[1:] == [
        "| Revenue | $ 13,507 | $ 6,704 | $ 20,699 | $ 14,992 |",
        "| Operating expenses: |  |  |  |  |",
        "| Research and development | 2,040 | 1,824 | 3,916 | 3,443 |",
        "| Selling | 622 | (92) | 1,253 | — |",
        "| Total | $ 16,169 | $ 8,436 | $ 25,868 | $ 18,435 |",
    ]


def test_every_row_of_a_table_knows_its_place() -> None:
    """One box for the header, then one a row, from top to bottom and as wide as the table."""
    (table,) = aligned.find(STATEMENT, page=7)
    header, *rows = table.line_boxes()
    assert (header.page, header.top, header.bottom) == (7, 100.0, 138.0)
    assert [(box.top, box.bottom) for box in rows] == [(142.0, 152.0), (156.0, 166.0), (170.0, 194.0), (198.0, 208.0), (212.0, 222.0)]
    assert len({(box.x0, box.x1) for box in rows}) == 1


def test_a_title_above_is_no_header() -> None:
    """What is centred over the whole table names the table, not a column."""
    rows = ["Age        Bronze        Gold", "18           1.50        2.50", "19           1.60        2.60", "20           1.70        2.70"]
    assert grids(page("       Premiums a month", *rows)) == [[row.split() for row in rows]]


def test_a_sentence_between_two_tables_parts_them() -> None:
    """A full-width sentence that ends in a colon begins another table."""
    row = "{:18}{:24}{}".format
    table = [row("Age", "Bronze", "Gold"), row("18", "1.50", "2.50"), row("19", "1.60", "2.60"), row("20", "1.70", "2.70")]
    found = grids(page(*table, "The premiums for all the others are as follows, as they have always been:", *table))
    assert found == [[line.split() for line in table]] * 2


TWICE = (
    "                      June 30, 2023      ",
    "                  Cost      Fair value   ",
    "Bonds           $    7      $    8       ",
    "Shares               5           4       ",
    "Total           $   12      $   12       ",
    "                     June 30, 2022       ",
    "                  Cost      Fair value   ",
    "Bonds           $    1      $    2       ",
    "Shares               3           3       ",
    "Total           $    4      $    5       ",
)


def rule(first: int, last: int, line: int) -> tuple[float, float, float]:
    """A rule below a line of the page, from one column of the text to another."""
    return first * LETTER, last * LETTER, 100 + 14 * line + LINE + 1


def test_a_second_header_begins_a_second_table() -> None:
    """Figures of another year never stand under the first year's header, though no more than a line of white parts the two."""
    rules = [rule(16, 40, at) for at in (0, 5)] + [rule(first, last, at) for first, last in ((16, 23), (28, 40)) for at in (1, 6)]
    upper, lower = aligned.find(page(*TWICE), rules)
    assert upper.markdown().split("\n")[0] == "| June 30, 2023 | Cost | Fair value |"
    assert upper.grid()[2:] == [["Bonds", "$ 7", "$ 8"], ["Shares", "5", "4"], ["Total", "$ 12", "$ 12"]]
    assert lower.markdown().split("\n")[0] == "| June 30, 2022 | Cost | Fair value |"
    assert lower.grid()[2:] == [["Bonds", "$ 1", "$ 2"], ["Shares", "3", "3"], ["Total", "$ 4", "$ 5"]]


def test_the_rule_below_a_name_says_which_columns_it_names() -> None:
    """A name over four of five columns, set nearer to one of them; and one whose first line stands alone. Rules are drawn in pieces."""
    words = page(
        "                   2022                   2023                   ",
        "                  Gross      Paid     Open     Held     Gross    ",
        "                 Amount                                 Amount   ",
        "Bonds                 1         2        3        4         5    ",
        "Shares                6         7        8        9        10    ",
        "Total                 7         9       11       13        15    ",
    )
    pieces = [rule(28, 40, 0), rule(40, 62, 0)]
    names = [rule(first, first + 7, 2) for first in (17, 28, 36, 45, 55)]
    (table,) = aligned.find(words, [rule(17, 24, 0), *pieces, *names])
    assert table.markdown().split("\n")[0] == "|  | 2022 > Gross Amount | 2023 > Paid | 2023 > Open | 2023 > Held | 2023 > Gross Amount |"


def test_a_footnote_below_a_table_is_no_row() -> None:
    """Its mark stands apart from its text, as a label does from its figures."""
    row = "{:30}{:24}{}".format
    table = [row("Raw materials", "1,632", "2,430"), row("Work in process", "1,058", "466"), row("Finished goods", "1,629", "2,263")]
    note = "(1)   During the second quarter we recorded a provision of about seven millions in cost of revenue"
    assert grids(page(*table, note, *table)) == [[line.split("  ")[0:1] + line.split()[-2:] for line in table]] * 2


def test_a_name_stands_above_the_name_of_a_group() -> None:
    """The only column of figures keeps its name, though "Fiscal year:" stands between the two; the sign at its other edge is its figures'."""
    rows = ["                                           Commitments  ", "Fiscal year:                                            ",
            "2024            $                                8,439  ", "2025                                             3,960  ",
            "2026            $                               12,399  "]  # fmt: skip
    ((name, _, *lines),) = [table.markdown().split("\n") for table in aligned.find(page(*rows))]
    assert name == "|  | Commitments |"
    assert lines == ["| Fiscal year: |  |", "| 2024 | $ 8,439 |", "| 2025 | 3,960 |", "| 2026 | $ 12,399 |"]


PROSE = ("the policy covers damage by water that", "comes out of pipes inside the house and", "no other water, unless it says so in a")


@pytest.mark.parametrize(
    "rows",
    [
        [f"{left:45}{right}" for left, right in zip(PROSE * 3, PROSE[::-1] * 3, strict=True)],
        ["(a)    the policy covers damage by water", "(b)    the policy covers storm", "(c)    it covers no floods", "(d)    that is all"],
        ["Introduction ................ 1", "Claims ...................... 7", "Complaints .................. 9", "Index ...................... 12"],
        ["We   covered    wide   words", "justified   text   here", "over the   whole   page"],
    ],
    ids=["columns", "list", "contents", "justified"],
)
def test_running_text_is_no_table(rows: list[str]) -> None:
    """Two columns of text, a list, a table of contents and justified lines stay text."""
    assert grids(page(*rows)) == []


@pytest.mark.parametrize(("sign", "sides"), [("$", ("$ 1", "$ 2")), ("%", ("1 %", "2 %"))])
def test_a_sign_apart_belongs_to_its_figure(sign: str, sides: tuple[str, str]) -> None:
    """Set to the column's edge, a currency's sign is still that of the figure behind it, and a percent sign that of the one before."""
    row = "name {n}      $      1      $      2" if sign == "$" else "name {n}      1 %           2 %"
    table = grids(page(*(row.format(n=n) for n in range(4))))
    assert table == [[[f"name {n}", *sides] for n in range(4)]]


words = st.builds(
    lambda text, x, y, wide, high: Word(text, x, y, x + wide, y + high),
    st.sampled_from(["1,200", "$", "%", "-", "Total", "a", "2023", "营业收入", "x" * 80]),
    st.floats(0, 600), st.floats(0, 800), st.floats(0, 120), st.floats(0, 40),
)  # fmt: skip


@given(st.lists(words, max_size=60))
def test_any_words_give_whole_tables_or_none(found: list[Word]) -> None:
    """Wherever words stand: every cell of every table lies inside its grid, no two cover one place, and each word is in at most one."""
    for table in aligned.find(found):
        places = [
            (row, col) for cell in table.cells for row in range(cell.row, cell.row + cell.rows) for col in range(cell.col, cell.col + cell.cols)
        ]
        assert len(places) == len(set(places))
        assert len(table.boxes) == table.height >= 2
        assert table.width >= 2
        assert 1 <= table.header < table.height
        assert all(box.x0 <= box.x1 and box.top <= box.bottom for box in table.boxes)
    said = "".join(sorted("".join(cell.text for table in aligned.find(found) for cell in table.cells).replace(" ", "")))
    there = list("".join(word.text for word in found))
    for char in said:
        there.remove(char)
