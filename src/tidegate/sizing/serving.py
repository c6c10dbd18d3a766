"""What a load makes of the memory's bandwidth, and of an error budget.

A decode step reads the weights once for all requests in it and each request's cache once (roofline of decoding: Pope et al., arXiv 2211.05102). With
`qps` requests of `answer` tokens a second, Little's law says how many run at once: n = qps * answer * step time, and the step time is
(weights + n * cache) / bandwidth; solved for n. Prefill, which computing bounds, is not in it, so n is a lower bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tidegate.core.errors import BadRequest
from tidegate.sizing.cache import Cache, Cells
from tidegate.sizing.cards import Card
from tidegate.sizing.model_config import Experts, Model
from tidegate.sizing.weights import total_bytes

#: The part of a data sheet's bandwidth that decoding kernels reach.
EFFICIENCY = 0.75
_DAY_S = 86_400
_MONTH_DAYS = 30


@dataclass(frozen=True, slots=True)
class Budget:
    """What an objective leaves for failing."""

    objective: float
    failures_a_day: float
    minutes_a_month: float


@dataclass(frozen=True, slots=True)
class Serving:
    """A load on all cards together. Null where no number of requests at once can keep up."""

    qps: float
    prompt_tokens: int
    answer_tokens: int
    bandwidth_gbs: float
    at_once: float | None
    step_ms: float | None
    bandwidth_per_request_gbs: float | None
    read_per_request_gb: float
    budget: Budget | None


def serving(
    model: Model, cache: Cache, card: Card, cards: int, qps: float | None, prompt: int, answer: int, slo: float | None
) -> Serving | None:
    """None without a rate. Raises BadRequest for a rate or an objective that is none, or a card without a known bandwidth."""
    if qps is None:
        return None
    if not 0 < qps < 1e6:
        raise BadRequest(f"--qps {qps:g} is no rate.", hint="Requests a second, more than 0.")
    if card.bandwidth_gbs is None:
        raise BadRequest("The bandwidth of this card is not known.", hint="Name a card with --gpu for --qps.")
    bandwidth = card.bandwidth_gbs * 1e9 * EFFICIENCY * cards
    ranks = 1 if isinstance(cache, Cells) else cards
    per_request = (cache.token_bytes * (prompt + answer / 2) + cache.state_bytes) * ranks
    rate = qps * answer
    left = bandwidth - rate * per_request
    at_once = rate * read_bytes(model, 1.0) / left if left > 0 else None
    for _ in range(20):  # how many experts a step reads depends on how many requests are in it
        if at_once is not None:
            at_once = rate * read_bytes(model, max(at_once, 1.0)) / left
    step_s = (at_once / rate) if at_once is not None else None
    return Serving(
        qps=qps, prompt_tokens=prompt, answer_tokens=answer, bandwidth_gbs=bandwidth / 1e9, at_once=at_once,
        step_ms=None if step_s is None else step_s * 1e3, bandwidth_per_request_gbs=None if not at_once else bandwidth / at_once / 1e9,
        read_per_request_gb=(per_request + read_bytes(model, max(at_once or 1.0, 1.0)) / max(at_once or 1.0, 1.0)) * answer / 1e9,
        budget=_budget(qps, slo),
    )


def read_bytes(model: Model, batch: float) -> float:
    """Bytes of weights that a step of `batch` tokens reads: all of the dense ones, and of the experts those that some token chose."""
    experts = [layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, Experts)]
    total = float(model.weight_bytes or total_bytes(model))
    own = model.dtype_bytes * 8
    routed = sum(e.count * (3 if e.gated else 2) * model.hidden * e.width * model.quantisation.bits_of("experts", own) / 8 for e in experts)
    if not routed:
        return total
    first = experts[0]
    touched = 1.0 - math.pow(1.0 - first.active / first.count, batch)
    return max(total - routed, 0.0) + min(routed, total) * touched


def _budget(qps: float, slo: float | None) -> Budget | None:
    if slo is None:
        return None
    if not 0 < slo < 100:
        raise BadRequest(f"--slo {slo:g} is no objective.", hint="A percentage between 0 and 100, as 99.9.")
    share = 1 - slo / 100
    return Budget(slo, share * qps * _DAY_S, share * _MONTH_DAYS * 24 * 60)
