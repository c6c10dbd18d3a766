"""multilingual-e5-small (Wang et al. 2024, arXiv:2402.05672), ready to run: tokenizer, word vectors, network. Not for the event loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from tidegate.core.ports import Vectors
from tidegate.retrieval.e5_cache import load_graph
from tidegate.retrieval.e5_runtimes import Runtime, open_network, precision_for
from tidegate.retrieval.e5_tokenizer import E5Tokenizer
from tidegate.retrieval.e5_weights import E5Weights, find_package, unpack
from tidegate.retrieval.embedder_texts import WEIGHTS_SHA256


class Window(msgspec.Struct, frozen=True, gc=False):
    """A stretch of one text that the network reads at once. `weight`: how many of its tokens are the text's (markers are not)."""

    text: int
    ids: list[int]
    weight: int


class E5Model:
    """The network and its tokenizer. Any number of threads may call it at once."""

    def __init__(self, weights: E5Weights, graph: bytes, threads: int, runtime: Runtime = "onnxruntime") -> None:
        """`graph`: a model from `build_graph`. Raises LocalPartError where the runtime's package is missing."""
        self._tokenizer = E5Tokenizer(weights.read_pieces())
        self._words = weights.q4("emb.word", weights.header.hidden)
        self._network = open_network(graph, threads, runtime)

    def encode(self, text: str) -> list[int]:
        """Token ids without markers."""
        return self._tokenizer.encode(text)

    def windows(self, text: int, ids: list[int], max_length: int) -> list[Window]:
        """The ids of text number `text` in stretches of at most `max_length` tokens, markers included; at least one."""
        step = max_length - 2
        return [
            Window(text, [self._tokenizer.bos, *part, self._tokenizer.eos], max(1, len(part)))
            for part in (ids[at : at + step] for at in range(0, max(1, len(ids)), step))
        ]

    def run(self, windows: Sequence[Window]) -> Vectors:
        """The mean vector of each window, float32 (windows, hidden), not normalised. Padded to the longest."""
        longest = max(len(window.ids) for window in windows)
        ids = np.zeros((len(windows), longest), np.int64)
        mask = np.zeros((len(windows), longest), np.int32)
        for row, window in enumerate(windows):
            ids[row, : len(window.ids)] = window.ids
            mask[row, : len(window.ids)] = 1
        words = unpack(self._words[ids.ravel()]).reshape(len(windows), longest, -1)
        return self._network(words, mask)


def batches(windows: Sequence[Window], tokens: int) -> Iterator[list[Window]]:
    """Windows of like length together, each batch at most `tokens` with its padding (a longer window goes alone), shortest first."""
    batch: list[Window] = []
    for window in sorted(windows, key=lambda window: len(window.ids)):
        if batch and (len(batch) + 1) * len(window.ids) > tokens:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def load_model(cache: Path, threads: int, runtime: Runtime = "onnxruntime") -> E5Model:
    """The int8 model of the installed weights, built in `cache` at the first call. Blocks for 0.4 to 3 s. Raises LocalPartError."""
    path, version = find_package()
    weights = E5Weights(path)
    weights.check(WEIGHTS_SHA256)
    return E5Model(weights, load_graph(weights, version, cache, precision_for(runtime)), threads, runtime)
