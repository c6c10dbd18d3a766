"""Two legs' orders become one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.ask import Passage
from tidegate.core.search import Found, Ranking
from tidegate.retrieval.fuse import fuse


def found(near: str, worded: str = "", coverage: float = 1.0) -> Found:
    """Passages by letter, as a store gives them."""
    ids = list(dict.fromkeys(near + worded))
    legs = [Ranking("vector", list(near), [0.5] * len(near))]
    if worded:
        legs.append(Ranking("words", list(worded), [1.0] * len(worded), [coverage] * len(worded)))
    return Found([Passage(id, "d", "D", id, 0.5) for id in ids], "3-x", "graph", legs)


def order(of: Found) -> str:
    return "".join(passage.id for passage in fuse(of).passages)


def test_what_both_legs_have_comes_first() -> None:
    """Second in both beats first in one: 2 / 62 is more than 1 / 61."""
    assert order(found("abc", "db")) == "badc"


def test_votes_are_reciprocal_ranks() -> None:
    """1/64 + 1/62 is more than 2/63; with k = 0, the first of either leg comes before all that both have."""
    assert order(found("xabc", "acb")) == "acbx"
    assert "".join(passage.id for passage in fuse(found("xabc", "dcba"), k=0).passages)[:2] == "xd"


def test_words_without_evidence_change_nothing() -> None:
    """A leg whose passages hold next to nothing of what was asked does not turn neighbours round."""
    assert order(found("abcd", "dcba", coverage=0.1)) == "abcd"
    assert order(found("abcd", "bca", coverage=0.9))[0] == "b"


def test_coverage_counts_for_each_passage() -> None:
    """Of two that the words found, the one that holds the question speaks."""
    of = found("abcd", "dc")
    legs = [of.legs[0], Ranking("words", ["d", "c"], [2.0, 1.0], [0.05, 1.0])]
    assert order(Found(of.passages, legs=legs))[:2] == "ca"


def test_one_leg_stays_as_it_is() -> None:
    """Also where no leg is told of."""
    one = found("abc")
    assert fuse(one) == one
    assert fuse(Found(one.passages)) == Found(one.passages)


def test_legs_version_and_way_are_kept() -> None:
    """Where each leg had a passage can be told afterwards."""
    before = found("ab", "ba")
    after = fuse(before)
    assert (after.legs, after.index_version, after.way) == (before.legs, "3-x", "graph")


@given(st.lists(st.sampled_from("abcdefgh"), unique=True), st.lists(st.sampled_from("abcdefgh"), unique=True), st.floats(0, 1))
def test_nothing_is_lost_and_the_order_is_always_the_same(near: list[str], worded: list[str], coverage: float) -> None:
    """Every passage once; equals stay as they came; what leads in all that a passage is in leads."""
    of = found("".join(near), "".join(worded), coverage)
    fused = order(of)
    assert sorted(fused) == sorted({*near, *worded})
    assert fused == order(of)
    if near and worded and near[0] == worded[0]:
        assert fused[0] == near[0]
