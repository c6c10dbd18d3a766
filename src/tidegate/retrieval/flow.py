"""Lines that belong to one paragraph become one line of text, in scripts with and without spaces between words."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: Characters of scripts that put no space between words, and their punctuation.
CJK = r"\u3000-\u303f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uffef"

_CJK_CHAR = re.compile(f"[{CJK}]")
_HYPHENATED = re.compile(r"[a-z]-\Z")
_LOWER = re.compile(r"[a-z]")


def join_lines(lines: Iterable[str]) -> str:
    """A space between lines; none between two CJK characters; a word hyphenated at a line's end is made whole."""
    flow: list[str] = []
    for line in filter(None, lines):
        last = flow[-1] if flow else ""
        if _HYPHENATED.search(last, max(0, len(last) - 2)) and _LOWER.match(line):
            flow[-1] = last[:-1]
        elif last and not (_CJK_CHAR.match(last, len(last) - 1) and _CJK_CHAR.match(line)):
            flow.append(" ")
        flow.append(line)
    return "".join(flow)


_ENDED = re.compile(r"[.!?:;。！？：；…]['\"”’」』）)]*\Z")


def goes_on(text: str, following: str) -> bool:
    """Whether a text that a page or a column broke off goes on with `following`: it has no end, and that has no beginning."""
    if _ENDED.search(text, max(0, len(text) - 8)):
        return False
    return bool(_LOWER.match(following)) or bool(_CJK_CHAR.match(text, len(text) - 1) and _CJK_CHAR.match(following))
