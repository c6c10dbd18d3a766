"""Sentences that do not bear on the question go; what stays is the passage's own, in its order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.retrieval.compress import GAP, compress

LONG = (
    "The insurer was founded in a small harbour. It has many members. Its office stands at the quay. Ships pass all day. "
    "A car accident must be reported within seven days. Late ones are read too. The garden is open. Tea is served there. Music plays."
)
TABLE = "Table 2: premiums\n| age | premium |\n|---|---|\n| 30 | 120 |\n| 40 | 150 |\n| 50 | 210 |"
NAMED = "Premiums by age\nage: 30; premium: 120. Of a year; note: none\nage: 40; premium: 150; note: none\nage: 50; premium: 210; note: none"


def one(question: str, text: str) -> str:
    return compress(question, [text])[0]


def test_sentences_far_from_the_question_go() -> None:
    """The sentence that answers stays with its neighbours; a gap is a gap to see."""
    assert one("When to report car accidents?", LONG) == (
        f"{GAP} Ships pass all day. A car accident must be reported within seven days. Late ones are read too. {GAP}"
    )


def test_a_passage_found_by_its_meaning_stays_whole() -> None:
    """Where no sentence holds a word of the question nothing is left out: it is in another language, or says it otherwise."""
    assert one("交通事故多久内要报案？", LONG) == LONG
    assert one("", LONG) == LONG


def test_a_table_keeps_its_caption_and_header_and_whole_rows() -> None:
    """Rows without a word of the question go; where no row has one all stay."""
    assert one("What does it cost at the age of 40?", TABLE) == "Table 2: premiums\n| age | premium |\n|---|---|\n| 40 | 150 |"
    assert one("Which premiums are there?", TABLE) == TABLE


def test_a_row_with_its_cells_named_is_never_torn() -> None:
    """A full stop in a cell ends no row."""
    assert one("premium for age 30", NAMED).split("\n")[:2] == NAMED.split("\n")[:2]
    assert one("150", NAMED) == "Premiums by age\nage: 40; premium: 150; note: none"


def test_chinese_sentences_go_too() -> None:
    """Without blanks between sentences none comes in but the gap's own."""
    text = "公司成立于港口。码头很大。海鸥很多。交通事故应当在七日内报案。逾期仍可受理。花园开放。茶水免费。"
    assert one("交通事故几日内报案？", text) == f"{GAP} 海鸥很多。交通事故应当在七日内报案。逾期仍可受理。 {GAP}"


SENTENCES = st.lists(st.sampled_from([
    "The cat sat.", "A dog ran 30 miles!", "Who pays?", "保险合同有效。", "See e.g. page 4.", "| a | 1 |", "|---|---|", "a: 1; b: 2; c: x. Y", "",
]), max_size=12)


@given(st.text("abcdog 30?保险", max_size=20), st.lists(st.tuples(SENTENCES, st.sampled_from([" ", "\n", "\n\n"])), max_size=4))
def test_what_stays_is_the_passages_own_in_its_order(question: str, given_texts: list[tuple[list[str], str]]) -> None:
    """Every piece between gaps stands in the text, one behind the other; no row is torn; nothing is emptied."""
    texts = [joint.join(sentences).strip() for sentences, joint in given_texts]
    shown = compress(question, texts)
    assert len(shown) == len(texts)
    for text, said in zip(texts, shown, strict=True):
        assert bool(said) == bool(text)
        if said == text:
            continue
        at = 0
        for line in said.replace(GAP, "\n").split("\n"):
            piece = line.strip()
            at = text.find(piece, at)
            assert at >= 0, (piece, text)
            at += len(piece)
        rows = [line for line in text.split("\n") if line.startswith("|")]
        assert all(line in rows for line in said.split("\n") if line.startswith("|"))
