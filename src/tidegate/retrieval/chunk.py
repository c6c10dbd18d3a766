"""Blocks to passages: one section at a time, packed from sentences up to a size in tokens, with a little of the last one repeated.

A passage never crosses a heading. A table's passages each begin with its caption and its header row.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tidegate.core.document import Box, NewPassage
from tidegate.core.errors import DocumentUnreadable
from tidegate.retrieval.loaded import Block, Loaded, Part
from tidegate.retrieval.sentences import cut, split_sentences, tail
from tidegate.retrieval.tables import around

#: Raised by one when the same document gives other passages than before.
VERSION = 6

CountTokens = Callable[[Sequence[str]], Awaitable[list[int]]]

#: Longer pieces of text are cut before they are counted: a token holds about four characters of English.
CHARS_PER_TOKEN = 4
#: Texts counted in one call: a long document must not hold up everybody else's.
COUNT_BATCH = 500
#: A longer name of a column is whole at its first cell, and cut at the others.
NAME_CHARS = 100
#: Characters of a table whose cells are named, at most.
NAMED_CHARS = 100_000_000
#: A longer path of headings loses its upper ones.
HEADING_CHARS = 200
#: A paragraph that does not fit begins a new passage, where the last one is at least this full.
FULL_ENOUGH = 0.5
#: What is repeated may be this share of it shorter or longer, so that it begins with a sentence: of 12 percent, 10 to 15.
NEAR = 0.2
#: A short paragraph before a table that ends in a colon, begins like this or says the unit of its figures is its caption.
_CAPTION = re.compile(
    r"^(table|tab\.|表)\s*[\d一二三四五六七八九十A-Z]|[:：]$|单位\s*[:：]\s*\S{1,12}$|^[(（][^)）]*\bin (thousands|millions|billions)\b",
    re.IGNORECASE,
)
_CAPTION_CHARS = 200


@dataclass(frozen=True, slots=True)
class Size:
    """Tokens of a passage at most, and the share of it that is repeated in the next one."""

    tokens: int = 280
    overlap: float = 0.12


@dataclass(slots=True)
class Unit:
    """A sentence, a list item, a table row: never torn, unless it is larger than a passage. `before`: what parts it from the last."""

    text: str
    before: str
    boxes: list[Box]
    tokens: int = 0
    #: Tokens of the paragraph that begins here; 0 inside a paragraph.
    paragraph: int = 0


@dataclass(slots=True)
class Section:
    """What stands under one heading: paragraphs as units, or one table. `lead`: the lines that every passage of a table repeats,
    and where they stand."""

    heading: str
    units: list[Unit]
    lead: str = ""
    lead_tokens: int = 0
    lead_boxes: list[Box] = field(default_factory=list)
    table: bool = False
    part: Part = "body"


async def chunk(loaded: Loaded, count_tokens: CountTokens, size: Size | None = None) -> list[NewPassage]:
    """Passages in the order of the document. `count_tokens` is the embedder's. Raises what it raises, and DocumentUnreadable for a table that
    would become far larger than it is."""
    size = size or Size()
    sections = list(_sections(loaded, size))
    await _count(sections, count_tokens, size)
    return [passage for section in sections for passage in _pack(section, size)]


def _sections(loaded: Loaded, size: Size) -> Iterator[Section]:
    path: list[tuple[int, str]] = []
    pending: list[Block] = []

    def flush() -> Iterator[Section]:
        units = [unit for block in pending for unit in _units(block.text, block.boxes, size)]
        if units:
            yield Section(_heading(path, loaded.title), units, part=pending[0].part)
        pending.clear()

    for block in (block for block in loaded.blocks if block.part != "contents"):
        if pending and block.part != pending[0].part:
            yield from flush()
        if block.kind == "heading":
            yield from flush()
            path = [*((level, text) for level, text in path if level < block.level), (block.level, block.text)]
        elif block.kind == "table":
            caption = Block(block.caption)
            if not block.caption and pending and _is_caption(pending[-1].text):
                caption = pending.pop()
            yield from flush()
            yield _table(block, caption, _heading(path, loaded.title), size)
        else:
            pending.append(block)
    yield from flush()


def _heading(path: list[tuple[int, str]], title: str) -> str:
    """The title stands beside every passage already: it is not repeated."""
    heading = ""
    for _, text in reversed(path):
        longer = f"{text} > {heading}" if heading else text[:HEADING_CHARS]
        if text == title or len(longer) > HEADING_CHARS:
            continue
        heading = longer
    return heading


def _is_caption(text: str) -> bool:
    return len(text) <= _CAPTION_CHARS and _CAPTION.search(text) is not None


def _units(text: str, boxes: list[Box], size: Size) -> list[Unit]:
    pairs = [
        (before if at == 0 else "", piece)
        for before, sentence in split_sentences(text)
        for at, piece in enumerate(cut(sentence, size.tokens * CHARS_PER_TOKEN))
    ]
    return [Unit(piece, "\n\n" if at == 0 else before, boxes) for at, (before, piece) in enumerate(pairs)]


def _table(block: Block, caption: Block, heading: str, size: Size) -> Section:
    header, rule, *rows = block.text.split("\n")
    lead = "\n".join(filter(None, (caption.text, header, rule)))
    lead_boxes = [*caption.boxes, *block.boxes[:1]]
    boxes = [[box] for box in block.boxes[1:]] or [[]] * len(rows)
    widest = max((len(row) for row in rows), default=0)
    if len(lead) + widest > size.tokens * CHARS_PER_TOKEN // 2:
        # Too wide to repeat its header over every row: each cell is named instead.
        named = [unit for text, where in zip(_named(header, rows), boxes, strict=True) for unit in _units(text, where, size)]
        for unit in named:
            unit.before = "\n" if unit.before == "\n\n" else unit.before
        return Section(heading, named, caption.text, lead_boxes=lead_boxes, table=True, part=block.part)
    units = [Unit(row, "\n", where) for row, where in zip(rows, boxes, strict=True)]
    return Section(heading, units or [Unit("", "\n", [])], lead, lead_boxes=lead_boxes, table=True, part=block.part)


def _named(header: str, rows: Sequence[str]) -> Iterator[str]:
    names, chars = _cells(header), 0
    for row in rows:
        cells = _cells(row)
        text = "; ".join(f"{name}: {cell}" if name else cell for name, cell in zip(names, cells, strict=False) if cell)
        chars += len(text)
        if chars > NAMED_CHARS:
            raise DocumentUnreadable(f"A table has more than {NAMED_CHARS} characters when its cells are named.", hint="Split it.")
        yield text
        for at in [at for at, cell in enumerate(cells[: len(names)]) if cell and len(names[at]) > NAME_CHARS]:
            names[at] = names[at][: NAME_CHARS - 1] + "…"


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip()[1:-1])]


async def _count(sections: list[Section], count_tokens: CountTokens, size: Size) -> None:
    """Set every unit's tokens, and cut what is larger than a passage (dense scripts, long words) until all fit."""
    # Every count includes the model's own markers, which are not the text's. What an empty text counts is no measure of them: the space behind a
    # marker is a token of its own there, and part of the first word everywhere else.
    one, two = await count_tokens(["a", "a a"])
    markers = max(0, 2 * one - two)

    async def tokens_of(texts: list[str]) -> list[int]:
        batches = [texts[start : start + COUNT_BATCH] for start in range(0, len(texts), COUNT_BATCH)]
        return [count - markers for batch in batches for count in await count_tokens(batch)]

    for section, tokens in zip(sections, await tokens_of([section.lead for section in sections]), strict=True):
        section.lead_tokens = tokens if section.lead else 0
    while uncounted := [unit for section in sections for unit in section.units if not unit.tokens]:
        for unit, tokens in zip(uncounted, await tokens_of([unit.text for unit in uncounted]), strict=True):
            unit.tokens = max(1, tokens)
        for section in sections:
            section.units = [piece for unit in section.units for piece in _fitting(unit, _room(section, size))]
    for section in sections:
        _measure_paragraphs(section.units)


