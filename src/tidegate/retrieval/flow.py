"""Lines that belong to one paragraph become one line of text, in scripts with and without spaces between words."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

#: Characters of scripts that put no space between words, and their punctuation.
CJK = r"\u3000-\u303f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uffef"

_CJK_CHAR = re.compile(f"[{CJK}]")
_HYPHENATED = re.compile(r"[a-z]-\Z")
_LOWER = re.compile(r"[a-z]")
_COMPOUND = re.compile(r"[A-Za-z]+(?:-[a-z]+)+")
_LAST, _FIRST = re.compile(r"[A-Za-z]+-\Z"), re.compile(r"[a-z]+")


def compounds(lines: Iterable[str]) -> set[str]:
    """Words that are written with a hyphen inside of a line, in small letters: "open-domain"."""
    return {found.lower() for line in lines for found in _COMPOUND.findall(line)}


def join_lines(lines: Iterable[str], hyphened: Collection[str] = ()) -> str:
    """A space between lines; none between two CJK characters; a word hyphenated at a line's end is made whole, and keeps its hyphen where it is
    one of `hyphened`."""
    flow: list[str] = []
    for line in filter(None, lines):
        last = flow[-1] if flow else ""
        if _HYPHENATED.search(last, max(0, len(last) - 2)) and _LOWER.match(line):
            if not (hyphened and _parted(last, line) in hyphened):
                flow[-1] = last[:-1]
        elif last and not (_CJK_CHAR.match(last, len(last) - 1) and _CJK_CHAR.match(line)):
            flow.append(" ")
        flow.append(line)
    return "".join(flow)


def _parted(last: str, line: str) -> str:
    first, second = _LAST.search(last, max(0, len(last) - 40)), _FIRST.match(line)
    return (first.group() + second.group()).lower() if first and second else ""


_ENDED = re.compile(r"[.!?:;。！？：；…]['\"”’」』）)]*\Z")


def goes_on(text: str, following: str) -> bool:
    """Whether a text that a page or a column broke off goes on with `following`: it has no end, and that has no beginning."""
    if _ENDED.search(text, max(0, len(text) - 8)):
        return False
    return bool(_LOWER.match(following)) or bool(_CJK_CHAR.match(text, len(text) - 1) and _CJK_CHAR.match(following))
