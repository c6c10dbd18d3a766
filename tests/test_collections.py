"""What the command line says of a collection that holds nothing."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from tidegate.app import collections
from tidegate.core.errors import NotFound
from tidegate.core.search import ANY
from tidegate.settings import Settings
from tidegate.stores.systems.memory import Memory


class Embedder:
    fingerprint, dimensions = "e", 384

    async def embed(self, texts: list[str], kind: str) -> Any:
        return np.ones((len(texts), self.dimensions), np.float32) / np.sqrt(self.dimensions)


@pytest.mark.parametrize(
    "command",
    [
        lambda settings: collections.search(settings, "why", collection="nope", k=1, wanted=ANY, rerank="off"),
        lambda settings: collections.reembed(settings, "nope", lambda _: None),
    ],
    ids=["search", "reembed"],
)
async def test_a_collection_that_holds_nothing_is_said(monkeypatch: pytest.MonkeyPatch, command: Callable[[Settings], Awaitable[Any]]) -> None:
    """A slip of the pen looks like a search that found nothing otherwise, and like work that was done."""

    @contextlib.asynccontextmanager
    async def opened(settings: Settings) -> AsyncIterator[tuple[Embedder, Memory]]:
        yield Embedder(), Memory()

    monkeypatch.setattr(collections, "embedder_and_passages", opened)
    with pytest.raises(NotFound, match="'nope' holds no document"):
        await command(Settings.model_validate({}))
