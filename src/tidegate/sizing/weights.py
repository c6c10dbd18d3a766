"""Bytes of weights that one rank holds: which matrices are cut by tensor parallelism, and which every rank has whole.

As vLLM shards them (vllm/model_executor/layers): attention by heads, keys and values by their own heads with copies where there are fewer of them
than ranks, feed-forward parts by width, embeddings and output by a vocabulary that is padded to a multiple of 64. Routers, norms and the
compressing matrices of latent attention are whole on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tidegate.sizing.model_config import Attention, Experts, Latent, Layer, Mixer, Mlp, Model
from tidegate.sizing.quantisation import Part

VOCABULARY_PAD = 64


def padded_vocabulary(vocabulary: int) -> int:
    return -(-vocabulary // VOCABULARY_PAD) * VOCABULARY_PAD


def kv_heads_of(kv_heads: int, tp: int) -> int:
    """Heads of keys and values on one rank: at least one, so that fewer heads than ranks are held more than once."""
    return max(1, kv_heads // tp)


def stages(count: int, pp: int) -> list[tuple[int, int]]:
    """The layers of each pipeline stage, as vLLM cuts them (distributed/utils.py, get_pp_indices): the remainder goes to the last stages but one."""
    sizes = [count // pp] * pp
    for extra in range(2, 2 + count % pp):
        sizes[-extra] += 1
    starts = [sum(sizes[:stage]) for stage in range(pp)]
    return [(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def weight_bytes(model: Model, tp: int, first: int, last: int) -> float:
    """Bytes on one rank of the stage that holds the layers `first` up to `last`."""
    own = model.dtype_bytes * 8
    bits = 0.0
    for layer, times in Counter(model.layers[first:last]).items():
        bits += times * sum(count * model.quantisation.bits_of(part, own) for part, count in _layer(model, layer, tp))
        bits += times * sum(count * own for count in _plain(model, layer, tp))
    table = padded_vocabulary(model.vocabulary) // tp * model.hidden
    ends = (first == 0) + (last == len(model.layers))
    if model.quantisation.method == "gguf" and model.quantisation.bits:
        own = model.quantisation.bits
    if model.tied:
        bits += table * own * min(ends, 1)
    else:
        bits += (table * own if first == 0 else 0.0) + (table * model.quantisation.bits_of("head", own) if last == len(model.layers) else 0.0)
    if first == 0:
        bits += (model.vision_parameters / tp) * model.quantisation.bits_of("vision", own) + model.extra_parameters * own
    return bits / 8


def total_bytes(model: Model) -> float:
    """Bytes of all weights on one card."""
    return weight_bytes(model, 1, 0, len(model.layers))


def _layer(model: Model, layer: Layer, tp: int) -> list[tuple[Part, float]]:
    """What is quantised together, in numbers on one rank."""
    found: list[tuple[Part, float]] = [
        ("attention" if isinstance(mixer, Attention | Latent) else "recurrent", _mixer(model.hidden, mixer, tp)) for mixer in layer.mixers
    ]
    part = layer.feed_forward
    if isinstance(part, Mlp):
        found.append(("mlp", (3 if part.gated else 2) * model.hidden * part.width / tp))
    elif isinstance(part, Experts):
        matrices = 3 if part.gated else 2
        hidden, width = model.hidden, part.width / tp
        if model.quantisation.method == "mxfp4":  # kernels want multiples of 256 and 128 (vLLM, quantization/mxfp4.py)
            hidden, width = -(-hidden // 256) * 256, -(-part.width // tp // 128) * 128
        found.append(("experts", part.count * matrices * hidden * width))
        found.append(("shared", matrices * model.hidden * part.shared_width / tp))
    return found


def _plain(model: Model, layer: Layer, tp: int) -> list[float]:
    """What stays in the model's own type whatever the quantisation: routers, norms, and copies of matrices that latent attention unfolds at start."""
    part = layer.feed_forward
    router = model.hidden * part.count if isinstance(part, Experts) else 0
    unfolded = sum(mixer.rank * (mixer.heads / tp) * (mixer.nope_dim + mixer.value_dim) for mixer in layer.mixers if isinstance(mixer, Latent))
    return [router, 2.0 * model.hidden, unfolded]


def _mixer(hidden: int, mixer: Mixer, tp: int) -> float:
    if isinstance(mixer, Attention):
        heads = mixer.heads / tp
        queries = hidden * heads * mixer.head_dim * (2 if mixer.gated else 1)
        keys_values = hidden * kv_heads_of(mixer.kv_heads, tp) * (mixer.head_dim + mixer.value_dim) if mixer.owns_cache else 0
        return queries + keys_values + heads * mixer.value_dim * hidden
    if isinstance(mixer, Latent):
        width = (mixer.heads / tp) * (mixer.nope_dim + mixer.rope_dim)
        queries = hidden * mixer.query_rank + mixer.query_rank * width if mixer.query_rank else hidden * width
        compressed = hidden * (mixer.rank + mixer.rope_dim)
        unfold = mixer.rank * (mixer.heads / tp) * (mixer.nope_dim + mixer.value_dim)
        return queries + compressed + unfold + (mixer.heads / tp) * mixer.value_dim * hidden
    return mixer.parameters / tp


def widest(model: Model, layers: Sequence[Layer], tp: int) -> tuple[int, Experts | None]:
    """The widest dense feed-forward part on a rank (numbers between its two halves, gate included) and the largest mixture of experts, if any."""
    dense, experts = 0, None
    for layer in set(layers):
        part = layer.feed_forward
        if isinstance(part, Mlp):
            dense = max(dense, part.width * (3 if part.gated else 2) // tp)
        elif isinstance(part, Experts):
            dense = max(dense, part.shared_width * (3 if part.gated else 2) // tp)
            experts = part if experts is None or part.width * part.active > experts.width * experts.active else experts
    return dense, experts
