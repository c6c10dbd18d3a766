"""Blocks to passages: sizes, borders, overlap, tables, and nothing lost."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.document import Box, NewPassage
from tidegate.retrieval import language
from tidegate.retrieval.chunk import Size, chunk
from tidegate.retrieval.e5_tokenizer import E5Tokenizer
from tidegate.retrieval.e5_weights import E5Weights
from tidegate.retrieval.flow import compounds, join_lines
from tidegate.retrieval.loaded import Block, Loaded, markdown_table
from tidegate.retrieval.sentences import cut, split_sentences, tail

SIZE = Size(40, 0.12)


async def count_tokens(texts: Sequence[str]) -> list[int]:
    """A word is a token, and so is a Chinese character; three more for the model's own marks."""
    return [3 + len(re.findall(r"[\u4e00-\u9fff]|[^\s\u4e00-\u9fff]+", text)) for text in texts]


def passages_of(*blocks: Block, title: str = "T", size: Size = SIZE) -> list[NewPassage]:
    return asyncio.run(chunk(Loaded(title, list(blocks)), count_tokens, size))


def on(page: int, top: float = 100.0) -> Box:
    return Box(page, 72.0, top, 500.0, top + 20)


def sentences(n: int, words: int = 8) -> str:
    return " ".join(f"S{at} " + "word " * (words - 2) + "end." for at in range(n))


def test_a_short_section_is_one_passage_with_its_headings() -> None:
    """A passage knows the headings above it, the page and its size; the document's title is not repeated."""
    passages = passages_of(
        Block("T", "heading", 1), Block("Claims", "heading", 2), Block("Deadlines", "heading", 3), Block("Within 14 days.", boxes=[on(3)])
    )
    assert passages == [NewPassage("Within 14 days.", 3, "Claims > Deadlines", 3, boxes=[on(3)])]


def test_a_passage_never_crosses_a_heading() -> None:
    """What stands under two headings is two passages, however short."""
    passages = passages_of(Block("A", "heading", 2), Block("one"), Block("B", "heading", 2), Block("two"))
    assert [(passage.heading, passage.text) for passage in passages] == [("A", "one"), ("B", "two")]


def test_a_long_section_is_cut_between_sentences() -> None:
    """No passage is larger than the size, and each ends with a whole sentence."""
    passages = passages_of(Block(sentences(20)))
    assert len(passages) > 3
    assert all(passage.tokens <= SIZE.tokens for passage in passages)
    assert all(passage.text.endswith("end.") for passage in passages)


@pytest.mark.parametrize("block", [sentences(30), sentences(60, words=4), "".join(f"这是第{n}句话说明了赔付的条件。" for n in range(30))])
def test_a_tenth_of_a_passage_is_repeated_in_the_next(block: str) -> None:
    """Each passage begins with the end of the one before: 9 to 15 percent of it."""
    passages = passages_of(Block(block), size=Size(80, 0.12))
    for last, passage in itertools.pairwise(passages):
        longest = max(n for n in range(len(passage.text)) if last.text.endswith(passage.text[:n].rstrip()))
        assert 0.09 <= longest / len(last.text) <= 0.155


def test_a_paragraph_that_does_not_fit_begins_a_passage() -> None:
    """A passage that is half full ends before a paragraph that fits whole into the next one."""
    passages = passages_of(Block(sentences(3)), Block("New " + sentences(3)), size=Size(40, 0.0))
    assert [passage.text.startswith("New ") for passage in passages] == [False, True]


