"""The shared embedder as the supervisor sees it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tidegate.core.errors import LocalPartError
from tidegate.local.embedder import LocalEmbedder
from tidegate.local.folder import DataFolder
from tidegate.local.settings import LocalSettings
from tidegate.retrieval.settings import EmbedderSettings


def test_a_runtime_that_is_not_installed_is_met_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any process is started: the package, or the setting."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "openvino" else real(name))
    with pytest.raises(LocalPartError, match="not installed") as caught:
        LocalEmbedder(DataFolder(tmp_path), LocalSettings(), EmbedderSettings(runtime="openvino"))
    assert caught.value.hint == "pip install 'tidegate[openvino]', or set embedder.runtime = \"onnxruntime\"."
