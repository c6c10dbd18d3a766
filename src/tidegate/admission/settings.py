"""Settings of the admission room."""

from __future__ import annotations

from pydantic import Field

from tidegate.core.settings import Section


class LimitSettings(Section):
    """`[limits]`: what one API key may use, where the key itself carries no limit of its own."""

    requests_per_minute: int = Field(
        0, ge=0, description="Requests that one API key may start per minute; 0 means no limit. A key's own limit wins."
    )
    tokens_per_minute: int = Field(
        0, ge=0, description="Prompt and completion tokens that one API key may use per minute; 0 means no limit. A key's own limit wins."
    )
