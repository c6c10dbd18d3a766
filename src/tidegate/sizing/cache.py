"""The KV cache of a model in blocks: how many fit into a pool of bytes, and how many a request of a given length holds.

The layout is vLLM's (vllm/v1/core/kv_cache_utils.py and kv_cache_interface.py). Layers with the same needs form groups of equal size; a block serves
one group, has one size for all groups, and so costs the same whether a full layer or a sliding window uses it. Blocks, not bytes per token, are
what runs out: a window holds its window and what one step adds, a recurrent state one block whatever the length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tidegate.sizing.model_config import Attention, Latent, Layer, Mixer, Recurrent
from tidegate.sizing.weights import kv_heads_of

#: Bytes per token of DeepSeek's own 8-bit layout of a latent cache: 512 numbers in 8 bits, 4 scales in 32, 64 numbers in 16.
_FP8_LATENT = 656
_BLOCK = 16
#: Kernels of latent attention take blocks in multiples of this many tokens.
_LATENT_BLOCK = 64
#: No request is longer: where nothing grows with its length, this is the answer.
_MOST_TOKENS = 1 << 31
#: llama.cpp pads the cells of a sequence to a multiple of this.
_CELLS = 256


@dataclass(frozen=True, slots=True)
class Group:
    """Layers with the same needs. `layers`: on this rank; `copies`: block tables of a request, the same on every rank. `page_bytes`: of one layer's
    part of a block. `tokens`: how many tokens a block holds; 0 for a state."""

    kind: str
    layers: int
    copies: int
    page_bytes: int
    tokens: int
    window: int = 0


class Cache(Protocol):
    """What a plan asks of a cache: blocks in a pool, blocks of a request, the longest request."""

    @property
    def block_bytes(self) -> int: ...
    @property
    def token_bytes(self) -> float: ...
    @property
    def state_bytes(self) -> float: ...
    def blocks_of(self, tokens: int) -> int: ...
    def blocks_in(self, pool_bytes: float) -> int: ...
    def longest(self, blocks: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Cells:
    """llama.cpp's cache: cells for every token of every sequence, in multiples of 256; a layer with a window has cells for its window and a
    micro-batch. A block is a byte here: nothing is shared (llama-kv-cache-iswa.cpp)."""

    layers: tuple[Layer, ...]
    kv_bits: float
    micro_batch: int
    block_bytes: int = 1

    def blocks_of(self, tokens: int) -> int:
        return int(sum(self._of(mixer, tokens) for layer in self.layers for mixer in layer.mixers))

    def blocks_in(self, pool_bytes: float) -> int:
        return max(0, int(pool_bytes))

    def longest(self, blocks: int) -> int:
        return _search(self.blocks_of, blocks)

    @property
    def token_bytes(self) -> float:
        return (self.blocks_of(1 << 24) - self.blocks_of(1 << 23)) / (1 << 23)

    @property
    def state_bytes(self) -> float:
        return sum(self._of(mixer, 0) for layer in self.layers for mixer in layer.mixers if isinstance(mixer, Recurrent))

    def _of(self, mixer: Mixer, tokens: int) -> float:
        if isinstance(mixer, Recurrent):  # llama.cpp keeps states in 32 bits
            return 4.0 * (mixer.heads * mixer.rows * mixer.columns + mixer.channels * (mixer.kernel - 1))
        if isinstance(mixer, Latent):
            return -(-tokens // _CELLS) * _CELLS * (mixer.rank + mixer.rope_dim) * self.kv_bits / 8
        if not mixer.owns_cache:
            return 0.0
        kept = tokens if mixer.window is None else min(tokens, mixer.window + self.micro_batch)
        return -(-kept // _CELLS) * _CELLS * mixer.kv_heads * (mixer.head_dim + mixer.value_dim) * self.kv_bits / 8


def _search(blocks_of: Callable[[int], int], blocks: int) -> int:
    """The most tokens whose blocks are not more than `blocks`."""
    if blocks_of(_MOST_TOKENS) <= blocks:
        return _MOST_TOKENS
    low, high = 0, _MOST_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if blocks_of(middle) <= blocks else (low, middle - 1)
    return low


@dataclass(frozen=True, slots=True)
class Layout:
    """The cache of one rank. `stride`: how many of its layers share a block in each group; `block_bytes`: what one block takes on the rank."""

    groups: tuple[Group, ...]
    stride: int
    block_bytes: int
    step_tokens: int
    state_blocks: int

    def blocks_of(self, tokens: int) -> int:
        """Blocks that a request of `tokens` holds at most."""
        return sum(group.copies * self._of(group, tokens) for group in self.groups)

    def blocks_in(self, pool_bytes: float) -> int:
        return max(0, int(pool_bytes // self.block_bytes)) if self.block_bytes else 0

    @property
    def copies(self) -> int:
        """How many block tables a request has."""
        return sum(group.copies for group in self.groups)

    @property
    def block_tokens(self) -> int:
        return min((group.tokens for group in self.groups if group.tokens), default=0)

    @property
    def token_bytes(self) -> float:
        """Bytes that one more token takes on the rank when a request is long: those of the layers that see everything."""
        return sum(group.layers * group.page_bytes / group.tokens for group in self.groups if group.kind in ("full", "latent"))

    @property
    def state_bytes(self) -> int:
        """Bytes that a request holds whatever its length."""
        return sum(group.layers * group.page_bytes * self.state_blocks for group in self.groups if group.kind == "state")

    def longest(self, blocks: int) -> int:
        """The longest request that `blocks` can hold, in tokens; whole blocks only."""
        return _search(self.blocks_of, blocks)

    def _of(self, group: Group, tokens: int) -> int:
        if group.kind == "state":
            return self.state_blocks
        if group.kind == "window":
            return -(-min(group.window - 1 + self.step_tokens, tokens) // group.tokens) + 1
        if group.kind == "chunk":
            return -(-min(group.window + self.step_tokens, tokens) // group.tokens)
        return -(-tokens // group.tokens)


def layout(
    layers: Sequence[Layer], *, tp: int, kv_bits: float, state_dtype_bytes: int, whole: Sequence[Layer] | None = None, block: int = _BLOCK,
    step_tokens: int = 8192, hybrid: bool = True, prefix_caching: bool = True, draft_tokens: int = 0, fp8_latent: bool = False,
) -> Layout:
    """The cache of one rank that holds `layers`, of a model of the layers `whole` (default: the same): groups are made of the whole model, and each
    rank has its share of each group's layers.

    `state_dtype_bytes`: of the numbers that wait for a recurrent layer's convolution. `step_tokens`: the most tokens of one step (a window holds them
    beside itself). `hybrid`: whether windows save memory at all (before vLLM 0.10 they did not). `prefix_caching`: a recurrent layer then keeps
    two states, and one more for each drafted token (mamba_cache_mode align).
    """

    def needs_of(some: Sequence[Layer]) -> dict[_Need, int]:
        found = Counter(_need(mixer, tp, kv_bits, state_dtype_bytes, draft_tokens, fp8_latent, hybrid) for layer in some for mixer in layer.mixers)
        counts = {need: count for need, count in found.items() if need is not None}
        full = next((need for need in counts if need[0] in ("full", "latent")), None)
        if draft_tokens and full is not None:  # a multi-token-prediction head is one more layer of the kind that sees everything
            counts[full] += 1
        return counts

    needs, here = needs_of(whole if whole is not None else layers), needs_of(layers)
    if not needs:
        return Layout((), 1, 0, step_tokens, 0)
    counts = list(needs.values())
    # As vLLM chooses it: the smallest kind's count, or the largest's where they differ by less than half, so that little is padded.
    size = max(counts) if max(counts) < min(counts) * 1.5 else min(counts)
    groups = tuple(_groups(needs, here, size, block))
    stride = max(-(-group.layers // group.copies) for group in groups)
    state_blocks = ((2 if prefix_caching else 1) + draft_tokens) if any(group.kind == "state" for group in groups) else 0
    return Layout(groups, stride, max(group.page_bytes for group in groups) * stride, step_tokens, state_blocks)


#: kind, bytes per token (or of the state), window
_Need = tuple[str, float, int]


def _need(
    mixer: Mixer, tp: int, kv_bits: float, state_dtype_bytes: int, draft_tokens: int, fp8_latent: bool, hybrid: bool
) -> _Need | None:
    if isinstance(mixer, Attention):
        if not mixer.owns_cache:
            return None
        per_token = kv_heads_of(mixer.kv_heads, tp) * (mixer.head_dim + mixer.value_dim) * kv_bits / 8
        if mixer.window is None or not hybrid:
            return "full", per_token, 0
        return ("chunk" if mixer.chunked else "window"), per_token, mixer.window
    if isinstance(mixer, Latent):
        index = mixer.index_dim + mixer.index_dim // 128 * 4
        return "latent", _FP8_LATENT + index if fp8_latent else (mixer.rank + mixer.rope_dim) * kv_bits / 8 + index, 0
    assert isinstance(mixer, Recurrent)
    state = mixer.heads / tp * mixer.rows * mixer.columns * mixer.state_bytes
    waiting = mixer.channels / tp * (mixer.kernel - 1 + draft_tokens) * state_dtype_bytes
    return "state", state + waiting, 0


def _groups(needs: dict[_Need, int], here: dict[_Need, int], size: int, block: int) -> Iterator[Group]:
    """Groups of `size` layers, with blocks of one size in bytes. Beside recurrent layers a block of attention grows until it is as large as a state;
    where kinds of attention differ, the smaller ones hold more tokens per block."""
    largest_state = max((amount for kind, amount, _ in needs if kind == "state"), default=0.0)
    largest = max((amount for kind, amount, _ in needs if kind != "state"), default=0.0)
    if largest_state and largest:
        unit = _LATENT_BLOCK if any(kind == "latent" for kind, _, _ in needs) else _BLOCK
        block = max(block, -(-int(largest_state) // int(largest)))
        block = -(-block // unit) * unit
    page = int(max(block * largest, largest_state))
    for need, count in needs.items():
        kind, amount, window = need
        ratio = largest / amount if kind != "state" else 0.0
        tokens = 0 if kind == "state" else int(block * ratio) if ratio.is_integer() else block
        yield Group(kind, here.get(need, 0), -(-count // size), page, tokens, window)