def test_a_sentence_larger_than_a_passage_is_cut() -> None:
    """A sentence without an end, in English or Chinese, still gives passages within the size."""
    for text in ("word " * 500, "字" * 500, "x" * 5000):
        passages = passages_of(Block(text), size=Size(40, 0.0))
        assert all(passage.tokens <= 40 for passage in passages)
        assert "".join(passage.text.replace(" ", "") for passage in passages) == text.replace(" ", "")


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=300), max_size=5))
def test_nothing_is_lost_and_nothing_is_too_large(paragraphs: list[str]) -> None:
    """Every word of any text is in some passage, in order, and every passage is within the size."""
    passages = passages_of(*(Block(text) for text in paragraphs), size=Size(40, 0.0))
    assert all(passage.tokens <= 40 for passage in passages)
    assert re.sub(r"\s", "", "".join(passage.text for passage in passages)) == re.sub(r"\s", "", "".join(paragraphs))


def test_no_passage_is_larger_than_it_may_be_as_the_embedder_counts(weights: E5Weights) -> None:
    """Counted whole by the shipped model's own tokenizer, rows of a table and sentences in both languages alike."""
    tokenizer = E5Tokenizer(weights.read_pieces())

    async def counted(texts: Sequence[str]) -> list[int]:
        return [len(tokenizer.encode("passage: " + text)) + 2 for text in texts]

    table = markdown_table([["项目", "2023", "2022"], *([f"第{n}行收入", f"{n},507", f"({n}.5)"] for n in range(60))])
    text = " ".join(f"Claim {n} is paid." for n in range(120)) + "".join(f"第{n}条是责任。" for n in range(120))
    passages = asyncio.run(chunk(Loaded("T", [Block(table, "table"), Block(text)]), counted, Size(120, 0.12)))
    whole = [len(tokenizer.encode("passage: " + passage.text)) - len(tokenizer.encode("passage:")) for passage in passages]
    assert len(passages) > 10
    assert max(whole) <= 120


def test_every_passage_of_a_table_repeats_its_caption_and_header() -> None:
    """Rows are never torn, and none stands without the names of its columns."""
    table = markdown_table([["Age", "Bronze", "Gold"], *([str(n), f"{n}.50", f"{2 * n}.50"] for n in range(30))])
    passages = passages_of(Block("Premium by age:"), Block(table, "table"), size=Size(60, 0.12))
    assert len(passages) > 2
    assert all(passage.text.startswith("Premium by age:\n| Age | Bronze | Gold |\n|---|---|---|\n| ") for passage in passages)
    assert all(passage.tokens <= 60 for passage in passages)
    rows = [row for passage in passages for row in passage.text.split("\n")[3:]]
    assert rows == table.split("\n")[2:]


def test_a_table_too_wide_for_its_header_names_each_cell() -> None:
    """Where the header would fill the passage, each value carries its column's name instead."""
    names = [f"a long name of column {n}" for n in range(12)]
    passages = passages_of(Block(markdown_table([names, [str(n) for n in range(12)]]), "table"), size=Size(60, 0.0))
    assert "a long name of column 7: 7" in " ".join(passage.text for passage in passages)


def test_rows_with_named_cells_stand_for_themselves_below_their_caption() -> None:
    """Of a table too wide for its header no row is repeated in part: every passage begins with the caption and a whole row."""
    names = [f"a long name of column {n}" for n in range(6)]
    table = markdown_table([names, *([f"r{row}c{n}" for n in range(6)] for row in range(9))])
    passages = passages_of(Block("Rates:"), Block(table, "table"), size=Size(60, 0.12))
    assert len(passages) > 3
    assert all(passage.text.startswith("Rates:\na long name of column 0: r") for passage in passages)


@pytest.mark.parametrize("unit", ["单位：元", "1、利润表项目变动的情况及原因 单位：人民币元", "(In millions, except per share data)", "表 3 保费"])
def test_a_unit_goes_with_its_table(unit: str) -> None:
    """Figures never stand without what they are counted in."""
    table = markdown_table([["项目", "金额"], *([f"第{n}行", f"{n}.00"] for n in range(40))])
    passages = passages_of(Block(unit), Block(table, "table"), size=Size(60, 0.12))
    assert len(passages) > 2
    assert all(passage.text.startswith(f"{unit}\n| 项目 | 金额 |\n") for passage in passages)


