"""What comes in, judged before a model reads it: how large, how deep, in which characters, and whether it looks like data, a flood or an injection.

Only a judgement: what follows from it is `pipeline/entrance.py`'s. A text without anything is passed in one quick look for each kind.
"""

from __future__ import annotations

import re
from binascii import a2b_base64
from typing import Literal, NamedTuple, get_args

from tidegate.guard.injection import injection
from tidegate.guard.runs import blob, repetition

Kind = Literal["control", "invisible", "encoding", "blob", "repetition", "injection"]
#: What happens to a text of a kind: nothing is looked for, it passes and is told of, or it is refused.
Action = Literal["pass", "mark", "refuse"]
KINDS: tuple[Kind, ...] = get_args(Kind)

#: Control characters of C0, but for the tab and line ends that texts have, and DEL.
_C0 = bytes({*range(0x20), 0x7F} - set(b"\t\n\r"))
_NOT_PLAIN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ud800-\udfff\ufdd0-\ufdef\ufeff\ufff9-\uffff"
    "\U0001fffe\U0001ffff\U000e0000-\U000e0fff\U0010fffe\U0010ffff]"
)
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
#: Characters that reorder a text (UAX 9: embeddings, overrides, isolates) or write another one that nobody sees: tag characters, selectors beyond
#: those of a pictograph's form, annotations. Joiners and single direction marks are part of many scripts, so it takes a row of them.
_INVISIBLE = re.compile(
    "[\u202a-\u202e\u2066-\u2069\u206a-\u206f\ufff9-\ufffb\U000e0000-\U000e007f\U000e0100-\U000e0fff]|[\u00ad\u061c\u180e\u200b-\u200f\u2060-\u2064\ufeff]{3}"
    "|[\u200b\u2060-\u2064](?=[A-Za-z])(?<=[A-Za-z].)"
)
#: Flags of regions are tag characters behind a black flag.
_FLAG = re.compile("\U0001f3f4[\U000e0030-\U000e007a]{1,8}\U000e007f")
_SPOILT = re.compile("[\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff\U0001fffe\U0001ffff\U0010fffe\U0010ffff]")
_REPLACED = "\ufffd"
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
        if self._characters:
            if text.isascii():
                data = text.encode()
                if len(data.translate(None, _C0)) != size:
                    self._look_at_characters(text, marks)
            elif _NOT_PLAIN.search(text) or _REPLACED in text:
                self._look_at_characters(text, marks)
        if size >= self._blob and (run := blob(text, self._blob)):
            marks.append(Mark("blob", run[0], f"{run[1] - run[0]} characters of encoded data"))
        if size >= self._repeats and (run := repetition(text, self._repeats)):
            marks.append(Mark("repetition", run[0], f"{run[1] - run[0]} characters of one passage over and over"))
        if self._injection and (names := injection(text) or (marks and _hidden(text, marks))):
            marks.append(Mark("injection", 0, " ".join(names)))
        return marks

    def _look_at_characters(self, text: str, marks: list[Mark]) -> None:
        wanted = {"control", "invisible", "encoding"} & self._kinds
        if "encoding" in wanted and text.count(_REPLACED) >= _MOST_REPLACED:
            marks.append(Mark("encoding", text.index(_REPLACED), f"{text.count(_REPLACED)} replacement characters"))
            wanted.discard("encoding")
        behind = 0  # where a flag that was passed over ends
        for found in _NOT_PLAIN.finditer(text):
            if not wanted:
                break
            at, point = found.start(), ord(found[0])
            kind: Kind = "control" if point < 0xA0 else "encoding" if _SPOILT.match(found[0]) else "invisible"
            if kind not in wanted or at < behind:
                continue
            if kind == "invisible":
                if flag := _FLAG.match(text, max(0, at - 1)):
                    behind = flag.end()
                    continue
                if not _INVISIBLE.match(text, at):
                    continue
            wanted.discard(kind)
            marks.append(Mark(kind, at, f"U+{point:04X}, {_WHAT[kind]}"))


_WHAT: dict[Kind, str] = {
    "control": "a control character", "invisible": "which cannot be seen or reorders the text", "encoding": "which is no character",
}  # fmt: skip


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
