"""Options that several commands share, and the settings that come out of them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])


def settings_options(command: F) -> F:
    """--config and --set."""
    sets = click.option("--set", "sets", metavar="NAME=VALUE", multiple=True, help="Override one setting, e.g. --set log.level=debug.")
    config = click.option("--config", metavar="FILE", type=click.Path(path_type=Path), help="The settings file (default: ./tidegate.toml).")
    return config(sets(command))


def settings_from(config: Path | None, sets: Sequence[str], **overrides: Any) -> Settings:
    """The settings in force under --config and --set; `overrides` are a command's own flags, as SECTION__NAME (None: not given)."""
    from tidegate.settings import load

    named: dict[str, Any] = {}
    for one in sets:
        name, equals, value = one.partition("=")
        if not equals:
            raise click.BadParameter(f"{one!r} is not NAME=VALUE.", param_hint="--set")
        named[name.strip()] = value
    named.update((name.replace("__", "."), value) for name, value in overrides.items() if value is not None)
    return load(config, os.environ, named)


def a_number(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """A callback of options that are FloatRange: to click, NaN is in every range."""
    if value is not None and math.isnan(value):
        raise click.BadParameter("nan is not a number.")
    return value


def a_name(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """A callback of options that name something: an empty one, of a variable that is not set, is not to mean the default."""
    if value is not None and not value.strip():
        raise click.BadParameter("the name is empty.")
    return value


def secret(name: str | None) -> str | None:
    """A secret from the environment: arguments can be read by everybody on a machine."""
    if name is None:
        return None
    value = os.environ.get(name)
    if not value:
        raise click.BadParameter(f"There is no environment variable {name!r}, or it is empty.", param_hint="--api-key-env")
    return value
