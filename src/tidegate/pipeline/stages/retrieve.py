"""Finds the passages that an answer may rest on."""

from __future__ import annotations

from tidegate.core.ask import Ask
from tidegate.core.errors import SettingsError
from tidegate.core.ports import Stage
from tidegate.core.search import Filter
from tidegate.pipeline.capability import Capability, Retrieve
from tidegate.pipeline.parts import Parts, Searcher


class RetrieveStage:
    """Question in, passages out; notes what was found, from which version of the index."""

    name = "retrieve"

    def __init__(self, search: Searcher, settings: Retrieve) -> None:
        self._search = search
        self._settings = settings

    async def __call__(self, ask: Ask) -> None:
        settings = self._settings
        tags = {tag: str(ask.input[field]) for tag, field in settings.tags_from.items() if ask.input.get(field) is not None}
        flight = ask.flight
        try:
            question = str(ask.input[settings.question])
            found = await self._search.find(question, k=settings.k, wanted=Filter(tags), collection=settings.collection)
        finally:  # also where the search failed or the client left: the time until then was its own
            flight.lap("retrieve")
        flight.index_version = found.index_version
        ask.passages = [passage for passage in found.passages if passage.score >= settings.min_score]
        flight.passage_ids = [passage.id for passage in ask.passages]
        # The names of the tags alone: their values are the caller's words.
        flight.decide(
            "retrieved", collection=settings.collection, tags=sorted(tags), way=found.way,
            scores=[round(passage.score, 4) for passage in found.passages],
        )


def build(capability: Capability, parts: Parts) -> Stage:
    if parts.search is None:
        raise SettingsError(
            f"The capability {capability.path} retrieves, but there is no embedder.",
            hint='Set embedder.socket, or embedder.mode = "in_process"; with tidegate up, local.embedder = true starts one.',
        )
    return RetrieveStage(parts.search, capability.manifest.retrieve)
