"""A file of terms: one a line, comments, and what is wrong with a line that is no term."""

from __future__ import annotations

from pathlib import Path

from tidegate.core.errors import SettingsError
from tidegate.guard.terms import MOST_TERM_CHARS, normal_form


def read_terms(file: Path) -> list[str]:
    """The terms of a file: UTF-8, one a line; empty lines and lines that begin with # are passed over.

    Raises SettingsError that names the file and line of what is no term.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise SettingsError(f"The terms file {file} cannot be read: {error.strerror}.", hint="Correct the path in terms_file.") from None
    try:
        decoded = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at = data.count(b"\n", 0, error.start) + 1
        raise SettingsError(f"{file}:{at}: the terms file is not UTF-8.", hint="Save it as UTF-8.") from None
    terms: list[str] = []
    for number, line in enumerate(decoded.split("\n"), 1):
        term = line.strip()
        if not term or term.startswith("#"):
            continue
        if why := _why_not(term):
            raise SettingsError(f"{file}:{number}: {why}", hint="One term a line; a line that begins with # is a comment.")
        terms.append(term)
    if not terms:
        raise SettingsError(f"The terms file {file} holds no term.", hint="One term a line, or leave terms_file out.")
    return terms


def _why_not(term: str) -> str:
    if term.isascii() and term.isprintable() and len(term) <= MOST_TERM_CHARS:  # nearly all: no need to make the normal form twice
        return ""
    folded = normal_form(term).strip()
    if not folded:
        return "nothing is left of this term when what cannot be seen is taken away."
    if len(folded) > MOST_TERM_CHARS:
        return f"this term has more than {MOST_TERM_CHARS} characters."
    return ""
