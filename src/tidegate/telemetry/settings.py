"""[log]: what the process says about itself."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tidegate.core.settings import Section

Level = Literal["debug", "info", "warning", "error"]


class LogSettings(Section):
    """The log goes to stderr, one line per event. Prompt and answer text never reach it."""

    level: Level = Field("info", description="The lowest level that is written: debug, info, warning or error.")
    format: Literal["json", "text"] = Field("json", description="json writes one JSON object per line; text is for reading at a terminal.")
    flights: bool | Literal["errors"] = Field(
        True, description='One line per finished flight: true, false, or "errors" for those that did not end well.'
    )
    exception_messages: bool = Field(
        False, description="Also log the messages of unexpected exceptions, which may quote what a caller sent; type and stack always are."
    )
    recent_flights: int = Field(
        512, ge=16, le=100_000, description="How many of the newest flights stay in memory for the page, /health and `tidegate flights`."
    )
