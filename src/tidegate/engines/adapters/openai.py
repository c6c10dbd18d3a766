"""Any server with OpenAI's API: OpenAI itself, and the many others that have no adapter of their own."""

from __future__ import annotations

from tidegate.engines.openai_http import OpenAIHttp
from tidegate.engines.settings import EngineSettings


class OpenAI(OpenAIHttp):
    """OpenAI's API and nothing beside it."""


def build(name: str, settings: EngineSettings) -> OpenAI:
    """The engine of one `[engines.NAME]` section."""
    return OpenAI(name, settings)
