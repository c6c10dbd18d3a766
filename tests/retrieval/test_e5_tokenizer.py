"""Our tokenizer against the one in the weights' own engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.retrieval.e5_tokenizer import E5Tokenizer

#: NUL ends a text for the engine; lone surrogates are refused before; control names are tokens for the engine and text for us.
UNICODE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0<"), max_size=200)


@pytest.fixture(scope="session")
def tokenizer(weights):
    return E5Tokenizer(weights.read_pieces())


def count(tokenizer, text):
    return len(tokenizer.encode("passage: " + text)) + 2


def test_counts_equal_the_engines(tokenizer, engine, texts):
    """Every text has as many tokens here as there."""
    assert [count(tokenizer, text) for text in ["", *texts]] == [engine.token_count(text) for text in ["", *texts]]


def test_counts_equal_the_engines_for_any_unicode(tokenizer, engine):
    """Also for what nobody writes."""

    @settings(deadline=None)  # other work on the machine is no error
    @given(UNICODE)
    def check(text):
        assert count(tokenizer, text) == engine.token_count(text)

    check()


def test_a_text_is_the_same_the_second_time(tokenizer, weights, texts):
    """Words that were read before are remembered, in whatever text they stand; a tokenizer that has seen nothing reads the same."""
    before = [tokenizer.encode(text) for text in texts]
    assert [tokenizer.encode(text) for text in texts] == before
    assert [E5Tokenizer(weights.read_pieces()).encode(text) for text in texts[:3]] == before[:3]


def test_pieces_across_spaces_are_no_pieces_of_this_model():
    """Words could not be read one by one with them."""
    pieces = SimpleNamespace(bos=0, eos=1, unk=2, code_points={}, pieces=[("\u2581a", -1.0), ("a\u2581b", -2.0)])
    with pytest.raises(ValueError, match="crosses a space"):
        E5Tokenizer(pieces)


def test_control_tokens_cannot_be_written(tokenizer):
    """`</s>` in a document is four characters, not the end of the text."""
    for name in ("<s>", "</s>", "<pad>", "<unk>", "<mask>"):
        assert not {0, 1, 2, 3, 250_001} & set(tokenizer.encode(f"before {name} after"))


def test_an_unknown_character_is_one_unknown_token(tokenizer):
    """Cuneiform is not among the pieces; what stands around it is read."""
    ids = tokenizer.encode("a\U00012000b")
    assert ids.count(3) == 1
    assert len(ids) >= 3


def test_nul_is_nothing(tokenizer):
    """Like the other control characters, NUL is dropped and does not end the text."""
    assert tokenizer.encode("water\0 damage") == tokenizer.encode("water damage")


def test_ten_thousand_characters_without_a_space_are_read(tokenizer, engine):
    """Time grows with the length, not with its square."""
    text = "ab1" * 3_334
    assert count(tokenizer, text) == engine.token_count(text)
