"""A domain's own rules: titles that begin a section, titles that own a table, sections to skip; and what is wrong in the file."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.document import Box
from tidegate.core.errors import SettingsError
from tidegate.retrieval import structure
from tidegate.retrieval.chunk import Size, chunk
from tidegate.retrieval.loaded import Block, Loaded, markdown_table
from tidegate.retrieval.structure import Rules, read_rules

TABLE = markdown_table([["项目", "期末", "期初"], *([f"资产{n}", f"{n}", f"{n + 1}"] for n in range(40))])


def apply(rules: dict[str, list[str]], *blocks: Block) -> Loaded:
    return structure.apply(Loaded("T", list(blocks)), Rules.model_validate(rules))


def test_a_title_begins_a_section() -> None:
    """A line that the file takes for text is a heading below the one above it, whatever its number and case."""
    loaded = apply({"starts": ["exclusions"]}, Block("Cover", "heading", 2), Block("We pay."), Block("4.1  EXCLUSIONS:"), Block("War."))
    assert loaded.blocks[2:] == [Block("4.1  EXCLUSIONS:", "heading", 3), Block("War.")]


def test_a_table_keeps_the_title_that_owns_it() -> None:
    """A balance sheet's name and unit, which stand above it as text, are repeated in every passage of it; so line and figure stay together."""
    blocks = [Block("2、合并资产负债表"), Block("单位：元"), Block(TABLE, "table")]
    loaded = apply({"owns_table": ["*资产负债表"]}, Block("财务报表", "heading", 1), *blocks, Block("其他。"))

    async def count_tokens(texts: Sequence[str]) -> list[int]:
        return [len(text) // 2 for text in texts]

    passages = asyncio.run(chunk(loaded, count_tokens, Size(120, 0.1)))
    of_table = [passage for passage in passages if "资产" in passage.text and "| 项目" in passage.text]
    assert len(of_table) > 2
    assert all(passage.text.startswith("2、合并资产负债表\n单位：元\n| 项目 | 期末 | 期初 |\n") for passage in of_table)
    assert {passage.heading for passage in of_table} == {"财务报表 > 2、合并资产负债表"}
    assert "单位：元" not in "".join(passage.text for passage in passages if passage not in of_table)


def test_the_place_of_an_owned_table_reaches_up_to_its_title() -> None:
    """What is highlighted is what is quoted."""
    title = Block("Balance sheet", boxes=[Box(1, 50.0, 80.0, 200.0, 90.0)])
    table = Block(TABLE, "table", boxes=[Box(1, 72.0, 100.0, 500.0, 120.0)] * 41)
    assert apply({"owns_table": ["balance sheet"]}, title, table).blocks[1].boxes[0] == Box(1, 50.0, 80.0, 500.0, 120.0)


def test_a_title_owns_the_next_table_only() -> None:
    """Behind a paragraph of text, or behind its table, a title owns nothing."""
    table, text = Block(TABLE, "table"), Block("A long paragraph. " * 20)
    loaded = apply({"owns_table": ["rates"]}, Block("Rates", "heading", 1), table, table, Block("Rates"), text, table)
    assert [block.caption for block in loaded.blocks if block.kind == "table"] == ["Rates", "", ""]


def test_a_section_is_skipped_with_what_is_below_it_and_noted() -> None:
    """Up to the next heading of its level or above; the note counts what was left out."""
    loaded = apply(
        {"skip": ["forward-looking *"]}, Block("A", "heading", 1), Block("one"), Block("Forward-looking statements", "heading", 2), Block("x"),
        Block("Risks", "heading", 3), Block("y"), Block("B", "heading", 2), Block("two"),
    )
    assert [block.text for block in loaded.blocks] == ["A", "one", "B", "two"]
    assert loaded.notes == ["The section 'Forward-looking statements' was skipped (3 blocks), as structure.toml says."]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('start = ["a"]', "start: Extra inputs are not permitted.*Known names: starts, owns_table, skip"),
        ("starts = 1", "starts: Input should be a valid list"),
        ('skip = ["*"]', r"skip: '\*' fits every title"),
        ("starts = [", "is not TOML"),
        (b"\xff", "cannot be read"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(tmp_path: Path, content: str | bytes, said: str) -> None:
    """Unknown names with those that there are, wrong types, titles that fit everything, and what is no TOML."""
    file = tmp_path / "structure.toml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SettingsError) as caught:
        read_rules(file)
    assert re.search(said, f"{caught.value.message} {caught.value.hint}")
    assert str(file) in caught.value.message




def a_block(text: str, kind: Literal["heading", "paragraph", "table"], level: int) -> Block:
    if kind == "table":
        return Block(markdown_table([["a", "b"], [text, "1"]]), "table")
    return Block(text, kind, level if kind == "heading" else 0)


some = st.builds(
    a_block, st.sampled_from(["Rates", "1. Claims", "单位：元", "x" * 300, "Skipped"]), st.sampled_from(["heading", "paragraph", "table"]),
    st.integers(1, 6),
)  # fmt: skip


@given(st.lists(some, max_size=20))
def test_nothing_is_lost_but_what_is_skipped(blocks: list[Block]) -> None:
    """Whatever the order of blocks: without a rule to skip, every text stands in some block or caption; with one, the notes say how many went."""
    loaded = apply({"starts": ["claims"], "owns_table": ["rates"]}, *blocks)
    said = "\n".join(f"{block.caption}\n{block.text}" for block in loaded.blocks)
    assert all(block.text in said for block in blocks)
    assert sum(block.kind == "table" for block in loaded.blocks) == sum(block.kind == "table" for block in blocks)
    skipped = apply({"skip": ["skipped"]}, *blocks)
    assert len(skipped.blocks) + sum(1 + int(note.split("(")[1].split()[0]) for note in skipped.notes) == len(blocks)
