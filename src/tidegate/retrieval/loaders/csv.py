"""Tables as text (csv, tsv): the delimiter is told by the file, the first row names the columns."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from tidegate.core.errors import DocumentUnreadable
from tidegate.retrieval import sheet
from tidegate.retrieval.encoding import decode
from tidegate.retrieval.loaded import Bounds, Loaded

SUFFIXES = (".csv", ".tsv")

_DELIMITERS = (",", ";", "\t", "|")
#: A first line that tells Excel the delimiter.
_TOLD = re.compile(r"\"?sep=([,;\t|])\"?\n", re.IGNORECASE)
#: Rows that the delimiter is told by.
_LOOKED_AT = 50
#: Characters of a field at most: a quote that is never closed makes one of all that follows.
MAX_FIELD = 1 << 20
#: A text has hardly any control characters.
_CONTROL_SHARE = 0.01


def load(path: str, bounds: Bounds) -> Loaded:
    """Raises DocumentUnreadable: unknown encoding, binary, a field without end."""
    text = decode(Path(path).read_bytes())
    if "\0" in text or sum(char < " " and char not in "\t\n\f" for char in text[:100_000]) > _CONTROL_SHARE * len(text[:100_000]):
        raise DocumentUnreadable("The file is binary, named as a table.", hint="Export the table again.")
    csv.field_size_limit(MAX_FIELD)
    told = _TOLD.match(text)
    delimiter = told.group(1) if told else "\t" if path.lower().endswith(".tsv") else _delimiter(text)
    try:
        rows = list(csv.reader(io.StringIO(text[told.end() if told else 0 :], newline=""), delimiter=delimiter))
    except csv.Error as error:
        hint = "Look for a quotation mark that is not closed."
        raise DocumentUnreadable(f"The table is broken: {error} ({MAX_FIELD} characters are the most of a field).", hint=hint) from None
    texts = {at: {col: " ".join(field.split()) for col, field in enumerate(fields) if field.strip()} for at, fields in enumerate(rows)}
    return Loaded(Path(path).stem, list(sheet.blocks({at: row for at, row in texts.items() if row})))


def _delimiter(text: str) -> str:
    """The one that cuts most of the first rows into as many fields, of those the one that gives the most."""
    head = "\n".join(text.split("\n", _LOOKED_AT)[:_LOOKED_AT])[: MAX_FIELD // 2]

    def fit(delimiter: str) -> tuple[float, int]:
        try:
            widths = [len(row) for row in csv.reader(io.StringIO(head, newline=""), delimiter=delimiter) if row]
        except csv.Error:
            return 0.0, 0
        usual = max(set(widths), key=widths.count, default=1)
        return (widths.count(usual) / len(widths) if usual > 1 else 0.0), usual

    return max(_DELIMITERS, key=fit)
