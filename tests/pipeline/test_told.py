"""What was told can be cut anywhere."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.ask import Said
from tidegate.pipeline.told import Told


@given(st.lists(st.tuples(st.text(max_size=4), st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=3)), max_size=8), st.integers(0, 40))
def test_a_cut_is_a_prefix(pieces: list[tuple[str, list[int] | None]], at: int) -> None:
    """The text up to the cut; ids only where they are of exactly that text; never more tokens than there were."""
    told = Told()
    for text, ids in pieces:
        told.add(text, ids)
    whole, tokens = "".join(text for text, _ in pieces), told.tokens
    at = min(at, len(whole))
    said = told.cut(at)
    assert said.text == whole[:at] == "".join(told.text)
    assert told.chars == at
    assert said.tokens == told.tokens <= tokens
    if said.token_ids is not None:
        kept = list(pieces)
        while kept and (len("".join(text for text, _ in kept)) > at or not kept[-1][0]):
            kept.pop()
        assert "".join(text for text, _ in kept) == said.text, "a cut inside a piece has no ids"
        assert said.token_ids == [one for _, ids in kept for one in ids or ()]


def test_ids_behind_the_last_character_are_not_said() -> None:
    """The first bytes of a character that nobody saw are told again."""
    told = Told()
    told.add("a", [1])
    told.add("", [2])
    assert told.cut(1) == Said("a", 1, [1])


def test_inserted_text_counts_no_tokens_and_has_no_ids() -> None:
    """Only what an engine made is counted."""
    told = Told()
    told.add("a", [1])
    told.insert("bc")
    told.add("d", [4])
    assert told.cut(3) == Said("abc", 1, None)
    assert told.exact
    assert told.between(1, 3) == "bc"
