"""Plain text: paragraphs are parted by blank lines. There is no markup, so there are no headings; front matter is read as in Markdown."""

from __future__ import annotations

import re
from pathlib import Path

from tidegate.retrieval import front_matter
from tidegate.retrieval.encoding import decode
from tidegate.retrieval.loaded import Block, Bounds, Loaded

SUFFIXES = (".txt",)


def load(path: str, bounds: Bounds) -> Loaded:
    """Raises DocumentUnreadable where the encoding is not known, or the front matter says what it cannot mean."""
    head, text = front_matter.split(decode(Path(path).read_bytes()))
    paragraphs = (paragraph.strip() for paragraph in re.split(r"\n[ \t]*\n", text))
    blocks = [Block(paragraph) for paragraph in paragraphs if paragraph]
    return Loaded(head.title or Path(path).stem, blocks, head.tags, head.notes, head.dated_unix_s, head.confidence, head.supersedes)
