"""Tables as text: delimiters, quotes, encodings, and what is no table."""

from __future__ import annotations

import codecs
import csv as standard
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.errors import DocumentUnreadable
from tidegate.retrieval.load_child import by_suffix, read
from tidegate.retrieval.loaded import Block, Bounds
from tidegate.retrieval.loaders import csv


def load(folder: Path, content: str | bytes, name: str = "rates.csv") -> list[Block]:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return csv.load(str(folder / name), Bounds()).blocks


TABLE = Block("| Age | Gold |\n|---|---|\n| 18 | 1,50 |\n| 19 | 1,60 |", "table")


@pytest.mark.parametrize(
    "text",
    ['Age,Gold\n18,"1,50"\n19,"1,60"\n', "Age;Gold\r\n18;1,50\r\n19;1,60", "Age\tGold\n18\t1,50\n19\t1,60", "Age|Gold\n18|1,50\n19|1,60"],
    ids=["comma", "semicolon", "tab", "bar"],
)
def test_the_delimiter_is_told_by_the_file(tmp_path: Path, text: str) -> None:
    """Comma, semicolon, tab or bar; decimal commas and quoted commas part nothing."""
    assert load(tmp_path, text) == [TABLE]


def test_a_delimiter_may_be_told_in_a_line_of_its_own(tmp_path: Path) -> None:
    """As Excel wants it: the line is no text of the table."""
    assert load(tmp_path, "sep=;\nAge;Gold\n18;1,50\n19;1,60") == [TABLE]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "gb18030"])
def test_tables_are_read_in_the_usual_encodings(tmp_path: Path, encoding: str) -> None:
    """As spreadsheets save them here and in China."""
    assert load(tmp_path, "年龄,保费\n18,120元\n".encode(encoding)) == [Block("| 年龄 | 保费 |\n|---|---|\n| 18 | 120元 |", "table")]


def test_rows_of_different_lengths_and_titles_are_kept(tmp_path: Path) -> None:
    """Short rows are filled up, a line above the table is a text, blank lines part tables."""
    assert [block.text for block in load(tmp_path, "Premiums 2026\nAge,Gold,Note\n18,1.50\n\na,b\n1,2\n")] == [
        "Premiums 2026", "| Age | Gold | Note |\n|---|---|---|\n| 18 | 1.50 |  |", "| a | b |\n|---|---|\n| 1 | 2 |",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a,b\n1,2\n" * 600 + b"\0\0", "binary"),
        (codecs.BOM_UTF8 + b"a,b\n" + bytes(range(1, 9)) * 200, "binary"),
        (b"a,b\n1,\"" + b"x" * 1_100_000, "not closed"),
    ],
    ids=["nul", "control", "quote"],
)
def test_what_is_no_table_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    """Binary behind a good beginning, and a quotation mark that is never closed."""
    with pytest.raises(DocumentUnreadable) as caught:
        load(tmp_path, content)
    assert said in caught.value.message + (caught.value.hint or "")


def test_a_long_table_is_read_in_linear_time(tmp_path: Path) -> None:
    """Were the time the square of the number of rows, this test would run into its time-out."""
    (table,) = load(tmp_path, "a,b,c\n" + "1,two,3.5\n" * 100_000)
    assert table.text.count("\n") == 100_001


def test_a_picture_named_csv_says_what_it_is(tmp_path: Path) -> None:
    """What the first bytes say goes before the name."""
    (tmp_path / "a.csv").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    assert "a PNG picture, named .csv" in read(by_suffix(), str(tmp_path / "a.csv"), Bounds()).message


cells = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=8)


@given(rows=st.lists(st.lists(cells, min_size=2, max_size=2), min_size=2, max_size=8))
def test_what_was_written_is_read(rows: list[list[str]], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every cell of a table of two columns comes back, whatever signs it holds."""
    out = io.StringIO()
    standard.writer(out, quoting=standard.QUOTE_ALL).writerows(rows)
    blocks = load(tmp_path_factory.getbasetemp(), out.getvalue(), "fuzz.csv")
    said = "\n".join(block.text for block in blocks)
    assert all(cell.replace("|", "\\|") in said for row in rows for cell in row)
