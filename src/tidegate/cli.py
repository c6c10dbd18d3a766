"""The other door: the command line. Each command imports what it needs when it runs, so that `tidegate --help` is quick."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from tidegate import __version__
from tidegate.core.errors import SettingsError, TidegateError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from tidegate.core.ports import KeyRecord
    from tidegate.engines.conformance import Step
    from tidegate.retrieval.ingest import IngestReport, Progress
    from tidegate.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])


class Door(click.Group):
    """Says errors as people read them: what was wrong, then the way out; a traceback only with --debug."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TidegateError as error:
            if ctx.params.get("debug"):
                raise
            _say_error(error.message, error.hint)
            ctx.exit(2 if isinstance(error, SettingsError) else 1)
        except (click.ClickException, click.exceptions.Exit, click.Abort, KeyboardInterrupt, BrokenPipeError):
            raise  # click says these itself
        except Exception as error:  # the last door: whatever it is, the user gets a sentence
            if ctx.params.get("debug"):
                raise
            _say_error(f"{type(error).__name__}: {error}", "This is Tidegate's fault: run `tidegate --debug ...` and report it.")
            ctx.exit(1)


def _say_error(message: str, hint: str | None) -> None:
    click.echo(f"{click.style('error:', fg='red', bold=True)} {message}", err=True)
    if hint:
        click.echo(f"{click.style('hint:', fg='cyan')} {hint}", err=True)


