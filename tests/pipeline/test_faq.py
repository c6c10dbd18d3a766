"""Answers by keywords: which entry fits which question, and which files are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.errors import SettingsError
from tidegate.pipeline.faq import Faq, read_faq

FILE = """
[defaults]
citations = []
[[entry]]
keywords = ["report*|notif*", "loss|damage"]
output = { answer = "Within 14 days." }
[[entry]]
keywords = ["report*", "loss", "car|vehicle"]
output = { answer = "Within 7 days." }
[[entry]]
keywords = ["no claims"]
unless = ["abroad"]
output = { answer = "Ten years." }
[[entry]]
keywords = ["报案"]
output = { answer = "七天。" }
"""


def faq(tmp_path: Path, text: str = FILE) -> Faq:
    file = tmp_path / "faq.toml"
    file.write_text(text, encoding="utf-8")
    return read_faq(file)


@pytest.mark.parametrize(
    ("question", "entry"),
    [
        ("When must I report a LOSS?", 0),
        ("How do I notify you of damage", 0),
        ("I am reporting a loss of my car", 1),
        ("ＲＥＰＯＲＴ　ａ　ｌｏｓｓ", 0),
        ("A report about floss", None),
        ("Is a loss covered?", None),
        ("no  claims\tbonus", 2),
        ("no claims bonus abroad", None),
        ("车险出险后多长时间内要报案？", 3),
        ("", None),
    ],
)
def test_the_entry_with_the_most_keywords_wins(tmp_path: Path, question: str, entry: int | None) -> None:
    """All keywords of an entry must be there, as whole words unless a star ends them; where words have no blanks, anywhere."""
    assert faq(tmp_path).find(question) == entry


def test_defaults_are_in_every_output(tmp_path: Path) -> None:
    """What all entries share is written once."""
    assert faq(tmp_path).entries[0].output == {"citations": [], "answer": "Within 14 days."}


@given(st.text(max_size=80), st.text(max_size=80))
def test_words_around_a_question_never_lose_its_answer(before: str, behind: str) -> None:
    """Whatever stands around a question, the entry that fits it is found, or one with more of its keywords."""
    found = _ONE.find(f"{before} report the loss {behind}")
    assert found in (0, 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[entry]]\nkeywords = [\"a\"]", "output"),
        ("[[entry]]\nkeywords = []\noutput = {}", "keywords"),
        ("[[entry]]\nkeywords = [\"a\"]\noutput = {}\nanswer = 1", "answer"),
        ("[[entry]]\nkeywords = [\"a|\"]\noutput = {}", "entry 1: 'a|' is no keyword"),
        ("[[entry]]\nkeywords = [\"a*b\"]\noutput = {}", "'a\\*b' is no keyword"),
        ("[[entry]]\nkeywords = [\"*\"]\noutput = {}", "is no keyword"),
        ("", "entry"),
        ("[[", "is not TOML"),
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    """The error names the file and what is wrong in it."""
    with pytest.raises(SettingsError, match=says) as error:
        faq(tmp_path, text)
    assert "faq.toml" in error.value.message


def _written() -> Faq:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return faq(Path(folder))


_ONE = _written()
