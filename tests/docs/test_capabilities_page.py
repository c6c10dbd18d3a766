"""docs/capabilities.md lists what a capability.toml may say."""

from __future__ import annotations

import json
from collections.abc import Iterator

from desk import ROOT

from tidegate.core.plugins import load, names
from tidegate.core.settings import Section
from tidegate.local.drill import DRILLS, drill_names
from tidegate.pipeline.capability import Manifest
from tidegate.pipeline.rungs import Rung

PAGE = (ROOT / "docs" / "capabilities.md").read_text(encoding="utf-8")


def rows(section: type[Section], before: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from rows(field.annotation, f"{before}{name}.")
        else:
            default = "(required)" if field.is_required() else f"`{json.dumps(field.get_default(call_default_factory=True))}`"
            yield f"| `{before}{name}` | {default} | {field.description} |"


def test_every_name_is_listed_with_its_default() -> None:
    """The table has each field of the manifest as the code has it."""
    assert [row for row in rows(Manifest) if row not in PAGE] == []


def test_every_field_of_a_rung_is_listed() -> None:
    """docs/ladder.md has each field of [[ladder]] as the code has it."""
    page = (ROOT / "docs" / "ladder.md").read_text(encoding="utf-8")
    assert [row for row in rows(Rung) if row not in page] == []


def test_every_drill_is_listed() -> None:
    """docs/drills.md has each drill with its own words."""
    page = (ROOT / "docs" / "drills.md").read_text(encoding="utf-8")
    missing = [name for name in drill_names() if f"| `{name}` | {load(DRILLS, name.replace('-', '_')).SUMMARY} |" not in page]
    assert missing == []


def test_every_stage_is_listed() -> None:
    """The table of stages has each file of pipeline/stages."""
    assert [name for name in names("tidegate.pipeline.stages") if f"| `{name}` |" not in PAGE] == []
