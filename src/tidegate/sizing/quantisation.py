"""How many bits a weight takes, by the part of the model that it belongs to, and how many a number of the KV cache.

Bits count what travels with the weights: scales and zero points per group. Sources: the formats' own definitions (GPTQ and AWQ: packed 4-bit
weights, one 16-bit scale and one packed zero point per group; OCP Microscaling MXFP4: an 8-bit scale per 32; NVFP4: an 8-bit scale per 16;
bitsandbytes NF4: a 32-bit scale per 64, or 8 bits plus a share with double quantisation; ggml: the block structures of ggml-common.h).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tidegate.core.errors import BadRequest
from tidegate.core.plugins import nearest

if TYPE_CHECKING:
    from tidegate.sizing.model_config import Fields

#: Parts of a model that checkpoints quantise together or leave alone.
Part = Literal["attention", "recurrent", "mlp", "experts", "shared", "head", "vision"]
#: A weight's names as checkpoints spell them, by which lists of exceptions are matched.
_NAMES: dict[Part, tuple[str, ...]] = {
    "attention": ("model.layers.1.self_attn.q_proj",),
    "recurrent": ("model.layers.1.linear_attn.in_proj_qkv", "model.layers.1.mamba.in_proj"),
    "mlp": ("model.layers.1.mlp.gate_proj",),
    "experts": ("model.layers.1.mlp.experts.1.gate_proj",),
    "shared": ("model.layers.1.mlp.shared_expert.gate_proj", "model.layers.1.mlp.shared_experts.gate_proj"),
    "head": ("lm_head",),
    "vision": ("visual.blocks.1.attn.qkv",),
}
_METHODS = ("gptq", "awq", "auto-round", "fp8", "fbgemm_fp8", "compressed-tensors", "quark", "mxfp4", "modelopt", "modelopt_fp4", "bitsandbytes")

#: Bits of a number, by the name an engine or a checkpoint gives the type.
DTYPE_BITS = {"float32": 32, "float": 32, "bfloat16": 16, "float16": 16, "half": 16, "float8_e4m3fn": 8, "float8_e5m2": 8, "int8": 8, "uint8": 8}
#: Bits of a number in the KV cache. ggml's types carry a 16-bit scale per 32 numbers (two in the _1 types), nvfp4 an 8-bit one per 16.
KV_BITS = {
    "bf16": 16.0, "bfloat16": 16.0, "fp16": 16.0, "f16": 16.0, "float16": 16.0, "fp32": 32.0, "f32": 32.0, "float32": 32.0,
    "fp8": 8.0, "fp8_e4m3": 8.0, "fp8_e5m2": 8.0, "int8": 8.0, "nvfp4": 4.5, "q8_0": 8.5, "q5_1": 6.0, "q5_0": 5.5, "q4_1": 5.0,
    "q4_0": 4.5, "iq4_nl": 4.5,
}
#: ggml file types (general.file_type): their mean bits per weight in published models of 7 to 70 billion weights (llama.cpp, tools/quantize).
_GGUF_BITS = {
    0: 32.0, 1: 16.0, 2: 4.55, 3: 5.0, 7: 8.5, 8: 5.54, 9: 6.0, 10: 2.96, 11: 3.41, 12: 3.89, 13: 4.27, 14: 4.58, 15: 4.85, 16: 5.52, 17: 5.67,
    18: 6.56, 19: 2.2, 20: 2.31, 22: 3.3, 23: 3.06, 24: 1.75, 25: 4.5, 26: 3.44, 27: 3.66, 28: 2.5, 29: 2.7, 30: 4.25, 31: 1.75, 32: 16.0, 38: 4.25,
}


@dataclass(frozen=True, slots=True)
class Quantisation:
    """A method, its bits per weight (scales included), and the parts it leaves in the model's own type."""

    method: str
    bits: float
    kept: frozenset[Part] = frozenset({"head", "vision"})
    group: int = 0

    def bits_of(self, part: Part, own: float) -> float:
        """Bits of a weight of `part`; `own`: bits of the model's own type."""
        return own if not self.bits or part in self.kept else self.bits


NONE = Quantisation("none", 0.0)
#: Methods that can be asked for in a what-if: weight-only and runtime quantisation of everything but embeddings and head.
WHAT_IF = {"fp8": Quantisation("fp8", 8.0), "int4": Quantisation("int4", 4.16, group=128)}
#: The same for GGUF files, where everything is in the file's type.
WHAT_IF_GGUF = {"Q8_0": Quantisation("gguf", 8.5, frozenset()), "Q4_K_M": Quantisation("gguf", 4.85, frozenset())}


