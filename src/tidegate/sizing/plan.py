"""Does a model fit on these cards, for so many requests of such a length; with how much to spare; and what would change it.

For vLLM a share of each card is the budget; weights, activation, non-torch memory (and graphs) come off it, and the rest is the pool of the KV cache.
For llama.cpp the cache is as large as it is asked to be, and the card must hold the sum. Each term is a band; the verdict is *fits* where the
request fits at the band's bad end, *tight* where it does only as expected, *fails* where it does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from tidegate.core.errors import BadRequest
from tidegate.sizing.cache import Layout
from tidegate.sizing.describe import describe, engine_words, parameters, weights_words
from tidegate.sizing.memory import GIB
from tidegate.sizing.model_config import Attention, Latent, Model
from tidegate.sizing.quantisation import WHAT_IF, WHAT_IF_GGUF, kv_bits
from tidegate.sizing.rank import Stage, Wish, graphs_inside, kv_dtype_of, logged_tokens, tightest
from tidegate.sizing.rules import broken_rules
from tidegate.sizing.serving import Serving, serving

Verdict = Literal["fits", "tight", "fails"]
#: The reserve that people multiply an estimate by to be safe; shown apart, and never mixed into a term.
RESERVE = 1.35
_OLDEST = (0, 6)


@dataclass(frozen=True, slots=True)
class Term:
    """One part of a card's memory, in GiB. `inside`: whether it comes off the budget; `basis`: what it rests on."""

    name: str
    low_gib: float
    gib: float
    high_gib: float
    inside: bool
    basis: str


@dataclass(frozen=True, slots=True)
class Reserve:
    """All of it, times 1.35, beside what the card shows."""

    factor: float
    needs_gib: float
    card_gib: float
    holds: bool


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One change, and what it makes of the plan."""

    change: str
    weights_gib: float
    pool_gib: float
    tokens: int
    concurrency: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer. Sizes are per card, of the pipeline stage with the least room. `tokens`: as vLLM prints its cache's size; `blocks`: of
    `block_tokens` each, of all groups of layers; for llama.cpp, tokens of one request."""

    model: str
    architecture: str
    attention: str
    parameters: float
    weights: str
    card: str
    card_gib: float
    card_source: str
    cards: int
    tp: int
    pp: int
    engine: str
    kv_dtype: str
    length: int
    concurrency: int
    budget_gib: float
    terms: list[Term]
    pool_gib: float
    pool_low_gib: float
    pool_high_gib: float
    kv_bytes_per_token: float
    state_bytes_per_request: float
    blocks: int
    block_tokens: int
    tokens: int
    tokens_low: int
    tokens_high: int
    most_requests: float
    most_requests_low: float
    longest: int
    needs_gib: float
    margin_gib: float
    margin: float
    verdict: Verdict
    why: list[str]
    reserve: Reserve
    what_if: list[WhatIf]
    serving: Serving | None
    notes: list[str]


