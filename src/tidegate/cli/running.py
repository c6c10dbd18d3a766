"""The commands that run the gateway: up, serve, and migrate for its database."""

from __future__ import annotations

from pathlib import Path

import click

from tidegate.cli.options import settings_from, settings_options
from tidegate.core.errors import SettingsError


@click.command()
@click.option("--host", help="Address to listen on.")
@click.option("--port", type=int, help="Port to listen on; it must be free, while the default gives way to the next free one.")
@click.option("--data", metavar="FOLDER", help="The data folder of this machine's parts.")
@settings_options
@click.pass_context
def up(ctx: click.Context, host: str | None, port: int | None, data: str | None, config: Path | None, sets: tuple[str, ...]) -> None:
    """Run everything on this machine: database, engine, embedder and gateway."""
    settings = settings_from(config, sets, server__host=host, server__port=port, local__data=data)
    port_by_hand = settings.provenance["server.port"][1] != "default"
    from tidegate import home

    ctx.exit(home.up(settings, port_by_hand=port_by_hand))


@click.command()
@click.option("--host", help="Address to listen on.")
@click.option("--port", type=int, help="Port to listen on.")
@click.option("--fd", type=int, metavar="N", help="Serve on this inherited listening socket instead.")
@settings_options
@click.pass_context
def serve(ctx: click.Context, host: str | None, port: int | None, fd: int | None, config: Path | None, sets: tuple[str, ...]) -> None:
    """Run the gateway alone; database and engines are those that the settings name."""
    settings = settings_from(config, sets, server__host=host, server__port=port)
    from tidegate.app import serving

    ctx.exit(serving.serve(settings, fd))


@click.command()
@settings_options
def migrate(config: Path | None, sets: tuple[str, ...]) -> None:
    """Bring the schema of the database that store.dsn names to this version."""
    settings = settings_from(config, sets)
    if not settings.store.dsn:
        raise SettingsError("store.dsn is empty.", hint="Name the database; the one that `tidegate up` runs is migrated at its start.")
    from tidegate.app import collections

    applied = collections.migrate_store(settings)
    click.echo("\n".join([*(f"applied {name}" for name in applied), "The schema is up to date."]))