@click.group(cls=Door, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(__version__, prog_name="tidegate")
def main(debug: bool) -> None:
    """A self-hosted gate between business systems and language models."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a block character gets a question mark, not a traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


# -- options that several commands share --


def settings_options(command: F) -> F:
    """--config and --set."""
    sets = click.option("--set", "sets", metavar="NAME=VALUE", multiple=True, help="Override one setting, e.g. --set log.level=debug.")
    config = click.option("--config", metavar="FILE", type=click.Path(path_type=Path), help="The settings file (default: ./tidegate.toml).")
    return config(sets(command))


def gateway_options(command: F) -> F:
    """--url and --key of a running gateway, and the options of the settings that know its data folder."""
    key = click.option("--key", envvar="TIDEGATE_KEY", help="An API key (default: the first key in the data folder).")
    url = click.option("--url", envvar="TIDEGATE_URL", help="The gateway (default: the one that runs on this machine).")
    return url(key(settings_options(command)))


def _settings(config: Path | None, sets: Sequence[str], **overrides: Any) -> Settings:
    from tidegate.settings import load

    named: dict[str, Any] = {}
    for one in sets:
        name, equals, value = one.partition("=")
        if not equals:
            raise click.BadParameter(f"{one!r} is not NAME=VALUE.", param_hint="--set")
        named[name.strip()] = value
    named.update((name.replace("__", "."), value) for name, value in overrides.items() if value is not None)
    return load(config, os.environ, named)


#: Columns for a list that goes into a pipe: more than any list has, so that nothing in it is shortened.
WIDE = 400


def _console(piped: int = 80) -> Console:
    """`piped`: how wide to write where stdout is no terminal (a terminal and COLUMNS know better)."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = piped
    return console


# -- running --


@main.command()
@click.option("--host", help="Address to listen on.")
@click.option("--port", type=int, help="Port to listen on; it must be free, while the default gives way to the next free one.")
@click.option("--data", metavar="FOLDER", help="The data folder of this machine's parts.")
@settings_options
@click.pass_context
def up(ctx: click.Context, host: str | None, port: int | None, data: str | None, config: Path | None, sets: tuple[str, ...]) -> None:
    """Run everything on this machine: database, engine, embedder and gateway."""
    settings = _settings(config, sets, server__host=host, server__port=port, local__data=data)
    port_by_hand = settings.provenance["server.port"][1] != "default"
    from tidegate import home

    ctx.exit(home.up(settings, port_by_hand=port_by_hand))


@main.command()
@click.option("--host", help="Address to listen on.")
@click.option("--port", type=int, help="Port to listen on.")
@click.option("--fd", type=int, metavar="N", help="Serve on this inherited listening socket instead.")
@settings_options
@click.pass_context
def serve(ctx: click.Context, host: str | None, port: int | None, fd: int | None, config: Path | None, sets: tuple[str, ...]) -> None:
    """Run the gateway alone; database and engines are those that the settings name."""
    settings = _settings(config, sets, server__host=host, server__port=port)
    from tidegate import app

    ctx.exit(app.serve(settings, fd))


@main.command()
@settings_options
def migrate(config: Path | None, sets: tuple[str, ...]) -> None:
    """Bring the schema of the database that store.dsn names to this version."""
    settings = _settings(config, sets)
    if not settings.store.dsn:
        raise SettingsError("store.dsn is empty.", hint="Name the database; the one that `tidegate up` runs is migrated at its start.")
    from tidegate import app

    applied = app.migrate_store(settings)
    click.echo("\n".join([*(f"applied {name}" for name in applied), "The schema is up to date."]))


@main.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port to listen on; 0, the default, takes a free one and prints it.")
@click.option("--api-key", metavar="KEY", help="Refuse requests that do not bring it.")
@click.option("--first-ms", metavar="MS[~SIGMA]", default="0", help="Time to the first token: 200 is always 200 ms, 200~0.5 is lognormal around it.")
@click.option("--between-ms", metavar="MS[~SIGMA]", default="0", help="Time between two tokens, in the same way.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed and the same order of requests give the same times.")
@click.option("--slots", type=click.IntRange(0), default=0, help="Answers at the same time; the others wait in order. 0: any number.")
@click.option("--context", type=click.IntRange(0), default=0, help="Refuse prompts of more words than this. 0: refuse none.")
@click.option("--words", metavar="FILE", type=click.Path(path_type=Path), help="Say the words of this text in turn, in place of the built-in ones.")
def scripted(
    host: str, port: int, api_key: str | None, first_ms: str, between_ms: str, seed: int, slots: int, context: int, words: Path | None
) -> None:
    """Run the scripted engine: an OpenAI-compatible server whose words, delays and faults are to order.

    A prompt orders with ##t=20,i=5,n=3##: 20 ms to the first token, 5 ms between tokens, 3 tokens; m=cut breaks the stream off. All orders
    and faults are in docs/engines.md. The options hold where a prompt orders nothing.
    """
    from tidegate.bench.behaviour import Behaviour, curve, read_words
    from tidegate.bench.scripted import run

    said = read_words(words) if words is not None else ()
    run(host, port, api_key, Behaviour(curve(first_ms), curve(between_ms), words=said, slots=slots, context=context, seed=seed))


@main.command()
@click.argument("target", metavar="URL|FILE")
@click.option("--adapter", help="The engine's dialect, as in engines.NAME.adapter (default: found by asking the server).")
@click.option("--model", help="The engine's own name of the model (default: the first that it lists).")
@click.option("--api-key-env", metavar="VARIABLE", help="The environment variable that holds the engine's API key.")
@click.option("--tokenizer", metavar="FILE", type=click.Path(path_type=Path), help="A GGUF file with the vocabulary that the engine should have.")
@click.option("--chat-template", help="As engines.NAME.chat_template: how messages become a prompt where the engine does not do it itself.")
@click.option("--time-limit", type=click.FloatRange(1), metavar="S", help="Seconds for all checks (30; a slow engine gets up to 120).")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def check(
    ctx: click.Context, target: str, adapter: str | None, model: str | None, api_key_env: str | None, tokenizer: Path | None,
    chat_template: str | None, time_limit: float | None, as_json: bool,
) -> None:
    """Check whether an engine does what the gateway relies on: each check with its verdict and the evidence.

    URL is a running engine; FILE is a GGUF file, of which the vocabulary alone is checked. The exit code is 0 where no must failed, 1 where
    one did, 2 where nothing could be checked.
    """
    from tidegate.engines.conformance import check_file, check_url, exit_code

    try:
        if "://" not in target:
            report = check_file(Path(target))
        else:
            with _check_progress(quiet=as_json) as progress:
                report = asyncio.run(check_url(
                    target, adapter=adapter, model=model, api_key=_variable(api_key_env), tokenizer=tokenizer, chat_template=chat_template,
                    limit_s=time_limit, progress=progress,
                ))
    except SettingsError:
        raise
    except TidegateError as error:  # whatever it is, nothing was checked
        raise SettingsError(error.message, hint=error.hint) from error
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode({"passed": not report.failed_musts, **msgspec.to_builtins(report)})))
    else:
        from tidegate.terminal import render_report

        _console(WIDE).print(render_report(report))
    ctx.exit(exit_code(report))


