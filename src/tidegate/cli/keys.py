"""The commands about API keys: create, list, limit, revoke."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tidegate.cli.console import WIDE, console
from tidegate.cli.options import a_number, settings_from, settings_options

if TYPE_CHECKING:
    from tidegate.core.ports import KeyRecord

F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def keys() -> None:
    """Create, list, limit and revoke API keys."""


def _limits(command: F) -> F:
    """The limits that a key itself may carry."""
    for option, kind, words in reversed((
        ("--rpm", click.IntRange(0, 2**31 - 1), "Requests per minute; 0: limits.requests_per_minute applies."),
        ("--tpm", click.IntRange(0, 2**31 - 1), "Tokens per minute; 0: limits.tokens_per_minute applies."),
        ("--concurrent", click.IntRange(0, 1_000_000), "Requests at the same time; 0: limits.concurrent applies."),
        ("--money", click.FloatRange(0, 100_000), "Money per day, by [prices]; 0: limits.money_per_day applies."),
    )):  # fmt: skip
        command = click.option(option, type=kind, help=words, callback=a_number)(command)
    return command



@keys.command("create")
@click.option("--tenant", default="default", show_default=True, help="Whose key it is.")
@click.option("--role", type=click.Choice(["data", "admin"]), default="data", show_default=True, help="data asks models, admin manages.")
@click.option("--name", default="", help="A name for people.")
@_limits
@settings_options
def create_key(
    tenant: str, role: str, name: str, rpm: int | None, tpm: int | None, concurrent: int | None, money: float | None, config: Path | None,
    sets: tuple[str, ...],
) -> None:
    """Make a key and print it: once, on stdout, alone; what it is goes to stderr."""
    from tidegate.app import parts
    from tidegate.core.keys import hash_key, new_key, new_key_id
    from tidegate.core.ports import KeyRecord

    settings = settings_from(config, sets)
    key = new_key()
    record = KeyRecord(
        new_key_id(), hash_key(key), tenant, "admin" if role == "admin" else "data", name, time.time_ns() / 1e9,
        requests_per_minute=rpm or 0, tokens_per_minute=tpm or 0, concurrent=concurrent or 0, money_per_day=money or 0.0,
    )

    async def add() -> None:
        async with parts.key_store(settings) as store:
            await store.add_key(record)

    asyncio.run(add())
    kind = "an admin key" if role == "admin" else "a data key"
    click.echo(f"{record.id}: {kind} of tenant {tenant}. It is shown this once and cannot be shown again:", err=True)
    click.echo(key)


@keys.command("limit")
@click.argument("key_id")
@_limits
@settings_options
def limit_key(
    key_id: str, rpm: int | None, tpm: int | None, concurrent: int | None, money: float | None, config: Path | None, sets: tuple[str, ...]
) -> None:
    """Change what a key may use; what is not named stays. Gateways notice within server.keys_refresh_s."""
    from tidegate.app import parts
    from tidegate.core.errors import NotFound
    from tidegate.core.ports import KeyLimits

    limits = KeyLimits(rpm, tpm, concurrent, money)
    if limits == KeyLimits():
        raise click.UsageError("Name at least one of --rpm, --tpm, --concurrent and --money.")
    settings = settings_from(config, sets)

    async def limit() -> bool:
        async with parts.key_store(settings) as store:
            return await store.limit_key(key_id, limits)

    if not asyncio.run(limit()):
        raise NotFound(f"There is no living key {key_id!r}.", hint="`tidegate keys list` lists them.")
    click.echo(f"{key_id} has its new limits.")


@keys.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@settings_options
def list_keys(as_json: bool, config: Path | None, sets: tuple[str, ...]) -> None:
    """List the keys, without the keys."""
    from tidegate.app import parts

    settings = settings_from(config, sets)

    async def read() -> list[KeyRecord]:
        async with parts.key_store(settings) as store:
            return await store.list_keys()

    records = asyncio.run(read())
    if as_json:
        import msgspec

        click.echo(json.dumps([{**msgspec.to_builtins(record), "sha256": record.sha256[:12]} for record in records], indent=2))
        return
    console(WIDE).print(_key_table(records))


def _key_table(records: Sequence[KeyRecord]) -> Any:
    from rich.table import Table

    from tidegate.terminal import printable

    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("key", no_wrap=True, min_width=max((len(record.id) for record in records), default=0))
    # In a narrow terminal tenants and names give way.
    for heading in ("tenant", "role", "name", "rpm", "tpm", "at once", "money/day", "created", "revoked"):
        table.add_column(heading, overflow="fold", no_wrap=heading not in ("tenant", "name"))
    for record in records:
        table.add_row(
            printable(record.id), printable(record.tenant), record.role, printable(record.name or "-"),
            str(record.requests_per_minute or "-"), str(record.tokens_per_minute or "-"), str(record.concurrent or "-"),
            f"{record.money_per_day:g}" if record.money_per_day else "-", _day(record.created_unix_s),
            _day(record.revoked_unix_s) if record.revoked_unix_s else "-",
        )
    return table


def _day(unix_s: float) -> str:
    from tidegate.terminal import when

    return when(int(unix_s * 1e9))[:10]


@keys.command("revoke")
@click.argument("key_id")
@settings_options
def revoke_key(key_id: str, config: Path | None, sets: tuple[str, ...]) -> None:
    """End a key's life; gateways notice within server.keys_refresh_s."""
    from tidegate.app import parts
    from tidegate.core.errors import NotFound

    settings = settings_from(config, sets)

    async def revoke() -> bool:
        async with parts.key_store(settings) as store:
            return await store.revoke_key(key_id)

    if not asyncio.run(revoke()):
        raise NotFound(f"There is no living key {key_id!r}.", hint="`tidegate keys list` lists them.")
    click.echo(f"{key_id} is revoked.")
