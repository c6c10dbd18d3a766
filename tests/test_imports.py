"""Who may import whom, as a test."""

from __future__ import annotations

import tomllib
from pathlib import Path

from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[1]


def test_every_import_goes_downwards() -> None:
    """Rooms import downwards only, plug-ins do not know each other, core does no I/O, the path does not import telemetry."""
    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True, no_logo=True) == 0


def test_every_socket_has_its_contract() -> None:
    """A new folder of plug-ins inside a room is named in an independence contract, or here as something that is not a socket."""
    not_sockets = {"tidegate.api.page"}
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    named = {module.removesuffix(".*") for contract in contracts if contract["type"] == "independence" for module in contract["modules"]}
    source = ROOT / "src"
    folders = {".".join(init.parent.relative_to(source).parts) for init in source.glob("tidegate/*/*/**/__init__.py")}
    assert folders - not_sockets == named