def test_a_paragraph_before_a_table_that_is_no_caption_stays_alone() -> None:
    """Only a line that announces the table goes with it."""
    passages = passages_of(Block("We pay at once."), Block(markdown_table([["a", "b"], ["1", "2"]]), "table"))
    assert [passage.text.split("\n")[0] for passage in passages] == ["We pay at once.", "| a | b |"]


def test_a_page_is_where_a_passage_begins() -> None:
    """The page of a passage is the one of its first new sentence, not of what it repeats from the page before."""
    first, second = passages_of(Block(sentences(5), boxes=[on(1)]), Block("New " + sentences(4), boxes=[on(2)]), size=Size(50, 0.3))
    assert (first.page, second.page) == (1, 2)
    assert not second.text.startswith("New")


def test_a_passage_knows_each_place_that_it_stands_at() -> None:
    """Of two paragraphs in one passage both boxes are kept, in order, each once; so are the places of what is repeated."""
    (passage,) = passages_of(Block("One. Two.", boxes=[on(1)]), Block("Three.", boxes=[on(1, 200.0), on(2)]))
    assert passage.boxes == [on(1), on(1, 200.0), on(2)]


def test_the_rows_of_a_passage_have_their_own_place() -> None:
    """Each passage of a table names the header's place and that of its own rows, one box a page; its page is that of its first row."""
    table = markdown_table([["Age", "Bronze"], *([f"{n}", f"{n}.50"] for n in range(12))])
    boxes = [on(1, 100.0), *(on(1 + n // 8, 120.0 + 20 * (n % 8)) for n in range(12))]
    first, second = passages_of(Block(table, "table", boxes=boxes), size=Size(37, 0.12))
    assert (first.page, first.boxes) == (1, [on(1, 100.0), Box(1, 72.0, 120.0, 500.0, 240.0)])
    assert second.boxes == [on(1, 100.0), Box(1, 72.0, 240.0, 500.0, 280.0), Box(2, 72.0, 120.0, 500.0, 200.0)]


def test_contents_make_no_passages_and_an_appendix_says_so() -> None:
    """What stands in a table of contents is found in the text itself; a search may tell an appendix from the body by a tag."""
    passages = passages_of(Block("1 Claims 7", part="contents"), Block("Text."), Block("Table of rates.", part="appendix"))
    assert [(passage.text, passage.tags) for passage in passages] == [("Text.", {}), ("Table of rates.", {"part": "appendix"})]


cells = st.sampled_from(["1,200", "Gold", "营业收入", "a | b", ""])
tables = st.integers(1, 4).flatmap(lambda cols: st.lists(st.lists(cells, min_size=cols, max_size=cols), min_size=2, max_size=30))
blocks = st.lists(
    st.one_of(
        st.builds(lambda level: Block(f"H{level}", "heading", level), st.integers(1, 6)),
        st.integers(1, 12).map(lambda n: Block(sentences(n), boxes=[on(n)])),
        tables.map(lambda rows: Block(markdown_table(rows), "table", boxes=[on(1, 10.0 * at) for at in range(len(rows))])),
    ),
    max_size=8,
)


@given(blocks)
def test_no_row_is_torn_and_no_word_lost(blocks: list[Block]) -> None:
    """Of any document: every row of every table stands whole in one passage below its header, every paragraph's words are there, every passage
    is within the size and knows its places."""
    passages = passages_of(*blocks, size=Size(60, 0.12))
    texts = [passage.text for passage in passages]
    assert all(passage.tokens <= 60 for passage in passages)
    assert all(passage.page == passage.boxes[0].page or passage.page in {box.page for box in passage.boxes} for passage in passages)
    for block in blocks:
        if block.kind == "paragraph":
            assert all(any(sentence in text for text in texts) for _, sentence in split_sentences(block.text))
        elif block.kind == "table":
            header, _, *rows = block.text.split("\n")
            whole = [text for text in texts if header in text]
            named = [text for text in texts if header not in text]
            assert all(any(row in text.split("\n") for text in whole) for row in rows) or named


@given(st.lists(st.integers(4, 40), min_size=80, max_size=120))
def test_an_eighth_is_repeated(lengths: list[int]) -> None:
    """Over a long section of sentences of any length, what passages repeat of the one before is 9 to 15 percent of the size."""
    text = " ".join(f"S{at} " + "word " * (words - 2) + "end." for at, words in enumerate(lengths))
    passages = passages_of(Block(text), size=Size(280, 0.12))
    repeated = sum(passage.tokens for passage in passages) - sum(lengths)
    assert 0.09 <= repeated / (280 * (len(passages) - 1)) <= 0.15


# -- sentences


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ("Call Dr. Okafor at 9.30 a.m. sharp. Then wait.", ["Call Dr. Okafor at 9.30 a.m. sharp.", "Then wait."]),
        ("保费为 4.5 元。“可以吗？”可以。", ["保费为 4.5 元。", "“可以吗？”", "可以。"]),
        ("- one\n- two", ["- one", "- two"]),
        ("See No. 5. It says so.", ["See No. 5.", "It says so."]),
    ],
)
def test_sentences_end_where_people_end_them(text: str, expected: list[str]) -> None:
    """Full stops in abbreviations and figures end nothing; Chinese marks need no space."""
    assert [sentence for _, sentence in split_sentences(text)] == expected


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc"])))
def test_sentences_joined_are_the_text(text: str) -> None:
    """What parts the sentences is kept beside them."""
    assert "".join(before + sentence for before, sentence in split_sentences(text)) == text.rstrip()


@given(st.text(), st.integers(1, 50))
def test_pieces_joined_are_the_text(text: str, size: int) -> None:
    """Cutting loses nothing and keeps to the size."""
    pieces = cut(text, size)
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= size for piece in pieces)