def _room(section: Section, size: Size) -> int:
    return max(size.tokens // 4, size.tokens - section.lead_tokens)


def _fitting(unit: Unit, room: int) -> list[Unit]:
    """The unit itself, or pieces of it that are still to be counted."""
    if unit.tokens <= room or len(unit.text) == 1:
        return [unit]
    pieces = cut(unit.text, -(-len(unit.text) // (unit.tokens // room + 1)))
    return [Unit(piece, unit.before if at == 0 else "", unit.boxes) for at, piece in enumerate(pieces)]


def _measure_paragraphs(units: list[Unit]) -> None:
    first: Unit | None = None
    for unit in units:
        if first is None or unit.before == "\n\n":
            first = unit
        first.paragraph += unit.tokens


def _pack(section: Section, size: Size) -> Iterator[NewPassage]:
    room = _room(section, size)
    repeated: list[Unit] = []
    fresh: list[Unit] = []
    for unit in section.units:
        filled = sum(other.tokens for other in (*repeated, *fresh))
        fits = filled + unit.tokens <= room
        breaks = unit.paragraph and filled + unit.paragraph > room and unit.paragraph <= room and filled >= FULL_ENOUGH * room
        if fresh and (not fits or breaks):
            yield _passage(section, repeated, fresh)
            # A table's rows stand for themselves, and its header is repeated already.
            repeated = [] if section.table else _overlap(fresh, min(size.overlap * room, (room - unit.tokens) / (1 + NEAR)))
            fresh = []
        fresh.append(unit)
    if fresh:
        yield _passage(section, repeated, fresh)


def _overlap(units: list[Unit], target: float) -> list[Unit]:
    """The last sentences, about `target` tokens of them: whole ones as far as they come near it, of a longer one its last words."""
    taken: list[Unit] = []
    left = target
    for unit in reversed(units):
        if left <= NEAR * target:
            break
        if unit.tokens <= left + NEAR * target:
            taken.insert(0, unit)
            left -= unit.tokens
            continue
        words = tail(unit.text, int(len(unit.text) * left / unit.tokens)).strip()
        if left >= 1 and words:
            taken.insert(0, Unit(words, "", unit.boxes, int(left)))
        break
    return taken


def _passage(section: Section, repeated: list[Unit], fresh: list[Unit]) -> NewPassage:
    units = [*repeated, *fresh]
    text = (section.lead + "\n" if section.lead else "") + "".join((unit.before if at else "") + unit.text for at, unit in enumerate(units))
    where = _places(section, units)
    page = next((box.page for unit in fresh for box in unit.boxes), where[0].page if where else None)
    tags: dict[str, str] = {} if section.part == "body" else {"part": section.part}
    return NewPassage(text.strip(), page, section.heading, section.lead_tokens + sum(unit.tokens for unit in units), tags, where)


def _places(section: Section, units: list[Unit]) -> list[Box]:
    """Each once; rows of a table that stand below each other on one page are one box."""
    boxes = list(dict.fromkeys(box for unit in units for box in unit.boxes))
    if not section.table:
        return boxes
    by_page: dict[int, list[Box]] = {}
    for box in boxes:
        by_page.setdefault(box.page, []).append(box)
    return list(dict.fromkeys([*section.lead_boxes, *(around(rows) for rows in by_page.values())]))
