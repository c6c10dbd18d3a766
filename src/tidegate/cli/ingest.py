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
    from tidegate.retrieval.structure import Rules
    from tidegate.settings import Settings


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PATH...")
@click.option("--collection", help="The collection (default: the capability's, else retrieval.collection).")
@click.option(
    "--capability", metavar="GROUP/NAME", help="Read as this capability's structure.toml says, into the collection that it searches."
)
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
    ctx: click.Context, paths: tuple[Path, ...], collection: str | None, capability: str | None, tags: tuple[str, ...], base: Path | None,
    prune: bool, as_json: bool, config: Path | None, sets: tuple[str, ...],
) -> None:
    """Read documents into a collection: PDF, Word, Excel, HTML, Markdown, CSV, text; unchanged ones are skipped, a bad one does not stop the rest."""
    settings = settings_from(config, sets)
    wanted = dict(pair(tag) for tag in tags)
    from tidegate.app import collections

    with _progress(quiet=as_json) as progress:
        its_own, rules = _of_capability(settings, capability) if capability else (settings.retrieval.collection, None)
        report = asyncio.run(
            collections.ingest(settings, paths, collection=collection or its_own, tags=wanted, base=base, prune=prune, rules=rules, progress=progress)
        )
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(report))
    else:
        _say_report(report)
    ctx.exit(1 if report.failed else 0)


def _of_capability(settings: Settings, name: str) -> tuple[str, Rules | None]:
    """The collection that it searches, and its rules, where it has some. Raises SettingsError."""
    from tidegate.core.errors import SettingsError
    from tidegate.core.plugins import nearest
    from tidegate.pipeline.capability import load_all
    from tidegate.retrieval.structure import FILE, read_rules

    folders = settings.capabilities.folders or [str(Path(__file__).parents[1] / "examples" / "capabilities")]
    known = load_all(folders, settings.budgets)
    if name not in known:
        raise SettingsError(f"There is no capability {name!r} in {', '.join(folders)}.", hint=nearest(name, known))
    files = [file for folder in folders if (file := Path(folder).expanduser() / name / FILE).exists()]
    return known[name].manifest.retrieve.collection, read_rules(files[0]) if files else None


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
