"""What a domain knows of its documents, as data: `structure.toml` in a capability's folder, for `tidegate ingest --capability`.

    starts = ["Exclusions", "Note * Debt", "责任免除"]       titles that begin a section, though nothing in the file says so
    owns_table = ["Consolidated balance sheets", "资产负债表"]  titles that belong to the table below, with what stands between
    skip = ["Forward-looking statements"]                   sections that make no passages

Titles are compared without case, numbering and closing colon; `*` stands for anything.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import msgspec
from pydantic import Field

from tidegate.core.document import Box
from tidegate.core.errors import SettingsError
from tidegate.core.settings import Section, parse
from tidegate.retrieval.loaded import Block, Loaded
from tidegate.retrieval.tables import around

FILE = "structure.toml"

#: A longer text is no title.
TITLE_CHARS = 160
#: Between a title and its table stand at most so many short texts: units, dates, "continued".
BETWEEN, BETWEEN_CHARS = 3, 80
#: The number of a title: "1.2", "IV.", "(a)", "第三节", "二、".
_NUMBER = re.compile(
    r"(?:(?:part|item|note|section|chapter|article)\s+)?(?:\(?\d+(?:\.\d+)*[.):]*|\(?[ivxlc]+[.)]|\([a-z]\)|[a-z][.)]|第?\(?[一二三四五六七八九十\d]+[章节條条款部分)、.]+)\s*"
)


class Rules(Section):
    """The file."""

    starts: list[str] = Field(default_factory=list, max_length=1000, description="Titles that begin a section.")
    owns_table: list[str] = Field(default_factory=list, max_length=1000, description="Titles that belong to the table below them.")
    skip: list[str] = Field(default_factory=list, max_length=1000, description="Titles of sections that make no passages.")


def read_rules(file: Path) -> Rules:
    """Raises SettingsError that names the file and what is wrong in it."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file} cannot be read: {error}.", hint="It is UTF-8 text in the capability's folder.") from None
    rules = parse(text, str(file), Rules, f"Known names: {', '.join(Rules.model_fields)}; see docs/ingest.md.")
    for name in Rules.model_fields:
        for title in getattr(rules, name):
            if not _normal(title).replace("*", ""):
                raise SettingsError(f"{file}: {name}: {title!r} fits every title, or none.", hint="Name a word of the title.")
    return rules


def apply(loaded: Loaded, rules: Rules) -> Loaded:
    """The document as its domain reads it. What is skipped is noted."""
    starts, owners, skipped = (_patterns(titles) for titles in (rules.starts, rules.owns_table, rules.skip))
    blocks: list[Block] = []
    notes = list(loaded.notes)
    level = 0  # of the last heading that the file itself has
    skips: Block | None = None
    left = 0
    for found in loaded.blocks:
        block = found
        title = _normal(block.text) if block.kind != "table" and len(block.text) <= TITLE_CHARS else ""
        if block.kind == "heading":
            level = block.level
        elif title and any(pattern.fullmatch(title) for pattern in (*starts, *owners, *skipped)):
            block = msgspec.structs.replace(found, kind="heading", level=min(6, level + 1))
        if skips is not None and (block.kind != "heading" or block.level > skips.level):
            left += 1
            continue
        if skips is not None:
            notes.append(_skipped(skips, left))
            skips = None
        if block.kind == "heading" and title and any(pattern.fullmatch(title) for pattern in skipped):
            skips, left = block, 0
            continue
        blocks.append(block)
    if skips is not None:
        notes.append(_skipped(skips, left))
    return msgspec.structs.replace(loaded, blocks=_with_captions(blocks, owners), notes=notes)


def _skipped(title: Block, blocks: int) -> str:
    return f"The section {title.text!r} was skipped ({blocks} blocks), as {FILE} says."


def _with_captions(blocks: Sequence[Block], owners: Sequence[re.Pattern[str]]) -> list[Block]:
    """Tables with the title that owns them, and with what stands between."""
    made: list[Block] = []
    caption: list[Block] = []
    for block in blocks:
        if block.kind == "heading":
            caption = [block] if any(pattern.fullmatch(_normal(block.text)) for pattern in owners) else []
        elif block.kind == "table" and caption:
            del made[len(made) - len(caption) + 1 :]  # the title stays: it is a heading, too
            made.append(_captioned(block, caption))
            caption = []
            continue
        elif caption:
            caption = [*caption, block] if len(caption) <= BETWEEN and len(block.text) <= BETWEEN_CHARS else []
        made.append(block)
    return made


def _captioned(table: Block, caption: Sequence[Block]) -> Block:
    text = "\n".join(block.text for block in caption)
    boxes: list[Box] = list(table.boxes)
    if boxes:  # the header's box reaches up to the title, where that is on its page
        boxes[0] = around([boxes[0], *(box for block in caption for box in block.boxes if box.page == boxes[0].page)])
    return msgspec.structs.replace(table, caption=text, boxes=boxes)


def _patterns(titles: Sequence[str]) -> list[re.Pattern[str]]:
    return [re.compile(".*".join(map(re.escape, _normal(title).split("*"))), re.DOTALL) for title in titles]


def _normal(title: str) -> str:
    text = " ".join(unicodedata.normalize("NFKC", title).casefold().split())
    found = _NUMBER.match(text)
    return (text[found.end() :] or text if found else text).rstrip(":").strip()
