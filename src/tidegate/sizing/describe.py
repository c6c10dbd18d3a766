"""A model and an engine in words: the kinds of attention, the weights, the version."""

from __future__ import annotations

from dataclasses import replace

from tidegate.sizing.memory import Engine
from tidegate.sizing.model_config import Attention, Experts, Latent, Model, Recurrent
from tidegate.sizing.weights import total_bytes


def parameters(model: Model) -> float:
    """Weights of the model, counted."""
    plain = replace(model, dtype_bytes=1, quantisation=replace(model.quantisation, bits=0.0, method="none"))
    latent = [mixer for layer in model.layers for mixer in layer.mixers if isinstance(mixer, Latent)]
    return total_bytes(plain) - sum(mixer.rank * mixer.heads * (mixer.nope_dim + mixer.value_dim) for mixer in latent)


def describe(model: Model) -> str:
    """The kinds of attention in it, with their counts."""
    counts: dict[str, int] = {}
    for layer in model.layers:
        for mixer in layer.mixers:
            kind = _kind(mixer)
            counts[kind] = counts.get(kind, 0) + 1
    experts = next((layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, Experts)), None)
    words = [f"{count} x {kind}" for kind, count in counts.items()]
    return ", ".join(words) + (f"; {experts.count} experts, {experts.active} for a token" if experts else "")


def _kind(mixer: Attention | Latent | Recurrent) -> str:
    if isinstance(mixer, Latent):
        return f"latent attention (rank {mixer.rank} + {mixer.rope_dim})"
    if isinstance(mixer, Recurrent):
        return f"recurrent state ({mixer.heads} x {mixer.rows} x {mixer.columns})"
    name = "multi-head" if mixer.kv_heads == mixer.heads else "multi-query" if mixer.kv_heads == 1 else f"grouped {mixer.heads}/{mixer.kv_heads}"
    window = "" if mixer.window is None else f", {'chunks' if mixer.chunked else 'window'} of {mixer.window}"
    return f"{name} attention{window}{'' if mixer.owns_cache else ', reads the cache of another layer'}"


def weights_words(model: Model) -> str:
    if model.quantisation.bits:
        return f"{model.quantisation.method}, {model.quantisation.bits:.3g} bits a weight"
    return f"{model.dtype_bytes * 8:g} bits a weight"


def engine_words(engine: Engine) -> str:
    return engine.name if engine.name != "vllm" else f"vllm {engine.version[0]}.{engine.version[1]}"
