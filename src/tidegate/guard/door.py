"""What comes in, judged before a model reads it: how large, how deep, in which characters, and whether it looks like data, a flood or an injection.

Only a judgement: what follows from it is `pipeline/entrance.py`'s. A text without anything is passed in one quick look for each kind.
"""

from __future__ import annotations

import re
from binascii import a2b_base64
from typing import Literal, NamedTuple, get_args

from tidegate.guard.characters import Odd, odd_ones
from tidegate.guard.injection import injection
from tidegate.guard.runs import blob, repetition

Kind = Literal["control", "invisible", "encoding", "blob", "repetition", "injection"]
#: What happens to a text of a kind: nothing is looked for, it passes and is told of, or it is refused.
Action = Literal["pass", "mark", "refuse"]
KINDS: tuple[Kind, ...] = get_args(Kind)

#: This many replacement characters are a text that was read in a wrong encoding.
_MOST_REPLACED = 8
#: Tag characters to the ASCII that they stand for.
_TAGS = {0xE0000 + code: chr(code) for code in range(0x20, 0x7F)}
#: Characters of a text written in tag characters that are looked at, and of encoded data.
_MOST_HIDDEN = 1 << 16
#: Bytes at the beginning of decoded data that must be UTF-8, or nobody takes it for words.
_MUST_BE_TEXT = 64


class Mark(NamedTuple):
    """Something that was found. `at`: the first character of it; `why`: in words, without the text."""

    kind: Kind
    at: int
    why: str


class Door:
    """Looks at texts. Only kinds that are not passed are looked for."""

    __slots__ = ("_blob", "_characters", "_injection", "_kinds", "_repeats")

    def __init__(self, kinds: frozenset[Kind] | set[Kind] = frozenset(KINDS), *, blob_chars: int = 512, repeat_chars: int = 1024) -> None:
        """`blob_chars`, `repeat_chars`: characters from which a run of encoded data, or of one passage over and over, counts."""
        self._kinds = frozenset(kinds)
        self._characters = bool(self._kinds & {"control", "invisible", "encoding"})
        self._blob = blob_chars if "blob" in kinds else 1 << 62
        self._repeats = repeat_chars if "repetition" in kinds else 1 << 62
        self._injection = "injection" in kinds

    def look(self, text: str) -> list[Mark]:
        """What there is in a text, at most one mark of each kind. The time grows with the length of the text alone."""
        size = len(text)
        marks: list[Mark] = []
        if self._characters and (odd := odd_ones(text)) is not None:
            self._look_at_characters(odd, text, marks)
        if size >= self._blob and (run := blob(text, self._blob)):
            marks.append(Mark("blob", run[0], f"{run[1] - run[0]} characters of encoded data"))
        if size >= self._repeats and (run := repetition(text, self._repeats)):
            marks.append(Mark("repetition", run[0], f"{run[1] - run[0]} characters of one passage over and over"))
        if self._injection and (names := injection(text) or (marks and _hidden(text, marks))):
            marks.append(Mark("injection", 0, " ".join(names)))
        return marks

    def _look_at_characters(self, odd: Odd, text: str, marks: list[Mark]) -> None:
        if "encoding" in self._kinds:
            count, first = odd.replaced()
            if count >= _MOST_REPLACED and first is not None:
                marks.append(Mark("encoding", first, f"{count} replacement characters"))
            elif (at := odd.spoilt()) is not None:
                marks.append(_mark("encoding", at, text))
        if "control" in self._kinds and (at := odd.control()) is not None:
            marks.append(_mark("control", at, text))
        if "invisible" in self._kinds and (at := odd.hidden()) is not None:
            marks.append(_mark("invisible", at, text))


_WHAT: dict[Kind, str] = {
    "control": "a control character", "invisible": "which cannot be seen or reorders the text", "encoding": "which is no character",
}  # fmt: skip


def _mark(kind: Kind, at: int, text: str) -> Mark:
    return Mark(kind, at, f"U+{ord(text[at]):04X}, {_WHAT[kind]}")


def _hidden(text: str, marks: list[Mark]) -> list[str]:
    """The marks of injection in what a text hides: in tag characters, or in its first run of base64."""
    for mark in marks:
        if mark.kind == "invisible":
            tags = [character for character in text if 0xE0020 <= ord(character) < 0xE007F][:_MOST_HIDDEN]
            if names := injection("".join(tags).translate(_TAGS)):
                return names
        elif mark.kind == "blob" and (names := injection(_decoded(text[mark.at : mark.at + _MOST_HIDDEN]))):
            return names
    return []


def _decoded(data: str) -> str:
    """The text that the beginning of a run of base64 stands for; what is none gives what nobody takes for words."""
    kept = re.match(r"[A-Za-z0-9+/]*", data.translate({10: None, 13: None, 45: "+", 95: "/"}))
    assert kept is not None
    found = a2b_base64(kept[0][: len(kept[0]) // 4 * 4])
    try:
        found[:_MUST_BE_TEXT].decode()
    except UnicodeDecodeError as error:
        if error.start < len(found[:_MUST_BE_TEXT]) - 3:  # not a character that is cut there
            return ""
    return found.decode("utf-8", "replace")
