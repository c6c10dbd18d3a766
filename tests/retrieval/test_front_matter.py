"""Front matter: what a text says of itself, and that what cannot be meant is refused by name and line."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from tidegate.core.errors import DocumentUnreadable
from tidegate.retrieval import front_matter
from tidegate.retrieval.front_matter import split, unix_s
from tidegate.retrieval.loaded import Block, Bounds
from tidegate.retrieval.loaders import pdf, txt

MARCH = datetime(2026, 3, 31, tzinfo=UTC).timestamp()

YAML = """---
title: "Motor cover: 2026"   # as printed
date: 2026-03-31
confidence: 0.8
supersedes:
  - old/motor.md
  - 'motor 2024.md'
tags:
  product: motor
  year: "2026"
---
The text.
"""

TOML = """+++
title = "Motor cover: 2026"
date = 2026-03-31
confidence = 0.8
supersedes = ["old/motor.md", "motor 2024.md"]
[tags]
product = "motor"
year = 2026
+++
The text.
"""


@pytest.mark.parametrize("text", [YAML, TOML, YAML.replace("\n---\nThe", "\n---  \nThe").replace("  - old/motor.md\n", "- old/motor.md\n")])
def test_all_fields_are_read_and_are_no_text(text: str) -> None:
    """Both forms say the same, and only what stands below them is the document's text."""
    head, body = split(text)
    assert (head.title, head.dated_unix_s, head.confidence) == ("Motor cover: 2026", MARCH, 0.8)
    assert head.supersedes == ("old/motor.md", "motor 2024.md")
    assert head.tags == {"product": "motor", "year": "2026"}
    assert (body, head.notes) == ("The text.\n", [])


@pytest.mark.parametrize(
    ("said", "meant"),
    [("2026-03-31T02:00:00+02:00", MARCH), ("2026-03-31 00:00:00 +0000", MARCH), ("2026-03-31T00:00:00Z", MARCH), ("20260331", MARCH)],
)
def test_times_have_zones_or_are_utc(said: str, meant: float) -> None:
    """ISO 8601 in its forms, also with a space before the zone."""
    assert unix_s(said) == meant


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("title: x\ndate: last spring", r"line 3: `date` is no date: 'last spring'"),
        ("date: 2026-02-30", "line 2: `date`"),
        ("date: 9999-12-31T23:59:59-12:00", "line 2: `date`"),
        ("date: 0001-01-01T00:00:00+14:00", "line 2: `date`"),
        ("confidence: 1.5", "line 2: `confidence` is no number from 0 to 1"),
        ("confidence: nan", "line 2: `confidence`"),
        ("confidence: high", "line 2: `confidence`"),
        ("title: 'x", "line 2: `title` has a quotation mark that is not closed"),
        ("title: |\n  many lines", "line 2: `title` is YAML that is not read"),
        ("title: &a x", "line 2: `title` is YAML"),
        ("title: x\ntitle: y", "line 3: `title` stands there twice"),
        ("supersedes:\n  a: b", "line 3: `supersedes` goes on with"),
        ("tags:\n  a:\n    b: c", "line 3: `tags`"),
        ("tags:\n  a: [b, c]", "line 2: `tags` has more than one value for 'a'"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name_and_line(lines: str, says: str) -> None:
    """A date that is none must not become the day of the ingest."""
    with pytest.raises(DocumentUnreadable, match=says):
        split(f"---\n{lines}\n---\ntext\n")


@pytest.mark.parametrize(
    ("lines", "says"),
    [("date = 'soon'", "line 2: `date`"), ("a = 1\nconfidence = 2", "line 3: `confidence`"), ("x = 1\ny = = 2", "no TOML.*line 3")],
)
def test_toml_is_refused_by_name_and_line(lines: str, says: str) -> None:
    """As the other form, and broken TOML as well."""
    with pytest.raises(DocumentUnreadable, match=says):
        split(f"+++\n{lines}\n+++\ntext\n")


def test_other_keys_are_noted_with_all_that_is_theirs() -> None:
    """Files made for other programs are read: what is not known is left out and named; so is a list of tags, which have no names."""
    head, body = split("---\nlayout: post\nauthors:\n  - name: Ann\ntags: [a, b]\n---\ntext")
    assert (body, head.tags, len(head.notes)) == ("text", {}, 4)


@pytest.mark.parametrize("text", ["---\ntext\n", "---\n\nWater, and more.\n\n---\nmore\n", "+++\ntext", "text\n---\ntitle: x\n---\n", ""])
def test_rules_between_words_are_text(text: str) -> None:
    """Nothing of a text is lost because it begins with a rule."""
    assert split(text) == (front_matter.FrontMatter(), text)


def test_plain_text_has_front_matter(tmp_path: Path) -> None:
    """As Markdown has."""
    file = tmp_path / "a.txt"
    file.write_text(YAML)
    loaded = txt.load(str(file), Bounds())
    assert (loaded.title, loaded.blocks, loaded.dated_unix_s) == ("Motor cover: 2026", [Block("The text.")], MARCH)


@pytest.mark.parametrize(
    ("stamp", "meant"),
    [
        ("D:20260331020000+02'00'", MARCH), ("D:20260331", MARCH), ("D:20260331000000Z", MARCH), ("D:20260330203000-03'30'", MARCH),
        ("D:19700101000000Z", None), ("D:29990101000000Z", None), ("D:20261331000000Z", None), ("yesterday", None), ("", None),
    ],
)  # fmt: skip
def test_a_pdf_is_dated_when_it_says_it_was_made(stamp: str, meant: float | None) -> None:
    """With its zone; what cannot be is no date."""
    assert pdf._made_unix_s(stamp) == meant
