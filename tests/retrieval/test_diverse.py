"""Near-duplicates take one place; what only looks alike keeps its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.ask import Passage
from tidegate.retrieval.diverse import choose

HOUSE = "The household policy covers water damage from burst pipes up to the sum insured, less the excess."
CAR = "A car accident is to be reported at once by telephone or on the web page of the insurer."
HORSE = "Horses that are kept for racing cannot be insured under any of the policies for animals."


def passages(*texts: str, documents: str = "abcdefghij") -> list[Passage]:
    return [Passage(f"p{at}", f"{documents[at]}.md", "T", text, 1 - at / 100) for at, text in enumerate(texts)]


def test_the_same_text_in_two_documents_takes_one_place() -> None:
    """The better one stays, and the place goes to the next."""
    assert choose(passages(HOUSE, HOUSE, CAR, HORSE), 2) == ([0, 2], [1], [])


def test_a_passage_that_lies_within_a_better_one_says_nothing_new() -> None:
    """It repeats, however short it is beside it; a longer passage around a better one does say something new."""
    assert choose(passages(f"{CAR} {HOUSE} {HORSE}", HOUSE, "Other words stand here and nowhere else."), 3).repeated == [1]
    assert choose(passages(HOUSE, f"{CAR} {HOUSE} {HORSE}"), 2).kept == [0, 1]


def test_a_little_overlap_costs_no_place() -> None:
    """Chunks that follow each other repeat a sentence; their order is that of their relevance."""
    assert choose(passages(f"{HOUSE} {CAR}", f"{CAR[-40:]} {HORSE}", "Stamps may be insured as a collection."), 3).kept == [0, 1, 2]


def test_a_passage_with_much_in_common_stands_behind_one_that_is_new() -> None:
    """Three quarters said already: it still comes, later than its relevance alone would have it."""
    longer = f"{HOUSE} {CAR} {HOUSE[::-1]}"
    mostly = f"{HOUSE} {CAR} But the moon is far away."
    assert choose(passages(longer, mostly, HORSE, "Yet another one that is not about any of this."), 3).kept == [0, 2, 3]


def test_other_figures_are_no_repetition_and_are_named() -> None:
    """Two documents that differ in a figure alone both stay, and are told to differ; two versions in one document are its own affair."""
    old, new = (f"Claims for water damage are to be sent in within {days} days after the damage was seen." for days in (30, 60))
    assert choose(passages(old, new, HOUSE), 2) == ([0, 1], [], [(0, 1)])
    assert choose(passages(old, new, documents="aa"), 2) == ([0, 1], [], [])


def test_chinese_repeats_too() -> None:
    """Pairs of characters are its words."""
    text = "家庭财产保险承保水管爆裂造成的损失，以保险金额为限。"
    assert choose(passages(text, text, "机动车辆事故应当立即报告保险公司。"), 2).kept == [0, 2]


def test_fewer_come_where_all_repeat() -> None:
    """A place is left empty before the same is said twice."""
    assert choose(passages(HOUSE, HOUSE, HOUSE), 3) == ([0], [1, 2], [])
    assert choose([], 3) == ([], [], [])


TEXTS = st.lists(st.one_of(st.sampled_from([HOUSE, CAR, HORSE, f"{HOUSE} {CAR}", "", "7", "水管"]), st.text(max_size=60)), max_size=10)


@given(TEXTS, st.integers(1, 12))
def test_what_is_chosen_is_a_part_of_what_was_found(texts: list[str], k: int) -> None:
    """Each at most once, none more than asked for, the best one first, and no two of the same text without figures."""
    chosen = choose(passages(*texts), k)
    assert len(set(chosen.kept)) == len(chosen.kept) <= k
    assert set(chosen.kept) <= set(range(len(texts)))
    assert not set(chosen.kept) & set(chosen.repeated)
    if texts:
        assert chosen.kept[0] == 0
    assert len({texts[at] for at in chosen.kept}) == len(chosen.kept)