@main.command()
@click.argument("model", metavar="MODEL", type=click.Path(path_type=Path))
@click.option("--gpu", metavar="NAME", help="The card, e.g. H100, A100-80GB, RTX-4090.")
@click.option("--gpu-memory", type=float, metavar="GIB", help="The memory that a program sees on the card, where it is another or you know better.")
@click.option("--tp", type=click.IntRange(1, 1024), default=1, show_default=True, help="Tensor parallel: cards that share each layer.")
@click.option("--pp", type=click.IntRange(1, 1024), default=1, show_default=True, help="Pipeline parallel: stages of layers.")
@click.option("--engine", default="auto", show_default=True, help="auto, vllm or llama.cpp.")
@click.option("--engine-version", metavar="X.Y", help="vLLM's version (default: the newest that is known).")
@click.option("--length", type=click.IntRange(1, 1 << 31), metavar="TOKENS", help="The longest request (default: the model's context).")
@click.option("--concurrency", type=click.IntRange(1, 1 << 20), default=1, show_default=True, help="How many requests of that length at once.")
@click.option("--kv-dtype", default="auto", show_default=True, help="The type of the KV cache: bf16, fp8, q8_0, ...")
@click.option("--share", type=float, help="The part of the card that the engine may use (vLLM: --gpu-memory-utilization).")
@click.option("--step-tokens", type=click.IntRange(1, 1 << 24), help="vLLM: --max-num-batched-tokens.")
@click.option("--sequences", type=click.IntRange(1, 1 << 20), help="vLLM: --max-num-seqs.")
@click.option("--block", type=click.IntRange(1, 1 << 16), default=16, show_default=True, help="vLLM: --block-size.")
@click.option("--micro-batch", type=click.IntRange(1, 1 << 20), default=512, show_default=True, help="llama.cpp: --ubatch-size.")
@click.option("--prefix-caching/--no-prefix-caching", default=True, show_default=True, help="vLLM: recurrent layers keep more states with it.")
@click.option("--cuda-graphs/--no-cuda-graphs", default=True, show_default=True, help="vLLM: graphs; off is --enforce-eager.")
@click.option("--draft-tokens", type=click.IntRange(0, 64), default=0, show_default=True, help="Tokens drafted by a multi-token-prediction head.")
@click.option("--weights", type=float, metavar="GIB", help="Given instead of computed, per card; so are --activation, --non-torch and --graphs.")
@click.option("--activation", type=float, metavar="GIB", help="The peak of a step.")
@click.option("--non-torch", type=float, metavar="GIB", help="Context, libraries, collective operations.")
@click.option("--graphs", type=float, metavar="GIB", help="CUDA graphs.")
@click.option("--qps", type=float, help="Requests a second: also says how many run at once, and the bandwidth of each.")
@click.option("--prompt-tokens", type=click.IntRange(0, 1 << 31), default=1024, show_default=True, help="For --qps: tokens of a prompt.")
@click.option("--answer-tokens", type=click.IntRange(1, 1 << 24), default=256, show_default=True, help="For --qps: tokens of an answer.")
@click.option("--slo", type=float, metavar="PERCENT", help="For --qps: the objective, e.g. 99.9; says its error budget.")
@click.option("--observe", metavar="URL", help="A running engine (vLLM, llama.cpp) to compare with.")
@click.option("--api-key-env", metavar="VARIABLE", help="The environment variable that holds that engine's API key.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.pass_context
def plan(ctx: click.Context, /, model: Path, api_key_env: str | None, as_json: bool, **options: Any) -> None:
    """Say whether a model fits on cards: weights, KV cache, activation, and with how much to spare.

    MODEL is a config.json, a folder with one, or a GGUF file. The exit code is 0 where it fits (also tightly), 1 where it does not.
    """
    from tidegate.sizing.command import Options, make_plan
    from tidegate.sizing.report import render
    from tidegate.terminal import plain

    made, comparison = make_plan(model, Options(**options), api_key=_variable(api_key_env))
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode({**msgspec.to_builtins(made), "compared": comparison})))
    else:
        click.echo("\n".join(plain(line) for line in render(made, comparison).split("\n")))
    ctx.exit(1 if made.verdict == "fails" else 0)


