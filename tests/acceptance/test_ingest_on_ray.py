"""`tidegate ingest --on ray` with a real Ray on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests import waiting

TIDEGATE = [sys.executable, "-m", "tidegate.cli"]
HAS_RAY = importlib.util.find_spec("ray") is not None


def ingest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*TIDEGATE, "ingest", str(folder), "--on", "ray", "--json", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, env={**os.environ, "RAY_ADDRESS": ""})


@pytest.mark.local
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_of_a_cluster_store_each_document_once(data_home: Path, tmp_path: Path) -> None:
    """The report is that of all workers, a bad file costs itself alone, and the second run stores nothing."""
    if not HAS_RAY:
        pytest.skip("Ray is not installed: pip install 'tidegate[ray]'.")
    for number in range(80):
        (tmp_path / f"{number:02}.md").write_text(f"# Rule {number}\n\nWhat rule {number} says.\n")
    (tmp_path / "bad.pdf").write_bytes(b"no PDF")
    home = data_home / "ray"
    home.mkdir(mode=0o711)
    log = home / "up.log"
    with log.open("ab") as out:
        command = [*TIDEGATE, "up", "--data", str(home / "data"), "--port", "0", "--set", "local.engine=false"]
        up = subprocess.Popen(command, stdout=out, stderr=out, cwd=home, start_new_session=True)
    try:
        waiting.until_blocking(lambda: "curl" in log.read_text() or up.poll() is not None, "start", 240)
        options = ["--collection", "rules", "--set", f"local.data={home / 'data'}", "--workers", "2"]
        runs: list[dict[str, Any]] = []
        for _ in range(2):
            done = ingest(tmp_path, *options)
            assert (done.returncode, bool(done.stdout)) == (1, True), done.stderr[-2000:]  # a traceback is 1, too
            runs.append(json.loads(done.stdout))
        assert [(len(run["stored"]), len(run["unchanged"]), len(run["failed"])) for run in runs] == [(80, 0, 1), (0, 80, 1)]
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(60)


def test_without_ray_the_error_says_what_to_install(tmp_path: Path) -> None:
    """And nothing else is asked for: no database, no embedder."""
    program = (
        "import sys; sys.modules['ray'] = None\n"  # as if it were not installed
        f"sys.argv[1:] = ['ingest', {str(tmp_path)!r}, '--on', 'ray']\n"
        "from tidegate.cli import main; main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 2
    assert "pip install 'tidegate[ray]'" in done.stderr
