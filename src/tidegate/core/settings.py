"""What a room's settings look like: a name, a default and a sentence each; unknown names are refused."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of tidegate.toml. Every field carries `Field(default, description="one sentence")`: a test fails where one does not."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=False)
