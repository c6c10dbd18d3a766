"""HTML: headings, paragraphs, lists, tables with merged cells. Scripts, menus and what is hidden from readers is left out, and noted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from selectolax.lexbor import LexborHTMLParser, LexborNode

from tidegate.core.document import Box
from tidegate.core.errors import DocumentUnreadable
from tidegate.retrieval.encoding import decode
from tidegate.retrieval.loaded import Block, Bounds, Loaded
from tidegate.retrieval.tables import Cell, Table, tidy

SUFFIXES = (".html", ".htm", ".xhtml")

#: No text for readers.
_UNSEEN = {"script", "style", "template", "noscript", "iframe", "object", "embed", "svg", "canvas", "audio", "video", "head", "select", "datalist"}
#: Menus and what stands on every page; fields of forms.
_AROUND = {"nav", "footer", "aside", "button", "input", "textarea"}
_HEADINGS = {"h1": 1, "h2": 2, "h3": 3, "h4": 4, "h5": 5, "h6": 6}
_BLOCKS = {
    "p", "div", "section", "article", "main", "body", "header", "address", "blockquote", "pre", "ul", "ol", "li", "dl", "dt", "dd", "figure",
    "figcaption", "form", "fieldset", "legend", "details", "summary", "hr", "table", "caption", "tr", "td", "th", "center", "html",
} | _HEADINGS.keys()  # fmt: skip
_HIDDEN_STYLE = re.compile(
    r"display\s*:\s*none|visibility\s*:\s*hidden|font-size\s*:\s*0|opacity\s*:\s*0(?:\.0*)?\s*(?:;|$)|(?:left|top|text-indent)\s*:\s*-\d{3,}",
    re.IGNORECASE,
)
_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([A-Za-z0-9_:.-]{1,40})", re.IGNORECASE)
#: Names that pages give to encodings, and those that they mean (WHATWG, Encoding).
_ENCODINGS = {
    "utf-8": "utf-8", "utf8": "utf-8", "gb2312": "gb18030", "gbk": "gb18030", "gb18030": "gb18030", "gb_2312-80": "gb18030", "big5": "big5hkscs",
    "iso-8859-1": "cp1252", "latin1": "cp1252", "us-ascii": "cp1252", "ascii": "cp1252", "windows-1252": "cp1252", "windows-1251": "cp1251",
    "shift_jis": "cp932", "euc-kr": "cp949", "iso-8859-15": "iso-8859-15",
}  # fmt: skip
#: Elements inside each other at most, and elements in all: a page that people read has far fewer.
MAX_DEPTH, MAX_NODES = 1_000, 2_000_000
#: Rows and columns that one cell may cover, columns of a table, and places of a table.
MAX_SPAN, MAX_COLUMNS, MAX_PLACES = 1_000, 1_000, 2_000_000


def load(path: str, bounds: Bounds) -> Loaded:
    """Raises DocumentUnreadable: unknown encoding, nested too deeply."""
    tree = LexborHTMLParser(_decode(Path(path).read_bytes()))
    reader = _Reader()
    if tree.body is not None:
        reader.read(tree.body)
    titles = tree.css("head > title")
    title = " ".join(titles[0].text().split()) if titles else ""
    if not title:
        title = next((block.text for block in reader.blocks if block.kind == "heading"), Path(path).stem)
    left = [f"{times} <{tag}>" for tag, times in sorted(reader.left_out.items())]
    return Loaded(title, reader.blocks, {}, [f"Left out as no text of the page: {', '.join(left)}."] if left else [])


def _decode(data: bytes) -> str:
    """By its mark, then by what the page says of itself, then by what it is."""
    declared = _CHARSET.search(data[:4096])
    name = _ENCODINGS.get(declared.group(1).decode().lower(), "") if declared else ""
    if name and not data.startswith((b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf")):
        try:
            return data.decode(name).replace("\r\n", "\n")
        except UnicodeDecodeError:
            pass  # it says something wrong of itself
    return decode(data)


class _Reader:
    """Walks a page once, without recursion: pages may be nested as deeply as somebody likes."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        #: How many elements of a kind were left out though they had text.
        self.left_out: Counter[str] = Counter()
        self._text: list[str] = []
        self._lists: list[int | None] = []
        self._items: list[str] = []
        #: Whether the item that is open has its first line: what follows stands below it.
        self._begun = False
        self._level = 0

    def read(self, body: LexborNode) -> None:
        waiting: list[tuple[LexborNode, bool]] = [(body, False)]
        depth = nodes = 0
        while waiting:
            node, ends = waiting.pop()
            if ends:
                depth -= 1
                self._leave(node)
                continue
            nodes += 1
            if nodes > MAX_NODES or depth > MAX_DEPTH:
                what = f"more than {MAX_NODES} elements" if nodes > MAX_NODES else f"elements nested more than {MAX_DEPTH} deep"
                raise DocumentUnreadable(f"The page has {what}.", hint="Export its text in another way.")
            if self._enter(node):
                depth += 1
                waiting.append((node, True))
                waiting += [(child, False) for child in reversed(list(node.iter(include_text=True)))]
        self._flush()
        self._end_list()

    def _enter(self, node: LexborNode) -> bool:
        """Whether its children are read."""
        tag = node.tag or ""
        if tag == "-text":
            self._text.append(node.text_content or "")
            return False
        if tag in _UNSEEN or tag in _AROUND or _is_hidden(node):
            if tag not in ("input", "head") and node.text(deep=True, strip=True):
                self.left_out[tag] += 1
            return False
        if tag == "br":
            self._text.append("\v")
        elif tag == "img":
            self._text.append(node.attributes.get("alt") or "")
        elif tag == "table" and (table := _table(node, self.left_out)) is not None:
            self._flush()
            self._end_list()
            self.blocks.append(Block(table.markdown(), "table"))
            return False
        if tag in _BLOCKS:
            self._flush()
            self._level = _HEADINGS.get(tag, 0)
            if tag in ("ul", "ol"):
                self._lists.append(_start(node) - 1 if tag == "ol" else None)
            elif tag == "li":
                self._begun = False
                if self._lists and (number := self._lists[-1]) is not None:
                    self._lists[-1] = number + 1
        return True

    def _leave(self, node: LexborNode) -> None:
        tag = node.tag or ""
        if tag == "a" and (target := node.attributes.get("href") or "").startswith(("http://", "https://")):
            self._text.append(f" ({target})")
        if tag in _BLOCKS:
            self._flush(keeps_lines=tag == "pre")
            self._level = 0
            if tag in ("ul", "ol"):
                self._begun = True  # the rest of the item around it
                self._lists.pop()
                if not self._lists:
                    self._end_list()

    def _flush(self, *, keeps_lines: bool = False) -> None:
        said, self._text = "".join(self._text), []
        if keeps_lines:
            text = said.replace("\v", "\n").strip("\n").rstrip()
        else:
            text = "\n".join(line for line in (" ".join(part.split()) for part in said.split("\v")) if line)
        if not text.strip():
            return
        if self._level:
            self._end_list()
            self.blocks.append(Block(" ".join(text.split()), "heading", self._level))
        elif self._lists:
            number = self._lists[-1]
            mark = "- " if number is None else f"{number}. "
            mark = " " * len(mark) if self._begun else mark
            self._items.append("  " * (len(self._lists) - 1) + mark + " ".join(text.split()))
            self._begun = True
        else:
            self.blocks.append(Block(text))

    def _end_list(self) -> None:
        if self._items:
            self.blocks.append(Block("\n".join(self._items)))
            self._items = []


