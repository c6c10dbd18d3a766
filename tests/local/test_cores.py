"""How many cores may be used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tidegate.local.cores import usable_cores

MINE = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000\n", MINE), ("50000 100000\n", 1), ("100000 100000\n", 1), ("99900000 100000\n", MINE)]
)
def test_a_containers_quota_counts(tmp_path: Path, text: str, cores: int) -> None:
    """cgroup v2: quota and period in one file; a part of a core is one core, and a quota never adds cores."""
    (tmp_path / "cpu.max").write_text(text)
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1\n", MINE), ("40000\n", 1)])
def test_the_older_files_count_too(tmp_path: Path, quota: str, cores: int) -> None:
    """cgroup v1: two files."""
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == cores


def test_without_a_quota_all_cores_count(tmp_path: Path) -> None:
    """A machine without these files."""
    assert usable_cores(tmp_path) == MINE
