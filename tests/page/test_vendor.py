"""What others wrote and we ship: named, unchanged, with its licence."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path

import pytest

import tidegate.api.page

VENDOR = Path(tidegate.api.page.__file__).parent / "vendor"
FILES = tomllib.loads((VENDOR / "VENDOR.toml").read_text())["file"]


@pytest.mark.parametrize("entry", FILES, ids=lambda entry: entry["file"])
def test_a_vendored_file_is_the_one_that_is_named(entry: dict[str, str]) -> None:
    """Its SHA-256 is the recorded one, and its licence lies beside it."""
    assert hashlib.sha256((VENDOR / entry["file"]).read_bytes()).hexdigest() == entry["sha256"]
    assert (VENDOR / entry["licence_file"]).stat().st_size > 300
    assert entry["package"].endswith("@" + entry["version"])


def test_nothing_else_is_vendored() -> None:
    """Every file of the folder is named in VENDOR.toml."""
    named = {"VENDOR.toml"} | {entry["file"] for entry in FILES} | {entry["licence_file"] for entry in FILES}
    assert {file.name for file in VENDOR.iterdir()} == named
