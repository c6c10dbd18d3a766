"""The engine that does as it is told (`python -m tidegate.bench.scripted`): for tests, demos and load."""

from __future__ import annotations

from typing import Any, ClassVar

from tidegate.engines.continuation import Continuing, Step, by_ids
from tidegate.engines.settings import EngineSettings
from tidegate.engines.traits import Cannot


class Scripted(Continuing):
    """OpenAI's API, the server's own counters as figures, and the rest of an answer that was begun."""

    cannot: ClassVar[Cannot] = {
        "token_ids": "The scripted engine tells token ids only to callers who ask for them (return_token_ids).",
        "control_text": "The scripted engine reads nothing in a message but its orders: text goes to it as it is.",
    }

    async def ask_figures(self) -> dict[str, Any]:
        """Requests, active generations, aborted streams and connections, as its /stats tells them."""
        stats = await self.get_json(f"{self.root}/stats")
        return {key: stats[key] for key in ("requests", "active", "aborted", "connections") if key in stats}

    async def one_token(self, model: str, fields: dict[str, Any], prompt: list[int]) -> Step:
        """See `Continuing.one_token`. A word of the script, which may take several ids."""
        call = by_ids(model, {**fields, "return_token_ids": True}, prompt, 1)
        said = await self.post_json(f"{self.base}/completions", self.fields(call, stream=False))
        choice = said["choices"][0]
        return Step(choice["token_ids"], choice["text"], None if choice["finish_reason"] == "length" else "stop")


def build(name: str, settings: EngineSettings) -> Scripted:
    """The engine of one `[engines.NAME]` section."""
    return Scripted(name, settings)
