"""Settings of the pipeline room."""

from __future__ import annotations

from pydantic import Field

from tidegate.core.settings import Section


class CapabilitySettings(Section):
    """`[capabilities]`: where the folders of your capabilities are."""

    folders: list[str] = Field(
        default_factory=list,
        description="Folders that hold capabilities as GROUP/NAME/capability.toml; each is served at POST /api/v1/GROUP/NAME.",
    )


class GenerationSettings(Section):
    """`[generation]`: how an answer is told."""

    max_resumes: int = Field(
        2, ge=0, description="How often one answer that an engine broke off in its middle goes on, on the same or another engine. 0: it is an error."
    )
    resume_wait_s: float = Field(
        10.0, ge=0, allow_inf_nan=False,
        description="Seconds that an answer which broke off waits while no engine of its model can be reached. 0: none.",
    )
