"""A Hugging Face config.json as a model: the families' names for the same things, which layers attend to what, and where the experts are.

Rules by field, as the families' own modelling files read them (transformers, and vLLM's model files where they differ).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidegate.sizing.model_config import MOST_LAYERS, Attention, Experts, Fields, Latent, Layer, Mixer, Mlp, Model, Recurrent, every
from tidegate.sizing.quantisation import DTYPE_BITS, read_quantisation

#: Under these names a config of several parts keeps that of the language model.
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "talker_config")
#: Families whose feed-forward part has two matrices, not three.
_NOT_GATED = {
    "opt", "phi", "gpt2", "gpt_neo", "gpt_neox", "gptj", "falcon", "bloom", "mpt", "starcoder2", "gpt_bigcode", "nemotron", "nemotron_h", "codegen",
}
#: Families that tie the output to the embeddings where the config does not say.
_TIED = {"gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4_text", "cohere", "cohere2", "gpt2", "opt", "bloom", "falcon", "mpt"}
#: Architectures whose cache follows rules that are not written here. Guessing would be worse than saying so.
_UNKNOWN_CACHE = {"deepseek_v4": "its cache is compressed by ratios", "rwkv": "its states are not known", "xlstm": "its states are not known"}
#: Fields that give layers a shape of their own, each under rules that are not written here.
_UNKNOWN_FIELDS = {
    "block_configs": "its layers differ from each other", "num_key_value_heads_per_layer": "its layers have heads of their own numbers",
    "cross_attention_layers": "some of its layers look at images", "block_types": "its layers alternate with a recurrence that is not known",
}  # fmt: skip
_FULL = {"full_attention", "attention", "global", "full", "moe"}
_SLIDING = {"sliding_attention", "sliding", "local", "local_attention", "swa"}
_LINEAR = {"linear_attention", "mamba", "mamba2", "recurrent", "linear", "gdn", "kda", "conv"}


def from_config(values: Mapping[str, Any], where: str, *, name: str, weight_bytes: int | None = None) -> Model:
    """The model of a config's fields. Raises BadRequest where they do not say what is needed."""
    top = Fields(values, where)
    text = _text(top)
    kind = text.text("model_type") or top.text("model_type")
    if kind in _UNKNOWN_CACHE:
        raise text.refused(f"model_type is {kind}: {_UNKNOWN_CACHE[kind]}")
    if top.flag("is_encoder_decoder"):
        raise top.refused("it is an encoder-decoder model, and only decoders are planned")
    for name_of, why in _UNKNOWN_FIELDS.items():
        if text.has(name_of):
            raise text.refused(f"there is {name_of} in it: {why}")
    architectures = top.names("architectures") or []
    hidden = text.whole("hidden_size", "n_embd", "d_model", "dim", most=1 << 20)
    count = text.whole("num_hidden_layers", "n_layer", "num_layers", "n_layers", most=MOST_LAYERS)
    layers = _layers(text, kind, hidden, count)
    dtype = text.text("dtype") or text.text("torch_dtype") or top.text("dtype") or top.text("torch_dtype") or "bfloat16"
    if dtype not in DTYPE_BITS:
        raise text.refused(f"torch_dtype is {dtype!r}; known: {', '.join(sorted(DTYPE_BITS))}")
    notes = ["weights of the vision part are computed from its width and depth"] if top.has("vision_config") else []
    about = (top if top.has("quantization_config") else text).inner("quantization_config")
    if about is not None and about.has("kv_cache_scheme", "kv_cache_quant_algo"):
        notes.append("the checkpoint has a KV cache in fewer bits: give --kv-dtype fp8 where the engine follows it")
    return Model(
        name=name, architecture=architectures[0] if architectures else kind or "unnamed", source=where, hidden=hidden,
        vocabulary=text.whole("vocab_size", "padded_vocab_size", "n_vocab", most=1 << 24),
        context=_context(text), layers=every(layers),
        tied=text.flag("tie_word_embeddings", default=top.flag("tie_word_embeddings", default=kind in _TIED)),
        dtype_bytes=DTYPE_BITS[dtype] / 8,
        quantisation=read_quantisation(top if top.has("quantization_config", "compression_config") else text, count),
        vision_parameters=_vision(top), extra_parameters=_extra(text, hidden, count), weight_bytes=weight_bytes, notes=tuple(notes),
    )


