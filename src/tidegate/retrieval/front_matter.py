"""What stands at the head of a text about the text: `key: value` lines between `---` lines, or TOML between `+++` lines.

Read are `title`, `date`, `confidence`, `supersedes` and `tags`. Of YAML that is: a value on the key's own line, quoted or not; `[a, b]`, or
`- item` lines below the key; `name: value` lines below `tags`. A value of these keys that cannot be read is refused; other keys are noted.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from datetime import UTC, date, datetime
from typing import Any, NoReturn, TypeAlias

import msgspec

from tidegate.core.errors import DocumentUnreadable

KEYS = ("title", "date", "confidence", "supersedes", "tags")
_KEY = re.compile(r"([A-Za-z_][\w -]*?)\s*:(?:\s+(.*))?$")
_COMMENT = re.compile(r"\s+#.*$")
#: Dates that every reader of the database can tell: in any zone they are in the years 1 to 9999. `9999-12-31`, which means "without end", is one.
FIRST_UNIX_S = datetime(1, 1, 2, tzinfo=UTC).timestamp()
LAST_UNIX_S = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
#: What begins a value that is no text: anchors, aliases, types, blocks of lines, mappings.
_BEYOND = re.compile(r"[&*!|>{%@`]")


class FrontMatter(msgspec.Struct, frozen=True):
    """What a document says of itself; None and empty: nothing. `supersedes`: paths as they are written there."""

    title: str = ""
    dated_unix_s: float | None = None
    confidence: float | None = None
    supersedes: tuple[str, ...] = ()
    tags: dict[str, str] = {}
    notes: list[str] = []


class _Value(msgspec.Struct, frozen=True):
    """A value with the line of its key, counted from 1 in the file."""

    line: int
    value: Any


_Head: TypeAlias = dict[str, _Value]


def split(text: str) -> tuple[FrontMatter, str]:
    """The front matter and the text below it; without one, or where it is not closed, all is text. Raises DocumentUnreadable with the line."""
    lines = text.split("\n")
    mark = lines[0].rstrip()
    if mark not in ("---", "+++"):
        return FrontMatter(), text
    end = next((at for at, line in enumerate(lines) if at and line.rstrip() == mark), None)
    if end is None or (mark == "---" and not _looks_like_keys(lines[1:end])):
        return FrontMatter(), text
    notes: list[str] = []
    head = _toml(lines[1:end]) if mark == "+++" else _yaml(lines[1:end], notes)
    return _read(head, notes), "\n".join(lines[end + 1 :])


def unix_s(text: str) -> float:
    """A date or a time of ISO 8601 as seconds since 1970; without a zone it is UTC. Raises ValueError, also for what no calendar of all zones has."""
    when = datetime.fromisoformat(re.sub(r"\s+(?=[+-]\d\d:?\d\d$|Z$)", "", text.strip()))
    seconds = (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    if not FIRST_UNIX_S <= seconds <= LAST_UNIX_S:
        raise ValueError("a date from 0001-01-02 to 9999-12-31 was expected")
    return seconds


def share(value: Any) -> float:
    """A number from 0 to 1. Raises ValueError."""
    if isinstance(value, bool) or not 0 <= (number := float(value)) <= 1:  # which is false of NaN
        raise ValueError
    return number


def _looks_like_keys(lines: list[str]) -> bool:
    """Two rules with words between them are no front matter: its first line names a key."""
    first = next((line for line in lines if line.strip() and not line.lstrip().startswith("#")), None)
    return first is None or _KEY.match(first.rstrip()) is not None


def _toml(lines: list[str]) -> _Head:
    try:
        found = tomllib.loads("\n" + "\n".join(lines))  # the empty line stands for the mark, so that errors name the file's lines
    except tomllib.TOMLDecodeError as error:
        raise DocumentUnreadable(f"The front matter is no TOML: {error}.", hint="Mend it, or remove the +++ lines.") from None
    at = {key: next((n for n, line in enumerate(lines, 2) if re.match(rf"\s*\[?\s*[\"']?{re.escape(key)}\b", line)), 1) for key in found}
    return {key: _Value(at[key], value) for key, value in found.items()}


def _yaml(lines: list[str], notes: list[str]) -> _Head:
    head: _Head = {}
    key = ""
    for number, line in enumerate(lines, 2):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        below = line[0] in " \t-"
        match = _KEY.match(line.strip())
        if not below and match is None:
            _left_out(line, notes)
            continue
        if not below and match is not None:
            key = match[1].lower()
            if key in head:
                _refuse(number, key, "stands there twice")
            if key in KEYS:
                head[key] = _Value(number, _scalar(match[2] or "", number, key))
            else:
                _left_out(line, notes)
        elif key in KEYS:
            head[key] = _Value(head[key].line, _with(head[key].value, line, number, key))
        else:
            _left_out(line, notes)
    return head


def _with(value: Any, line: str, number: int, key: str) -> Any:
    """The value of `key` with one more line of it: an item, or a name with its value."""
    item = line.strip()
    if item.startswith("- ") and (value == "" or isinstance(value, list)):
        return [*(value or []), _scalar(item[2:].strip(), number, key)]
    if key == "tags" and (value == "" or isinstance(value, dict)) and (pair := re.match(r"([^:]+?)\s*:\s+(.*)$", item)):
        return {**(value or {}), _plain(pair[1]): _scalar(pair[2], number, key)}
    return _refuse(number, key, f"goes on with {item[:80]!r}, which is not read")


def _scalar(text: str, number: int, key: str) -> Any:
    """Text, or the items of `[a, b]`."""
    text = text.strip()
    if text[:1] in ("'", '"'):
        found = re.fullmatch(r"""("(?:[^"\\]|\\.)*"|'(?:[^']|'')*')(?:\s+#.*)?""", text)
        if found is None:
            _refuse(number, key, "has a quotation mark that is not closed")
        return _plain(found[1])
    text = _COMMENT.sub("", text)
    if text.startswith("[") and text.endswith("]"):
        inner = text[1:-1].strip()
        parts = re.findall(r"""\s*("(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[^,]+)\s*(?:,|$)""", inner)
        return [_plain(part.strip()) for part in parts]
    if text.startswith("[") or _BEYOND.match(text):
        _refuse(number, key, f"is YAML that is not read here: {text[:80]!r}")
    return text


