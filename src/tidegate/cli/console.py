"""How commands print: tables as wide as the terminal or the pipe, and a progress bar on stderr."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

#: Columns for a list that goes into a pipe: more than any list has, so that nothing in it is shortened.
WIDE = 400


def console(piped: int = 80) -> Console:
    """Writes to stdout; `piped`: how wide where stdout is no terminal (a terminal and COLUMNS know better)."""
    from rich.console import Console

    made = Console(highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = piped
    return made


def progress_bar(quiet: bool, *, transient: bool = False) -> Progress:
    """A bar on stderr, where stderr is a terminal; `transient`: it is gone when all is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=Console(stderr=True), disable=quiet or not sys.stderr.isatty(), transient=transient)