def _text(top: Fields) -> Fields:
    """The fields of the language model, wherever a config of several parts keeps them."""
    for _ in range(3):
        for name in _NESTED:
            if top.has(name):
                inner = top.inner(name)
                assert inner is not None
                top = inner
                break
        else:
            break
    return top


def _context(text: Fields) -> int | None:
    if not text.has("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"):
        return None
    return text.whole("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")


# -- layers --


def _layers(text: Fields, kind: str, hidden: int, count: int) -> list[Layer]:
    pattern = text.text("hybrid_override_pattern")
    if pattern:
        return _override(text, hidden, count, pattern, kind)
    kinds = _kinds(text, kind, count)
    gated = kind not in _NOT_GATED
    shared_from = count - text.whole("num_kv_shared_layers", default=0, least=0, most=count)
    layers = []
    for number, one in enumerate(kinds):
        mixers = _mixers(text, hidden, one, owns_cache=number < shared_from)
        layers.append(Layer(mixers, _feed_forward(text, kind, hidden, number, gated=gated)))
    return layers


def _override(text: Fields, hidden: int, count: int, pattern: str, kind: str) -> list[Layer]:
    """Nemotron-H: one letter a layer, which is a mixer or a feed-forward part: M mamba, * attention, - dense, E experts."""
    if len(pattern) != count or set(pattern) - set("M*-E"):
        raise text.refused(f"hybrid_override_pattern should be {count} letters of M, *, - and E")
    gated = kind not in _NOT_GATED
    dense = Mlp(text.whole("intermediate_size", default=0, least=0, most=1 << 24), gated)
    made = {
        "M": lambda: Layer((_recurrent(text, hidden),), None),
        "*": lambda: Layer((_attention(text, hidden, None, owns_cache=True),), None),
        "-": lambda: Layer((), dense),
        "E": lambda: Layer((), _experts(text, gated)),
    }
    return [made[letter]() for letter in pattern]


def _kinds(text: Fields, kind: str, count: int) -> list[str]:
    """What each layer looks back with: full, sliding, chunked, linear, both."""
    listed = text.names("layer_types", count) or text.names("layers_block_type", count)
    if listed is not None:
        return [_known(text, one) for one in listed]
    linear = text.inner("linear_attn_config")
    if linear is not None and linear.has("kda_layers"):  # Kimi Linear counts from one
        recurrent = set(linear.wholes("kda_layers") or ())
        return ["linear" if number + 1 in recurrent else "full" for number in range(count)]
    if text.has("full_attention_interval"):
        every_nth = text.whole("full_attention_interval", most=MOST_LAYERS)
        return ["full" if (number + 1) % every_nth == 0 else "linear" for number in range(count)]
    if text.has("attn_layer_period"):  # Jamba
        period, offset = text.whole("attn_layer_period", most=MOST_LAYERS), text.whole("attn_layer_offset", default=0, least=0, most=MOST_LAYERS)
        return ["full" if number % period == offset else "linear" for number in range(count)]
    if text.has("attn_type_list"):  # MiniMax: 1 sees everything, 0 is lightning attention
        marks = text.wholes("attn_type_list") or []
        if len(marks) != count:
            raise text.refused(f"attn_type_list names {len(marks)} layers, and there are {count}")
        return ["full" if mark else "linear" for mark in marks]
    if text.has("attn_layer_indices"):  # Bamba
        attending = set(text.wholes("attn_layer_indices") or ())
        return ["full" if number in attending else "linear" for number in range(count)]
    if kind == "falcon_h1":
        return ["both"] * count
    if kind in ("mamba", "mamba2", "falcon_mamba"):
        return ["linear"] * count
    return _windows(text, kind, count)