def _plain(text: str) -> str:
    if len(text) >= 2 and text[0] == text[-1] == "'":
        return text[1:-1].replace("''", "'")
    if len(text) >= 2 and text[0] == text[-1] == '"':
        return re.sub(r'\\(["\\])', r"\1", text[1:-1])
    return text


def _read(head: Mapping[str, _Value], notes: list[str]) -> FrontMatter:
    found: dict[str, Any] = {}
    for key, (line, value) in ((key, (one.line, one.value)) for key, one in head.items()):
        if key not in KEYS:
            _left_out(f"{key} = {value}", notes)
        elif value in ("", [], {}):
            continue
        elif key == "title":
            found[key] = value if isinstance(value, str) else _refuse(line, key, "is no text")
        elif key == "date":
            found["dated_unix_s"] = _date(value, line)
        elif key == "confidence":
            found[key] = _confidence(value, line)
        elif key == "supersedes":
            items = value if isinstance(value, list) else [value]
            found[key] = tuple(items) if all(isinstance(item, str) and item for item in items) else _refuse(line, key, "is no list of paths")
        elif isinstance(value, dict):
            found[key] = {name: _tag(name, one, line) for name, one in value.items() if one != ""}
        else:
            notes.append(f"Front matter, line {line}: `tags` were left out: they are `name: value` lines here, below the key.")
    return FrontMatter(**found, notes=notes)


def _date(value: Any, line: int) -> float:
    try:
        return unix_s(value.isoformat() if isinstance(value, date) else value)
    except (ValueError, TypeError, OverflowError, AttributeError):
        _refuse(line, "date", f"is no date: {str(value)[:80]!r}", "Write it as 2026-03-31, or with a time: 2026-03-31T09:00:00+02:00.")


def _confidence(value: Any, line: int) -> float:
    try:
        return share(value)
    except (ValueError, TypeError):
        _refuse(line, "confidence", f"is no number from 0 to 1: {str(value)[:80]!r}")


def _tag(name: str, value: Any, line: int) -> str:
    if isinstance(value, (list, dict)):
        _refuse(line, "tags", f"has more than one value for {name[:80]!r}")
    return value if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


def _refuse(line: int, key: str, what: str, hint: str | None = None) -> NoReturn:
    raise DocumentUnreadable(f"Front matter, line {line}: `{key}` {what}.", hint=hint or "docs/ingest.md says what is read there.")


def _left_out(line: str, notes: list[str]) -> None:
    notes.append(f"Front matter line {line.strip()[:200]!r} was left out: only {', '.join(KEYS)} are read.")
