"""Fuzzes one target: `python -m tests.fuzz TARGET [libFuzzer's options]`, for example `-max_total_time=600`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["tidegate.engines", "tidegate.guard", "tests.fuzz.targets"]):
    from tests.fuzz.targets import SEEDS, TARGETS


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"Name a target: {', '.join(TARGETS)}.")
    name = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(SEEDS[name]):
            (Path(folder) / f"seed{number}").write_bytes(seed)
        atheris.Setup([sys.argv[0], *sys.argv[2:], folder], TARGETS[name])
        atheris.Fuzz()


main()