def test_a_tail_begins_with_a_word() -> None:
    """The repeated end of a sentence does not begin in the middle of a word."""
    assert tail("the quick brown fox", 7) == "fox"
    assert tail("短", 7) == "短"


def test_lines_become_one_paragraph() -> None:
    """A space in English, none in Chinese, and a hyphenated word made whole."""
    assert join_lines(["the insur-", "ance of", "a home"]) == "the insurance of a home"
    assert join_lines(["港湾", "互助"]) == "港湾互助"
    assert join_lines(["港湾", "Mutual"]) == "港湾 Mutual"


def test_a_compound_keeps_its_hyphen() -> None:
    """What the document writes with a hyphen elsewhere has one at a line's end, too; what it does not is one word."""
    hyphened = compounds(["An open-domain", "question of Open-Domain answers, a state-of-the-art one"])
    assert hyphened == {"open-domain", "state-of-the-art"}
    assert join_lines(["for open-", "domain insur-", "ance"], hyphened) == "for open-domain insurance"


# -- language


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Report a loss within 14 days of the day on which you noticed it.", "en"),
        ("请在 48 小时内拨打 Harbour Mutual 的报案电话，并准备好保单号。", "zh"),
        ("Melden Sie den Schaden innerhalb von vierzehn Tagen nach dem Ereignis.", None),
        ("これはペンです。それはほんです。保険。", None),
        ("12,500.00 | 7", None),
    ],
)
def test_language_is_told_or_left_open(text: str, expected: str | None) -> None:
    """English and Chinese are recognised; nothing else is called one of them."""
    assert language.detect(text) == expected


@pytest.mark.parametrize("text", ["." * 1_000_000, "Dr. " * 250_000, '."' * 500_000, ". " + "(" * 500_000, "。" * 500_000, "a" * 1_000_000])
def test_hostile_punctuation_is_linear(text: str) -> None:
    """A million full stops take a million steps: were it their square, this test would run into its time-out."""
    assert all(passage.tokens <= 280 for passage in passages_of(Block(text), size=Size(280)))
