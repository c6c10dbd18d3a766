"""Plain text: paragraphs are parted by blank lines. There is no markup, so there are no headings."""

from __future__ import annotations

import re
from pathlib import Path

from tidegate.retrieval.encoding import decode
from tidegate.retrieval.loaded import Block, Bounds, Loaded

SUFFIXES = (".txt",)


def load(path: str, bounds: Bounds) -> Loaded:
    """Raises DocumentUnreadable where the encoding is not known."""
    text = decode(Path(path).read_bytes())
    paragraphs = (paragraph.strip() for paragraph in re.split(r"\n[ \t]*\n", text))
    return Loaded(Path(path).stem, [Block(paragraph) for paragraph in paragraphs if paragraph])
