"""Retrieval as a number: what counts as right, and what the measures are of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.ask import Passage
from tidegate.core.errors import BadRequest
from tidegate.core.search import Found
from tidegate.retrieval import quality
from tidegate.retrieval.quality import Question, QuestionSet, judge, mean, read_set


def passage(document: str, text: str = "x") -> Passage:
    return Passage(f"{document} {text}", document, document, text, 0.5)


def looks(orders: Mapping[str, Sequence[Passage]]) -> quality.Looks:
    async def look(question: str) -> tuple[Mapping[str, Sequence[Passage]], Found]:
        return orders, Found([], "7-a")

    return look


async def judged(question: Question, **orders: Sequence[Passage]) -> quality.Quality:
    return await judge(QuestionSet("s", "0", [question]), looks(orders), collection="c")


async def test_a_right_passage_is_of_the_document_and_holds_the_answer() -> None:
    """White space, case and width aside; the end of a path names a document, the end of a name does not."""
    question = Question("q", ["fees/cards.md"], "5 EUR a month")
    wrong = [passage("/d/fees/cards.md", "nothing"), passage("/d/otherfees/cards.md", "5 EUR a month")]
    found = await judged(question, final=[*wrong, passage("/d/fees/cards.md", "It costs 5 eur\na  month.")])
    assert found.orders["final"].mrr.value == pytest.approx(1 / 3)
    assert found.orders["final"].precision_at_1.value == 0
    assert found.orders["final"].recall_at[3].value == 1
    assert found.orders["final"].recall_at[1].value == 0


async def test_documents_may_say_it_differently() -> None:
    """Any of the words will do."""
    question = Question("q", ["a", "b"], "five", also=["5"])
    found = await judged(question, final=[passage("a", "It is five."), passage("b", "It is 5.")])
    assert found.orders["final"].recall_at[3].value == 1


async def test_a_document_counts_once() -> None:
    """Two passages of one document are one find, and recall is of as many documents as k can hold."""
    question = Question("q", ["a", "b", "c"])
    found = (await judged(question, final=[passage("a", "1"), passage("a", "2"), passage("b")])).orders["final"]
    assert {k: one.value for k, one in found.recall_at.items()} == {1: 1.0, 3: 2 / 3, 5: 2 / 3, 10: 2 / 3}
    ideal = 1 + 1 / math.log2(3) + 1 / 2
    assert found.ndcg.value == pytest.approx((1 + 1 / math.log2(4)) / ideal)


async def test_the_gain_over_a_leg_is_question_by_question() -> None:
    """What the answer is made from has it at rank 1, the vectors beyond rank 5."""
    question = Question("q", ["a"])
    others = [passage(str(number)) for number in range(7)]
    found = await judged(question, vector=[*others, passage("a")], final=[passage("a"), *others])
    assert found.gains["vector"].value == 1
    assert (found.index_version, found.questions, sorted(found.orders)) == ("7-a", 1, ["final", "vector"])


async def test_documents_that_are_not_there_are_named() -> None:
    """A set for another collection would only look bad."""
    wanted = QuestionSet("s", "0", [Question("q", ["a.md", "gone.md"])])
    found = await judge(wanted, looks({"final": []}), collection="c", sources=["/d/a.md"])
    assert found.unknown == ["gone.md"]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_the_interval_holds_the_mean(values: list[float]) -> None:
    """And is the same each time."""
    found = mean(values)
    assert found.low <= found.value + 1e-9
    assert found.value <= found.high + 1e-9
    assert mean(values) == found


@given(st.lists(st.tuples(st.sampled_from("abcdx"), st.booleans()), max_size=15), st.sets(st.sampled_from("abcd"), min_size=1))
async def test_measures_stay_between_0_and_1(found: list[tuple[str, bool]], documents: set[str]) -> None:
    """Whatever was found, and recall never falls with k where the documents are one."""
    question = Question("q", sorted(documents), "yes")
    ranked = (await judged(question, final=[passage(name, "yes" if right else "no") for name, right in found])).orders["final"]
    for one in (ranked.precision_at_1, ranked.mrr, ranked.ndcg, *ranked.recall_at.values()):
        assert 0 <= one.value <= 1
    if len(documents) == 1:
        assert list(ranked.recall_at.values()) == sorted(ranked.recall_at.values(), key=lambda one: one.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"question": "q", "documents": ["a"]}\n{"question"', ":2:"),
        ('{"question": "q", "documents": ["a"], "answr": "x"}', "answr"),
        ('{"question": " ", "documents": ["a"]}', "needs words"),
        ('{"question": "q", "documents": []}', "at least one document"),
        ('{"question": "q", "documents": ["a", ""]}', "by its name"),
        ("\n", "holds no question"),
        ('{"question": "\udcff", "documents": ["a"]}', ":1:"),
    ],
)
def test_a_bad_set_is_refused_with_its_line(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text(content, "utf-8", errors="surrogateescape")
    with pytest.raises(BadRequest, match=says):
        read_set(file)


def test_a_set_is_read_with_its_digest(tmp_path: Path) -> None:
    """Blank lines are nothing."""
    file = tmp_path / "set.jsonl"
    file.write_text('{"question": "q", "documents": ["a"], "kind": "fee"}\n\n', "utf-8")
    found = read_set(file)
    assert (found.name, len(found.sha256), found.questions) == ("set.jsonl", 64, [Question("q", ["a"], kind="fee")])
    with pytest.raises(BadRequest, match="cannot be read"):
        read_set(tmp_path / "none")


def test_a_set_without_end_is_refused() -> None:
    """A device or a pipe named by mistake costs a bounded memory."""
    with pytest.raises(BadRequest, match="more than 64 MiB"):
        read_set(Path("/dev/zero"))


def test_a_file_whose_name_is_not_utf_8_gives_a_report_that_can_be_kept(tmp_path: Path) -> None:
    """Names are bytes; what is no text becomes U+FFFD."""
    file = tmp_path / "set\udcff"
    file.write_text('{"question": "q", "documents": ["a"]}', "utf-8")
    assert read_set(file).name == "set\ufffd"
