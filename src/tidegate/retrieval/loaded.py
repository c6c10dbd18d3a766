"""What every loader makes of a file: blocks of text in reading order, and a note for each thing that was left out."""

from __future__ import annotations

import re
from typing import Literal, Protocol

import msgspec

from tidegate.core.document import Box

BlockKind = Literal["heading", "paragraph", "table"]
Part = Literal["body", "cover", "contents", "appendix"]


class Bounds(msgspec.Struct, frozen=True):
    """What one file may cost. Beyond them the file is refused with the bound's name; it is never read in part."""

    max_bytes: int = 64 * 1024 * 1024
    max_pages: int = 2_000
    seconds: float = 120.0
    #: Address space of the process that reads files (RLIMIT_AS), shared libraries included.
    memory_bytes: int = 1024 * 1024 * 1024
    #: What reads pages that are pictures.
    ocr: Literal["off", "tesseract"] = "off"
    #: Its languages, as the program names them.
    ocr_languages: str = "eng"


class Block(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of a document. `level`: 1 to 6 for a heading. `part`: of the document, what the piece belongs to.

    The text of a table is a Markdown table: header row, rule, rows. The text of a list has one item a line.
    `boxes`: where it stands, in formats that have pages; of a table one for the header and one for each row, of the rest one a page.
    """

    text: str
    kind: BlockKind = "paragraph"
    level: int = 0
    boxes: list[Box] = []
    part: Part = "body"
    #: Of a table, where it is known to have one: what every passage of it repeats.
    caption: str = ""

    @property
    def page(self) -> int | None:
        """Where it begins, counted from 1; None where the format has no pages."""
        return self.boxes[0].page if self.boxes else None


class Loaded(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file that was read. `notes`: sentences about what was left out or is doubtful, and why.

    What the file says of itself: its date, how far it may be trusted (0 to 1), and the paths of documents whose place it takes, as written there.
    """

    title: str
    blocks: list[Block]
    tags: dict[str, str] = {}
    notes: list[str] = []
    dated_unix_s: float | None = None
    confidence: float | None = None
    supersedes: tuple[str, ...] = ()


#: What an appendix calls itself.
_APPENDIX = re.compile(r"(?:appendi(?:x|ces)|annex(?:es)?)\b|附\s*(?:录|錄|件|表)", re.IGNORECASE)


def with_appendix(loaded: Loaded) -> Loaded:
    """The blocks below a heading that calls itself an appendix marked as such, up to the next heading of its level or above that does not."""
    blocks: list[Block] = []
    level = 0
    for block in loaded.blocks:
        if block.kind == "heading" and (level == 0 or block.level <= level):
            level = block.level if _APPENDIX.match(block.text.lstrip("0123456789.、 ")) else 0
        blocks.append(msgspec.structs.replace(block, part="appendix") if level and block.part == "body" else block)
    return msgspec.structs.replace(loaded, blocks=blocks)


class Load(Protocol):
    """A loader's one function. `path` is a regular file within `bounds.max_bytes`. Raises DocumentUnreadable."""

    def __call__(self, path: str, bounds: Bounds) -> Loaded: ...


def markdown_table(rows: list[list[str]]) -> str:
    """Rows (the first one is the header, all of one length) as a Markdown table."""
    lines = ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
