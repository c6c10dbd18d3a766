"""What a rank's memory holds beside the KV cache, each term as a band: low, expected, high.

Sources of the rules and figures:
- The budget, what is subtracted from it and in which order: vLLM, vllm/v1/worker/gpu_worker.py (determine_available_memory).
- Activation: the larger of two peaks of vLLM's profiling run. The step: for each token of it the halves of the widest feed-forward part and three
  vectors of the hidden size; a mixture of experts adds its two workspaces. The sampler: for each sequence and word of the vocabulary 14 bytes
  (16-bit logits, and 32-bit logits, probabilities and a copy), 38 before vLLM 0.17, which sorted with 64-bit indices.
- Non-torch memory and CUDA graphs: start-up logs of vLLM 0.15 to 0.19 on H100 (llm-d-incubation/llm-d-planner, pull request 205, and
  docs/empirical-vllm-memory-results.md). Before 0.21 graphs came on top of the budget; since then they are inside it
  (noonghunna/club-3090, issue 104, prints vLLM's own words).
- The defaults of a step's tokens and of sequences: vLLM, engine/arg_utils.py: 8192 and 1024 on cards of 70 GiB and more that are no A100, else 2048
  and 256. The share of memory: 0.9, 0.92 since 0.20.
- llama.cpp: the compute buffer is a micro-batch of logits (ollama/ollama, issue 16416: 796 MiB at 1024 tokens and a vocabulary of 201,088).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.core.errors import BadRequest
from tidegate.sizing.cards import Card
from tidegate.sizing.model_config import Experts, Latent, Layer, Model
from tidegate.sizing.weights import padded_vocabulary, widest

GIB = 1 << 30
#: Until this version sampling took more memory per logit.
_LEAN_SAMPLER = (0, 17)
#: Since this version windows save memory, and the number of sequences depends on the card.
HYBRID_CACHE = (0, 10)
#: Since this version graphs are counted inside the share of memory.
GRAPHS_INSIDE = (0, 21)
#: Since this version the log's "GPU KV cache size" is the concurrency at the full length, times that length.
TOKENS_BY_CONCURRENCY = (0, 20)
_LARGER_RUNTIME = (0, 18)
#: The newest version of which logs were looked at.
NEWEST = (0, 26)

#: How far the expected figure was off, on start-up logs: measured divided by expected, lowest and highest. benchmarks/results/plan.json.
_WEIGHTS_BAND = (0.99, 1.08)
_ACTIVATION_BAND = (0.8, 1.35)


@dataclass(frozen=True, slots=True)
class Band:
    """Bytes: at least, expected, at most."""

    low: float
    mid: float
    high: float

    @classmethod
    def exact(cls, value: float) -> Band:
        return cls(value, value, value)

    @classmethod
    def around(cls, value: float, low: float, high: float) -> Band:
        return cls(value * low, value, value * high)


@dataclass(frozen=True, slots=True)
class Engine:
    """What an engine is started with. `version`: of vLLM."""

    name: str = "vllm"
    version: tuple[int, int] = NEWEST
    step_tokens: int = 8192
    sequences: int = 1024
    share: float = 0.92
    graphs: bool = True


def version_of(text: str) -> tuple[int, int]:
    """Raises BadRequest where the text is no version."""
    found = re.fullmatch(r"v?(\d{1,3})\.(\d{1,4})(\..*)?", text)
    if not found:
        raise BadRequest(f"{text!r} is no version of an engine.", hint="Give two numbers: --engine-version 0.19.")
    return int(found[1]), int(found[2])


def defaults(version: tuple[int, int], card: Card) -> tuple[int, int, float]:
    """vLLM's own step tokens, sequences and share of memory on this card."""
    large = card.visible_gib >= 70 and not card.name.startswith("A100")
    sequences = 1024 if large and version >= (0, 8) else 256
    return (8192 if large else 2048), sequences, 0.92 if version >= (0, 20) else 0.9


def weights_band(value: float, *, known: bool) -> Band:
    return Band.exact(value) if known else Band.around(value, *_WEIGHTS_BAND)


def activation(model: Model, layers: Sequence[Layer], engine: Engine, tp: int, *, last: bool, pp: int) -> Band:
    """The peak of one step on a rank of the stage that holds `layers`."""
    size = 2.0 if model.dtype_bytes < 4 else 4.0
    dense, experts = widest(model, layers, tp)
    step = engine.step_tokens * size * (dense + 3 * model.hidden + (4 * model.hidden if pp > 1 else 0))
    workspace = 0.0
    if experts is not None and model.quantisation.method != "mxfp4":  # whose kernels need no workspace of that size
        width = experts.width // tp
        workspace = engine.step_tokens * experts.active * size * (max(2 * width, model.hidden) + max(width, model.hidden))
    sampler = 0.0
    if last:
        per_logit = 14 if engine.version >= _LEAN_SAMPLER else 38
        sequences = min(engine.sequences, engine.step_tokens)
        sampler = per_logit * sequences * padded_vocabulary(model.vocabulary) + 3 * size * engine.step_tokens * model.hidden
    band = Band.around(max(step, sampler) + workspace, *_ACTIVATION_BAND)
    seen = 0.9 * GIB if model.vision_parameters else 0.0  # the vision part is profiled with the largest image
    latent = 0.3 * GIB if any(isinstance(mixer, Latent) for layer in layers for mixer in layer.mixers) else 0.0
    return Band(band.low, band.mid, band.high + seen + latent)


def non_torch(engine: Engine, card: Card, tp: int, pp: int) -> Band:
    """The CUDA context's growth, libraries, and the buffers of collective operations."""
    if tp == 1:
        mid = 0.25 if engine.version >= _LARGER_RUNTIME and pp == 1 else 0.1
        return Band(0.02 * GIB, mid * GIB, 0.5 * GIB)
    if engine.version >= _LARGER_RUNTIME and card.fabric:
        return Band(0.6 * GIB, 2.1 * GIB, 2.3 * GIB)
    return Band(0.2 * GIB, 0.55 * GIB, 1.8 * GIB)


def graphs(layers: Sequence[Layer], engine: Engine) -> Band:
    """CUDA graphs of the decode steps: a part for the pool, a part per layer, and in proportion to the batch sizes that are captured. Those of
    experts were up to 2.4 times as large as expected."""
    if not engine.graphs:
        return Band.exact(0)
    largest = min(512, 2 * engine.sequences)
    sizes = 3 + min(largest, 256) // 8 + max(0, largest - 256) // 16 if largest >= 8 else 3
    mid = (0.35 + 0.0175 * len(layers)) * sizes / 51
    experts = any(isinstance(layer.feed_forward, Experts) for layer in layers)
    return Band.around(mid * GIB, 0.6, 2.5 if experts else 1.4)


def llama_compute(model: Model, micro_batch: int) -> Band:
    """llama.cpp's compute buffer: the logits of a micro-batch in 32 bits, and what its layers need beside them."""
    return Band.around(4.0 * micro_batch * model.vocabulary + 24.0 * micro_batch * model.hidden, 0.7, 1.6)
