"""Finds the passages that an answer may rest on."""

from __future__ import annotations

from typing import Any

import msgspec

from tidegate.core.ask import Ask
from tidegate.core.errors import SettingsError
from tidegate.core.ports import Stage
from tidegate.core.search import Filter
from tidegate.pipeline.capability import Capability, Retrieve
from tidegate.pipeline.parts import Parts, Searcher
from tidegate.retrieval.search import SECONDS, Searched, Steps

#: What the caller is told of a search that had to do without a part of it.
SEARCH = "search"


class RetrieveStage:
    """Question in, passages out; notes what was found and how, from which version of the index."""

    name = "retrieve"

    def __init__(self, search: Searcher, settings: Retrieve, within_s: float) -> None:
        """`within_s`: what the stage may take; whoever walks the stages holds it to that."""
        self._search = search
        self._settings = settings
        self._steps = Steps(settings.hybrid, settings.rerank or None, settings.compress, settings.min_score, within_s)

    async def __call__(self, ask: Ask) -> None:
        settings = self._settings
        tags = {tag: str(ask.input[field]) for tag, field in settings.tags_from.items() if ask.input.get(field) is not None}
        flight = ask.flight
        steps = self._steps
        if (left_s := ask.deadline.left_s()) < steps.seconds:
            steps = msgspec.structs.replace(steps, seconds=left_s)
        try:
            question = str(ask.input[settings.question])
            found = await self._search.find(
                question, k=settings.k, wanted=Filter(tags), collection=settings.collection, steps=steps, ask=ask
            )
        finally:  # also where the search failed or the client left: the time until then was its own
            flight.lap("retrieve")
        flight.index_version = found.index_version
        ask.passages = found.passages
        flight.passage_ids = [passage.id for passage in found.passages]
        # The names of the tags alone: their values are the caller's words.
        flight.decide("retrieved", collection=settings.collection, tags=sorted(tags), way=found.way, **_facts(found))
        lacking = _lacking(found)
        if found.index_version == "0":  # nothing was ever ingested: that is a fault of the house, not an answer of its documents
            lacking["no_documents"] = settings.collection
        if lacking:
            ask.note(SEARCH, lacking)


def _lacking(found: Searched) -> dict[str, str]:
    """What the search had to do without, and why."""
    return {name: why for name, why in (("words_only", found.words_only), ("not_reranked", found.not_reranked)) if why}


def _facts(found: Searched) -> dict[str, Any]:
    """Numbers and ids, of each passage that is given on, in their order. Of each leg [place, score] (and coverage of the words), or null where it did
    not find the passage."""
    facts: dict[str, Any] = {"scores": [round(passage.score, 4) for passage in found.passages]}
    stands = [found.stands(passage.id) for passage in found.passages]
    for leg in (leg.leg for leg in found.legs):
        facts[leg] = [
            [one.rank, round(one.score, 4), *([round(one.coverage, 3)] if one.coverage is not None else [])] if (one := of.get(leg)) else None
            for of in stands
        ]
    facts["reranker"] = found.reranker
    if found.scores:
        facts["rerank_scores"] = [round(score, 4) for score in found.scores]
    facts |= _lacking(found)
    counts = {"weak": found.weak, "repeated": found.repeated, "characters_left_out": found.left_out}
    facts |= {name: count for name, count in counts.items() if count}
    if found.differing:
        facts["differing"] = found.differing
    facts["took_ms"] = {step: round(took / 1e6, 3) for step, took in found.took_ns.items()}
    return facts


def build(capability: Capability, parts: Parts) -> Stage:
    if parts.search is None:
        raise SettingsError(
            f"The capability {capability.path} retrieves, but there is no embedder.",
            hint='Set embedder.socket, or embedder.mode = "in_process"; with tidegate up, local.embedder = true starts one.',
        )
    return RetrieveStage(parts.search, capability.manifest.retrieve, capability.budgets.retrieve_s or SECONDS)
