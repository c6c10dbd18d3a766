"""Documentation runs: every command of every page, from top to bottom, against a Tidegate that `make up` started."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from blocks import COMMANDS, DATA, SHOWN, Block, blocks
from desk import ROOT, Desk, Product, reader
from markdown_it import MarkdownIt

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/README.md"), *ROOT.glob("benchmarks/*.md")])
#: The Chinese page has the very blocks of the English one (below): running them once is enough.
READ = [page for page in PAGES if page.name != "README.zh-CN.md"]
#: Start-up and a model on one core, for all blocks of a page.
PAGE_S = 600


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def commands(page: Path) -> list[Block]:
    """The blocks that a reader would do something with."""
    return [one for one in blocks(page) if one.steer != "not run" and (one.language in COMMANDS or one.steer == "file")]


def headings(page: Path) -> list[str]:
    """The levels of the headings, from top to bottom."""
    return [token.tag for token in MarkdownIt().parse(page.read_text(encoding="utf-8")) if token.type == "heading_open"]


@pytest.mark.local
@pytest.mark.timeout(PAGE_S)
@pytest.mark.parametrize("page", [page for page in READ if commands(page)], ids=name)
def test_every_command_of_a_page_works(page: Path, desk: Desk) -> None:
    """A reader who does what the page says, in its order, meets no error that the page does not announce."""
    for block in commands(page):
        desk.do(block)


@pytest.mark.local
@pytest.mark.timeout(PAGE_S)
def test_the_printed_curl_line_answers(product: Product) -> None:
    """The line that `make up` prints gives an answer when it is pasted."""
    done = subprocess.run(["bash", "-c", product.curl], env=reader(), stdout=subprocess.PIPE, timeout=180, check=True)
    assert len(done.stdout) > 20


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_says_what_it_is(page: Path) -> None:
    """A block names its language, so that no command hides in a block that is only shown."""
    unknown = [f"{one.where}: {one.language!r}" for one in blocks(page) if one.language not in COMMANDS | DATA | SHOWN]
    assert not unknown


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_block_that_is_not_run_has_a_reason(page: Path) -> None:
    """What cannot be run is listed with its reason, in the page's source."""
    silent = [one.where for one in blocks(page) if one.steer == "not run" and len(one.words) < 10]
    assert not silent


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_data_is_what_it_says(page: Path) -> None:
    """TOML and JSON blocks can be read."""
    for one in blocks(page):
        if one.language == "toml":
            tomllib.loads(one.text)
        elif one.language == "json":
            json.loads(one.text)
        elif one.language == "jsonl":
            for line in one.text.splitlines():
                json.loads(line)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    """A link or picture inside the project names a file that is there."""
    addresses = [
        str(child.attrGet("href") or child.attrGet("src") or "")
        for token in MarkdownIt().parse(page.read_text(encoding="utf-8"))
        for child in token.children or []
        if child.type in {"link_open", "image"}
    ]
    inside = [address.partition("#")[0] for address in addresses if not re.match(r"[a-z]+:|#", address)]
    assert [address for address in inside if not (page.parent / address).exists()] == []


def test_the_two_readmes_are_kept_in_step() -> None:
    """README.md and README.zh-CN.md have the same code blocks, and as many headings of each level."""
    english, chinese = (ROOT / "README.md", ROOT / "README.zh-CN.md")
    assert [one.text for one in blocks(english)] == [one.text for one in blocks(chinese)]
    assert headings(english) == headings(chinese)


def test_the_readme_shows_the_page() -> None:
    """Both READMEs show the picture of the page."""
    assert all("](docs/page.png)" in (ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "README.zh-CN.md"))
