"""A chat as the ids of its prompt's tokens, made so that text from outside is never read as a control token. The same for every engine.

An adapter brings two callables: how its engine renders messages to a prompt, and how it turns texts into ids. Text that holds a control token
is not handed to the template: a placeholder that nobody can guess stands in its place, and the rendered prompt is cut there. What the
template wrote is tokenised with control tokens read as such, what came from outside without.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

Message = dict[str, Any]
#: Messages to the prompt's text, as the engine's own template writes it, up to where the answer begins.
Render = Callable[[list[Message]], Awaitable[str]]
#: The ids of each text. The second argument: whether control tokens that stand in a text are read as such, or are text like any other.
#: Nothing is put before or behind a text (no BOS).
Tokenize = Callable[[Sequence[str], bool], Awaitable[list[list[int]]]]

#: Everything that may be a control token of some model: something short in angle or square brackets. A blank behind the first bracket ends it.
MAY_BE_CONTROL = re.compile(r"<(?=[^<>]{1,80}>)|\[(?=[^\[\]]{1,80}\])")


def may_hold_control(messages: Any) -> bool:
    """Whether any text in `messages` holds a bracket that a control token could begin with. Cheap: a look for two characters, no more."""
    if isinstance(messages, str):
        return "<" in messages or "[" in messages
    # loops, not `any` over a generator: every chat passes here
    if isinstance(messages, dict):
        for value in messages.values():
            if value.__class__ is str:
                if "<" in value or "[" in value:
                    return True
            elif may_hold_control(value):
                return True
    elif isinstance(messages, list):
        for value in messages:
            if may_hold_control(value):
                return True
    return False


async def texts_with_control(messages: Sequence[Message], tokenize: Tokenize) -> tuple[set[str], bool]:
    """The texts of contents in which the engine would read a control token, and whether one stands in another place (a name, a tool call).

    Text parts of one message are also looked at together, because a template may put them together. Raises what `tokenize` does.
    """
    inside: set[str] = set()
    elsewhere: set[str] = set()
    joined: dict[str, list[str]] = {}
    for message in messages:
        for key, value in message.items():
            if key != "content":
                _collect(value, elsewhere)
        parts = _texts(message.get("content"))
        inside.update(text for text in parts if may_hold_control(text))
        if len(parts) > 1 and may_hold_control(parts):
            joined["".join(parts)] = parts
    asked = list(dict.fromkeys([*inside, *elsewhere, *joined]))
    if not asked:
        return set(), False
    # one after the other, on one connection: an engine may have few threads that answer, and every open connection may hold one
    read = await tokenize(asked, True)
    plain = await tokenize(asked, False)
    hit = {text for text, one, other in zip(asked, read, plain, strict=True) if one != other}
    found = inside & hit
    for whole in joined.keys() & hit:
        found.update(text for text in joined[whole] if text)
    return found, bool(elsewhere & hit)


async def prompt_ids(
    messages: Sequence[Message], foreign: Collection[str], render: Render, tokenize: Tokenize, *, begin: Sequence[int] = ()
) -> list[int] | None:
    """The ids of the whole prompt, with each text of `foreign` (as `texts_with_control` found them) taken as plain text.

    `begin`: ids that the engine puts before every prompt (its BOS). None where the template does not hand texts on as they are, so that a
    placeholder is lost to sight. Raises what `render` and `tokenize` do.
    """
    marks = {text: _Mark() for text in foreign}
    prompt = await render([_marked(message, marks) for message in messages] if marks else list(messages))
    own, found = _cut(prompt, marks)
    if any(mark.secret in part for part in own for mark in marks.values()):
        return None
    ids = list(begin)
    own_ids = await _each(own, True, tokenize)
    foreign_ids = await _each(found, False, tokenize)
    for number, part in enumerate(own):
        ids += own_ids[part]
        if number < len(found):
            ids += foreign_ids[found[number]]
    return ids


async def first_tokens(text: str, tokenize: Tokenize) -> list[int]:
    """Every token that `text` can begin with, with a blank before it and without: those whose own text is a beginning of it, and those with which the
    engine itself would begin (which may be a part of a character)."""
    bare = text.lstrip()
    starts = list(dict.fromkeys((text, bare, " " + bare)))
    beginnings = dict.fromkeys(start[:size] for start in starts for size in range(1, min(len(start), _LONGEST_TOKEN) + 1))
    ids = await tokenize([*starts, *beginnings], False)
    found = [one[0] for one in ids[: len(starts)] if one] + [one[0] for one in ids[len(starts) :] if len(one) == 1]
    return list(dict.fromkeys(found))


def apart(separator: str, separator_id: int, tokenize: Callable[[str], Awaitable[list[int]]]) -> Callable[[str], Awaitable[list[int]]]:
    """How plain text is tokenised by an engine that always reads control tokens: cut open inside everything that could be one.

    `separator` is a control token of the model and `separator_id` its id. It is put behind each bracket that stands in the text, so that no
    control token of the text is whole any more, and its ids are taken out again. One call to the engine, however many brackets there are.
    """

    async def plain(text: str) -> list[int]:
        cut = re.sub(r"[<\[]", lambda match: match[0] + separator, text)
        return [token for token in await tokenize(cut) if token != separator_id]

    return plain


#: Characters; no vocabulary has longer words that somebody would forbid.
_LONGEST_TOKEN = 48


class _Mark:
    """A placeholder: letters and digits only, which templates hand on as they are; blanks around the text stay around it."""

    def __init__(self) -> None:
        self.secret = "x" + secrets.token_hex(12)
        self.text = self.secret + "z"


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    if isinstance(content, list):
        return [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return []


def _collect(value: Any, into: set[str]) -> None:
    """Every text below `value` that may hold a control token."""
    if isinstance(value, str):
        if may_hold_control(value):
            into.add(value)
    elif isinstance(value, dict):
        for one in value.values():
            _collect(one, into)
    elif isinstance(value, list):
        for one in value:
            _collect(one, into)


def _marked(message: Message, marks: dict[str, _Mark]) -> Message:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": _around(content, marks)}
    if isinstance(content, list):
        parts = [
            {**part, "text": _around(part["text"], marks)} if isinstance(part, dict) and isinstance(part.get("text"), str) else part
            for part in content
        ]
        return {**message, "content": parts}
    return message


def _around(text: str, marks: dict[str, _Mark]) -> str:
    """The placeholder with the text's outer blanks: a template that trims contents still does."""
    mark = marks.get(text)
    if mark is None:
        return text
    core = text.strip()
    start = text.index(core)
    return text[:start] + mark.text + text[start + len(core) :]


def _cut(prompt: str, marks: dict[str, _Mark]) -> tuple[list[str], list[str]]:
    """What the template wrote, and the texts between (one fewer)."""
    if not marks:
        return [prompt], []
    by_mark = {mark.text: text.strip() for text, mark in marks.items()}
    pieces = re.split("(" + "|".join(by_mark) + ")", prompt)
    return pieces[::2], [by_mark[piece] for piece in pieces[1::2]]


async def _each(texts: Sequence[str], special: bool, tokenize: Tokenize) -> dict[str, list[int]]:
    """The ids of each different text, in one question."""
    asked = [text for text in dict.fromkeys(texts) if text]
    found = await tokenize(asked, special) if asked else []
    return {"": [], **dict(zip(asked, found, strict=True))}
