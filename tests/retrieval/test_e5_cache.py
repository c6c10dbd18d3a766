"""The built model on disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tidegate.core.errors import LocalPartError
from tidegate.retrieval import e5_cache
from tidegate.retrieval.e5_cache import load_graph

LOAD = """
import re, sys
from pathlib import Path
from tidegate.retrieval.e5_model import load_model
load_model(Path(sys.argv[1]), 1)
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])  # getrusage tells the parent's peak where that was more
"""


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replaces the builder; counts how often it was asked."""
    built: list[int] = []

    def build(weights, precision):
        built.append(1)
        return b"a graph"

    monkeypatch.setattr(e5_cache, "build_graph", build)
    return built


def models(folder: Path) -> list[Path]:
    return list(folder.glob("*.onnx"))


def test_a_model_is_built_once(weights, tmp_path: Path, builds):
    """The second start finds it."""
    assert load_graph(weights, "1", tmp_path / "new") == b"a graph"
    assert load_graph(weights, "1", tmp_path / "new") == b"a graph"
    assert len(builds) == 1


def test_a_new_version_of_the_package_or_of_the_builder_builds_anew(weights, tmp_path: Path, builds, monkeypatch: pytest.MonkeyPatch):
    """Both versions are in the name."""
    load_graph(weights, "1", tmp_path)
    load_graph(weights, "2", tmp_path)
    monkeypatch.setattr(e5_cache, "BUILDER", e5_cache.BUILDER + 1)
    load_graph(weights, "2", tmp_path)
    assert len(builds) == 3


@pytest.mark.parametrize("content", [b"", b"a gra", b"b graph"])
def test_a_damaged_model_is_built_anew(weights, tmp_path: Path, builds, content: bytes):
    """Cut short or changed: its digest is not the one in its name, and it is replaced."""
    load_graph(weights, "1", tmp_path)
    models(tmp_path)[0].write_bytes(content)
    assert load_graph(weights, "1", tmp_path) == b"a graph"
    assert [path.read_bytes() for path in models(tmp_path)] == [b"a graph"]


def test_a_build_that_was_killed_leaves_nothing_that_hurts(weights, tmp_path: Path, builds):
    """Its half of a file is overwritten, and nobody waits for its lock."""
    (tmp_path / f"e5-small-1-{e5_cache.BUILDER}.tmp").write_bytes(b"a gr")
    (tmp_path / f"e5-small-1-{e5_cache.BUILDER}.lock").touch()
    assert load_graph(weights, "1", tmp_path) == b"a graph"
    assert not list(tmp_path.glob("*.tmp"))


def test_a_folder_that_cannot_be_used_is_named(weights, tmp_path: Path, builds):
    """The error says where, why, and what to do."""
    (tmp_path / "file").touch()
    with pytest.raises(LocalPartError, match="Not a directory") as caught:
        load_graph(weights, "1", tmp_path / "file" / "cache")
    assert "another folder" in caught.value.hint


@pytest.mark.local
def test_three_first_starts_at_once_make_one_model_in_little_memory(tmp_path: Path):
    """Real builds, side by side: all load, one file stays, no process needs more than 600 MB."""
    starts = [subprocess.Popen([sys.executable, "-c", LOAD, str(tmp_path)], stdout=subprocess.PIPE) for _ in range(3)]
    peaks_kb = [int(start.communicate(timeout=100)[0]) for start in starts]
    assert [start.returncode for start in starts] == [0, 0, 0]
    assert len(models(tmp_path)) == 1
    assert max(peaks_kb) < 600_000
