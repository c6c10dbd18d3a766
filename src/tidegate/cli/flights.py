"""The commands that look at flights: one as a waterfall, or the newest in a list."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import click

from tidegate.cli.console import WIDE, console
from tidegate.cli.gateway import ask, decoded, gateway_options


@click.command()
@click.argument("flight_id", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON.")
@gateway_options
def flight(flight_id: str, as_json: bool, url: str | None, key: str | None, config: Path | None, sets: tuple[str, ...]) -> None:
    """Draw where one request's time went. ID is the answer's trace id."""
    from tidegate.core.flight import FlightRecord

    body = ask(f"/api/v1/flights/{flight_id}", {}, url, key, config, sets)
    if as_json:
        click.echo(body)
        return
    from tidegate.terminal import render_waterfall

    console().print(render_waterfall(decoded(body, FlightRecord)))


@click.command()
@click.option("--limit", type=click.IntRange(1, 500), default=20, show_default=True, help="How many.")
@click.option("--capability", help="Only of this capability, e.g. support/answer.")
@click.option("--end", help="Only those that ended like this, e.g. cut.")
@click.option("--bad", is_flag=True, help="Only those that failed through an engine or through Tidegate, among the newest 500.")
@click.option("--json", "as_json", is_flag=True, help="Print the records as JSON.")
@gateway_options
def flights(
    limit: int, capability: str | None, end: str | None, bad: bool, as_json: bool, url: str | None, key: str | None, config: Path | None,
    sets: tuple[str, ...],
) -> None:
    """List the newest requests."""
    import msgspec

    from tidegate.core.chunk import End
    from tidegate.core.plugins import nearest
    from tidegate.telemetry.health import is_bad
    from tidegate.terminal import render_flights

    if end is not None and end not in get_args(End):
        raise click.BadParameter(f"No flight ends with {end!r}. {nearest(end, get_args(End))}", param_hint="--end")
    query = {"limit": str(500 if bad else limit), "capability": capability, "end": end}
    body = ask("/api/v1/flights", {name: value for name, value in query.items() if value}, url, key, config, sets)
    records = [record for record in decoded(body, _flight_list()).flights if is_bad(record) or not bad][:limit]
    if as_json:
        click.echo(msgspec.json.encode({"flights": records}))
    elif not records:
        click.echo("No flights.")
    else:
        console(WIDE).print(render_flights(records))


def _flight_list() -> Any:
    import msgspec

    from tidegate.core.flight import FlightRecord

    return msgspec.defstruct("FlightList", [("flights", list[FlightRecord])])