def kv_bits(name: str) -> float:
    """Raises BadRequest for a type that is not known."""
    if name not in KV_BITS:
        raise BadRequest(f"There is no KV cache type {name!r}. {nearest(name, KV_BITS)}", hint=f"Known: {', '.join(sorted(KV_BITS))}.")
    return KV_BITS[name]


def gguf_file_type(number: int) -> float | None:
    """Mean bits per weight of a GGUF file's type; None where it is not known."""
    return _GGUF_BITS.get(number)


def read_quantisation(config: Fields, layers: int) -> Quantisation:
    """What `quantization_config` of a model of so many layers says. Raises BadRequest for a method that is not known, or one that lacks what decides
    its size."""
    about = config.inner("quantization_config") or config.inner("compression_config")
    if about is None:
        return NONE
    method = about.text("quant_method") or about.text("quant_algo").lower()
    kept = _kept(about, layers)
    if method in ("gptq", "awq", "auto-round", "auto_round", "awq_marlin", "gptq_marlin"):
        bits, group = about.whole("bits", "w_bit", least=2, most=8), _group(about)
        return Quantisation(method, bits + ((16 + bits) / group if group else 0.0), kept, group)
    if method in ("fp8", "fbgemm_fp8"):
        return Quantisation(method, 8.0, kept)
    if method == "mxfp4":
        return Quantisation(method, 4.25, kept)
    if method == "bitsandbytes":
        four = about.flag("load_in_4bit", "_load_in_4bit")
        return Quantisation(method, (4.127 if about.flag("bnb_4bit_use_double_quant") else 4.5) if four else 8.0, kept)
    if method in ("modelopt", "modelopt_fp4", "nvfp4", "fp4"):
        algorithm = (about.text("quant_algo") or method).lower()
        return Quantisation(method, 4.5 if "fp4" in algorithm else 8.0, kept)
    if method in ("compressed-tensors", "compressed_tensors", "quark"):
        return _compressed(about, method, kept)
    raise about.refused(f"quant_method is {method or 'missing'!r}. {nearest(method, _METHODS)}")


def _group(about: Fields) -> int:
    """Weights per scale; -1 is one scale a row, which weighs nothing."""
    size = about.whole("group_size", "q_group_size", default=128, least=-1, most=1 << 16)
    return size if size > 0 else 0


def _compressed(about: Fields, method: str, kept: frozenset[Part]) -> Quantisation:
    groups = about.inner("config_groups")
    for name in groups.values if groups is not None else ():
        assert groups is not None
        one = groups.inner(name)
        weights = one.inner("weights") if one is not None else None
        if weights is None:
            continue
        bits = weights.whole("num_bits", least=2, most=16)
        group = weights.whole("group_size", default=-1, least=-1, most=1 << 16)
        scale = 8 if weights.text("type") == "float" and bits == 4 else 16
        return Quantisation(method, bits + (scale / group if group > 0 else 0.0), kept, max(group, 0))
    raise about.refused("config_groups does not say how many bits a weight has")


def _kept(about: Fields, layers: int) -> frozenset[Part]:
    """The parts that a list of exceptions names, by name, by prefix or by pattern (`re:...`). A part that it names in a few layers only, often the
    first and the last, is not kept: most of it is quantised."""
    counts: dict[Part, float] = dict.fromkeys(_NAMES, 0.0)
    for key in ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules"):
        for pattern in about.names(key) or ():
            weight = 1.0 if re.search(r"layers\.\d+\.", pattern) and not pattern.startswith("re:") else float(layers)
            for part, names in _NAMES.items():
                counts[part] += weight * any(_names(pattern, name) for name in names)
    return frozenset({"head", "vision", *(part for part, count in counts.items() if count >= layers / 2)})


def _names(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], name) is not None
        except re.error:
            return False
    # Lists name each layer (`model.layers.31.self_attn`): here every layer has the number one.
    plain = re.sub(r"\.\d+(?=\.|$)", ".1", pattern.replace("*", "")).strip(".")
    if plain in ("model.layers.1", "model.layers", "model", "", "layers.1"):
        return False  # a whole layer, often the first or the last: a small part of the whole
    return name == plain or name.startswith(plain + ".") or f".{plain}." in f".{name}."
