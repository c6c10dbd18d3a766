"""Excel workbooks (xlsx): every sheet that is shown, as tables; values as they are shown where that is a date or a share, not formulas."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from tidegate.core.errors import DocumentUnreadable
from tidegate.retrieval import sheet
from tidegate.retrieval.loaded import Block, Bounds, Loaded
from tidegate.retrieval.ooxml import Package

SUFFIXES = (".xlsx", ".xlsm")

_BOOK = "xl/workbook.xml"
#: Cells with a value in one sheet.
MAX_CELLS = 2_000_000
#: Built-in number formats (ECMA-376, 18.8.30) of dates and times, and of shares.
_DATES, _SHARES = {*range(14, 23), *range(27, 37), *range(45, 48), *range(50, 59)}, {9, 10}
_QUOTED = re.compile(r'"[^"]*"|\\.|\[[^\]]*\]|_.|\*.')
_REFERENCE = re.compile(r"([A-Z]{1,3})(\d{1,7})")


class Sheet(msgspec.Struct):
    name: str
    member: str
    shown: bool


def load(path: str, bounds: Bounds) -> Loaded:
    """Raises DocumentUnreadable: broken, encrypted, a trap."""
    notes: list[str] = []
    with closing(Package(path, bounds)) as package:
        if _BOOK not in package:
            raise DocumentUnreadable("The file is an archive, but no Excel workbook (it has no xl/workbook.xml).", hint="Save it as .xlsx again.")
        sheets, since_1904 = _sheets(package)
        texts = _shared_texts(package)
        formats = _formats(package)
        blocks: list[Block] = []
        for found in sheets:
            if not found.shown:
                notes.append(f"The hidden sheet {found.name!r} was left out.")
            elif found.member in package:
                blocks += _blocks(found, _Cells(package, found.member, texts, formats, since_1904), notes)
        title = package.title()
    return Loaded(title or Path(path).stem, blocks, {}, notes)


def _blocks(found: Sheet, cells: _Cells, notes: list[str]) -> Iterator[Block]:
    if cells.formulas:
        notes.append(f"{cells.formulas} formulas of the sheet {found.name!r} have no stored value and were left out.")
    made = list(sheet.blocks(cells.rows, cells.merged))
    if made:
        yield Block(found.name, "heading", 1)
        yield from made


def _sheets(package: Package) -> tuple[list[Sheet], bool]:
    """In their order; and whether days are counted from 1904."""
    targets = package.relations(_BOOK)
    sheets: list[Sheet] = []
    since_1904 = False

    def start(element: str, attributes: dict[str, str]) -> None:
        nonlocal since_1904
        if element == "sheet":
            shown = attributes.get("state", "visible") == "visible"
            sheets.append(Sheet(attributes.get("name", ""), targets.get(attributes.get("id", ""), ""), shown))
        elif element == "workbookPr":
            since_1904 = attributes.get("date1904", "") in ("1", "true")

    package.parse(_BOOK, start, _nothing, _nothing)
    return sheets, since_1904


def _shared_texts(package: Package) -> list[str]:
    texts: list[str] = []
    parts: list[str] = []
    inside = phonetic = False

    def start(element: str, _: dict[str, str]) -> None:
        nonlocal inside, phonetic
        inside = element == "t"
        phonetic = phonetic or element == "rPh"
        if element == "si":
            parts.clear()

    def end(element: str) -> None:
        nonlocal inside, phonetic
        inside = False
        if element == "rPh":
            phonetic = False
        elif element == "si":
            texts.append("".join(parts))

    def text(said: str) -> None:
        if inside and not phonetic:
            parts.append(said)

    if "xl/sharedStrings.xml" in package:
        package.parse("xl/sharedStrings.xml", start, end, text)
    return texts


def _formats(package: Package) -> list[str]:
    """What each cell format makes of a number: "date", "share" or "" for the number itself."""
    codes: dict[int, str] = {}
    formats: list[str] = []
    inside = False

    def start(element: str, attributes: dict[str, str]) -> None:
        nonlocal inside
        if element == "numFmt" and attributes.get("numFmtId", "").isdigit():
            codes[int(attributes["numFmtId"])] = _kind(attributes.get("formatCode", ""))
        elif element == "cellXfs":
            inside = True
        elif element == "xf" and inside:
            number = int(attributes.get("numFmtId", "0")) if attributes.get("numFmtId", "0").isdigit() else 0
            built_in = "date" if number in _DATES else "share" if number in _SHARES else ""
            formats.append(codes.get(number, built_in))

    def end(element: str) -> None:
        nonlocal inside
        inside = inside and element != "cellXfs"

    if "xl/styles.xml" in package:
        package.parse("xl/styles.xml", start, end, _nothing)
    return formats


def _kind(code: str) -> str:
    bare = _QUOTED.sub("", code.split(";")[0]).lower()
    if re.search(r"[ymdhs]", bare):
        return "date"
    return "share" if "%" in bare else ""


class _Cells:
    """The cells of one sheet with a value, as texts by row and column, and what is merged."""

    def __init__(self, package: Package, member: str, texts: list[str], formats: list[str], since_1904: bool) -> None:
        self.rows: dict[int, sheet.Row] = {}
        self.merged: dict[tuple[int, int], tuple[int, int]] = {}
        #: Formulas without a stored value.
        self.formulas = 0
        self._texts, self._formats = texts, formats
        self._begins = datetime(1904, 1, 1) if since_1904 else datetime(1899, 12, 30)  # noqa: DTZ001 - a sheet's days have no zone
        self._count = 0
        self._place = (0, 0)
        self._kind = self._format = ""
        self._value: list[str] = []
        self._inside = self._formula = False
        package.parse(member, self._start, self._end, self._text)

    def _start(self, element: str, attributes: dict[str, str]) -> None:
        if element == "row":
            self._place = (int(attributes["r"]) - 1 if attributes.get("r", "").isdigit() else self._place[0] + 1, -1)
        elif element == "c":
            self._place = _place(attributes.get("r", "")) or (self._place[0], self._place[1] + 1)
            self._kind, self._value, self._formula = attributes.get("t", "n"), [], False
            at = int(attributes["s"]) if attributes.get("s", "").isdigit() else -1
            self._format = self._formats[at] if 0 <= at < len(self._formats) else ""
        elif element == "f":
            self._formula = True
        elif element == "mergeCell":
            ends = [place for end in attributes.get("ref", "").split(":") if (place := _place(end))]
            if len(ends) == 2:
                self.merged[ends[0]] = (ends[1][0] - ends[0][0] + 1, ends[1][1] - ends[0][1] + 1)
        self._inside = element in ("v", "t")

    def _text(self, text: str) -> None:
        if self._inside:
            self._value.append(text)

    def _end(self, element: str) -> None:
        self._inside = False
        if element != "c":
            return
        text = " ".join(self._shown("".join(self._value)).split())
        if text:
            self._count += 1
            if self._count > MAX_CELLS:
                raise DocumentUnreadable(f"A sheet has more than {MAX_CELLS} cells.", hint="Split it.")
            self.rows.setdefault(self._place[0], {})[self._place[1]] = text
        elif self._formula:
            self.formulas += 1

    def _shown(self, value: str) -> str:
        if self._kind == "s":
            return self._texts[int(value)] if value.isdigit() and int(value) < len(self._texts) else ""
        if self._kind == "b":
            return {"1": "TRUE", "0": "FALSE"}.get(value, value)
        if self._kind != "n" or not value:
            return value
        try:
            number = float(value)
        except ValueError:
            return value
        if self._format == "date":
            return _date(self._begins, number) or value
        if self._format == "share":
            return f"{_plain(number * 100)}%"
        return _plain(number)


def _place(reference: str) -> tuple[int, int] | None:
    """Row and column, counted from 0, of "B7"."""
    found = _REFERENCE.fullmatch(reference.replace("$", ""))
    if found is None:
        return None
    col = 0
    for letter in found.group(1):
        col = col * 26 + ord(letter) - ord("A") + 1
    return int(found.group(2)) - 1, col - 1


def _plain(number: float) -> str:
    """Without the noise of binary fractions: fifteen digits are what a sheet keeps."""
    text = f"{number:.15g}"
    return text if "e" not in text else repr(number)


def _date(begins: datetime, days: float) -> str:
    """Day, day and time, or time alone; "" beyond the calendar."""
    try:
        moment = begins + timedelta(seconds=round(days * 86_400))
    except OverflowError:
        return ""
    if 0 <= days < 1:
        return moment.strftime("%H:%M")
    return moment.strftime("%Y-%m-%d" if moment.hour == moment.minute == 0 else "%Y-%m-%d %H:%M")


def _nothing(_: str) -> None:
    return
