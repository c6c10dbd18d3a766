"""Prompts as token ids: text from outside is never read as a control token, and nothing else about a prompt changes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.bench.tokens import CONTROL, decode, encode, render
from tidegate.engines.prompt_ids import (
    MAY_BE_CONTROL,
    Message,
    apart,
    first_tokens,
    may_hold_control,
    prompt_ids,
    texts_with_control,
)

CONTROL_IDS = {encode(token, special=True)[0] for token in CONTROL}
#: Pieces that texts are made of: whole and broken control tokens, brackets, words, blanks.
PIECES = st.sampled_from([*CONTROL, "<|im_", "end|>", "<", "[", "|>", "]", " the", "é", "\n", " ", "x", ""])
TEXTS = st.lists(PIECES, max_size=6).map("".join)


class Engine:
    """A tokenizer and a template that count how often they are asked."""

    def __init__(self) -> None:
        self.asked = 0

    async def tokenize(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        self.asked += 1
        return [encode(text, special=special) for text in texts]

    async def render(self, messages: list[Message]) -> str:
        return render(messages)


async def ids_of(messages: list[Message], engine: Engine | None = None) -> list[int] | None:
    engine = engine or Engine()
    foreign, elsewhere = await texts_with_control(messages, engine.tokenize)
    assert not elsewhere
    return await prompt_ids(messages, foreign, engine.render, engine.tokenize)


@given(st.lists(st.one_of(TEXTS, st.lists(TEXTS, min_size=1, max_size=3)), min_size=1, max_size=4))
async def test_text_is_text(contents: list[Any]) -> None:
    """Whatever users type, in one text or in parts: the prompt says it to the byte, and its only control tokens are the template's."""
    messages = [{"role": "user", "content": _content(content)} for content in contents]
    ids = await ids_of(messages)
    assert ids is not None
    assert decode(ids).decode() == render(messages)
    assert sum(token in CONTROL_IDS for token in ids) == 2 * len(messages) + 1


def _content(content: Any) -> Any:
    return content if isinstance(content, str) else [{"type": "text", "text": text} for text in content]


async def test_text_without_control_tokens_changes_nothing() -> None:
    """The ids are those of the rendered prompt, and nobody is asked about texts without brackets."""
    engine = Engine()
    messages: list[Message] = [{"role": "user", "content": "a the b"}, {"role": "assistant", "content": None}]
    assert await ids_of(messages, engine) == encode(render(messages), special=True)
    assert engine.asked == 1


async def test_few_questions() -> None:
    """However many texts hold control tokens, the engine is asked four times."""
    engine = Engine()
    await ids_of([{"role": "user", "content": f"{number}</s>"} for number in range(50)], engine)
    assert engine.asked == 4


async def test_what_stands_before_a_prompt() -> None:
    """The engine's own beginning comes first."""
    engine = Engine()
    ids = await prompt_ids([{"role": "user", "content": "a"}], (), engine.render, engine.tokenize, begin=[5])
    assert ids is not None
    assert ids[0] == 5


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "a", "name": "</s>"},
        {"role": "</s>", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": '{"a": "<|im_end|>"}'}}]},
    ],
)
async def test_control_tokens_in_other_places(message: Message) -> None:
    """Names, roles and tool calls are looked through too."""
    assert await texts_with_control([message], Engine().tokenize) == (set(), True)


async def test_outer_blanks_are_the_templates() -> None:
    """A template that trims contents trims those that are kept apart as well."""
    engine = Engine()

    async def trimming(messages: list[Message]) -> str:
        return "|".join(message["content"].strip() for message in messages)

    ids = await prompt_ids([{"role": "user", "content": "  </s> \n"}, {"role": "user", "content": "x"}], {"  </s> \n"}, trimming, engine.tokenize)
    assert ids == [*b"</s>", *b"|x"]


async def test_a_template_that_cuts_texts() -> None:
    """A text that did not arrive whole cannot be found again: there are no ids."""
    engine = Engine()

    async def cutting(messages: list[Message]) -> str:
        return str(messages[0]["content"][:-1])

    assert await prompt_ids([{"role": "user", "content": "</s>"}], {"</s>"}, cutting, engine.tokenize) is None


@given(TEXTS)
async def test_plain_text_where_control_is_always_read(text: str) -> None:
    """Cut open at each bracket no control token is whole, and nothing of the text is lost."""

    async def read(asked: str) -> list[int]:
        return encode(asked, special=True)

    ids = await apart(CONTROL[1], encode(CONTROL[1], special=True)[0], read)(text)
    assert decode(ids).decode() == text
    assert not CONTROL_IDS.intersection(ids)


@given(TEXTS)
def test_a_blank_breaks_every_control_token(text: str) -> None:
    """What the pattern finds and a blank breaks is no control token any more; a bracket is all that the cheap look needs."""
    broken = MAY_BE_CONTROL.sub(lambda match: match[0] + " ", text)
    assert not CONTROL_IDS.intersection(encode(broken, special=True))
    assert broken.replace(" ", "") == text.replace(" ", "")
    assert may_hold_control([{"content": text}]) == bool(re.search(r"[<[]", text))


async def test_first_tokens() -> None:
    """Every token that is a beginning of the text, with a blank and without, and parts of a character."""
    engine = Engine()
    tokens = {decode([token]) for token in await first_tokens("quick one", engine.tokenize)}
    assert tokens == {b"q", b" ", b" quick"}
    assert {decode([token]) for token in await first_tokens(" \u4f60", engine.tokenize)} == {b" ", "\u4f60".encode()[:1]}
