"""A plural folder is a socket: its files are plug-ins, and the file's name is the name used in settings. Listing them imports nothing."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable
from types import ModuleType

from tidegate.core.errors import SettingsError

_MOST_LISTED = 20


def names(package: str) -> list[str]:
    """Names of the plug-ins in `package` (e.g. "tidegate.engines.adapters"), sorted; the plug-ins are not imported."""
    path = importlib.import_module(package).__path__
    return sorted(module.name for module in pkgutil.iter_modules(path) if not module.name.startswith("_"))


def load(package: str, name: str) -> ModuleType:
    """Import one plug-in by name. Raises SettingsError that lists the known names."""
    known = names(package)
    if name not in known:
        raise SettingsError(f"There is no {package.rsplit('.', 1)[-1]} plug-in {name!r}.", hint=nearest(name, known))
    return importlib.import_module(f"{package}.{name}")


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the nearest known one if any is near, and the list of all, unless that is long and would bury it."""
    known = sorted(known)
    if not known:
        return "None is known here."
    near = difflib.get_close_matches(name, known, n=1)
    if near and len(known) > _MOST_LISTED:
        return f"Did you mean {near[0]!r}?"
    return (f"Did you mean {near[0]!r}? " if near else "") + "Known: " + ", ".join(known) + "."
