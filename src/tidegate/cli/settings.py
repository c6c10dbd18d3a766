"""The commands that say what is in force: settings and version."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import click

from tidegate import __version__
from tidegate.cli.console import WIDE
from tidegate.cli.options import settings_from, settings_options


@click.command("settings")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--changed", is_flag=True, help="Only what is not a default.")
@settings_options
def show_settings(as_json: bool, changed: bool, config: Path | None, sets: tuple[str, ...]) -> None:
    """Print every setting in force and where it comes from; secrets are masked."""
    from tidegate.core.settings import shown
    from tidegate.core.toml import notation

    in_force = {
        name: {"value": shown(name, value), "source": source}
        for name, (value, source) in settings_from(config, sets).provenance.items()
        if source != "default" or not changed
    }
    if as_json:
        click.echo(json.dumps(in_force, indent=2, ensure_ascii=False))
        return
    rows = [(name, notation(one["value"]), str(one["source"])) for name, one in in_force.items()]
    names, texts, sources = (max((len(row[column]) for row in rows), default=0) for column in (0, 1, 2))
    if names + texts + sources + 4 > (shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDE):
        texts = min(texts, 40)  # one long value must not push every source into the next line
    for name, value, source in rows:
        click.echo(f"{name:{names}}  {value:{texts}}  {source}")


@click.command()
def version() -> None:
    """Print the version, and the Python that runs it."""
    click.echo(f"tidegate {__version__} (Python {sys.version.split()[0]}, {sys.executable})")
