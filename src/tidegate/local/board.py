"""What `tidegate up` shows while it starts and runs: one spinner per part on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

_MARKS = {"ready": Text("✓", "green"), "failed": Text("✗", "red")}


@dataclass
class Row:
    """One part or step."""

    name: str
    note: str = "starting"
    state: str = "busy"
    began_ns: int = field(default_factory=time.perf_counter_ns)
    took_s: float = 0.0
    spinner: Spinner = field(default_factory=lambda: Spinner("dots"))

    def seconds(self) -> float:
        return (time.perf_counter_ns() - self.began_ns) / 1e9 if self.state == "busy" else self.took_s

    def end(self, state: str) -> None:
        self.took_s = self.seconds()
        self.state = state


class Board:
    """Rows that are busy, ready or failed, and lines for people. A terminal that went away (SIGHUP) stops nothing."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._rows: list[Row] = []
        self._live: Live | None = None

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Spinners turn inside, where there is a terminal that knows their characters."""
        if not self._console.is_terminal or not self._console.encoding.startswith("utf"):
            yield
            return
        with Live(get_renderable=self._render, console=self._console, refresh_per_second=10) as self._live:
            yield
        self._live = None

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[Row]:
        """A part that starts inside; an error (or a cancel) marks it as failed and goes on its way."""
        row = Row(name)
        self._rows.append(row)
        if self._live is None:
            self.say(f"{name}: starting")
        try:
            yield row
        except BaseException:
            row.end("failed")
            raise
        row.end("ready")
        if self._live is None:
            self.say(f"{name}: ready after {row.took_s:.1f} s")

    def say(self, line: str) -> None:
        """One line exactly as it is: no markup, no wrapping, so that it can be copied."""
        with contextlib.suppress(OSError):
            if self._live is not None:
                self._console.print(Text(line), soft_wrap=True)
            else:
                encoding = self._console.encoding
                self._console.file.write(line.encode(encoding, "replace").decode(encoding) + "\n")
                self._console.file.flush()

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for row in self._rows:
            mark: RenderableType = row.spinner if row.state == "busy" else _MARKS[row.state]
            note = row.note if row.state == "busy" else row.state
            table.add_row(mark, row.name, Text(f"{row.seconds():5.1f} s", "dim"), Text(note, "dim"))
        return table
