"""Writes the file lists of ARCHITECTURE.md: each file of src/tidegate with the line that it says about itself at its top.

Run by `make docs`; tests/test_architecture.py fails where a list is old, so a file cannot land unnamed. The prose around it is by hand.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tidegate"
PAGE = ROOT / "ARCHITECTURE.md"

#: Between these two comments a list is written; the room `.` is the files beside the rooms.
LIST = re.compile(r"(<!-- files: (?P<room>\S+) -->\n).*?(<!-- end of files -->)", re.DOTALL)
#: How a file that is not Python says what it is, in its first lines.
FIRST_COMMENT = re.compile(r"\A\s*(?:--|//|/\*|\{#-?|<!--|#)\s*(.+?)\s*(?:\*/|-?#\}|-->)?\s*$", re.MULTILINE)
NAMED_QUERY = re.compile(r"^-- name: (\w+)", re.MULTILINE)
#: Taken from elsewhere (their folder has a list of its own), or pictures and marks.
SPEECHLESS = ("vendor/", "py.typed", ".svg", ".png", ".ico", ".woff2")
#: A template begins with what it sends, so its folder is named, with the files in it.
TEMPLATE = ".html"


def files() -> list[Path]:
    """The source files that must be named, sorted."""
    found = [path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    kept = [path for path in found if not any(mark in path.relative_to(SOURCE).as_posix() for mark in SPEECHLESS)]
    return sorted(path for path in kept if path.name != "__init__.py" and "examples" not in path.relative_to(SOURCE).parts)


def says(path: Path) -> str:
    """The first line of a module's docstring, or of another file's leading comment. Raises ValueError where there is none."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        words = ast.get_docstring(ast.parse(text)) or ""
    elif queries := NAMED_QUERY.findall(text):
        words = f"The queries {', '.join(queries)}."
    else:
        comment = FIRST_COMMENT.match(text)
        words = comment[1] if comment else ""
    if not words:
        raise ValueError(f"{path.relative_to(ROOT)} does not say in its first line what it is.")
    return words.splitlines()[0].strip()


def room_of(path: Path) -> str:
    """The first folder below src/tidegate, or `.`."""
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else "."


def entries() -> Iterator[tuple[str, str, str]]:
    """What is listed: name below src/tidegate, its words, its room."""
    templates: dict[Path, list[str]] = {}
    for path in files():
        if path.suffix == TEMPLATE:
            templates.setdefault(path.parent, []).append(path.stem)
        else:
            yield path.relative_to(SOURCE).as_posix(), says(path), room_of(path)
    for folder, names in templates.items():
        yield f"{folder.relative_to(SOURCE).as_posix()}/", f"The templates {', '.join(names)}.", room_of(folder / "x")


def render(page: str) -> str:
    """The page with every list written anew. Raises ValueError where a room has no place on the page."""
    rooms: dict[str, list[str]] = {}
    for name, words, room in entries():
        rooms.setdefault(room, []).append(f"- `{name}`: {words}\n")
    without = set(rooms) - {found["room"] for found in LIST.finditer(page)}
    if without:
        raise ValueError(f"ARCHITECTURE.md has no '<!-- files: ROOM -->' for: {', '.join(sorted(without))}.")
    return LIST.sub(lambda found: found[1] + "".join(rooms.get(found["room"], [])) + found[3], page)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
