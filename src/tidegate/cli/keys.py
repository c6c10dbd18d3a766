"""The commands about API keys: create, list, revoke."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tidegate.cli.console import WIDE, console
from tidegate.cli.options import settings_from, settings_options

if TYPE_CHECKING:
    from tidegate.core.ports import KeyRecord


@click.group()
def keys() -> None:
    """Create, list and revoke API keys."""


@keys.command("create")
@click.option("--tenant", default="default", show_default=True, help="Whose key it is.")
@click.option("--role", type=click.Choice(["data", "admin"]), default="data", show_default=True, help="data asks models, admin manages.")
@click.option("--name", default="", help="A name for people.")
@click.option("--rpm", type=click.IntRange(0, 2**31 - 1), default=0, help="Requests per minute; 0: limits.requests_per_minute applies.")
@click.option("--tpm", type=click.IntRange(0, 2**31 - 1), default=0, help="Tokens per minute; 0: limits.tokens_per_minute applies.")
@settings_options
def create_key(tenant: str, role: str, name: str, rpm: int, tpm: int, config: Path | None, sets: tuple[str, ...]) -> None:
    """Make a key and print it: once, on stdout, alone; what it is goes to stderr."""
    from tidegate import app
    from tidegate.core.keys import hash_key, new_key, new_key_id
    from tidegate.core.ports import KeyRecord

    settings = settings_from(config, sets)
    key = new_key()
    record = KeyRecord(
        new_key_id(), hash_key(key), tenant, "admin" if role == "admin" else "data", name, time.time_ns() / 1e9,
        requests_per_minute=rpm, tokens_per_minute=tpm,
    )

    async def add() -> None:
        async with app.key_store(settings) as store:
            await store.add_key(record)

    asyncio.run(add())
    kind = "an admin key" if role == "admin" else "a data key"
    click.echo(f"{record.id}: {kind} of tenant {tenant}. It is shown this once and cannot be shown again:", err=True)
    click.echo(key)


@keys.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@settings_options
def list_keys(as_json: bool, config: Path | None, sets: tuple[str, ...]) -> None:
    """List the keys, without the keys."""
    from tidegate import app

    settings = settings_from(config, sets)

    async def read() -> list[KeyRecord]:
        async with app.key_store(settings) as store:
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
    for heading in ("tenant", "role", "name", "rpm", "tpm", "created", "revoked"):  # in a narrow terminal tenants and names give way
        table.add_column(heading, overflow="fold", no_wrap=heading not in ("tenant", "name"))
    for record in records:
        table.add_row(
            printable(record.id), printable(record.tenant), record.role, printable(record.name or "-"),
            str(record.requests_per_minute or "-"), str(record.tokens_per_minute or "-"), _day(record.created_unix_s),
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
    from tidegate import app
    from tidegate.core.errors import NotFound

    settings = settings_from(config, sets)

    async def revoke() -> bool:
        async with app.key_store(settings) as store:
            return await store.revoke_key(key_id)

    if not asyncio.run(revoke()):
        raise NotFound(f"There is no living key {key_id!r}.", hint="`tidegate keys list` lists them.")
    click.echo(f"{key_id} is revoked.")
