"""One rank: what is asked of it, what it holds, and what is left for its KV cache. Every rank has as many blocks as the one with the least room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tidegate.sizing import memory
from tidegate.sizing.cache import Cache, Cells, Layout, layout
from tidegate.sizing.cards import Card
from tidegate.sizing.memory import GIB, Band, Engine
from tidegate.sizing.model_config import Latent, Layer, Model
from tidegate.sizing.quantisation import kv_bits
from tidegate.sizing.weights import stages, total_bytes, weight_bytes


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked of a plan. Sizes in GiB that are given take the place of computed ones."""

    card: Card
    engine: Engine
    tp: int = 1
    pp: int = 1
    kv_dtype: str = "auto"
    concurrency: int = 1
    length: int | None = None
    block: int = 16
    prefix_caching: bool = True
    draft_tokens: int = 0
    micro_batch: int = 512
    weights_gib: float | None = None
    activation_gib: float | None = None
    non_torch_gib: float | None = None
    graphs_gib: float | None = None
    qps: float | None = None
    prompt_tokens: int = 1024
    answer_tokens: int = 256
    slo: float | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """One rank of a pipeline stage: its terms, its cache and the pool that is left."""

    weights: Band
    activation: Band
    non_torch: Band
    graphs: Band
    cache: Cache
    pool: Band

    def blocks(self, end: Literal["low", "mid", "high"]) -> int:
        return self.cache.blocks_in(getattr(self.pool, end))


def tightest(model: Model, wish: Wish) -> Stage:
    """The rank with the fewest blocks: every rank has as many as that one."""
    made: dict[tuple[tuple[Layer, ...], bool, bool], Stage] = {}
    for first, last in stages(len(model.layers), wish.pp):  # stages of the same layers in the middle are the same
        key = (model.layers[first:last], first == 0, last == len(model.layers))
        if key not in made:
            made[key] = stage_of(model, wish, first, last)
    return min(made.values(), key=lambda stage: stage.blocks("mid") if stage.pool.mid > 0 else stage.pool.mid)


def stage_of(model: Model, wish: Wish, first: int, last: int) -> Stage:
    """A rank of the stage that holds the layers `first` up to `last`."""
    layers, engine = model.layers[first:last], wish.engine
    ends = last == len(model.layers)
    weights = _given(wish.weights_gib) or memory.weights_band(
        weight_bytes(model, wish.tp, first, last) * _correction(model), known=model.weight_bytes is not None
    )
    bits = kv_bits(kv_dtype_of(model, wish))
    if engine.name == "llama.cpp":
        activation = _given(wish.activation_gib) or memory.llama_compute(model, wish.micro_batch)
        other = _given(wish.non_torch_gib) or Band(0.2 * GIB, 0.4 * GIB, 0.7 * GIB)
        drawn = Band.exact(0)
        cache: Cache = Cells(layers, bits, wish.micro_batch)
    else:
        activation = _given(wish.activation_gib) or memory.activation(model, layers, engine, wish.tp, last=ends, pp=wish.pp)
        other = _given(wish.non_torch_gib) or memory.non_torch(engine, wish.card, wish.tp, wish.pp)
        drawn = _given(wish.graphs_gib) or memory.graphs(layers, engine)
        cache = vllm_cache(model, wish, first, last)
    budget = wish.card.visible_gib * GIB * engine.share
    taken = [weights, activation, other, *([drawn] if graphs_inside(engine) else [])]
    pool = Band(budget - sum(t.high for t in taken), budget - sum(t.mid for t in taken), budget - sum(t.low for t in taken))
    return Stage(weights, activation, other, drawn, cache, pool)


def vllm_cache(model: Model, wish: Wish, first: int, last: int) -> Layout:
    """vLLM's cache of a rank that holds these layers."""
    dtype = kv_dtype_of(model, wish)
    return layout(
        model.layers[first:last], whole=model.layers, tp=wish.tp, kv_bits=kv_bits(dtype), state_dtype_bytes=int(min(model.dtype_bytes, 2)),
        block=wish.block, step_tokens=wish.engine.step_tokens, hybrid=wish.engine.version >= memory.HYBRID_CACHE, prefix_caching=wish.prefix_caching,
        draft_tokens=wish.draft_tokens, fp8_latent=dtype == "fp8" and any(
            isinstance(mixer, Latent) and mixer.index_dim for layer in model.layers for mixer in layer.mixers
        ),
    )  # fmt: skip


def _given(gib: float | None) -> Band | None:
    return None if gib is None else Band.exact(gib * GIB)


def _correction(model: Model) -> float:
    """What the files' own size makes of computed ones."""
    return model.weight_bytes / total_bytes(model) if model.weight_bytes is not None else 1.0


def graphs_inside(engine: Engine) -> bool:
    return engine.name == "vllm" and engine.version >= memory.GRAPHS_INSIDE


def kv_dtype_of(model: Model, wish: Wish) -> str:
    if wish.kv_dtype != "auto":
        return wish.kv_dtype
    if wish.engine.name == "llama.cpp":
        return "f16"
    return "fp32" if model.dtype_bytes == 4 else "bf16"


def logged_tokens(cache: Cache, blocks: int, length: int, version: tuple[int, int]) -> int:
    """The "GPU KV cache size" that vLLM of this version prints for so many blocks; for llama.cpp, tokens of one request."""
    if not isinstance(cache, Layout):
        return cache.longest(blocks)
    if (version >= memory.TOKENS_BY_CONCURRENCY and len(cache.groups) > 1) or (cache.groups and not cache.block_tokens):
        return int(blocks / cache.blocks_of(length) * length)
    return blocks // max(cache.copies, 1) * cache.block_tokens
