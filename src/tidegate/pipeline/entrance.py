"""The door of a route: has the guard look at what comes in, and does what the settings say: pass, mark, refuse."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tidegate.core.ask import Ask
from tidegate.core.errors import BadRequest, BodyTooLarge, HostileInput
from tidegate.core.nesting import MAX_DEPTH, too_deep
from tidegate.core.settings import Section
from tidegate.guard.door import KINDS, Door, Kind, Mark
from tidegate.guard.settings import DoorSettings

#: The name of what the caller is told, and of its header: x-tidegate-door.
DOOR = "door"
_AS_SET = ("as_set", -1)
#: Parts of a message that carry encoded bytes, and where.
_MEDIA = {"image_url": "url", "video_url": "url", "audio_url": "url", "input_audio": "data", "file": "file_data"}
_DATA_URL = re.compile(r"data:[^,]{0,200};base64,")
#: Texts that are remembered as having nothing.
_MOST_CLEAN = 8192


class Entrance:
    """The door as one route's settings have it. Costs nothing where all is passed.

    A text in which nothing was found is not looked at again while it is remembered, by its hash alone: a system prompt and the turns of a
    conversation come with each request, and only what is new costs time.
    """

    __slots__ = ("_bounded", "_clean", "_door", "_max_chars", "_max_depth", "_refused", "_where", "open")

    def __init__(self, settings: DoorSettings, where: str = "door") -> None:
        """`where`: how the settings are called in what is said of them."""
        looked_for: set[Kind] = {kind for kind in KINDS if getattr(settings, kind) != "pass"}
        self._door = Door(looked_for, blob_chars=settings.blob_chars, repeat_chars=settings.repeat_chars)
        self._refused = {kind for kind in KINDS if getattr(settings, kind) == "refuse"}
        self._max_chars = settings.max_chars or 1 << 62
        self._max_depth = settings.max_depth
        self._where = where
        self._bounded = settings.max_depth < MAX_DEPTH
        self._clean: set[int] = set()
        #: Nothing is looked at.
        self.open = not looked_for and not settings.max_chars and not self._bounded

    def admit(self, ask: Ask, name: str, value: Any) -> None:
        """Look at all texts in a JSON value that is called `name` in the request ("": it is the whole of it).

        What is only marked is noted: in the flight as `door_marked`, and for the caller. Raises HostileInput that says what was found and where,
        never the text; BodyTooLarge and BadRequest where it is longer or deeper than allowed.
        """
        if self._bounded and too_deep(value, self._max_depth):
            raise BadRequest(
                f"{f'`{name}`' if name else 'The body'} is nested more than {self._max_depth} levels deep.",
                hint=f"Send it flatter; {self._where}.max_depth is the bound.", param=name or None,
            )  # fmt: skip
        texts: list[str] = []
        gather(value, texts)
        if (size := sum(map(len, texts)) + len(texts) - 1) > self._max_chars:
            raise BodyTooLarge(
                f"The texts have {size} characters, more than {self._max_chars}.",
                hint=f"Send less, or ask the operator to raise {self._where}.max_chars.", param=name or None,
            )  # fmt: skip
        clean = self._clean
        new = [text for text in texts if hash(text) not in clean]
        if not new:
            return
        if marks := self._door.look(new[0] if len(new) == 1 else "\n".join(new)):
            self._act(ask, marks, name, value)
            return
        if len(clean) + len(new) > _MOST_CLEAN:
            clean.clear()
        clean.update(map(hash, new))

    def _act(self, ask: Ask, marks: list[Mark], name: str, value: Any) -> None:
        refused = next((mark for mark in marks if mark.kind in self._refused), None)
        kinds = [mark.kind for mark in marks]
        if refused is None:
            ask.flight.decide("door_marked", kinds=kinds, why=[mark.why for mark in marks])
            ask.note(DOOR, kinds)
            return
        where = self._place(refused.kind, name, value)
        ask.flight.decide("door_refused", kind=refused.kind, why=refused.why, where=where)
        raise HostileInput(
            f"{f'`{where}`' if where else 'The text'} holds what is refused here: {_SAYS[refused.kind]} ({refused.why}).",
            hint=f"Leave it out. Whoever runs the gateway may let it pass with {self._where}.{refused.kind}.", param=where or None,
        )  # fmt: skip

    def _place(self, kind: Kind, name: str, value: Any) -> str:
        """Which text it is in; "" where it takes several together."""
        for where, text in _named(value, name):
            if any(mark.kind == kind for mark in self._door.look(text)):
                return where
        return ""


_SAYS: dict[Kind, str] = {
    "control": "control characters",
    "invisible": "characters that cannot be seen or that reorder the text",
    "encoding": "what is no text",
    "blob": "encoded data",
    "repetition": "one passage over and over",
    "injection": "marks of prompt injection",
}


def v1_door(settings: DoorSettings) -> tuple[Entrance | None, Entrance | None]:
    """The doors of /v1: of prompts, and of texts that are only embedded, which are no orders to anybody. None where it is not wanted."""
    if not settings.v1:
        return None, None
    unread = settings.model_copy(update={"injection": "pass"})
    return Entrance(settings if settings.v1_injection else unread), Entrance(unread)


def settings_of(house: DoorSettings, own: Section) -> DoorSettings:
    """A capability's settings where it has some, else the house's. The bounds of runs are never 0: there 0 is "as set" too."""
    said = {name: value for name, value in own.model_dump().items() if value not in _AS_SET and (value or name == "max_chars")}
    return house.model_copy(update=said)


def without_media(messages: list[Any]) -> list[Any]:
    """Messages of a chat as the door reads them: the bytes of a picture, a sound or a file are no text, and as long as they are."""
    return [
        {**message, "content": [_without_media(part) for part in message["content"]]} if message.get("content").__class__ is list else message
        for message in messages
    ]


def _without_media(part: Any) -> Any:
    kind = part["type"]
    name = _MEDIA.get(kind)
    media = part.get(kind) if name is not None else None
    if not isinstance(media, dict) or not isinstance(given := media.get(name), str):
        return part
    if kind != "input_audio" and _DATA_URL.match(given) is None:
        return part  # an address is read
    return {**part, kind: {**media, name: ""}}


def gather(value: Any, into: list[str]) -> None:
    """All texts in a JSON value, without the names of members."""
    kind = value.__class__
    if kind is str:
        into.append(value)
    elif kind is dict:
        for one in value.values():
            if one.__class__ is str:
                into.append(one)
            else:
                gather(one, into)
    elif kind is list:
        for one in value:
            gather(one, into)


def _named(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """The same texts, each with its path: messages[1].content."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _named(one, f"{name}.{key[:64]}" if name else key[:64])
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _named(one, f"{name}[{number}]")
