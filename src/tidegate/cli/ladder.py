"""The command ladder: how a capability answers where something fails."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tidegate.cli.console import WIDE, console
from tidegate.cli.options import settings_from, settings_options
from tidegate.core.errors import SettingsError


@click.command()
@click.argument("capability", metavar="CAPABILITY")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@settings_options
def ladder(capability: str, as_json: bool, config: Path | None, sets: tuple[str, ...]) -> None:
    """Show how a capability answers where something fails: its rungs, what each rests on, and what its users are told.

    CAPABILITY is GROUP/NAME, from capabilities.folders or the examples.
    """
    from tidegate.core.plugins import nearest
    from tidegate.pipeline.capability import load_all
    from tidegate.pipeline.rungs import described

    folders = settings_from(config, sets).capabilities.folders or [str(Path(__file__).parents[1] / "examples" / "capabilities")]
    known = load_all(folders)
    if capability not in known:
        raise SettingsError(f"There is no capability {capability!r} in {', '.join(folders)}.", hint=nearest(capability, known))
    rows = described(known[capability])
    if as_json:
        click.echo(json.dumps([row._asdict() for row in rows], indent=2, ensure_ascii=False))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table("rung", "answers when", "rests on", "time", "says", box=None, padding=(0, 1), pad_edge=False)
    for row in rows:
        table.add_row(row.rung, row.answers, Text(row.rests_on), f"{row.share:.0%}" if row.share else "", Text(row.note))
    console(WIDE).print(table)
    if len(rows) == 1:
        click.echo("It has no ladder: errors leave as they are. docs/ladder.md tells how to write one.")