def _start(numbered: LexborNode) -> int:
    """The number of a list's first item."""
    value = (numbered.attributes.get("start") or "").strip()
    return int(value) if value.isdecimal() and len(value) < 7 else 1


def _is_hidden(node: LexborNode) -> bool:
    attributes = node.attributes
    return "hidden" in attributes or attributes.get("aria-hidden") == "true" or bool(_HIDDEN_STYLE.search(attributes.get("style") or ""))


def _table(node: LexborNode, left_out: Counter[str]) -> Table | None:
    """None for a table that is there for the layout: one with tables inside, or with one row or column."""
    if node.attributes.get("role") == "presentation" or any(inner.mem_id != node.mem_id for inner in node.css("table")):
        return None
    hidden: Counter[str] = Counter()
    cells: list[Cell] = []
    taken: set[tuple[int, int]] = set()
    header = height = 0
    for height, row in enumerate(_rows(node, hidden), 1):
        col = 0
        named = [found for found in row.iter() if found.tag in ("td", "th") and _seen(found, hidden)]
        for cell in named:
            while (height - 1, col) in taken:
                col += 1
            rows, cols = _span(cell, "rowspan"), min(_span(cell, "colspan"), MAX_COLUMNS - col)
            if cols < 1 or len(taken) + rows * cols > MAX_PLACES:
                raise DocumentUnreadable(f"A table of the page has more than {MAX_COLUMNS} columns or {MAX_PLACES} places.", hint="Split it.")
            taken.update((height - 1 + down, col + over) for down in range(rows) for over in range(cols))
            cells.append(Cell(_text(cell, hidden), height - 1, col, rows, cols))
            col += cols
        if height == header + 1 and named and all(cell.tag == "th" for cell in named):
            header = height
    for made in cells:  # a cell may claim more rows than there are
        made.rows = min(made.rows, height - made.row)
    title = next((_text(caption, hidden) for caption in node.css("caption")), "")
    table = tidy(Table(cells, [Box(1, 0.0, 0.0, 0.0, 0.0)] * height, header if header < height else 0))
    if table is None:
        return None
    left_out.update(hidden)
    return _titled(table, title) if title else table


def _titled(table: Table, title: str) -> Table:
    """The caption as a first header row over all columns."""
    moved = [Cell(cell.text, cell.row + 1, cell.col, cell.rows, cell.cols) for cell in table.cells]
    return Table([Cell(title, 0, 0, 1, table.width), *moved], [table.boxes[0], *table.boxes], table.header + 1)


def _rows(table: LexborNode, hidden: Counter[str]) -> Iterator[LexborNode]:
    for part in table.iter():
        if part.tag == "tr" and _seen(part, hidden):
            yield part
        elif part.tag in ("thead", "tbody", "tfoot") and _seen(part, hidden):
            yield from (row for row in part.iter() if row.tag == "tr" and _seen(row, hidden))


def _span(cell: LexborNode, name: str) -> int:
    value = (cell.attributes.get(name) or "").strip()
    return max(1, min(MAX_SPAN, int(value))) if value.isdecimal() else 1


def _seen(node: LexborNode, hidden: Counter[str]) -> bool:
    """Whether readers see it; what they do not is counted, where it has a text."""
    if node.tag not in _UNSEEN and not _is_hidden(node):
        return True
    if node.text(deep=True, strip=True):
        hidden[node.tag or ""] += 1
    return False


def _text(of: LexborNode, hidden: Counter[str]) -> str:
    """In one line. Nothing is taken out of the tree: what is found twice would be freed twice."""
    parts: list[str] = []
    waiting = [of]
    while waiting:
        node = waiting.pop()
        if node.tag == "-text":
            parts.append(node.text_content or "")
        elif _seen(node, hidden):
            waiting += reversed(list(node.iter(include_text=True)))
    return " ".join(" ".join(parts).split())
