"""A GGUF file as a model: its header says the shape, its size on the disk is the size of its weights."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

from tidegate.engines.gguf import read_header
from tidegate.sizing.model_config import MOST_LAYERS, Attention, Experts, Fields, Latent, Layer, Mixer, Mlp, Model, Recurrent, every
from tidegate.sizing.quantisation import Quantisation, gguf_file_type

#: Families whose layers look back by turns: every nth sees everything (llama.cpp, llama_hparams::set_swa_pattern).
_PATTERN = {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "cohere2": 4, "gpt-oss": 2, "llama4": 4, "phi3": 1, "exaone4": 4}
#: The name of the output's tensor, and within how many bytes a file has named all of its tensors.
_OUTPUT = struct.pack("<Q", 13) + b"output.weight"
_MOST_NAMES = 64 << 20
_NOT_GATED = {"gpt2", "gptneox", "falcon", "bloom", "mpt", "phi2", "starcoder2", "nemotron", "opt", "starcoder", "gptj"}


def read_gguf(path: Path) -> Model:
    """The model of a GGUF file. Raises BadRequest where the file cannot be read, or holds a vocabulary alone."""
    header = read_header(path)
    architecture = header.get("general.architecture")
    if not isinstance(architecture, str):
        raise Fields({}, str(path)).refused("its header names no general.architecture")
    prefix = f"{architecture}."
    fields = Fields({key.removeprefix(prefix): value for key, value in header.items() if key.startswith(prefix)}, str(path))
    if not fields.has("block_count"):
        raise fields.refused(f"it holds a vocabulary alone: there is no {prefix}block_count in it")
    hidden = fields.whole("embedding_length", most=1 << 20)
    count = fields.whole("block_count", most=MOST_LAYERS)
    layers = [_layer(fields, architecture, hidden, number, count) for number in range(count)]
    vocabulary = fields.whole("vocab_size", default=len(header.get("tokenizer.ggml.tokens") or ()) or None, most=1 << 24)
    bits = gguf_file_type(header["general.file_type"]) if isinstance(header.get("general.file_type"), int) else None
    parts = _parts(path)
    size = sum(part.stat().st_size for part in parts)
    # A file of less than a bit per weight of its feed-forward parts alone holds a header without weights.
    holds_weights = path.suffix != ".gz" and size * 8 > sum(_least(layer, hidden) for layer in layers)
    if not holds_weights and bits is None:
        raise fields.refused("it holds no weights, and its general.file_type is not one whose size is known")
    return Model(
        name=str(header.get("general.name") or path.stem), architecture=architecture, source=str(path), hidden=hidden, vocabulary=vocabulary,
        context=fields.whole("context_length") if fields.has("context_length") else None, layers=every(layers),
        tied=holds_weights and not any(_names_an_output(part) for part in parts), dtype_bytes=2,
        quantisation=Quantisation("gguf", bits or 0.0, frozenset()), weight_bytes=size if holds_weights else None,
        notes=() if holds_weights else ("the file holds no weights: their size is computed from its file type",),
    )


def _parts(path: Path) -> list[Path]:
    """The file, or all parts of a split one (`-00001-of-00005.gguf`) that are there."""
    split = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    parts = [path.with_name(f"{split[1]}-{number + 1:05d}-of-{split[2]}.gguf") for number in range(int(split[2]))] if split else [path]
    return [part for part in parts if part.is_file()]


def _names_an_output(path: Path) -> bool:
    """Whether the file names a tensor for the output; without one it shares the embeddings. Names stand behind the header, each behind its length."""
    try:
        with path.open("rb") as file:
            return _OUTPUT in file.read(_MOST_NAMES)
    except OSError:
        return True  # a part that cannot be read: the larger answer


def _least(layer: Layer, hidden: int) -> int:
    part = layer.feed_forward
    if isinstance(part, Experts):
        return part.count * part.width * hidden
    return part.width * hidden if part is not None else 0


def _item(fields: Fields, name: str, number: int, count: int, default: int | None = None) -> int:
    """A number that is the same for all layers, or a list of one a layer."""
    value: Any = fields.values.get(name)
    if isinstance(value, list):
        if len(value) != count:
            raise fields.refused(f"{name} names {len(value)} layers, and there are {count}")
        return Fields({name: value[number]}, fields.where).whole(name, least=0, most=1 << 24)
    return fields.whole(name, default=default, least=0, most=1 << 24)


def _layer(fields: Fields, architecture: str, hidden: int, number: int, count: int) -> Layer:
    return Layer(_mixers(fields, architecture, hidden, number, count), _feed_forward(fields, architecture, number, count))


def _mixers(fields: Fields, architecture: str, hidden: int, number: int, count: int) -> tuple[Mixer, ...]:
    heads = _item(fields, "attention.head_count", number, count, default=0)
    kv_heads = _item(fields, "attention.head_count_kv", number, count, default=heads)
    interval = fields.whole("full_attention_interval", default=4, most=MOST_LAYERS) if architecture in ("qwen3next", "qwen35", "qwen35moe") else 0
    recurrent = (number + 1) % interval != 0 if interval else fields.has("ssm.state_size") and kv_heads == 0
    mixers: list[Mixer] = []
    if recurrent or (fields.has("ssm.state_size") and architecture in ("falcon-h1", "mamba", "mamba2")):
        mixers.append(_recurrent(fields, hidden))
    if recurrent or heads == 0:
        return tuple(mixers)
    if fields.has("attention.kv_lora_rank"):
        rope = fields.whole("rope.dimension_count", most=1 << 16)
        key = fields.whole("attention.key_length_mla", "attention.key_length", most=1 << 16)
        value = fields.whole("attention.value_length_mla", "attention.value_length", most=1 << 16)
        rank, queries = fields.whole("attention.kv_lora_rank", most=1 << 16), fields.whole("attention.q_lora_rank", default=0, least=0, most=1 << 16)
        return (*mixers, Latent(heads, rank, rope, max(key - rope, 0), value, queries))
    if kv_heads == 0:
        return tuple(mixers)
    dim = fields.whole("attention.key_length", default=max(hidden // heads, 1), most=1 << 16)
    value_dim = fields.whole("attention.value_length", default=dim, most=1 << 16)
    return (*mixers, Attention(heads, kv_heads, dim, value_dim, _window(fields, architecture, number)))


def _window(fields: Fields, architecture: str, number: int) -> int | None:
    window = fields.whole("attention.sliding_window", default=0, least=0)
    if not window or architecture not in _PATTERN:
        return None
    step = _PATTERN[architecture]
    return window if step == 1 or (number + 1) % step else None


def _recurrent(fields: Fields, hidden: int) -> Recurrent:
    inner = fields.whole("ssm.inner_size", most=1 << 24)
    state = fields.whole("ssm.state_size", most=1 << 16)
    groups = fields.whole("ssm.group_count", default=0, least=0, most=1 << 16)
    heads = fields.whole("ssm.time_step_rank", default=1, most=1 << 20) if groups else inner
    channels = inner + 2 * groups * state
    kernel = fields.whole("ssm.conv_kernel", default=4, most=64)
    return Recurrent(heads, max(inner // heads, 1), state, channels, kernel, hidden * (2 * inner + channels))


def _feed_forward(fields: Fields, architecture: str, number: int, count: int) -> Mlp | Experts | None:
    gated = architecture not in _NOT_GATED
    experts = fields.whole("expert_count", default=0, least=0, most=1 << 16)
    if experts and number >= fields.whole("leading_dense_block_count", default=0, least=0, most=MOST_LAYERS):
        width = fields.whole("expert_feed_forward_length", default=_item(fields, "feed_forward_length", number, count), most=1 << 24)
        shared = fields.whole("expert_shared_count", default=0, least=0, most=1 << 10) * width
        shared = fields.whole("expert_shared_feed_forward_length", default=shared, least=0)
        return Experts(experts, width, fields.whole("expert_used_count", most=experts), shared, gated)
    width = _item(fields, "feed_forward_length", number, count, default=0)
    return Mlp(width, gated) if width else None
