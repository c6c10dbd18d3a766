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
    """Show how a capability answers where something fails: its rungs, what each rests on, what its users are told, and the time of each part.

    CAPABILITY is GROUP/NAME, from capabilities.folders or the examples.
    """
    from tidegate.core.plugins import nearest
    from tidegate.pipeline import budgets
    from tidegate.pipeline.capability import load_all
    from tidegate.pipeline.rungs import described
    from tidegate.settings import EMBEDDED

    settings = settings_from(config, sets)
    if not settings.engines and settings.provenance["budgets.profile"][1] == "default":  # as `tidegate up` does for its own engine
        settings = settings_from(config, sets, budgets__profile=EMBEDDED)
    profile = settings.budgets.profile
    folders = settings.capabilities.folders or [str(Path(__file__).parents[1] / "examples" / "capabilities")]
    known = load_all(folders, settings.budgets)
    if capability not in known:
        raise SettingsError(f"There is no capability {capability!r} in {', '.join(folders)}.", hint=nearest(capability, known))
    rows = described(known[capability])

    def source(name: str) -> str:
        said = settings.provenance[name][1]
        return f"profile {profile}" if said == "default" else said

    times = budgets.described(known[capability], settings.admission.forecast_s, source)
    if as_json:
        said = {"rungs": [row._asdict() for row in rows], "profile": profile, "budgets": [time._asdict() for time in times]}
        click.echo(json.dumps(said, indent=2, ensure_ascii=False))
        return
    from rich.table import Table
    from rich.text import Text

    shares = ["share"] if any(row.share for row in rows) else []  # a column for what nobody has set would be empty
    table = Table("rung", "answers when", "rests on", *shares, "says", box=None, padding=(0, 1), pad_edge=False)
    for row in rows:
        share = [f"{row.share:.0%}" if row.share else ""] if shares else []
        table.add_row(row.rung, row.answers, Text(row.rests_on), *share, Text(row.note))
    console(WIDE).print(table)
    times_table = Table("part", "at most", "set by", "then", box=None, padding=(0, 1), pad_edge=False)
    for time in times:
        times_table.add_row(time.part, f"{time.at_most_s:g} s", Text(time.set_by), time.otherwise)
    click.echo(f"\nBudgets, profile {profile}:")
    console(WIDE).print(times_table)
    if len(rows) == 1:
        click.echo("It has no ladder: errors leave as they are. docs/ladder.md tells how to write one.")
