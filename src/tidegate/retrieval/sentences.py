"""Where sentences end, in English and Chinese, and where a sentence that is too long may be cut."""

from __future__ import annotations

import re

#: A full stop after one of these ends no sentence.
_ABBREVIATIONS = (
    "mr", "mrs", "ms", "dr", "prof", "st", "no", "nos", "vs", "e.g", "i.e", "cf", "approx", "fig", "art", "sec", "para", "p", "pp", "inc",
    "ltd", "co",
)
_ABBREVIATED = re.compile(rf"(?<![^\s(])(?:{'|'.join(map(re.escape, _ABBREVIATIONS))})\.\Z", re.IGNORECASE)
_LONGEST = max(map(len, _ABBREVIATIONS)) + 1
# Runs are taken whole (`++`) and only from their beginning, so that a million full stops cost a million steps, not their square.
_END = re.compile(
    r"(?<![.!?])[.!?]++[\"')\]”’]*+(\s++)(?=[\"'(\[“‘]*+[A-Z0-9\u3400-\u9fff])|(?<![。！？…])[。！？…]++[”’」』）)]*+(\s*+)|；(\s*+)"
)
_CLAUSE = re.compile(r"[，,；;：:、]\s*|\s+")


def split_sentences(text: str) -> list[tuple[str, str]]:
    """(what stands before it, sentence) pairs; joined in order they give `text` back, line ends and outer spaces aside.

    A line end always ends a sentence: lines inside a paragraph are list items or code.
    """
    parts: list[tuple[str, str]] = []
    for at, line in enumerate(text.split("\n")):
        before = "\n" if at else ""
        start = 0
        for end in _END.finditer(line):
            gap = end.group(1) or end.group(2) or end.group(3) or ""
            stop = end.end() - len(gap)
            if line[end.start()] == "." and _ABBREVIATED.search(line, max(start, end.start() - _LONGEST), end.start() + 1):
                continue
            parts.append((before, line[start:stop]))
            before, start = gap, end.end()
        if line[start:].strip():
            parts.append((before, line[start:].rstrip()))
    return parts


def cut(text: str, size: int) -> list[str]:
    """Pieces of at most `size` characters that joined give `text` back, cut after a clause or a word where the last third has one."""
    pieces = []
    start = 0
    while len(text) - start > size:
        ends = [found.end() for found in _CLAUSE.finditer(text, start + size * 2 // 3, start + size)]
        stop = ends[-1] if ends else start + size
        pieces.append(text[start:stop])
        start = stop
    return [*pieces, text[start:]] if start < len(text) else pieces


def tail(text: str, size: int) -> str:
    """About the last `size` characters, from the beginning of a clause or a word."""
    if len(text) <= size:
        return text
    starts = [found.end() for found in _CLAUSE.finditer(text, len(text) - size)]
    return text[starts[0] if starts else len(text) - size :]
