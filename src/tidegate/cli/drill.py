"""The command drill: break a part of this machine's gateway and say what users saw."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import click

from tidegate.cli.console import WIDE, console
from tidegate.cli.options import a_number, settings_from, settings_options


@click.command()
@click.argument("name", metavar="NAME")
@click.option("--capability", metavar="GROUP/NAME", help="The capability that is asked (default: the first that has a ladder).")
@click.option("--requests", type=click.IntRange(1, 200), default=6, show_default=True, help="Requests while the part is broken.")
@click.option(
    "--patience", type=click.FloatRange(1, 600), callback=a_number, default=130.0, show_default=True, metavar="S",
    help="Seconds after which a user gives up.",
)
@click.option("--input", "inputs", metavar="JSON", multiple=True, help="Business fields to ask with (default: the examples of the input contract).")
@click.option("--key", envvar="TIDEGATE_KEY", help="An API key (default: the first key in the data folder).")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@settings_options
@click.pass_context
def drill(
    ctx: click.Context, name: str, capability: str | None, requests: int, patience: float, inputs: tuple[str, ...], key: str | None, as_json: bool,
    config: Path | None, sets: tuple[str, ...],
) -> None:
    """Break a part of the `tidegate up` on this machine for a moment, ask real requests, and report what users saw.

    NAME is engine-down, db-down, embedder-down, slots-full, slow-engine or hostile-payload. The part is whole again afterwards, whatever becomes
    of the drill. The exit code is 1 where a user saw a bare 500 or nothing, or where it did not come back.
    """
    from tidegate.core.plugins import nearest
    from tidegate.local.drill import drill as run
    from tidegate.local.drill import drill_names

    if name not in drill_names():
        raise click.BadParameter(f"There is no drill {name!r}. {nearest(name, drill_names())}", param_hint="NAME")
    data = settings_from(config, sets).local.folder
    fields = [_object(one) for one in inputs]
    report = asyncio.run(run(name, data, key=key, capability=capability, inputs=fields, requests=requests, patience_s=patience))
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(report)))
    else:
        from tidegate.local.drill_table import render_drill

        console(WIDE).print(render_drill(report))
    ctx.exit(0 if report.passed else 1)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise click.BadParameter(f"{text[:80]!r} is no JSON object.", param_hint="--input")
    return value
