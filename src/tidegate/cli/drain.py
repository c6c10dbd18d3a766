"""The command that takes an engine out of use, and in again: who runs on it, and waiting until nobody does."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from tidegate.cli.console import WIDE, console
from tidegate.cli.gateway import admin_key, admin_options, ask, decoded
from tidegate.cli.options import a_number
from tidegate.core.errors import TidegateError

#: Seconds between two looks at what still runs: longer than an order takes to every worker.
LOOK_S = 0.5


@click.command()
@click.argument("instance", required=False)
@click.option("--undo", is_flag=True, help="Send it requests again, little by little.")
@click.option("--wait", is_flag=True, help="Come back when nothing runs on it any more.")
@click.option(
    "--time-limit", type=click.FloatRange(0, min_open=True), callback=a_number, metavar="S",
    help="With --wait: seconds after which it gives up, with exit code 1.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what the gateway knows of its engines as JSON.")
@admin_options
def drain(
    instance: str | None, undo: bool, wait: bool, time_limit: float | None, as_json: bool, url: str | None, key: str | None,
    config: Path | None, sets: tuple[str, ...],
) -> None:
    """Send an engine no new requests; those that run on it end well.

    INSTANCE is its name under [engines]; without one, the engines are only shown. The order holds for all workers and after a restart, until
    --undo. It takes an admin key, with --key or TIDEGATE_KEY; `tidegate keys create --role admin` makes one.
    """
    if instance is None and (undo or wait):
        raise click.UsageError(f"{'--undo' if undo else '--wait'} needs the name of an engine.")
    if wait and undo:
        raise click.UsageError("--wait is for a drain: with --undo requests come again.")
    if time_limit is not None and not wait:
        raise click.UsageError("--time-limit goes with --wait.")
    key = admin_key(key)

    def engines() -> dict[str, Any]:
        found: dict[str, Any] = decoded(ask("/api/v1/engines", {}, url, key, config, sets), _engine_list()).engines
        return found

    if instance is not None:
        ask(f"/api/v1/engines/{_quoted(instance)}/{'resume' if undo else 'drain'}", {}, url, key, config, sets, method="POST")
    known = engines()
    began_ns = time.perf_counter_ns()
    while wait and instance is not None:
        time.sleep(LOOK_S)
        known = engines()
        if not (left := int(known.get(instance, {}).get("fleet", {}).get("requests", 0))):
            break
        if time_limit is not None and time.perf_counter_ns() - began_ns > time_limit * 1e9:
            _show(known, as_json)
            raise TidegateError(
                f"{left} requests still run on {instance!r} after {time_limit:g} s.",
                hint="It stays drained: wait again, or take it back with --undo. `tidegate flights` shows what has ended.",
            )
    _show(known, as_json)


def _show(known: dict[str, Any], as_json: bool) -> None:
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode({"engines": known})))
        return
    from tidegate.terminal import render_engines

    console(WIDE).print(render_engines(known))


def _engine_list() -> Any:
    import msgspec

    return msgspec.defstruct("EngineList", [("engines", dict[str, dict[str, Any]])])


def _quoted(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")