def _variable(name: str | None) -> str | None:
    """A secret from the environment: arguments can be read by everybody on a machine."""
    if name is None:
        return None
    value = os.environ.get(name)
    if not value:
        raise click.BadParameter(f"There is no environment variable {name!r}, or it is empty.", param_hint="--api-key-env")
    return value


@contextmanager
def _check_progress(quiet: bool) -> Iterator[Callable[[Step], None]]:
    """A line on stderr: the check that runs, and how long all take by the engine's own speed."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=Console(stderr=True), disable=quiet or not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("measuring the engine's speed", total=None)

        def progress(now: Step) -> None:
            told = f" (about {now.estimate_s:.0f} s in all, at most {now.limit_s:.0f} s)" if now.estimate_s else ""
            bar.update(task, completed=max(now.number - 1, 0), total=now.total, description=f"{now.name}{told}")

        yield progress


# -- sizes --


@main.command()
@click.option("--trace", "file", required=True, metavar="FILE", type=click.Path(path_type=Path), help="When requests came and how long they were.")
@click.option("--what-if", "what_ifs", metavar="KEY=VALUE,...", multiple=True, help="A scenario, e.g. slots=24,burst=2000; more than once for more.")
@click.option("--policy", "names", metavar="NAME", multiple=True, help="Only these policies.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same figures.")
@click.option("--plot", metavar="FILE.svg", type=click.Path(path_type=Path), help="Also draw the times to first token.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@settings_options
def simulate(
    file: Path, what_ifs: tuple[str, ...], names: tuple[str, ...], seed: int, plot: Path | None, as_json: bool, config: Path | None,
    sets: tuple[str, ...],
) -> None:
    """Try admission policies on a recorded load, on an engine model under a virtual clock.

    All keys of --what-if, the engine model and the formats of traces are in docs/simulate.md. The gateway's own policy has the settings
    [admission] and [classes.NAME].
    """
    from tidegate.sizing import plots, tables
    from tidegate.sizing.gated import tidegate
    from tidegate.sizing.scenario import parse
    from tidegate.sizing.simulate import policies
    from tidegate.sizing.simulate import simulate as run
    from tidegate.sizing.traces import read

    settings = _settings(config, sets)
    chosen = policies(names, tidegate(settings.admission, settings.classes))
    done = []
    for scenario in [parse(said) for said in what_ifs or ("",)]:
        trace = read(file, scenario.requests, seed)
        done.append(tables.Simulated(scenario, trace, run(trace, scenario, chosen, seed), tables.bound(trace, scenario, seed)))
    if plot is not None:
        plots.write(plot, [(one.title, one.scenario.slo, one.figures) for one in done])
    if as_json:
        click.echo(json.dumps(tables.as_json(done, seed), indent=2))
    else:
        _console(WIDE).print(tables.render(done))


# -- ladders and drills --


@main.command()
@click.argument("capability", metavar="CAPABILITY")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@settings_options
def ladder(capability: str, as_json: bool, config: Path | None, sets: tuple[str, ...]) -> None:
    """Show how a capability answers where something fails: its rungs, what each rests on, and what its users are told.

    CAPABILITY is GROUP/NAME, from capabilities.folders or the examples.
    """
    from tidegate.core.plugins import nearest
    from tidegate.pipeline.capability import load_all
    from tidegate.pipeline.rungs import described

    folders = _settings(config, sets).capabilities.folders or [str(Path(__file__).parent / "examples" / "capabilities")]
    known = load_all(folders)
    if capability not in known:
        raise SettingsError(f"There is no capability {capability!r} in {', '.join(folders)}.", hint=nearest(capability, known))
    rows = described(known[capability])
    if as_json:
        click.echo(json.dumps([row._asdict() for row in rows], indent=2, ensure_ascii=False))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table("rung", "answers when", "rests on", "time", "says", box=None, padding=(0, 1), pad_edge=False)
    for row in rows:
        table.add_row(row.rung, row.answers, Text(row.rests_on), f"{row.share:.0%}" if row.share else "", Text(row.note))
    _console(WIDE).print(table)
    if len(rows) == 1:
        click.echo("It has no ladder: errors leave as they are. docs/ladder.md tells how to write one.")


@main.command()
@click.argument("name", metavar="NAME")
@click.option("--capability", metavar="GROUP/NAME", help="The capability that is asked (default: the first that has a ladder).")
@click.option("--requests", type=click.IntRange(1, 200), default=6, show_default=True, help="Requests while the part is broken.")
@click.option("--patience", type=click.FloatRange(1, 600), default=130.0, show_default=True, metavar="S", help="Seconds after which a user gives up.")
@click.option("--input", "inputs", metavar="JSON", multiple=True, help="Business fields to ask with (default: the examples of the input contract).")
@click.option("--key", envvar="TIDEGATE_KEY", help="An API key (default: the first key in the data folder).")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@settings_options
@click.pass_context
def drill(
    ctx: click.Context, name: str, capability: str | None, requests: int, patience: float, inputs: tuple[str, ...], key: str | None, as_json: bool,
    config: Path | None, sets: tuple[str, ...],
) -> None:
    """Break a part of the `tidegate up` on this machine for a moment, ask real requests, and report what users saw.

    NAME is engine-down, db-down, slots-full, slow-engine or hostile-payload. The part is whole again afterwards, whatever becomes of the drill.
    The exit code is 1 where a user saw a bare 500 or nothing, or where it did not come back.
    """
    from tidegate.core.plugins import nearest
    from tidegate.local.drill import drill as run
    from tidegate.local.drill import drill_names

    if name not in drill_names():
        raise click.BadParameter(f"There is no drill {name!r}. {nearest(name, drill_names())}", param_hint="NAME")
    data = _settings(config, sets).local.folder
    fields = [_object(one) for one in inputs]
    report = asyncio.run(run(name, data, key=key, capability=capability, inputs=fields, requests=requests, patience_s=patience))
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(report)))
    else:
        from tidegate.local.drill_table import render_drill

        _console(WIDE).print(render_drill(report))
    ctx.exit(0 if report.passed else 1)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise click.BadParameter(f"{text[:80]!r} is no JSON object.", param_hint="--input")
    return value


# -- documents --


@main.command()
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
    """Read documents into a collection: Markdown, text and PDF; unchanged ones are skipped, a bad one does not stop the rest."""
    settings = _settings(config, sets)
    wanted = dict(_pair(tag) for tag in tags)
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


def _pair(tag: str) -> tuple[str, str]:
    name, equals, value = tag.partition("=")
    if not (name and equals):
        raise click.BadParameter(f"{tag!r} is not NAME=VALUE.", param_hint="--tag")
    return name, value


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """A bar on stderr for as long as the ingest runs."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    from tidegate.terminal import plain

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=Console(stderr=True), disable=quiet or not sys.stderr.isatty()) as bar:
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


