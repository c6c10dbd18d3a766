"""The command line itself: how an error is said, and what stands before every command."""

from __future__ import annotations

import sys
from typing import Any

import click

from tidegate import __version__
from tidegate.core.errors import SettingsError, TidegateError


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
