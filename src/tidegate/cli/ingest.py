"""The command ingest: documents into a collection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tidegate.cli.console import progress_bar
from tidegate.cli.options import settings_from, settings_options

if TYPE_CHECKING:
    from tidegate.retrieval.ingest import IngestReport, Progress


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PATH...")
@click.option("--collection", help="The collection (default: retrieval.collection).")
@click.option("--tag", "tags", metavar="NAME=VALUE", multiple=True, help="A tag for every document; searches may filter on it.")
@click.option(
    "--base", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER",
    help="Name documents by their path below this folder (default: by their whole path); citations show the name.",
)
@click.option("--prune", is_flag=True, help="Also remove documents of these folders whose file is gone.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@settings_options
@click.pass_context
def ingest(
    ctx: click.Context, paths: tuple[Path, ...], collection: str | None, tags: tuple[str, ...], base: Path | None, prune: bool, as_json: bool,
    config: Path | None, sets: tuple[str, ...],
) -> None:
    """Read documents into a collection: PDF, Word, Excel, HTML, Markdown, CSV, text; unchanged ones are skipped, a bad one does not stop the rest."""
    settings = settings_from(config, sets)
    wanted = dict(pair(tag) for tag in tags)
    from tidegate import app

    with _progress(quiet=as_json) as progress:
        into = collection or settings.retrieval.collection
        report = asyncio.run(app.ingest(settings, paths, collection=into, tags=wanted, base=base, prune=prune, progress=progress))
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(report))
    else:
        _say_report(report)
    ctx.exit(1 if report.failed else 0)


def pair(tag: str) -> tuple[str, str]:
    """NAME=VALUE."""
    name, equals, value = tag.partition("=")
    if not (name and equals):
        raise click.BadParameter(f"{tag!r} is not NAME=VALUE.", param_hint="--tag")
    return name, value


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """A bar on stderr for as long as the ingest runs."""
    from rich.markup import escape

    from tidegate.terminal import plain

    with progress_bar(quiet) as bar:
        task = bar.add_task("looking for documents", total=None)

        def progress(now: Progress) -> None:
            passages = f", {now.passages} passages" if now.passages else ""
            bar.update(task, completed=now.done, total=now.total, description=escape(plain(f"{now.step} {Path(now.path).name}{passages}")))

        yield progress


def _say_report(report: IngestReport) -> None:
    from tidegate.terminal import plain

    for word, found in (("failed", report.failed), ("skipped", report.skipped), ("note", report.notes)):
        for path, why in found:
            click.echo(plain(f"{word}: {path}: {why}"))
    for path in report.vanished:
        click.echo(plain(f"{'removed' if report.pruned else 'gone, still searchable (--prune removes it)'}: {path}"))
    click.echo(
        f"{len(report.stored)} stored ({report.passages} passages), {len(report.unchanged)} unchanged, {len(report.skipped)} skipped, "
        f"{len(report.failed)} failed, in {report.seconds:.1f} s"
    )
