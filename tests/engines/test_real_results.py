"""What was proven on real engines was proven of this code."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.by_path import module_at

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    """tests/engines_real/run.py, which is no package."""
    return module_at(ROOT / "tests" / "engines_real" / "run.py")


@pytest.fixture(scope="module")
def results(runner: ModuleType) -> dict[str, Any]:
    assert runner.RESULTS.exists(), "run make test-engines"
    said: dict[str, Any] = json.loads(runner.RESULTS.read_text())
    return said


def test_the_results_are_those_of_this_code(runner: ModuleType, results: dict[str, Any]) -> None:
    """The digest of the adapters, the suite and what starts the engines is the one that was tested."""
    assert results["digest"] == runner.digest(), "run make test-engines: engines/ or its suite changed since"


def test_every_real_engine_passed(runner: ModuleType, results: dict[str, Any]) -> None:
    """Each engine was there, passed every test, and what it cannot do is named as its adapter names it."""
    assert set(results["engines"]) == set(runner.ENGINES)
    for name, engine in results["engines"].items():
        assert engine["failed"] == 0, engine["failures"]
        assert engine["passed"] >= 30
        assert engine["version"]
        assert engine["cannot"] == runner.cannot(name)


def test_the_digest_sees_every_change(runner: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A byte more, another name, a new file: each is another digest; a date is none."""
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    folder = tmp_path / "src" / "tidegate" / "engines" / "adapters"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("x = 1\n")
    seen = [runner.digest()]
    (folder / "a.py").write_text("x = 2\n")
    seen.append(runner.digest())
    (folder / "b.py").write_text("")
    seen.append(runner.digest())
    (folder / "b.py").rename(folder / "c.py")
    seen.append(runner.digest())
    assert len(set(seen)) == 4
    (folder / "c.py").touch()
    assert runner.digest() == seen[-1]
