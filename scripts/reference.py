"""Writes the reference pages that come from the code: docs/settings.md, docs/metrics.md, docs/cli.md and tidegate.example.toml.

Run by `make docs`; tests/test_reference.py fails where a page is old, so a setting, a metric or an option cannot land undocumented.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
import click
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from tidegate.cli import main as command_line
from tidegate.core.settings import Section, inner
from tidegate.core.toml import notation
from tidegate.settings import Settings
from tidegate.telemetry.described import FOLDED, READ, Described
from tidegate.telemetry.histogram import GAP_BOUNDS_S, PART_BOUNDS_S, REQUEST_BOUNDS_S
from tidegate.telemetry.metrics import MAX_NAMES, OTHER

ROOT = Path(__file__).parents[1]
GENERATED = "This page is written by `scripts/reference.py` from the code."


def pages() -> dict[Path, str]:
    """Each generated file and what it should hold."""
    return {
        ROOT / "docs" / "settings.md": settings_page(),
        ROOT / "docs" / "metrics.md": metrics_page(),
        ROOT / "docs" / "cli.md": cli_page(),
        ROOT / "tidegate.example.toml": example_file(),
    }


# -- settings --


def sections() -> Iterator[tuple[str, FieldInfo, type[Section]]]:
    """Name in brackets (`engines.NAME`), the field that says what it is, and its model."""
    for name, field in Settings.model_fields.items():
        assert inner(field)[0] is not None, f"{name} is a setting outside any section"
        yield from _sections(name, field)


def _sections(name: str, field: FieldInfo) -> Iterator[tuple[str, FieldInfo, type[Section]]]:
    """A section, and those inside it."""
    below, named = inner(field)
    if below is not None:
        name = f"{name}.NAME" if named else name
        yield name, field, below
        for key, one in below.model_fields.items():
            yield from _sections(f"{name}.{key}", one)


def _own(section: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """A section's settings, without the sections inside it."""
    return ((key, one) for key, one in section.model_fields.items() if inner(one)[0] is None)


def settings_page() -> str:
    """docs/settings.md."""
    lines = [
        "# Settings", "", GENERATED, "",
        "All settings live in one file, `tidegate.toml`: the one that `--config FILE` names, else the one in the current folder. Each can",
        "be overridden by an environment variable, and that by a flag. `tidegate settings` prints what is in force, and where each value",
        "comes from. `tidegate.example.toml` holds all of them, commented out.", "",
        "| from | example |", "|---|---|",
        "| file | `port = 9000` under `[server]` |",
        "| environment | `TIDEGATE_SERVER__PORT=9000`: section and name in capitals, two underscores between them |",
        "| flag | `tidegate up --port 9000`, or for any setting `--set server.port=9000` |", "",
        "The later line of this table wins. A name that does not exist is refused with the nearest one that does, and a value of the wrong",
        "type with what was expected; all mistakes are said at once. Values in the environment and after `--set` are TOML or JSON (`true`,",
        '`3`, `["a", "b"]`), or plain text. `TIDEGATE_URL` and `TIDEGATE_KEY` are no settings: they tell commands like `tidegate flight`',
        "where a running gateway is and which key to use.", "",
    ]
    for name, field, section in sections():
        lines += [f"## [{name}]", "", field.description or "", "", "| name | type | default | what it does |", "|---|---|---|---|"]
        for key, one in _own(section):
            lines.append(f"| `{key}` | {kind(one)} | {default(one)} | {cell(one.description or '')} |")
        lines.append("")
    return "\n".join(lines)


def default(field: FieldInfo) -> str:
    """A field's default as it is written in the file."""
    if field.is_required():
        return "(required)"
    value = field.get_default(call_default_factory=True, validated_data={})
    return "(none)" if value is None else f"`{cell(notation(value))}`"


def kind(field: FieldInfo) -> str:
    """A field's type and bounds in words."""
    bounds = [words for one in field.metadata if (words := _bound(one))]
    return cell(", ".join([_kind(field.annotation), *bounds]))


_KINDS: dict[Any, str] = {
    bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path", SecretStr: "text (secret)", type(None): "",
}