def _known(text: Fields, one: str) -> str:
    if one in _FULL:
        return "full"
    if one in _SLIDING:
        return "sliding"
    if one in _LINEAR:
        return "linear"
    if one in ("chunked_attention", "chunked"):
        return "chunked"
    if one == "hybrid":
        return "both"
    known = ", ".join(sorted(_FULL | _SLIDING | _LINEAR | {"chunked_attention", "hybrid"}))
    raise text.refused(f"it has layers of the kind {one!r}, which is not known; known: {known}")


def _windows(text: Fields, kind: str, count: int) -> list[str]:
    if text.has("attention_chunk_size"):  # Llama 4: layers without rotary positions see everything
        no_rope = text.wholes("no_rope_layers")
        step = text.whole("no_rope_layer_interval", default=4, most=MOST_LAYERS)
        far = [one == 0 for one in no_rope] if no_rope else [(number + 1) % step == 0 for number in range(count)]
        if len(far) != count:
            raise text.refused(f"no_rope_layers names {len(far)} layers, and there are {count}")
        return ["full" if one else "chunked" for one in far]
    if not text.has("sliding_window") or not text.flag("use_sliding_window", default=True):
        return ["full"] * count
    if kind == "gemma2":
        return ["sliding" if number % 2 == 0 else "full" for number in range(count)]
    if text.has("sliding_window_pattern", "_sliding_window_pattern") or kind in ("gemma3", "gemma3_text", "cohere2"):
        step = text.whole("sliding_window_pattern", "_sliding_window_pattern", default=4 if kind == "cohere2" else 6, most=MOST_LAYERS)
        return ["full" if (number + 1) % step == 0 else "sliding" for number in range(count)]
    full = text.whole("max_window_layers", default=0, least=0, most=MOST_LAYERS) if text.has("use_sliding_window") else 0
    return ["full" if number < full else "sliding" for number in range(count)]


def _mixers(text: Fields, hidden: int, kind: str, *, owns_cache: bool) -> tuple[Mixer, ...]:
    if kind == "linear":
        return (_recurrent(text, hidden),)
    if kind == "both":
        return (_attention(text, hidden, None, owns_cache=owns_cache), _recurrent(text, hidden))
    if text.has("kv_lora_rank"):
        return (_latent(text),)
    if kind == "full":
        return (_attention(text, hidden, None, owns_cache=owns_cache),)
    name = "attention_chunk_size" if kind == "chunked" else "sliding_window"
    return (_attention(text, hidden, text.whole(name), owns_cache=owns_cache, chunked=kind == "chunked"),)


