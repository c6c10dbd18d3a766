"""The generated pages say what the code says."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.by_path import module_at
from tidegate.settings import all_leaves, load

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """scripts/reference.py, which is no package."""
    return module_at(ROOT / "scripts" / "reference.py")


def test_no_page_is_old(reference: ModuleType) -> None:
    """Each page is what `make docs` would write now."""
    old = [str(path.relative_to(ROOT)) for path, text in reference.pages().items() if not path.exists() or path.read_text("utf-8") != text]
    assert old == [], "run scripts/reference.py"


def test_every_setting_has_a_sentence() -> None:
    """A name, a default and a sentence: the sentence ends like one."""
    silent = [".".join(leaf.path) for leaf in all_leaves() if not re.search(r"\w.*[.)]$", leaf.field.description or "")]
    assert silent == []


def test_every_setting_is_on_the_page() -> None:
    """Each name stands under its section's heading in docs/settings.md."""
    page = (ROOT / "docs" / "settings.md").read_text("utf-8")
    chapters = {chapter.split("]", 1)[0]: chapter for chapter in page.split("\n## [")[1:]}
    missing = [leaf.path for leaf in all_leaves() if f"| `{leaf.path[-1]}` |" not in chapters[".".join(leaf.path[:-1])]]
    assert missing == []


def test_the_example_file_changes_nothing(tmp_path: Path) -> None:
    """Copied as it is, the settings in force are the defaults."""
    (tmp_path / "none.toml").write_text("")
    assert load(ROOT / "tidegate.example.toml", {}).model_dump() == load(tmp_path / "none.toml", {}).model_dump()


def test_every_line_of_the_example_file_can_be_taken_in(tmp_path: Path) -> None:
    """With the # away from every value of the fixed sections the settings are still the defaults, now said by the file."""
    blocks = (ROOT / "tidegate.example.toml").read_text("utf-8").split("\n\n")
    fixed = "\n\n".join(block for block in blocks if ".NAME]" not in block)
    (tmp_path / "all.toml").write_text(re.sub(r"^# (\w+ = [^ ].*)$", r"\1", fixed, flags=re.MULTILINE))
    (tmp_path / "none.toml").write_text("")
    settings = load(tmp_path / "all.toml", {})
    assert settings.model_dump() == load(tmp_path / "none.toml", {}).model_dump()
    assert settings.provenance["server.port"][1].startswith(str(tmp_path))
