"""The engine that does as it is told (`python -m tidegate.bench.scripted`): for tests, demos and load."""

from __future__ import annotations

from typing import Any

from tidegate.engines.openai_http import OpenAIHttp
from tidegate.engines.settings import EngineSettings


class Scripted(OpenAIHttp):
    """OpenAI's API, and the server's own counters as figures."""

    async def ask_figures(self) -> dict[str, Any]:
        """Requests, active generations, aborted streams and connections, as its /stats tells them."""
        stats = await self.get_json(f"{self.root}/stats")
        return {key: stats[key] for key in ("requests", "active", "aborted", "connections") if key in stats}


def build(name: str, settings: EngineSettings) -> Scripted:
    """The engine of one `[engines.NAME]` section."""
    return Scripted(name, settings)
