"""From what a person writes on the command line to a plan: defaults of the engine and the card, bounds, and what a running engine says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from tidegate.core.errors import BadRequest
from tidegate.core.plugins import nearest
from tidegate.sizing import memory
from tidegate.sizing.cards import Card, find_card
from tidegate.sizing.memory import Engine
from tidegate.sizing.model_config import Model, read_model
from tidegate.sizing.observe import Comparison, Observed, compare, observe
from tidegate.sizing.plan import Plan, plan
from tidegate.sizing.quantisation import KV_BITS, kv_bits
from tidegate.sizing.rank import Wish

ENGINES = ("auto", "vllm", "llama.cpp")
_NEAR = 1e5


@dataclass(frozen=True, slots=True)
class Options:
    """The command line's own words; None is the engine's or the card's default."""

    gpu: str | None = None
    gpu_memory: float | None = None
    tp: int = 1
    pp: int = 1
    engine: str = "auto"
    engine_version: str | None = None
    kv_dtype: str = "auto"
    length: int | None = None
    concurrency: int = 1
    share: float | None = None
    step_tokens: int | None = None
    sequences: int | None = None
    block: int = 16
    micro_batch: int = 512
    prefix_caching: bool = True
    cuda_graphs: bool = True
    draft_tokens: int = 0
    weights: float | None = None
    activation: float | None = None
    non_torch: float | None = None
    graphs: float | None = None
    qps: float | None = None
    prompt_tokens: int = 1024
    answer_tokens: int = 256
    slo: float | None = None
    observe: str | None = None


def make_plan(path: Path, options: Options, *, api_key: str | None = None) -> tuple[Plan, Comparison | None]:
    """The plan, and beside it what a running engine says where one is named. Raises BadRequest and EngineError with the way out."""
    model = read_model(path)
    seen = observe(options.observe, api_key=api_key) if options.observe else None
    made = plan(model, wish(model, options, seen))
    return made, compare(made.blocks * made.block_tokens, seen) if seen is not None else None


def wish(model: Model, options: Options, seen: Observed | None = None) -> Wish:
    """What is asked, with the defaults filled in; what a running engine says of itself takes the place of what is not given."""
    _finite(options)
    card = _card(options)
    name = _engine_name(model, options, seen)
    version = memory.NEWEST if options.engine_version is None else memory.version_of(options.engine_version)
    step, sequences, share = memory.defaults(version, card)
    if seen is not None and seen.share is not None:
        share = seen.share
    if name == "llama.cpp":
        share = 1.0
    kv_dtype = options.kv_dtype
    if kv_dtype == "auto" and seen is not None and seen.kv_dtype in KV_BITS:
        kv_dtype = seen.kv_dtype
    if kv_dtype != "auto":
        kv_bits(kv_dtype)
    share = options.share if options.share is not None else share
    engine = Engine(name, version, options.step_tokens or step, options.sequences or sequences, share, options.cuda_graphs)
    return Wish(
        card=card, engine=engine, tp=options.tp, pp=options.pp, kv_dtype=kv_dtype,
        concurrency=seen.slots if seen is not None and seen.slots is not None and options.concurrency == 1 else options.concurrency,
        length=options.length or (seen.length if seen is not None else None), block=options.block, prefix_caching=options.prefix_caching,
        draft_tokens=options.draft_tokens, micro_batch=options.micro_batch, weights_gib=options.weights, activation_gib=options.activation,
        non_torch_gib=options.non_torch, graphs_gib=options.graphs, qps=options.qps, prompt_tokens=options.prompt_tokens,
        answer_tokens=options.answer_tokens, slo=options.slo,
    )  # fmt: skip


def _card(options: Options) -> Card:
    if options.gpu is None and options.gpu_memory is None:
        raise BadRequest("No card is named.", hint="--gpu NAME for a known one, --gpu-memory with the GiB that a program sees on any other.")
    if options.gpu is None:
        assert options.gpu_memory is not None
        return Card("card", options.gpu_memory, None, "as given")
    card = find_card(options.gpu)
    if options.gpu_memory is None:
        return card
    return Card(card.name, options.gpu_memory, card.bandwidth_gbs, "as given", card.fabric)


def _engine_name(model: Model, options: Options, seen: Observed | None) -> str:
    if options.engine not in ENGINES:
        raise BadRequest(f"There is no engine {options.engine!r} here. {nearest(options.engine, ENGINES)}", hint=f"Known: {', '.join(ENGINES)}.")
    if options.engine != "auto":
        return options.engine
    if seen is not None:
        return seen.engine
    return "llama.cpp" if model.quantisation.method == "gguf" else "vllm"


def _finite(options: Options) -> None:
    """Numbers that are none pass range checks: nothing is larger or smaller than they."""
    for name in ("gpu_memory", "share", "weights", "activation", "non_torch", "graphs", "qps", "slo"):
        value = getattr(options, name)
        if value is not None and not (math.isfinite(value) and 0 <= value < _NEAR):
            raise BadRequest(f"--{name.replace('_', '-')} {value} is no size.", hint="Give a number of zero or more.")
    if options.share is not None and options.share > 1:
        raise BadRequest(f"--share {options.share} is more than the card.", hint="A part of the card: more than 0, at most 1.")
    if options.gpu_memory == 0 or options.share == 0:
        raise BadRequest("A card without memory holds nothing.", hint="--gpu-memory and --share are more than 0.")
