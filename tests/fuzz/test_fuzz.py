"""Each fuzz target for a few thousand inputs. Longer: `python -m tests.fuzz TARGET -max_total_time=600`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.reference import events_of
from tests.fuzz.targets import SEEDS, TARGETS

ROOT = Path(__file__).parents[2]
RUNS = 4000


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_nothing_is_found(name: str, tmp_path: Path) -> None:
    """The same few thousand inputs every time: none raises, leaks through or is judged otherwise than the reference does."""
    argv = [sys.executable, "-m", "tests.fuzz", name, f"-runs={RUNS}", "-seed=7", f"-artifact_prefix={tmp_path}/"]
    ran = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert f"Done {RUNS} runs" in ran.stderr


def test_every_target_has_seeds() -> None:
    """A target without a beginning finds nothing in a few thousand inputs."""
    assert set(SEEDS) == set(TARGETS)


def test_a_fault_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parser that forgets a line end differs from the reference on the first seed."""
    monkeypatch.setattr("tidegate.engines.sse.SseParser.feed", lambda self, data: [])
    with pytest.raises(AssertionError):
        TARGETS["sse"](SEEDS["sse"][0])


def test_the_reference_reads_the_specification_s_examples() -> None:
    """The examples that the specification itself gives."""
    assert events_of(b"data: YHOO\ndata: +2\ndata: 10\n\n") == [(b"YHOO\n+2\n10", b"", b"")]
    stream = b": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n\n"
    assert events_of(stream) == [(b"first event", b"", b"1"), (b"second event", b"", b""), (b" third event", b"", b"")]
    assert events_of(b"data\n\ndata\ndata\n\ndata:") == [(b"", b"", b""), (b"\n", b"", b"")]
    assert events_of(b"data:test\n\ndata: test\n\n") == [(b"test", b"", b""), (b"test", b"", b"")]