def _attention(text: Fields, hidden: int, window: int | None, *, owns_cache: bool, chunked: bool = False) -> Attention:
    heads = text.whole("num_attention_heads", "n_head", "n_heads", "num_heads", most=1 << 16)
    dim = text.whole("head_dim", "attention_head_dim", "kv_channels", default=max(hidden // heads, 1), most=1 << 16)
    kv_heads = _kv_heads(text, heads)
    if window is None and text.has("global_head_dim"):  # Gemma 4: layers that see everything have heads of their own size
        dim = text.whole("global_head_dim", most=1 << 16)
        kv_heads = text.whole("num_global_key_value_heads", default=kv_heads, most=1 << 16)
    if heads % kv_heads:
        raise text.refused(f"num_attention_heads is {heads} and num_key_value_heads {kv_heads}: the first should be a multiple of the second")
    gated = text.flag("attn_output_gate") or text.text("model_type") in ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
    return Attention(heads, kv_heads, dim, text.whole("v_head_dim", default=dim, most=1 << 16), window, chunked, owns_cache, gated)


def _kv_heads(text: Fields, heads: int) -> int:
    if text.has("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv", "n_kv_heads"):
        return text.whole("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv", "n_kv_heads", most=1 << 16)
    inner = text.inner("attn_config")
    if inner is not None and inner.has("kv_n_heads"):
        return inner.whole("kv_n_heads", most=1 << 16)
    return 1 if text.flag("multi_query") else heads


def _latent(text: Fields) -> Latent:
    return Latent(
        heads=text.whole("num_attention_heads", most=1 << 16), rank=text.whole("kv_lora_rank", most=1 << 16),
        rope_dim=text.whole("qk_rope_head_dim", most=1 << 16), nope_dim=text.whole("qk_nope_head_dim", least=0, most=1 << 16),
        value_dim=text.whole("v_head_dim", most=1 << 16), query_rank=text.whole("q_lora_rank", default=0, least=0, most=1 << 16),
        index_dim=text.whole("index_head_dim", default=0, least=0, most=1 << 16),
    )


def _recurrent(text: Fields, hidden: int) -> Recurrent:
    """A gated delta net (Qwen3-Next), a Kimi delta attention, a Mamba-2 or a Mamba-1 state, by the fields that are there."""
    if text.has("linear_num_value_heads"):
        keys, values = text.whole("linear_num_key_heads", most=1 << 16), text.whole("linear_num_value_heads", most=1 << 16)
        key_dim, value_dim = text.whole("linear_key_head_dim", most=1 << 16), text.whole("linear_value_head_dim", most=1 << 16)
        mixed = 2 * keys * key_dim + values * value_dim
        weights = hidden * (mixed + values * value_dim + 2 * values) + values * value_dim * hidden
        return Recurrent(values, value_dim, key_dim, mixed, text.whole("linear_conv_kernel_dim", default=4, most=64), weights, _state_bytes(text))
    if text.has("attn_type_list"):  # lightning attention: the sum of keys times values, without a convolution
        seen = _attention(text, hidden, None, owns_cache=True)
        return Recurrent(seen.heads, seen.head_dim, seen.head_dim, 0, 1, 5 * hidden * seen.heads * seen.head_dim)
    if text.has("conv_L_cache"):  # LFM2: a gated short convolution, without a state behind it
        return Recurrent(hidden, 0, 0, hidden, text.whole("conv_L_cache", most=64), 4 * hidden * hidden)
    inner = text.inner("linear_attn_config")
    if inner is not None and inner.has("num_heads"):  # Kimi Linear keeps its state in 32 bits (vLLM, mamba_utils.py, kda_state_dtype)
        heads, dim = inner.whole("num_heads", most=1 << 16), inner.whole("head_dim", most=1 << 16)
        weights = 4 * hidden * heads * dim + 2 * (hidden * dim + dim * heads * dim) + hidden * heads
        return Recurrent(heads, dim, dim, 3 * heads * dim, inner.whole("short_conv_kernel_size", default=4, most=64), weights, 4)
    state = text.whole("mamba_d_state", "ssm_state_size", "state_size", "d_state", default=16 if text.has("mamba_dt_rank") else None, most=1 << 16)
    kernel = text.whole("mamba_d_conv", "conv_kernel", "d_conv", default=4, most=64)
    if text.has("mamba_n_heads", "mamba_num_heads", "num_heads"):
        heads = text.whole("mamba_n_heads", "mamba_num_heads", "num_heads", most=1 << 16)
        dim = text.whole("mamba_d_head", "mamba_head_dim", "head_dim", most=1 << 16)
        groups = text.whole("mamba_n_groups", "n_groups", default=1, most=1 << 16)
        inner_size = heads * dim
        channels = inner_size + 2 * groups * state
        weights = hidden * (inner_size + channels + heads) + inner_size * hidden
        return Recurrent(heads, dim, state, channels, kernel, weights, _state_bytes(text))
    inner_size = text.whole("mamba_expand", "expand", default=2, most=64) * hidden
    rank = text.whole("mamba_dt_rank", "time_step_rank", default=-(-hidden // 16), most=1 << 20)
    weights = 3 * hidden * inner_size + inner_size * (rank + 2 * state) + rank * inner_size + inner_size * state
    return Recurrent(inner_size, 1, state, inner_size, kernel, weights, _state_bytes(text))


def _state_bytes(text: Fields) -> int:
    """vLLM keeps a state in the model's type, unless the config names another."""
    name = text.text("mamba_ssm_dtype")
    return DTYPE_BITS[name] // 8 if name in DTYPE_BITS else 2


# -- feed-forward --


def _feed_forward(text: Fields, kind: str, hidden: int, number: int, *, gated: bool) -> Mlp | Experts | None:
    if _has_experts(text, number):
        return _experts(text, gated)
    if kind in ("mamba", "mamba2", "falcon_mamba"):
        return None
    if text.has("intermediate_size_mlp"):  # Llama 4: dense layers are wider than an expert
        return Mlp(text.whole("intermediate_size_mlp", most=1 << 24), gated)
    names = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff")
    widths = text.values.get("intermediate_size")
    if isinstance(widths, list):  # Gemma 3n: one for each layer
        if number >= len(widths):
            raise text.refused(f"intermediate_size names {len(widths)} layers, and there are more")
        return Mlp(Fields({"intermediate_size": widths[number]}, text.where).whole("intermediate_size", most=1 << 24), gated)
    if text.has(*names):
        return Mlp(text.whole(*names, most=1 << 24), gated)
    if gated and kind:
        raise text.refused("there is no intermediate_size in it")
    return Mlp(text.whole("expansion_ratio", default=4, most=64) * hidden, gated)


def _has_experts(text: Fields, number: int) -> bool:
    if not text.has("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        return False
    if text.whole("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", least=0, most=1 << 16) == 0:
        return False
    if number < text.whole("first_k_dense_replace", default=0, least=0, most=MOST_LAYERS) or number in (text.wholes("mlp_only_layers") or ()):
        return False
    if text.has("expert_layer_period"):
        return number % text.whole("expert_layer_period", most=MOST_LAYERS) == text.whole("expert_layer_offset", default=0, least=0, most=MOST_LAYERS)
    if isinstance(text.values.get("moe_layer_freq"), list):
        return bool((text.wholes("moe_layer_freq") or [])[number : number + 1] != [0])
    step = text.whole("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq", default=1, most=MOST_LAYERS)
    return (number + 1) % step == 0 if text.has("decoder_sparse_step", "interleave_moe_layer_step") else number % step == 0


def _experts(text: Fields, gated: bool) -> Experts:
    count = text.whole("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", most=1 << 16)
    width = text.whole("moe_intermediate_size", "expert_intermediate_size", "intermediate_size", most=1 << 24)
    of_all = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
    if text.has(*of_all):
        shared = text.whole(*of_all, least=0, most=1 << 24)
    elif text.has("n_shared_experts", "num_shared_experts"):
        shared = text.whole("n_shared_experts", "num_shared_experts", least=0, most=1 << 10) * width
    else:
        shared = width if text.has("intermediate_size_mlp") else 0  # Llama 4: one shared expert as wide as a routed one
    active = text.whole("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k", most=count)
    return Experts(count, width, active, shared, gated)


# -- the rest --


def _vision(top: Fields) -> int:
    """Weights of a vision transformer by its width and depth: four square matrices of attention and two (three if gated) of the feed-forward part."""
    about = top.inner("vision_config")
    if about is None:
        return 0
    width = about.whole("hidden_size", "embed_dim", "width", default=0, least=0, most=1 << 20)
    depth = about.whole("num_hidden_layers", "depth", "layers", default=0, least=0, most=MOST_LAYERS)
    inner = about.whole("intermediate_size", default=4 * width, least=0, most=1 << 24)
    matrices = 3 if about.text("hidden_act") in ("silu", "swiglu") else 2
    patch = about.whole("patch_size", default=14, most=1 << 10)
    return depth * (4 * width * width + matrices * width * inner) + 3 * patch * patch * width


def _extra(text: Fields, hidden: int, count: int) -> int:
    """Embeddings per layer (Gemma 3n and 4)."""
    per_layer = text.whole("hidden_size_per_layer_input", default=0, least=0, most=1 << 20)
    if not per_layer:
        return 0
    return text.whole("vocab_size_per_layer_input", default=0, least=0, most=1 << 24) * per_layer * count + count * 2 * hidden * per_layer
