"""A cross-encoder in this process: a folder with `model.onnx` and `tokenizer.json`, as sentence-transformers and Optimum export them."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tidegate.core.ask import Ask
from tidegate.core.errors import SettingsError, StoreDown
from tidegate.core.search import Found
from tidegate.retrieval.rerank import RerankerParts

#: Pairs computed at once: one that is given up is waited for by at most so many.
BATCH = 8
#: Tokens of a pair; the passage's end is cut.
MOST_TOKENS = 512


class Onnx:
    """Runs in one thread of its own, pairs of about one length together. A question that is given up stops after the batch that runs."""

    name = "onnx"

    def __init__(self, folder: Path) -> None:
        try:
            import onnxruntime
            from tokenizers import Tokenizer
        except ImportError as error:
            raise SettingsError(f'rerank = "onnx" needs the package {error.name}.', hint="pip install 'tidegate[rerank]'") from None
        model, tokenizer = folder / "model.onnx", folder / "tokenizer.json"
        for file in (model, tokenizer):
            if not file.is_file():
                raise SettingsError(f"The cross-encoder has no {file}.", hint="retrieval.rerank_folder holds model.onnx and tokenizer.json.")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        try:
            self._session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
            self._tokenizer = Tokenizer.from_file(str(tokenizer))
        except Exception as error:  # noqa: BLE001 - both raise bare classes of their own for files that they cannot read
            raise SettingsError(f"The cross-encoder in {folder} cannot be loaded: {type(error).__name__}.", hint="Export it anew.") from None
        self._inputs = {one.name for one in self._session.get_inputs()}
        if unknown := self._inputs - {"input_ids", "attention_mask", "token_type_ids"}:
            raise SettingsError(f"{model} wants inputs that a cross-encoder has not: {', '.join(sorted(unknown))}.", hint="Export it anew.")
        self._tokenizer.enable_truncation(MOST_TOKENS, strategy="only_second")
        self._tokenizer.no_padding()
        self._thread = ThreadPoolExecutor(1, "rerank")

    async def scores(self, question: str, found: Found, ask: Ask | None = None) -> list[float]:
        given_up = threading.Event()
        texts = [passage.text for passage in found.passages]
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, question, texts, given_up)
        finally:
            given_up.set()

    def _run(self, question: str, texts: list[str], given_up: threading.Event) -> list[float]:
        try:
            pairs = self._tokenizer.encode_batch([(question, text) for text in texts])
            scores = [0.0] * len(texts)
            by_length = sorted(range(len(pairs)), key=lambda at: len(pairs[at].ids))
            for start in range(0, len(by_length), BATCH):
                if given_up.is_set():
                    break
                places = by_length[start : start + BATCH]
                for at, score in zip(places, self._batch([pairs[at] for at in places]), strict=True):
                    scores[at] = score
        except Exception as error:  # noqa: BLE001 - ONNX Runtime and tokenizers raise bare classes of their own
            raise StoreDown(f"The cross-encoder failed: {type(error).__name__}.", hint="Does its tokenizer belong to its model?") from None
        return scores

    def _batch(self, pairs: list[Any]) -> list[float]:
        longest = max(len(pair.ids) for pair in pairs)
        rows = {name: np.zeros((len(pairs), longest), np.int64) for name in self._inputs}
        for row, pair in enumerate(pairs):
            for name, values in (("input_ids", pair.ids), ("attention_mask", pair.attention_mask), ("token_type_ids", pair.type_ids)):
                if name in rows:
                    rows[name][row, : len(values)] = values
        (logits, *_) = self._session.run(None, rows)
        logits = np.asarray(logits, np.float64).reshape(len(pairs), -1)
        # One output is the score; of two (or three) classes the last one says that the passage answers.
        judged: list[float] = (logits[:, -1] if logits.shape[1] == 1 else logits[:, -1] - logits[:, 0]).tolist()
        return judged

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def build(parts: RerankerParts) -> Onnx:
    folder = parts.settings.rerank_folder
    if folder is None:
        raise SettingsError('A cross-encoder is wanted (rerank = "onnx"), but retrieval.rerank_folder is empty.', hint="Set its folder.")
    return Onnx(folder.expanduser())
