"""ARCHITECTURE.md names every file."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.by_path import module_at

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def architecture() -> ModuleType:
    return module_at(ROOT / "scripts" / "architecture.py")


def test_every_file_is_named_with_what_it_says_of_itself(architecture: ModuleType) -> None:
    """The lists on the page are those that `make docs` writes: no file is missing, none is named that is gone."""
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    old = set(page.splitlines()) ^ set(architecture.render(page).splitlines())
    assert not old, "Run: make docs"


def test_a_file_without_words_is_refused(architecture: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that does not say what it is cannot be listed."""
    monkeypatch.setattr(architecture, "ROOT", tmp_path)
    silent = tmp_path / "silent.py"
    silent.write_text("x = 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="does not say"):
        architecture.says(silent)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.sql", "-- Flights, newest first.\nselect 1;\n", "Flights, newest first."),
        ("a.html", "{# The list of flights. #}\n<ul></ul>\n", "The list of flights."),
        ("a.css", "/* The page's look. */\nbody {}\n", "The page's look."),
        ("a.py", '"""One thing.\n\nAnd more."""\n', "One thing."),
    ],
)
def test_the_first_line_speaks(architecture: ModuleType, tmp_path: Path, name: str, text: str, words: str) -> None:
    """Each kind of file says what it is in its own kind of comment."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert architecture.says(path) == words
