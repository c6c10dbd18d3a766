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