# -- keys --


@main.group()
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

    settings = _settings(config, sets)
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

    settings = _settings(config, sets)

    async def read() -> list[KeyRecord]:
        async with app.key_store(settings) as store:
            return await store.list_keys()

    records = asyncio.run(read())
    if as_json:
        import msgspec

        click.echo(json.dumps([{**msgspec.to_builtins(record), "sha256": record.sha256[:12]} for record in records], indent=2))
        return
    _console(WIDE).print(_key_table(records))


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

    settings = _settings(config, sets)

    async def revoke() -> bool:
        async with app.key_store(settings) as store:
            return await store.revoke_key(key_id)

    if not asyncio.run(revoke()):
        raise NotFound(f"There is no living key {key_id!r}.", hint="`tidegate keys list` lists them.")
    click.echo(f"{key_id} is revoked.")


# -- looking --


@main.command()
@click.argument("flight_id", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON.")
@gateway_options
def flight(flight_id: str, as_json: bool, url: str | None, key: str | None, config: Path | None, sets: tuple[str, ...]) -> None:
    """Draw where one request's time went. ID is the answer's trace id."""
    from tidegate.core.flight import FlightRecord

    body = _ask(f"/api/v1/flights/{flight_id}", {}, url, key, config, sets)
    if as_json:
        click.echo(body)
        return
    from tidegate.terminal import render_waterfall

    _console().print(render_waterfall(_decoded(body, FlightRecord)))


@main.command()
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
    body = _ask("/api/v1/flights", {name: value for name, value in query.items() if value}, url, key, config, sets)
    records = [record for record in _decoded(body, _flight_list()).flights if is_bad(record) or not bad][:limit]
    if as_json:
        click.echo(msgspec.json.encode({"flights": records}))
    elif not records:
        click.echo("No flights.")
    else:
        _console(WIDE).print(render_flights(records))


def _flight_list() -> Any:
    import msgspec

    from tidegate.core.flight import FlightRecord

    return msgspec.defstruct("FlightList", [("flights", list[FlightRecord])])


def _decoded(body: bytes, kind: Any) -> Any:
    import msgspec

    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TidegateError(f"What answered is not a Tidegate gateway of this version: {error}", hint="Is --url right?") from error


def _ask(path: str, query: Mapping[str, str], url: str | None, key: str | None, config: Path | None, sets: tuple[str, ...]) -> bytes:
    """GET from the running gateway. Raises TidegateError with the gateway's own words where it refuses."""
    import httpx

    url, key = _where(url, key, config, sets)
    try:
        answer = httpx.get(url.rstrip("/") + path, params=query, headers={"authorization": f"Bearer {key}"}, timeout=30)
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeEncodeError) as error:
        hint = "Is it running? --url or TIDEGATE_URL names another."
        raise TidegateError(f"The gateway at {url} cannot be reached: {error}", hint=hint) from error
    if answer.is_success:
        return answer.content
    raise _refusal(answer.status_code, answer.content)