def _kind(annotation: Any) -> str:
    if annotation in _KINDS:
        return _KINDS[annotation]
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{notation(one)}`" for one in args)
    if origin in (Union, types.UnionType):
        return " or ".join(words for one in args if (words := _kind(one)))
    if origin in (list, tuple, set, frozenset):
        return f"list of {_kind(args[0])}"
    if origin is dict:
        return f"table of {_kind(args[1])}"
    raise TypeError(f"no words for the type {annotation}")


def _bound(constraint: Any) -> str:
    match constraint:
        case annotated_types.Ge(ge):
            return f">= {ge}"
        case annotated_types.Gt(gt):
            return f"> {gt}"
        case annotated_types.Le(le):
            return f"<= {le}"
        case annotated_types.Lt(lt):
            return f"< {lt}"
        case annotated_types.MinLen(least):
            return f"at least {least} long"
        case annotated_types.MaxLen(most):
            return f"at most {most} long"
    return ""


def cell(text: str) -> str:
    """Text inside a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def example_file() -> str:
    """tidegate.example.toml: every setting with its default, commented out."""
    lines = [
        "# Every setting of Tidegate with its default. Copy it to tidegate.toml and take the # away from what you change.",
        "# Written by scripts/reference.py from the code; docs/settings.md says the same with types and bounds.",
    ]
    for name, field, section in sections():
        # A named section stays commented out: its header alone would make an engine or a tenant of that name.
        header = f"# [{name}]" if name.endswith(".NAME") else f"[{name}]"
        lines += ["", f"# {field.description}", header]
        for key, one in _own(section):
            lines += [f"# {one.description}", f"# {key} = {_example(one)}"]
    return "\n".join(lines) + "\n"


def _example(field: FieldInfo) -> str:
    if field.is_required():
        return " # required"
    value = field.get_default(call_default_factory=True, validated_data={})
    return " # no default" if value is None else notation(value)


# -- metrics --


def metrics_page() -> str:
    """docs/metrics.md."""
    return "\n".join([
        "# Metrics", "", GENERATED, "",
        "`GET /metrics` speaks Prometheus' text format. Beside the metrics below it gives Prometheus' own figures of the process",
        "(`process_*`: CPU, memory, file descriptors) and `tidegate_build_info{version}`.", "",
        "## Folded from flights", "",
        "Each finished request is counted once, when it ends, so these agree with the flights that the page and the database show. A",
        f"label takes {MAX_NAMES} values at most; further ones are counted as `{OTHER}`. A model's or capability's name becomes a label",
        "only when a request with it was served: a name that a caller made up never does.", "", *_table(FOLDED), "",
        "## Read from the rooms", "", "Read when Prometheus asks; one that this gateway does not have is left out.", "", *_table(READ), "",
        "## Buckets", "", "Upper bounds in seconds:", "",
        f"- `tidegate_request_seconds`, `tidegate_first_token_seconds`: {_bounds(REQUEST_BOUNDS_S)}",
        f"- `tidegate_part_seconds`: {_bounds(PART_BOUNDS_S)}",
        f"- `tidegate_inter_token_seconds`: {_bounds(GAP_BOUNDS_S)}",
        "",
    ])


def _table(metrics: tuple[Described, ...]) -> list[str]:
    rows = [f"| `{one.name}` | {one.kind} | {', '.join(f'`{label}`' for label in one.labels)} | {cell(one.help)} |" for one in metrics]
    return ["| name | kind | labels | what it tells |", "|---|---|---|---|", *rows]


def _bounds(bounds_s: tuple[float, ...]) -> str:
    return ", ".join(f"{bound:g}" for bound in bounds_s)


# -- the command line --


def cli_page() -> str:
    """docs/cli.md."""
    lines = [
        "# Commands", "", GENERATED, "",
        "Every command prints its options with `--help`. An error is one sentence and a hint on stderr. The exit code is 0 where all went",
        "well, 2 where a setting or an option is wrong, else 1. `tidegate --debug COMMAND ...` shows the traceback of an error.", "",
    ]
    for path, command in _commands("tidegate", command_line):
        lines += [f"## {path}", "", (command.help or "").strip(), "", "```text", _usage(path, command), "```", ""]
        options = [one for one in command.params if isinstance(one, click.Option)]
        if options:
            lines += ["| option | what it does |", "|---|---|", *(_option(one) for one in options), ""]
    return "\n".join(lines)


def _commands(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from _commands(f"{path} {name}", command.commands[name])
    else:
        yield path, command


def _usage(path: str, command: click.Command) -> str:
    return " ".join([path, *command.collect_usage_pieces(click.Context(command))])


def _option(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in option.opts)
    value = "" if option.is_flag else f" `{option.make_metavar(click.Context(click.Command('x')))}`"
    said = cell(option.help or "")
    if option.show_default and option.default not in (None, ""):
        said += f" Default: `{option.default}`."
    if option.envvar:
        said += f" Environment: `{option.envvar}`."
    return f"| {names}{value} | {said} |"


def main() -> None:
    """Write what is old."""
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