def plan(model: Model, wish: Wish) -> Plan:
    """Raises BadRequest where the wish makes no sense; what does not fit is a verdict."""
    _check(model, wish)
    length = wish.length or model.context or 4096
    broken = broken_rules(model, wish)
    stage = tightest(model, replace(wish, tp=1, pp=1) if broken else wish)
    verdict, why = _verdict(stage, wish, length, broken)
    needed = wish.concurrency * stage.cache.blocks_of(length) * stage.cache.block_bytes
    inside = graphs_inside(wish.engine)
    terms = _terms(model, wish, stage, inside=inside)
    total = stage.weights.mid + stage.activation.mid + stage.non_torch.mid + stage.graphs.mid + needed
    return Plan(
        model=model.name, architecture=model.architecture, attention=describe(model), parameters=parameters(model), weights=weights_words(model),
        card=wish.card.name, card_gib=wish.card.visible_gib, card_source=wish.card.source, cards=wish.tp * wish.pp, tp=wish.tp, pp=wish.pp,
        engine=engine_words(wish.engine), kv_dtype=kv_dtype_of(model, wish), length=length, concurrency=wish.concurrency,
        budget_gib=wish.card.visible_gib * wish.engine.share, terms=terms,
        pool_gib=stage.pool.mid / GIB, pool_low_gib=stage.pool.low / GIB, pool_high_gib=stage.pool.high / GIB,
        kv_bytes_per_token=stage.cache.token_bytes, state_bytes_per_request=stage.cache.state_bytes,
        blocks=stage.blocks("mid") if isinstance(stage.cache, Layout) else stage.cache.longest(stage.blocks("mid")),
        block_tokens=stage.cache.block_tokens if isinstance(stage.cache, Layout) else 1,
        tokens=logged_tokens(stage.cache, stage.blocks("mid"), length, wish.engine.version),
        tokens_low=logged_tokens(stage.cache, stage.blocks("low"), length, wish.engine.version),
        tokens_high=logged_tokens(stage.cache, stage.blocks("high"), length, wish.engine.version),
        most_requests=_requests(stage, "mid", length), most_requests_low=_requests(stage, "low", length),
        longest=stage.cache.longest(stage.blocks("mid")), needs_gib=needed / GIB, margin_gib=(stage.pool.mid - needed) / GIB,
        margin=(stage.pool.mid - needed) / needed if needed else 0.0, verdict=verdict, why=why,
        reserve=Reserve(RESERVE, RESERVE * total / GIB, wish.card.visible_gib, RESERVE * total <= wish.card.visible_gib * GIB),
        what_if=[] if broken else list(_what_ifs(model, wish, length)),
        serving=serving(model, stage.cache, wish.card, wish.tp * wish.pp, wish.qps, wish.prompt_tokens, wish.answer_tokens, wish.slo),
        notes=_notes(model, wish, length, broken=bool(broken)),
    )


def _check(model: Model, wish: Wish) -> None:
    if wish.engine.name == "vllm" and wish.engine.version < _OLDEST:
        raise BadRequest("vLLM before 0.6 measured its memory in another way, and is not planned.", hint="--engine-version 0.6 or newer.")
    if wish.engine.name == "llama.cpp" and wish.tp > 1:
        raise BadRequest("llama.cpp spreads a model over cards by layers.", hint="Use --pp for the number of cards.")
    if wish.pp > len(model.layers):
        raise BadRequest(f"--pp {wish.pp} is more stages than the model has layers ({len(model.layers)}).", hint="A stage holds at least one layer.")


def _verdict(stage: Stage, wish: Wish, length: int, broken: list[str]) -> tuple[Verdict, list[str]]:
    if broken:
        return "fails", broken
    needed = wish.concurrency * stage.cache.blocks_of(length)
    if stage.pool.mid <= 0:
        return "fails", [f"weights and what a step needs are {-stage.pool.mid / GIB:.2f} GiB more than the budget"]
    if needed > stage.blocks("mid"):
        return "fails", [f"{stage.pool.mid / GIB:.2f} GiB are left for it"]
    why = []
    if needed > stage.blocks("low"):
        why.append(f"it fits as expected, not at the bad end of the band ({stage.pool.low / GIB:.2f} GiB of KV cache)")
    if not graphs_inside(wish.engine):
        over = wish.card.visible_gib * (wish.engine.share - 1) + stage.graphs.high / GIB
        if over > 0:
            why.append(f"graphs come on top of the share of {wish.engine.share:g} and may not fit beside it: {over:.2f} GiB too much")
    return ("tight" if why else "fits"), why


def _requests(stage: Stage, end: Literal["low", "mid", "high"], length: int) -> float:
    needed = stage.cache.blocks_of(length)
    return stage.blocks(end) / needed if needed else 0.0


