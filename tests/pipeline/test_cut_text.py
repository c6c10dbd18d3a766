"""Where texts are cut, and how much of them a number of tokens is."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.pipeline.cut_text import cut_after, cut_before, head, may_cut, pieces, shards, tail

TEXTS = st.text(alphabet="ab .\n字。é\u0301👍🏽👩\u200d🏫🇩🇪<|im_end|>[INST]", max_size=400)


async def by_words(texts: Sequence[str]) -> list[int]:
    """A tokenizer: a word with the blank before it, at most six letters of it, or a single sign."""
    return [len(re.findall(r" ?\w{1,6}|\s|[^\w\s]", text)) for text in texts]


@pytest.mark.parametrize(
    "whole",
    ["e\u0301", "👍🏽", "👩\u200d🏫", "🇩🇪", "❤\ufe0f", "\r\n", "<|im_end|>", "[INST]", "</s>", "<|start_header_id|>", "ก\u0e48"],
)  # fmt: skip
def test_what_belongs_together_is_not_cut(whole: str) -> None:
    """Not inside what a reader takes for one character, nor inside what a model may take for a control token."""
    text = f"ab{whole}cd"
    inside = range(3, 2 + len(whole))
    assert [at for at in inside if may_cut(text, at)] == []
    assert may_cut(text, 2)
    assert may_cut(text, 2 + len(whole))
    for at in inside:
        assert (cut_before(text, at), cut_after(text, at)) == (2, 2 + len(whole))


def test_flags_are_parted_between_flags() -> None:
    """Two letters make a flag: a row of flags is cut after each second one."""
    row = "🇩🇪🇫🇷🇯🇵"
    assert [at for at in range(1, len(row)) if may_cut(row, at)] == [2, 4]


def test_a_row_without_end_is_cut_all_the_same() -> None:
    """Thousands of marks on one letter belong to no character that anybody reads; they do not hold anybody up either."""
    text = "a" + "\u0301" * 5000
    assert 0 < cut_before(text, 2500) <= 2500 <= cut_after(text, 2500) < len(text)


@given(TEXTS, st.integers(1, 30))
@settings(deadline=None)
def test_pieces_are_the_text(text: str, count: int) -> None:
    """Nothing is lost between pieces, none is empty, and they are of about one length."""
    parts = pieces(text, count)
    assert "".join(parts) == text
    assert all(parts)
    assert all(len(part) <= 2 * (len(text) // count + 1) + 256 for part in parts)


@given(TEXTS, st.integers(0, 100))
@settings(deadline=None)
def test_a_head_and_a_tail_have_at_most_their_tokens(text: str, tokens: int) -> None:
    """What is taken has no more tokens than asked for, is nearly as much as that, and ends where the text may be cut."""

    async def check() -> None:
        (total,) = await by_words([text])
        first, last = await head(text, tokens, by_words), await tail(text, tokens, by_words)
        for part, at in ((text[:first], first), (text[last:], last)):
            (count,) = await by_words([part])
            # Pieces of a word count more than the word, so a few tokens more fit into the sum of pieces; the prompt is counted again in the end.
            assert count <= tokens
            assert may_cut(text, at)
        if tokens >= total * 2:
            assert (first, last) == (len(text), 0)

    asyncio.run(check())


def test_a_long_text_is_counted_little_more_than_once() -> None:
    """Finding a place in a text of 120,000 characters has less than twice the text counted, in a handful of questions."""
    text = "".join(f"word{n} " for n in range(12_000))
    asked: list[int] = []

    async def count(texts: Sequence[str]) -> list[int]:
        asked.append(sum(map(len, texts)))
        return await by_words(texts)

    at = asyncio.run(head(text, 10_000, count))
    (found,) = asyncio.run(by_words([text[:at]]))
    assert 9_950 <= found <= 10_000
    assert sum(asked) < 2 * len(text)
    assert len(asked) <= 6


@given(TEXTS, st.integers(8, 60))
@settings(deadline=None)
def test_shards_are_the_text_and_none_is_too_long(text: str, tokens: int) -> None:
    """Joined they are the text; none has more tokens than asked for, but where it cannot be cut."""

    async def check() -> None:
        parts = await shards(text, tokens, by_words)
        assert "".join(parts) == text
        for part, count in zip(parts, await by_words(parts) if parts else [], strict=True):
            assert count <= tokens or len(part) <= 13 or not any(may_cut(part, at) for at in range(1, len(part)))

    asyncio.run(check())
