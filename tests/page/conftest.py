"""The page over stand-ins, and a browser to look at it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stand_in import House, serving

from tidegate.api.page import TokenFolder

CHROMIUM = "/usr/bin/chromium"
_QUIET = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tokens=TokenFolder(tmp_path / "tokens"))


@pytest.fixture
def site(house: House) -> Iterator[str]:
    """The page's address."""
    with serving(house) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium; Debian's own. For one module of plain tests: while it runs, this thread can run no other event loop."""
    if shutil.which(CHROMIUM) is None:
        pytest.skip(f"{CHROMIUM} is not there: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=_QUIET)
        yield chromium
        chromium.close()