def _what_ifs(model: Model, wish: Wish, length: int) -> Iterator[WhatIf]:
    """Changes one at a time, those that change something."""
    bits = model.quantisation.bits or model.dtype_bytes * 8
    packed = model.quantisation.method == "gguf"
    for name, quantisation in (WHAT_IF_GGUF if packed else WHAT_IF).items():
        if quantisation.bits < bits * 0.9 and wish.weights_gib is None:
            scaled = int(model.weight_bytes * quantisation.bits / bits) if packed and model.weight_bytes is not None else None
            yield _what_if(f"weights in {name}", replace(model, quantisation=quantisation, weight_bytes=scaled), wish, length)
    cheaper = ("q8_0", "q4_0") if wish.engine.name == "llama.cpp" else ("fp8",)
    for name in cheaper:
        if kv_bits(name) < kv_bits(kv_dtype_of(model, wish)):
            yield _what_if(f"KV cache in {name}", model, replace(wish, kv_dtype=name), length)
    for tp in (wish.tp * 2, wish.tp // 2):
        other = replace(wish, tp=tp)
        if tp >= 1 and tp != wish.tp and wish.engine.name == "vllm" and wish.weights_gib is None and not broken_rules(model, other):
            yield _what_if(f"tensor parallel {tp}", model, other, length)
    if wish.engine.name == "llama.cpp" and wish.pp * 2 <= len(model.layers) and wish.weights_gib is None:
        yield _what_if(f"{wish.pp * 2} cards", model, replace(wish, pp=wish.pp * 2), length)
    if length >= 2048:
        yield _what_if(f"length {length // 2}", model, wish, length // 2)


def _what_if(change: str, model: Model, wish: Wish, length: int) -> WhatIf:
    stage = tightest(model, wish)
    verdict, _ = _verdict(stage, wish, length, [])
    tokens = logged_tokens(stage.cache, stage.blocks("mid"), length, wish.engine.version)
    return WhatIf(change, stage.weights.mid / GIB, stage.pool.mid / GIB, tokens, _requests(stage, "mid", length), verdict)


def _terms(model: Model, wish: Wish, stage: Stage, *, inside: bool) -> list[Term]:
    computed = "the file's size" if model.weight_bytes is not None else "computed from the config"
    step = f"{wish.micro_batch} tokens a micro-batch" if wish.engine.name == "llama.cpp" else (
        f"a step of {wish.engine.step_tokens} tokens, {wish.engine.sequences} sequences")  # fmt: skip
    rows = [
        ("weights", stage.weights, True, computed, wish.weights_gib),
        ("activation", stage.activation, True, step, wish.activation_gib),
        ("non-torch", stage.non_torch, True, "context, libraries, collective operations", wish.non_torch_gib),
        ("graphs", stage.graphs, inside, "inside the share" if inside else "on top of the share", wish.graphs_gib),
    ]
    return [
        Term(name, band.low / GIB, band.mid / GIB, band.high / GIB, within, "given" if given is not None else why)
        for name, band, within, why, given in rows
        if band.high > 0
    ]


def _notes(model: Model, wish: Wish, length: int, *, broken: bool) -> list[str]:
    notes = list(model.notes)
    if broken:
        notes.append("the sizes are those of one card alone")
    if wish.length is None and model.context is None:
        notes.append("the config names no context: a length of 4096 is taken")
    if model.context is not None and length > model.context:
        notes.append(f"the model was made for {model.context} tokens")
    if wish.draft_tokens:
        notes.append("weights of what drafts are not counted")
    if not wish.card.measured:
        notes.append("the memory that this card shows is an estimate; --gpu-memory gives your own figure")
    kv_heads = max((m.kv_heads for layer in model.layers for m in layer.mixers if isinstance(m, Attention)), default=0)
    if kv_heads and wish.tp > kv_heads and not broken:
        notes.append(f"{wish.tp // kv_heads} ranks each hold the same of the {kv_heads} heads of keys and values")
    if wish.tp > 1 and not broken and any(isinstance(m, Latent) for layer in model.layers for m in layer.mixers):
        notes.append("every rank holds the whole latent cache")
    return notes
