"""scripts/setup.sh: what it refuses, and what it says then."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: What the script needs of a system before it has checked anything.
TOOLS = ("bash", "cat", "cksum", "cut", "dirname", "env", "grep", "ls", "mkdir", "mktemp", "rm", "sleep", "tail")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what the script reads, and nothing installed."""
    folder = tmp_path / "checkout"
    (folder / "scripts").mkdir(parents=True)
    for name in ("scripts/setup.sh", "requirements.lock", "requirements-test.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def setup(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["scripts/setup.sh", *arguments], cwd=checkout, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False, timeout=100,
    )


def refusal(checkout: Path, *arguments: str, **environment: str) -> str:
    done = setup(checkout, *arguments, **environment)
    assert done.returncode == 1, done.stdout
    return done.stdout


def test_an_old_python_is_named(checkout: Path, tmp_path: Path) -> None:
    """The error says which version is needed, which was found, and how to get or name another."""
    old = script(tmp_path / "python3", 'case "$1" in -V) echo "Python 3.9.2";; *) exit 1;; esac')
    said = refusal(checkout, PYTHON=str(old))
    assert "Python 3.11 or newer is needed. Found: 3.9.2" in said
    assert "make up PYTHON=" in said


def test_a_python_without_venv_is_named(checkout: Path, tmp_path: Path) -> None:
    """Debian's Python comes without ensurepip: the error names the package that brings it."""
    bare = script(tmp_path / "python3", 'case "$2" in *ensurepip*) exit 1;; esac')
    assert "apt-get install python3-venv" in refusal(checkout, PYTHON=str(bare))


@pytest.mark.parametrize(
    ("kind", "taken"), [("3.11 optimised", "3.11.2"), ("3.11 plain", "3.11.7"), ("3.12 optimised", "3.11.7")],
    ids=["optimised", "as plain as the first", "of another version"],
)
def test_of_one_version_the_optimised_python_is_taken(checkout: Path, tmp_path: Path, kind: str, taken: str) -> None:
    """The first that can make environments, unless another one of the same version was built with optimisation."""
    answers = 'case "$1" in -V) echo "Python {version}";; -m) exit 1;; *) case "$2" in *CONFIG_ARGS*) echo "{kind}";; esac;; esac'
    first = script(tmp_path / "first", answers.format(version="3.11.7", kind="3.11 plain"))
    second = script(tmp_path / "second", answers.format(version="3.11.2", kind=kind))
    assert f"Making .venv with Python {taken}" in refusal(checkout, PYTHON=f"{first} {second}")


def test_without_a_network_it_says_so(checkout: Path) -> None:
    """What pip could not fetch is a sentence about the network, and nothing is stamped as done."""
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    said = refusal(checkout, PIP_RETRIES="0", PIP_NO_CACHE_DIR="1", **nowhere)
    assert "The packages could not be fetched." in said
    assert not (checkout / ".venv" / ".run").exists()


def test_a_linked_environment_is_left_alone(checkout: Path, tmp_path: Path) -> None:
    """Where .venv leads elsewhere, what is there keeps its files."""
    kept = tmp_path / "elsewhere" / "file"
    kept.parent.mkdir()
    kept.write_text("kept", encoding="utf-8")
    (checkout / ".venv").symlink_to(kept.parent)
    assert ".venv is a link" in refusal(checkout)
    assert kept.read_text(encoding="utf-8") == "kept"


def test_a_folder_that_is_no_environment_is_left_alone(checkout: Path) -> None:
    """Whatever somebody keeps under the name .venv is not cleared."""
    kept = checkout / ".venv" / "file"
    kept.parent.mkdir()
    kept.write_text("kept", encoding="utf-8")
    assert "is no Python environment" in refusal(checkout)
    assert kept.exists()


def test_missing_debian_packages_are_named_to_an_ordinary_user(checkout: Path, tmp_path: Path) -> None:
    """Who may not install packages is told the line that somebody else can run."""
    system = tmp_path / "bin"
    system.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (system / tool).symlink_to(found)
    script(system / "id", "echo 1000")
    said = refusal(checkout, "test", PATH=str(system))
    assert "chromium fonts-noto-cjk curl" in said
    assert "apt-get install chromium fonts-noto-cjk curl" in said


def test_ctrl_c_ends_a_stage_at_once(checkout: Path, tmp_path: Path) -> None:
    """The running stage gets the interrupt, can clean up, and nothing is left."""
    mark = tmp_path / "mark"
    slow = script(
        tmp_path / "python3", f'case "$1" in -m) trap "echo cleaned >{mark}; exit 1" INT; echo >{mark}; while sleep 0.1; do :; done;; esac',
    )
    process = subprocess.Popen(
        ["scripts/setup.sh"], cwd=checkout, env={**os.environ, "PYTHON": str(slow)}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )
    give_up_ns = time.perf_counter_ns() + 20 * 1_000_000_000
    while not mark.exists():
        assert time.perf_counter_ns() < give_up_ns
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Stopped." in said
    assert mark.read_text(encoding="utf-8") == "cleaned\n"


def test_an_unknown_word_is_refused(checkout: Path) -> None:
    """The script takes `test` or nothing."""
    assert "usage:" in refusal(checkout, "tests")
