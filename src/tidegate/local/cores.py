"""How many cores this process may use: what the scheduler lets it run on, and what a container's quota pays for."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """At least 1. More threads than that are slower than one: they wait for each other while the kernel holds some of them back."""
    quota = _quota(cgroup)
    cores = len(os.sched_getaffinity(0))
    return cores if quota >= cores else max(1, math.ceil(quota))


def _quota(cgroup: Path) -> float:
    """Cores' worth of time per period: cgroup v2's cpu.max, v1's two files; infinite where there is no limit."""
    try:
        limit, period = (cgroup / "cpu.max").read_text("ascii").split()
    except (OSError, ValueError):
        try:
            limit = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text("ascii").strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text("ascii").strip()
        except OSError:
            return math.inf
    return math.inf if limit in ("max", "-1") else int(limit) / int(period)
