"""A tenant's own part of the machine: what may be cut, what is left for all others, and what the tenant's engine does with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.embedded_engine import needs_engine

from tidegate.core.errors import SettingsError
from tidegate.local.engine import LocalEngine, find_model
from tidegate.local.engine_child import KEY_VARIABLE
from tidegate.local.folder import DataFolder
from tidegate.local.settings import LocalSettings
from tidegate.local.slices import CUDA, Slice, cores_left, environment_left, on

USABLE = frozenset({0, 1, 2, 3})


def test_the_others_have_the_cores_that_nobody_owns() -> None:
    """And all of them where nobody owns any."""
    assert cores_left([Slice("own1", "acme", (1, 3)), Slice("own2", "bolt", gpu="MIG-1")], USABLE) == {0, 2}
    assert cores_left([], USABLE) == USABLE


@pytest.mark.parametrize(
    ("slices", "says"),
    [
        ([Slice("own1", "acme", (7,))], r"tenants\.acme\.cores names core 7"),
        ([Slice("own1", "acme", (1, 2)), Slice("own2", "bolt", (2,))], "Core 2 is owned by two tenants, 'acme' and 'bolt'"),
        ([Slice("own1", "acme", gpu="MIG-1"), Slice("own2", "bolt", gpu="MIG-1")], "GPU 'MIG-1' is owned by two tenants"),
        ([Slice("own1", "acme", (0, 1)), Slice("own2", "bolt", (2, 3))], "own all 4 cores"),
    ],
    ids=["not there", "two owners", "two owners of a GPU", "none left"],
)
def test_a_slice_that_cannot_be_cut_is_refused_by_name(slices: list[Slice], says: str) -> None:
    """With the tenant, the core and the way out."""
    with pytest.raises(SettingsError, match=says) as refused:
        cores_left(slices, USABLE)
    assert refused.value.hint


def test_the_others_see_no_gpu_that_is_owned() -> None:
    """They see those that were named to us, without the tenants'; none where none was named, since unset means all."""
    owned = [Slice("own1", "acme", gpu="MIG-1")]
    assert environment_left(owned, {CUDA: "MIG-0,MIG-1,MIG-2"}) == {CUDA: "MIG-0,MIG-2"}
    assert environment_left(owned, {}) == {CUDA: ""}
    assert environment_left([Slice("own1", "acme", (1,))], {CUDA: "0"}) == {}


def test_what_a_slice_has_is_said_in_words() -> None:
    """For the table of `tidegate up`."""
    assert [on(Slice("x", "t", (1,))), on(Slice("x", "t", (1, 2), "MIG-1")), on(Slice("x", "t", gpu="0"))] == [
        "core 1", "cores 1, 2 and GPU MIG-1", "GPU 0",
    ]


@needs_engine
def test_the_engine_is_told_its_slice(tmp_path: Path) -> None:
    """Cores and their number as threads among its arguments, the GPU in its environment; other engines see what is left."""
    folder, settings = DataFolder(tmp_path), LocalSettings(engine_threads=7)
    own = LocalEngine(folder, settings, own=Slice("own1", "acme", (0, 2), "MIG-1"))
    others = LocalEngine(folder, settings, env={CUDA: ""})
    try:
        argv = list(own.child.spec.argv)
        assert (argv[argv.index("--cores") + 1], argv[argv.index("--threads") + 1], "--gpu" in argv) == ("0,2", "2", True)
        assert (own.child.spec.env[CUDA], own.name, own.child.spec.pid_file.name) == ("MIG-1", "engine-own1", "engine-own1.pid")
        argv = list(others.child.spec.argv)
        assert ("--cores" in argv, "--gpu" in argv, argv[argv.index("--threads") + 1], others.child.spec.env[CUDA]) == (False, False, "7", "")
    finally:
        own.release()
        others.release()


@pytest.mark.local
@needs_engine
def test_an_engine_without_its_gpu_does_not_start() -> None:
    """It never runs on a processor unnoticed: the error says what it was given."""
    argv = [sys.executable, "-P", "-m", "tidegate.local.engine_child", "--model", str(find_model("")), "--alias", "x", "--gpu"]
    env = {**os.environ, KEY_VARIABLE: "k", CUDA: "MIG-5"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "There is no GPU that this engine could use: CUDA_VISIBLE_DEVICES is 'MIG-5'" in done.stderr