def _refusal(status: int, body: bytes) -> TidegateError:
    try:
        said = json.loads(body)["error"]
        return TidegateError(str(said["message"]), hint=said.get("hint"))
    except (ValueError, KeyError, TypeError):
        return TidegateError(f"The gateway answered with HTTP {status} and no words that Tidegate knows.", hint="Is --url right?")


def _where(url: str | None, key: str | None, config: Path | None, sets: tuple[str, ...]) -> tuple[str, str]:
    """The running gateway's address and a key: as given, else as `tidegate up` left them in the data folder."""
    if url and key:
        return url, key
    folder = _settings(config, sets).local.folder
    try:
        url = url or str(json.loads((folder / "run" / "gateway.json").read_text("utf-8"))["url"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "Start one with `tidegate up`, or name another with --url or TIDEGATE_URL."
        raise TidegateError(f"No gateway runs on the data folder {folder}.", hint=hint) from error
    try:
        return url, key or (folder / "first-key").read_text("utf-8").strip()
    except OSError as error:
        raise TidegateError(f"There is no readable first key in {folder}.", hint="Give a key with --key or TIDEGATE_KEY.") from error


@main.command("settings")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--changed", is_flag=True, help="Only what is not a default.")
@settings_options
def show_settings(as_json: bool, changed: bool, config: Path | None, sets: tuple[str, ...]) -> None:
    """Print every setting in force and where it comes from; secrets are masked."""
    from tidegate.core.settings import shown
    from tidegate.core.toml import notation

    in_force = {
        name: {"value": shown(name, value), "source": source}
        for name, (value, source) in _settings(config, sets).provenance.items()
        if source != "default" or not changed
    }
    if as_json:
        click.echo(json.dumps(in_force, indent=2, ensure_ascii=False))
        return
    rows = [(name, notation(one["value"]), str(one["source"])) for name, one in in_force.items()]
    names, texts, sources = (max((len(row[column]) for row in rows), default=0) for column in (0, 1, 2))
    if names + texts + sources + 4 > (shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDE):
        texts = min(texts, 40)  # one long value must not push every source into the next line
    for name, value, source in rows:
        click.echo(f"{name:{names}}  {value:{texts}}  {source}")


@main.command()
def version() -> None:
    """Print the version, and the Python that runs it."""
    click.echo(f"tidegate {__version__} (Python {sys.version.split()[0]}, {sys.executable})")


if __name__ == "__main__":
    main()
