"""The command ingest: documents into a collection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tidegate.cli.console import progress_bar
from tidegate.cli.options import a_name, a_number, settings_from, settings_options

if TYPE_CHECKING:
    from tidegate.retrieval.ingest import IngestReport, Progress
    from tidegate.retrieval.structure import Rules
    from tidegate.settings import Settings


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="PATH...")
@click.option("--collection", callback=a_name, help="The collection (default: the capability's, else retrieval.collection).")
@click.option(
    "--capability", metavar="GROUP/NAME", help="Read as this capability's structure.toml says, into the collection that it searches."
)
@click.option("--tag", "tags", metavar="NAME=VALUE", multiple=True, help="A tag for every document; searches may filter on it.")
@click.option("--date", metavar="DATE", help="What the documents are dated, as 2026-03-31 or with a time; searches may filter on it.")
@click.option(
    "--confidence", type=click.FloatRange(0, 1), callback=a_number, help="How far the documents may be trusted, 0 to 1; searches may filter on it."
)
@click.option(
    "--supersedes", metavar="PATH", multiple=True,
    help="A document whose place these take (below --base, else from here): it is no longer quoted. May be given more than once.",
)
@click.option(
    "--base", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER",
    help="Name documents by their path below this folder (default: by their whole path); citations show the name.",
)
@click.option("--prune", is_flag=True, help="Also remove documents of these folders whose file is gone.")
@click.option(
    "--reembed", is_flag=True,
    help="Read no files, but embed all passages of the collection anew, with the embedder that runs now; nobody can search it until that is done.",
)
@click.option(
    "--on", "cluster", type=click.Choice(["ray"]), help="Read and embed on a cluster; files and database must be reachable from its machines."
)
@click.option(
    "--workers", type=click.IntRange(1, 256), help="Files that are read at once (default: retrieval.ingest_workers, else the number of cores)."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@settings_options
@click.pass_context
def ingest(
    ctx: click.Context, paths: tuple[Path, ...], collection: str | None, capability: str | None, tags: tuple[str, ...], date: str | None,
    confidence: float | None, supersedes: tuple[str, ...], base: Path | None, prune: bool, reembed: bool, cluster: str | None, workers: int | None,
    as_json: bool, config: Path | None, sets: tuple[str, ...],
) -> None:
    """Read documents into a collection: PDF, Word, Excel, HTML, Markdown, CSV, text; unchanged ones are skipped, a bad one does not stop the rest."""
    settings = settings_from(config, sets, retrieval__ingest_workers=workers)
    if not paths and not reembed:
        raise click.UsageError("Name the files or folders that are to be read.")
    if reembed and (paths or cluster):
        raise click.UsageError("--reembed reads no files, and runs on no cluster: name the collection alone.")
    from tidegate.app import collections, on_ray
    from tidegate.retrieval.ingest import Given

    # Seen from here, also where another machine reads the files.
    instead_of = tuple(name if base or "://" in name else str(Path.cwd() / name) for name in supersedes)
    given = Given(dict(pair(tag) for tag in tags), _unix_s(date), confidence, instead_of)

    try:
        with _progress(quiet=as_json) as progress:
            its_own, rules = _of_capability(settings, capability) if capability else (settings.retrieval.collection, None)
            into = collection or its_own
            if reembed:
                done = asyncio.run(collections.reembed(settings, into, progress))
                click.echo(f"{done} documents of {into} embedded anew")
                return
            run = on_ray.ingest if cluster else collections.ingest
            report = asyncio.run(run(settings, paths, collection=into, given=given, base=base, prune=prune, rules=rules, progress=progress))
    except KeyboardInterrupt:
        click.echo("stopped: the documents that are stored stay, whole; the next run goes on from there", err=True)
        ctx.exit(130)
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


def _unix_s(date: str | None) -> float | None:
    from tidegate.retrieval.front_matter import unix_s

    try:
        return None if date is None else unix_s(date)
    except (ValueError, OverflowError):
        raise click.BadParameter(f"{date!r} is no date. Write it as 2026-03-31 or 2026-03-31T09:00+02:00.", param_hint="--date") from None


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """A bar on stderr for as long as the ingest runs."""
    from rich.markup import escape

    from tidegate.terminal import plain

    began_ns = time.perf_counter_ns()
    with progress_bar(quiet) as bar:
        task = bar.add_task("looking for documents", total=None)

        def progress(now: Progress) -> None:
            seconds = (time.perf_counter_ns() - began_ns) / 1e9
            said = f"{pace(now, seconds)}  {now.step} {Path(now.path).name}"
            bar.update(task, completed=now.done, total=now.total, description=escape(plain(said)))

        yield progress


def pace(now: Progress, seconds: float) -> str:
    """How fast it goes, in documents and bytes, and how long it will still take: by whichever of the two has more left."""
    if not now.done or seconds <= 0:
        return f"{now.passages} passages"
    left = 1 - min(now.done / now.total, now.done_bytes / now.total_bytes if now.total_bytes else 1)
    eta_s = round(seconds * left / (1 - left)) if left < 1 else 0
    rate = f"{now.done / seconds:.1f} documents/s, {now.done_bytes / seconds / 2**20:.2f} MiB/s"
    return f"{now.passages} passages, {rate}, {eta_s // 3600}:{eta_s // 60 % 60:02}:{eta_s % 60:02} left"


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
