"""TOML as text: values and keys in its notation, and where in a text each key stands. Reading TOML is tomllib's work."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

#: The names from the root of a document down to a key.
KeyPath = tuple[str, ...]

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_HEADER = re.compile(r"^\s*\[\[?([^\[\]]+)\]\]?\s*(#.*)?$")
_KEY = re.compile(r"""^\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")


def notation(value: Any) -> str:
    """A value in TOML's notation; what TOML does not know is written as text, and None as the empty text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{dotted((str(key),))} = {notation(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple | set | frozenset):
        return "[" + ", ".join(notation(one) for one in value) + "]"
    # TOML's escapes are JSON's, but it wants one more character escaped.
    return json.dumps("" if value is None else str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def dotted(path: Iterable[str]) -> str:
    """A path as a TOML key: `engines.local.url`, with quotes where a name needs them."""
    return ".".join(name if _BARE.fullmatch(name) else notation(name) for name in path)


def key_path(key: str) -> KeyPath | None:
    """A TOML key (`a.b`, `a."b.c"`) as a path; None where it is none."""
    try:
        tree: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        return None
    path: list[str] = []
    while isinstance(tree, dict) and len(tree) == 1:
        name, tree = next(iter(tree.items()))
        path.append(name)
    return tuple(path) if path and tree == 0 and "\n" not in key else None


def line_numbers(text: str) -> dict[KeyPath, int]:
    """Where each table and key of a document begins. A text of several lines that looks like a key may fool it: it serves messages only."""
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = key_path(header[1]) or ()
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            lines.setdefault((*table, *(key_path(key[1]) or ())), number)
    return lines
