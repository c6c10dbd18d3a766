"""The command eval: quality as a number."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tidegate.cli.console import WIDE, console, progress_bar
from tidegate.cli.options import a_name, a_number, settings_from, settings_options

if TYPE_CHECKING:
    from rich.table import Table

    from tidegate.retrieval.quality import Mean, Quality


@click.group(name="eval")
def evaluate() -> None:
    """Judge by questions whose answers are known."""


@evaluate.command()
@click.argument("questions", type=click.Path(path_type=Path, dir_okay=False), metavar="SET", required=False)
@click.option("--collection", callback=a_name, help="The collection (default: retrieval.collection).")
@click.option("--history", is_flag=True, help="Print what earlier runs said of the collection, newest first.")
@click.option("--no-save", is_flag=True, help="Do not keep the report in the database.")
@click.option("--min-recall", type=click.FloatRange(0, 1), callback=a_number, help="Exit with 1 where recall@5 of the final order is below this.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@settings_options
@click.pass_context
def retrieval(
    ctx: click.Context, questions: Path | None, collection: str | None, history: bool, no_save: bool, min_recall: float | None, as_json: bool,
    config: Path | None, sets: tuple[str, ...],
) -> None:
    """Search for every question of SET, and say how often each way of searching finds what answers it.

    SET holds one JSON object a line: {"question": "...", "documents": ["fees/cards.md"], "answer": "words that the right passage holds"}.
    """
    if (questions is None) != history:
        raise click.UsageError("Name a set of questions, or --history.")
    settings = settings_from(config, sets)
    name = collection or settings.retrieval.collection
    from tidegate.app import evaluate as app

    if questions is None:
        _say_history(asyncio.run(app.list_evaluations(settings, name, 50)), as_json)
        return
    with progress_bar(quiet=as_json, transient=True) as bar:
        task = bar.add_task("searching", total=None)
        judged = asyncio.run(app.evaluate_retrieval(
            settings, questions, collection=name, save=not no_save, progress=lambda done, total: bar.update(task, completed=done, total=total)
        ))
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(judged))
    else:
        _say(judged)
    if min_recall is not None and judged.orders["final"].recall_at[5].value < min_recall:
        ctx.exit(1)


def _say(judged: Quality) -> None:
    from tidegate.terminal import plain

    click.echo(plain(f"{judged.questions} questions of {judged.set_name}, collection {judged.collection} at index version {judged.index_version}"))
    table = _table("order", "P@1", "recall@1", "recall@3", "recall@5", "recall@10", "MRR@10", "nDCG@10", "final's recall@5 beyond it")
    for name, one in judged.orders.items():
        gain = judged.gains.get(name)
        recall = (_mean(one.recall_at[k]) for k in (1, 3, 5, 10))
        table.add_row(name, _mean(one.precision_at_1), *recall, _mean(one.mrr), _mean(one.ndcg), _mean(gain, signed=True) if gain else "")
    console(piped=WIDE).print(table)
    click.echo("Below each mean, what holds it in 95 of 100 draws of the questions.")
    if judged.unknown:
        shown = ", ".join(judged.unknown[:5]) + (f" and {len(judged.unknown) - 5} more" if len(judged.unknown) > 5 else "")
        click.echo(plain(f"note: the collection does not hold {shown}"))


def _say_history(runs: list[tuple[float, Quality]], as_json: bool) -> None:
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode([{"at_unix_s": at_unix_s, **msgspec.to_builtins(judged)} for at_unix_s, judged in runs]))
        return
    from tidegate.terminal import plain

    table = _table("when (UTC)", "index version", "set", "questions", "recall@5", "MRR@10")
    for at_unix_s, judged in runs:
        when = datetime.fromtimestamp(at_unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
        final = judged.orders["final"]
        table.add_row(
            when, judged.index_version, plain(f"{judged.set_name} {judged.set_sha256[:8]}"), f"{judged.questions}", _mean(final.recall_at[5]),
            _mean(final.mrr),
        )
    console(piped=WIDE).print(table)


def _table(*titles: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for at, title in enumerate(titles):
        table.add_column(title, justify="left" if at == 0 else "right")
    return table


def _mean(one: Mean, *, signed: bool = False) -> str:
    kind = "+.3f" if signed else ".3f"
    return f"{one.value:{kind}}\n[dim]{one.low:{kind}}..{one.high:{kind}}[/]"
