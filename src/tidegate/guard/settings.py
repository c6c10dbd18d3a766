"""`[guard]`: what must not be said, and what happens when the model begins to say it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tidegate.core.settings import Section


class GuardSettings(Section):
    """`[guard]` of tidegate.toml, for every answer. A capability may add a list of its own in its capability.toml."""

    terms_file: str = Field("", description="File of terms that no answer may hold: UTF-8, one a line, # comments. Empty: no term is banned.")
    whole_words: bool = Field(
        True, description="Terms count as whole words; in scripts without blanks between words, anywhere. false: every term counts anywhere."
    )
    on_term: Literal["step_back", "stop"] = Field(
        "step_back",
        description="`step_back`: the model goes on from before the term, its beginning forbidden; `stop`: the answer ends as content_filter.",
    )
    max_step_backs: int = Field(3, ge=0, description="After so many steps back in one answer the next term ends it as content_filter.")
