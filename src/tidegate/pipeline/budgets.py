"""The budgets of a capability in words: what each part of the one deadline may take, and what follows where it is used up."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tidegate.pipeline.capability import Capability
from tidegate.pipeline.ladder import LAST_SHARE, SHARE


class Budget(NamedTuple):
    """One part of the deadline. `otherwise`: the declared fallback, the highest rung that a failure of this part leaves standing."""

    part: str
    at_most_s: float
    set_by: str
    otherwise: str


def described(capability: Capability, forecast_s: float, source: Callable[[str], str]) -> list[Budget]:
    """The parts in the order of a request. `forecast_s`: admission's bound for waits; `source` says where a setting's value comes from."""
    manifest, budgets = capability.manifest, capability.budgets
    retrieves, asks = "retrieve" in manifest.stages, "generate" in manifest.stages
    without_documents, without_engine = _fallback(capability, "retrieval"), _fallback(capability, "engine")

    def set_by(name: str) -> str:
        return "capability.toml" if getattr(manifest.budgets, name) else source(f"budgets.{name}")

    rows: list[Budget] = []
    if asks:
        busy = without_engine if manifest.ladder else "error 429 with Retry-After"
        rows.append(Budget("forecast of the wait for a slot", forecast_s, source("admission.forecast_s"), busy))
        if manifest.ladder:
            rows.append(Budget("wait for a slot", budgets.first_token_s, set_by("first_token_s"), without_engine))
    if retrieves:
        rows.append(Budget("retrieve", budgets.retrieve_s, set_by("retrieve_s"), without_documents))
    if "shard" in manifest.stages:
        rows.append(Budget("shard", manifest.shard.budget_s, "capability.toml", "goes on with what was read by then"))
    if manifest.length.policy == "compress":
        rows.append(Budget("fit", manifest.length.compress_s, "capability.toml", f"length.compress_else: {manifest.length.compress_else}"))
    if asks:
        rows.append(Budget("generate, to the first token", budgets.first_token_s, set_by("first_token_s"), f"another engine, then {without_engine}"))
    if manifest.ladder:
        below = any(rung.rung not in ("faq", "message") for rung in manifest.ladder)
        share = budgets.full_share or (SHARE if below else LAST_SHARE)
        said = f"{'capability.toml' if budgets.full_share else 'default'}: {share:.0%} of the whole"
        rows.append(Budget("the full answer, to its first text", round(budgets.total_s * share, 3), said, without_engine))
    rows.append(Budget("the whole", budgets.total_s, "capability.toml", _last(capability)))
    return rows


def _fallback(capability: Capability, failed: str) -> str:
    """The highest rung that does not rest on what failed."""
    manifest = capability.manifest
    drops = any(rung.rung == "no_retrieval" for rung in manifest.ladder)
    for rung in manifest.ladder:
        searches_too = rung.rung == "small_model" and not drops and "retrieve" in manifest.stages
        if not searches_too if failed == "retrieval" else rung.rung != "no_retrieval":
            return rung.rung
    return _last(capability)


def _last(capability: Capability) -> str:
    """What comes where nothing answers in time."""
    return "message" if capability.manifest.ladder else "error 504"
