"""The commands about engines: check one, or run the scripted one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tidegate.cli.console import WIDE, console, progress_bar
from tidegate.cli.options import a_number, secret
from tidegate.core.errors import SettingsError, TidegateError

if TYPE_CHECKING:
    from tidegate.engines.conformance import Step


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port to listen on; 0, the default, takes a free one and prints it.")
@click.option("--api-key", metavar="KEY", help="Refuse requests that do not bring it.")
@click.option("--first-ms", metavar="MS[~SIGMA]", default="0", help="Time to the first token: 200 is always 200 ms, 200~0.5 is lognormal around it.")
@click.option("--between-ms", metavar="MS[~SIGMA]", default="0", help="Time between two tokens, in the same way.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed and the same order of requests give the same times.")
@click.option("--slots", type=click.IntRange(0), default=0, help="Answers at the same time; the others wait in order. 0: any number.")
@click.option("--context", type=click.IntRange(0), default=0, help="Refuse prompts of more words than this. 0: refuse none.")
@click.option("--speeds", metavar="KEY=VALUE,...", help="Share steps among all answers: prefill=2000,decode=60,half=8,chunk=256.")
@click.option("--words", metavar="FILE", type=click.Path(path_type=Path), help="Say the words of this text in turn, in place of the built-in ones.")
def scripted(
    host: str, port: int, api_key: str | None, first_ms: str, between_ms: str, seed: int, slots: int, context: int, speeds: str | None,
    words: Path | None,
) -> None:
    """Run the scripted engine: an OpenAI-compatible server whose words, delays and faults are to order.

    A prompt orders with ##t=20,i=5,n=3##: 20 ms to the first token, 5 ms between tokens, 3 tokens; m=cut breaks the stream off. All orders
    and faults are in docs/engines.md. The options hold where a prompt orders nothing.
    """
    from tidegate.bench.behaviour import Behaviour, curve, read_words
    from tidegate.bench.scripted import run
    from tidegate.bench.steps import parse

    first, between = curve(first_ms), curve(between_ms)
    shared = parse(speeds) if speeds is not None else None
    if shared is not None and (first.median_ms or between.median_ms):
        raise SettingsError("--speeds and times of each answer of its own exclude each other.", hint="Leave out --first-ms and --between-ms.")
    said = read_words(words) if words is not None else ()
    run(host, port, api_key, Behaviour(first, between, words=said, slots=slots, context=context, seed=seed, speeds=shared))


@click.command()
@click.argument("target", metavar="URL|FILE")
@click.option("--adapter", help="The engine's dialect, as in engines.NAME.adapter (default: found by asking the server).")
@click.option("--model", help="The engine's own name of the model (default: the first that it lists).")
@click.option("--api-key-env", metavar="VARIABLE", help="The environment variable that holds the engine's API key.")
@click.option("--tokenizer", metavar="FILE", type=click.Path(path_type=Path), help="A GGUF file with the vocabulary that the engine should have.")
@click.option("--chat-template", help="As engines.NAME.chat_template: how messages become a prompt where the engine does not do it itself.")
@click.option(
    "--time-limit", type=click.FloatRange(1), callback=a_number, metavar="S", help="Seconds for all checks (30; a slow engine gets up to 120)."
)
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
                    target, adapter=adapter, model=model, api_key=secret(api_key_env), tokenizer=tokenizer, chat_template=chat_template,
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

        console(WIDE).print(render_report(report))
    ctx.exit(exit_code(report))


@contextmanager
def _check_progress(quiet: bool) -> Iterator[Callable[[Step], None]]:
    """A line on stderr: the check that runs, and how long all take by the engine's own speed."""
    with progress_bar(quiet, transient=True) as bar:
        task = bar.add_task("measuring the engine's speed", total=None)

        def progress(now: Step) -> None:
            told = f" (about {now.estimate_s:.0f} s in all, at most {now.limit_s:.0f} s)" if now.estimate_s else ""
            bar.update(task, completed=max(now.number - 1, 0), total=now.total, description=f"{now.name}{told}")

        yield progress
