"""What is left out of a prompt that is too long, and what of it stays: system messages and the last message of the user.

The texts that may be cut lie on one line of tokens, in their order. A policy is an interval of that line that goes: its beginning, its end or its
middle. Turns that lie in it whole are dropped; texts that lie in it in part are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from tidegate.pipeline.cut_text import Count, head, tail

Part = Literal["head", "tail", "middle"]
Message = dict[str, Any]

#: Of a turn of which fewer tokens would be left nothing is.
_LEAST_LEFT = 16
_KEPT_ROLES = ("system", "developer")


class Interval(msgspec.Struct, frozen=True):
    """Tokens from `begin` up to `end` that go."""

    begin: int
    end: int


def interval(part: Part, total: int, remove: int) -> Interval:
    """The part of a line of `total` tokens that goes, `remove` of them."""
    remove = min(total, remove)
    begin = 0 if part == "head" else total - remove if part == "tail" else (total - remove) // 2
    return Interval(begin, begin + remove)


@dataclass(slots=True)
class Piece:
    """A text on the line: where it stands (a message's content, or one text part of it) and how many tokens it has."""

    message: int
    part: int | None
    text: str
    tokens: int = 0


@dataclass(slots=True)
class Group:
    """Messages that stay or go together, so that no answer is without its question and no tool's result without its call."""

    messages: list[int]
    pieces: list[Piece]
    #: What cannot be cut: tool calls, names; and its tokens, with those that the template puts around the messages.
    rest: str = ""
    rest_tokens: int = 0

    @property
    def tokens(self) -> int:
        """All of it."""
        return self.rest_tokens + sum(piece.tokens for piece in self.pieces)


@dataclass(slots=True)
class Line:
    """The groups of a conversation that may be cut, in order; and the last message of the user, which may be cut only when they are gone."""

    messages: Sequence[Message]
    groups: list[Group]
    last: Group | None
    kept: list[str]

    @property
    def tokens(self) -> int:
        """Of the groups."""
        return sum(group.tokens for group in self.groups)

    async def count(self, count: Count, whole: int) -> None:
        """Have every text counted, in one question. `whole`: tokens of the prompt; what it has more is the template's, in equal shares."""
        groups = [*self.groups, *([self.last] if self.last is not None else [])]
        texts = [text for group in groups for text in (*(piece.text for piece in group.pieces), group.rest) if text]
        told = await count([*texts, *self.kept]) if texts or self.kept else []
        around = max(0, whole - sum(told)) // max(1, len(self.messages))
        counts = iter(told)
        for group in groups:
            for piece in group.pieces:
                piece.tokens = next(counts) if piece.text else 0
            group.rest_tokens = (next(counts) if group.rest else 0) + around * len(group.messages)


def line_of(messages: Sequence[Message]) -> Line:
    """The conversation as what may be cut."""
    asked = [number for number, message in enumerate(messages) if message.get("role") == "user"]
    last = asked[-1] if asked else -1
    groups: list[Group] = []
    kept = Group([], [])
    for number, message in enumerate(messages):
        role = message.get("role")
        if role in _KEPT_ROLES:
            _add(kept, number, message)
        if role in _KEPT_ROLES or number == last:
            continue
        # Before the last question a turn begins with the user; behind it with each message of the model, whose tools answer it.
        if not groups or role == ("user" if number < last else "assistant") or (number > last > groups[-1].messages[-1]):
            groups.append(Group([], []))
        _add(groups[-1], number, message)
    own = None
    if last >= 0:
        own = Group([], [])
        _add(own, last, messages[last])
    return Line(messages, groups, own, [text for text in (*(piece.text for piece in kept.pieces), kept.rest) if text])


def _add(group: Group, number: int, message: Message) -> None:
    group.messages.append(number)
    content = message.get("content")
    if isinstance(content, str):
        group.pieces.append(Piece(number, None, content))
    elif isinstance(content, list):
        for at, part in enumerate(content):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                group.pieces.append(Piece(number, at, part["text"]))
    rest = {name: value for name, value in message.items() if name not in ("role", "content") and value}
    if rest:
        group.rest += msgspec.json.encode(rest).decode()


@dataclass(slots=True)
class Cut:
    """What became of a conversation: its messages, and of what went the text, in order, and where it stood."""

    messages: list[Message]
    dropped: int = 0
    texts_cut: int = 0
    gone: list[str] = field(default_factory=list)
    #: Number of the first message (of the new ones) at or behind the place where something went, and whether its text holds the marker there.
    at: int = 0
    in_text: bool = False


async def cut(line: Line, gone: Interval, of_last: Interval | None, marker: str, count: Count) -> Cut:
    """Take an interval away, and one of the last message of the user (counted from its beginning)."""
    dropped: set[int] = set()
    changed: dict[tuple[int, int | None], str] = {}
    made = Cut([])
    at = 0
    for group in line.groups:
        left = max(0, min(gone.begin, at + group.tokens) - at) + max(0, at + group.tokens - max(gone.end, at))
        if gone.end > gone.begin and (left == 0 or left < min(group.tokens, _LEAST_LEFT)):
            dropped.update(group.messages)
            made.gone += [f"{line.messages[piece.message].get('role')}: {piece.text}" for piece in group.pieces if piece.text]
        else:
            await _cut_group(group, Interval(gone.begin - at, gone.end - at), marker, count, changed, made)
        at += group.tokens
    if of_last is not None and line.last is not None:
        await _cut_group(line.last, of_last, marker, count, changed, made)
    _put_together(line.messages, dropped, changed, made)
    return made


async def _cut_group(
    group: Group, gone: Interval, marker: str, count: Count, changed: dict[tuple[int, int | None], str], made: Cut
) -> None:
    at = 0
    for piece in group.pieces:
        begin, end = max(0, gone.begin - at), min(piece.tokens, gone.end - at)
        at += piece.tokens
        if begin >= end or not piece.text:
            continue
        first = await head(piece.text, begin, count)
        second = max(first, await tail(piece.text, piece.tokens - end, count))
        changed[piece.message, piece.part] = f"{piece.text[:first]}{marker}{piece.text[second:]}" if first or second < len(piece.text) else marker
        made.gone.append(piece.text[first:second])
        made.texts_cut += 1


def _put_together(messages: Sequence[Message], dropped: set[int], changed: dict[tuple[int, int | None], str], made: Cut) -> None:
    first = min((*dropped, *(number for number, _ in changed)), default=0)
    found = False
    for number, message in enumerate(messages):
        if number in dropped:
            made.dropped += 1
            continue
        if not found and number >= first and message.get("role") not in _KEPT_ROLES:
            made.at, made.in_text, found = len(made.messages), any(where[0] == number for where in changed), True
        parts = {where[1]: text for where, text in changed.items() if where[0] == number}
        if None in parts:
            made.messages.append({**message, "content": parts[None]})
        elif parts:
            content = [{**part, "text": parts[at]} if at in parts else part for at, part in enumerate(message["content"])]
            made.messages.append({**message, "content": content})
        else:
            made.messages.append(message)


def put_in(made: Cut, summary: str, here: str, marker: str) -> list[Message]:
    """The messages with a summary where something went: in place of the first `here`, or before the text of the message behind it. Other places hold
    the marker."""
    messages = list(made.messages)
    waits = not made.in_text
    for number, message in enumerate(messages):
        content = message.get("content")
        texts = [content] if isinstance(content, str) else [part.get("text") for part in content or ()]
        for at, text in enumerate(texts):
            if not isinstance(text, str):
                continue
            new = text
            if waits and number >= made.at:
                new, waits = f"{summary}\n\n{text}", False
            elif here in text and made.in_text and summary:
                new, summary = text.replace(here, f"\n{summary}\n"), ""
            else:
                new = text.replace(here, marker)
            if isinstance(content, str):
                messages[number] = {**message, "content": new}
            else:
                texts[at] = new
        if isinstance(content, list):
            parts = [{**part, "text": text} if isinstance(text, str) else part for part, text in zip(content, texts, strict=True)]
            messages[number] = {**message, "content": parts}
    return messages
