"""Markdown (CommonMark and tables). Front matter may give title, date, confidence, tags and what the document supersedes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode

from tidegate.retrieval import front_matter
from tidegate.retrieval.encoding import decode
from tidegate.retrieval.flow import join_lines
from tidegate.retrieval.loaded import Block, Bounds, Loaded, markdown_table

SUFFIXES = (".md", ".markdown")

#: A line end that means nothing: what stands in its place depends on the script around it.
_SOFT_BREAK = "\x1f"

_PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])


def load(path: str, bounds: Bounds) -> Loaded:
    """Raises DocumentUnreadable where the encoding is not known, or the front matter says what it cannot mean."""
    head, body = front_matter.split(decode(Path(path).read_bytes()))
    notes = list(head.notes)
    blocks = list(_blocks(SyntaxTreeNode(_PARSER.parse(body)), notes))
    title = head.title or next((block.text for block in blocks if block.kind == "heading" and block.level == 1), Path(path).stem)
    return Loaded(title, blocks, head.tags, notes, head.dated_unix_s, head.confidence, head.supersedes)


def _blocks(root: SyntaxTreeNode, notes: list[str]) -> Iterator[Block]:
    for node in root.children:
        if node.type == "heading":
            yield Block(_plain(node), "heading", int(node.tag[1]))
        elif node.type == "table":
            yield Block(markdown_table(_rows(node)), "table")
        elif node.type in ("fence", "code_block"):
            yield Block(node.content.rstrip("\n"))
        elif node.type == "html_block" and not node.content.startswith("<!--"):
            notes.append(f"An HTML block of {len(node.content)} characters was left out.")
        elif node.type in ("hr", "html_block"):  # a rule, a comment: nothing that anybody reads
            continue
        elif node.type == "blockquote":
            yield from _blocks(node, notes)
        else:
            text = "\n".join(_list_lines(node, "")) if node.type.endswith("_list") else _plain(node)
            if text.strip():
                yield Block(text)


def _list_lines(node: SyntaxTreeNode, indent: str) -> Iterator[str]:
    """A list, one item a line, nested lists indented. Code and tables inside an item are kept as their own lines."""
    first = int(node.attrs.get("start", 1)) if node.type == "ordered_list" else 0
    for at, item in enumerate(node.children):
        mark = f"{first + at}." if node.type == "ordered_list" else "-"
        for child in item.children:
            if child.type.endswith("_list"):
                yield from _list_lines(child, indent + "  ")
            elif child.type == "table":
                yield from markdown_table(_rows(child)).split("\n")
            else:
                yield f"{indent}{mark} {_plain(child)}"
                mark = " " * len(mark)


def _rows(table: SyntaxTreeNode) -> list[list[str]]:
    return [[_plain(cell) for cell in row.children] for part in table.children for row in part.children]


def _plain(node: SyntaxTreeNode) -> str:
    """Text without markup: link targets are kept beside their text, pictures by their alternative text."""
    if node.type in ("text", "code_inline", "fence", "code_block"):
        return node.content
    if node.type == "softbreak":
        return _SOFT_BREAK
    if node.type == "hardbreak":
        return "\n"
    if node.type == "html_inline":
        return " " if node.content.lower().startswith("<br") else ""
    inner = join_lines("".join(_plain(child) for child in node.children).split(_SOFT_BREAK))
    if node.type == "image":
        return str(node.attrs.get("alt") or node.content or inner)
    target = str(node.attrs.get("href", "")) if node.type == "link" else ""
    return f"{inner} ({target})" if target.startswith(("http://", "https://")) and target != inner else inner
