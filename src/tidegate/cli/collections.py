"""The commands search, explain and index: what is found in a collection, and how."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tidegate.cli.console import progress_bar
from tidegate.cli.ingest import pair
from tidegate.cli.options import a_name, a_number, settings_from, settings_options

if TYPE_CHECKING:
    from tidegate.core.search import Filter, IndexProgress

F = TypeVar("F", bound=Callable[..., Any])


@click.command()
@click.argument("collection", required=False)
@click.option(
    "--facet", "facets", metavar="NAME", multiple=True, help="A tag that gets an index of its own, the most important one first; as often as needed."
)
@click.option("--no-facets", is_flag=True, help="Drop the facets' indexes.")
@click.option("--graph/--no-graph", default=None, help="Build the graph of neighbours, whatever the size (default: from 20,000 passages on).")
@settings_options
def index(
    collection: str | None, facets: tuple[str, ...], no_facets: bool, graph: bool | None, config: Path | None, sets: tuple[str, ...]
) -> None:
    """Build the indexes that a collection needs; searches and ingests go on meanwhile."""
    if facets and no_facets:
        raise click.UsageError("--facet and --no-facets exclude each other.")
    settings = settings_from(config, sets)
    from tidegate.app import collections
    from tidegate.terminal import plain

    wanted: Sequence[str] | None = list(facets) if facets or no_facets else None
    with progress_bar(quiet=False) as bar:
        task = bar.add_task("looking at the collection", total=None)

        def progress(now: IndexProgress) -> None:
            bar.update(task, completed=now.done, total=now.total or None, description=f"{now.name}: {now.phase}")

        name = collection or settings.retrieval.collection
        states = asyncio.run(collections.build_indexes(settings, name, facets=wanted, graph=graph, progress=progress))
    for state in states:
        click.echo(plain(f"{'built' if state.built else 'there'}: {state.name}, {state.what}, {state.bytes / 1e6:.1f} MB"))
    click.echo(plain(f"The indexes of {name} are complete."))


def filter_options(command: F) -> F:
    """What a search goes through, and what it is limited to."""
    for option in (
        click.option("--superseded", is_flag=True, help="Also superseded documents."),
        click.option(
            "--min-confidence", type=click.FloatRange(0, 1), default=0.0, callback=a_number, help="Only documents of at least this confidence."
        ),
        click.option("--until", type=click.DateTime(), help="Only documents dated until then (UTC)."),
        click.option("--since", type=click.DateTime(), help="Only documents dated since then (UTC)."),
        click.option("--tag", "tags", metavar="NAME=VALUE", multiple=True, help="Only passages with this tag."),
        click.option("-k", default=None, type=click.IntRange(1, 1000), help="Passages (default: retrieval.k)."),
        click.option("--collection", callback=a_name, help="The collection (default: retrieval.collection)."),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("question")
@filter_options
@click.option("--no-rerank", is_flag=True, help="In the fused order, without the reranker of retrieval.rerank.")
@click.option("--legs", is_flag=True, help="Also what each leg found, by vectors and by words, in its own order.")
@click.option("--json", "as_json", is_flag=True, help="Print all that was found as JSON.")
@settings_options
def search(
    question: str, collection: str | None, k: int | None, tags: tuple[str, ...], since: datetime | None, until: datetime | None,
    min_confidence: float, superseded: bool, no_rerank: bool, legs: bool, as_json: bool, config: Path | None, sets: tuple[str, ...],
) -> None:
    """Show the passages that a question finds, where each leg had them, and their scores."""
    settings = settings_from(config, sets)
    from tidegate.app import collections
    from tidegate.retrieval.rerank import OFF

    wanted = _wanted(tags, since, until, min_confidence, superseded)
    found = asyncio.run(collections.search(
        settings, question, collection=collection or settings.retrieval.collection, k=k or settings.retrieval.k, wanted=wanted,
        rerank=OFF if no_rerank else None,
    ))
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(found))
        return
    from rich.console import Console

    from tidegate.terminal import render_search

    Console().print(render_search(found, legs=legs))


@click.command()
@click.argument("question")
@filter_options
@settings_options
def explain(
    question: str, collection: str | None, k: int | None, tags: tuple[str, ...], since: datetime | None, until: datetime | None,
    min_confidence: float, superseded: bool, config: Path | None, sets: tuple[str, ...],
) -> None:
    """Say which way a search goes, and what the database does for it. The search is run."""
    settings = settings_from(config, sets)
    from tidegate.app import collections
    from tidegate.terminal import plain

    wanted = _wanted(tags, since, until, min_confidence, superseded)
    name = collection or settings.retrieval.collection
    for line in asyncio.run(collections.explain_search(settings, question, collection=name, k=k or settings.retrieval.k, wanted=wanted)):
        click.echo(plain(line))


def _wanted(tags: tuple[str, ...], since: datetime | None, until: datetime | None, min_confidence: float, superseded: bool) -> Filter:
    from tidegate.core.search import Filter

    if since and until and since > until:
        raise click.UsageError(f"--since {since} is later than --until {until}: nothing can be from both.")
    return Filter(dict(pair(tag) for tag in tags), _unix_s(since), _unix_s(until), min_confidence, superseded)


def _unix_s(instant: datetime | None) -> float | None:
    return None if instant is None else instant.replace(tzinfo=UTC).timestamp()
