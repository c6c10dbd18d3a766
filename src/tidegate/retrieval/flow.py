"""Lines that belong to one paragraph become one line of text, in scripts with and without spaces between words."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: Characters of scripts that put no space between words, and their punctuation.
CJK = r"\u3000-\u303f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uffef"

_CJK_END = re.compile(f"[{CJK}]$")
_CJK_START = re.compile(f"^[{CJK}]")
_HYPHEN_END = re.compile(r"[a-z]-$")
_LOWER_START = re.compile(r"^[a-z]")


def join_lines(lines: Iterable[str]) -> str:
    """A space between lines; none between two CJK characters; a word hyphenated at a line's end is made whole."""
    flow = ""
    for line in lines:
        if _HYPHEN_END.search(flow) and _LOWER_START.search(line):
            flow = flow[:-1] + line
        elif not flow or (_CJK_END.search(flow) and _CJK_START.search(line)):
            flow += line
        else:
            flow += " " + line
    return flow
