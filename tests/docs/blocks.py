"""The code blocks of a Markdown page, and what the page says about running them.

A comment on the line before a block steers it; readers do not see it:

    <!-- file: NAME -->         the block is written to the file NAME, for the blocks after it
    <!-- until: WORDS -->       the command keeps running: wait until it has printed WORDS, stop it at the end of the page
    <!-- fails -->              the command is meant to end with an error
    <!-- not run: REASON -->    the block cannot be run here; the reason is for people who read the page's source
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

STEER = re.compile(r"^<!-- (file|until|fails|not run)(?:: (.+))? -->$")

#: Languages that are commands, and so are run.
COMMANDS = frozenset({"bash", "console", "python"})
#: Languages that are data: checked to be what they say they are.
DATA = frozenset({"toml", "json", "jsonl"})
#: Languages that are only shown.
SHOWN = frozenset({"text", "jinja", "sql", "nginx", "yaml", "markdown", "ini"})


@dataclass(frozen=True)
class Block:
    """One fenced block. `line` is where it begins on its page, counted from 1."""

    page: Path
    line: int
    language: str
    text: str
    steer: str = ""
    words: str = ""

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def script(self) -> str:
        """The commands of a shell block. In a console block those are the lines after a `$`; a line that ends in a backslash goes on."""
        if self.language != "console":
            return self.text
        kept: list[str] = []
        for line in self.text.splitlines():
            goes_on = bool(kept) and kept[-1].endswith("\\")
            if goes_on or line.startswith("$ "):
                kept.append(line if goes_on else line[2:])
        return "\n".join(kept) + "\n"


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, from top to bottom, also those inside lists. Raises ValueError for a comment that steers nothing."""
    found: list[Block] = []
    steer = words = ""
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type == "html_block":
            match = STEER.match(token.content.strip())
            steer, words = (match[1], match[2] or "") if match else ("", "")
        elif token.type == "fence":
            line = (token.map or [0])[0] + 1
            found.append(Block(page, line, token.info.strip(), token.content, steer, words))
            steer = words = ""
        elif steer and token.type not in {"bullet_list_open", "list_item_open"}:
            raise ValueError(f"{page.name}: the comment '{steer}: {words}' does not stand before a code block.")
    return found
