"""The rule that a skip in continuous integration is a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ONE_SKIP = "import pytest\n\ndef test_it():\n    pytest.skip({reason!r})\n"
WHOLE_FILE = "import pytest\npytest.skip({reason!r}, allow_module_level=True)\n"


def run(folder: Path, text: str, ci: str) -> int:
    (folder / "test_one.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    environment = {**os.environ, "CI": ci, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no_skips", "-p", "no:cacheprovider", str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, cwd=folder, check=False).returncode


@pytest.mark.parametrize("source", [ONE_SKIP, WHOLE_FILE])
def test_a_skip_in_ci_is_a_failure(tmp_path: Path, source: str) -> None:
    """A skipped test and a skipped file both fail the run where CI is set."""
    assert run(tmp_path, source.format(reason="no browser"), ci="true") != 0


def test_outside_ci_a_skip_is_a_skip(tmp_path: Path) -> None:
    """A person without a part may still run the rest."""
    assert run(tmp_path, ONE_SKIP.format(reason="no browser"), ci="") == 0


def test_data_beside_the_checkout_may_be_absent(tmp_path: Path) -> None:
    """The one allowed reason does not fail the run."""
    assert run(tmp_path, ONE_SKIP.format(reason="../shared/data is not here"), ci="true") == 0
