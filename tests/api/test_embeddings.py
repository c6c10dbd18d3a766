"""/v1/embeddings says what it cannot do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest

from tidegate.admission.limits import Limits
from tidegate.api.auth import KeyRing
from tidegate.api.control import NewKey, make_key
from tidegate.api.exchange import Exchange, House
from tidegate.api.openai import EmbeddingRoute
from tidegate.core.ports import Vectors
from tidegate.guard.settings import DoorSettings
from tidegate.pipeline.entrance import Entrance, v1_door
from tidegate.stores.systems.memory import Memory


class Embedder:
    model = "test-model"
    dimensions = 384

    async def embed(self, texts: Sequence[str], kind: Literal["query", "passage"]) -> Vectors:
        return np.ones((len(texts), 384), np.float32)

    async def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [1] * len(texts)


@pytest.mark.parametrize(("dimensions", "status"), [(None, 200), (384, 200), (10, 400), (0, 400), (-1, 400), (10**30, 400)])
async def test_other_dimensions_are_refused(dimensions: int | None, status: int) -> None:
    """A number of dimensions that the model does not have is an error, not silently another answer."""
    sent = await ask({"input": "x", "dimensions": dimensions})
    assert sent[0]["status"] == status
    if status == 400:
        assert json.loads(sent[1]["body"])["error"]["param"] == "dimensions"


@pytest.mark.parametrize(("model", "status"), [(None, 200), ("test-model", 200), ("bge-m3", 404)])
async def test_another_model_is_refused_by_name(model: str | None, status: int) -> None:
    """As chats refuse one: vectors of another model than was asked for would be stored beside those of that one."""
    sent = await ask({"input": "x", "model": model})
    assert sent[0]["status"] == status
    if status == 404:
        error = json.loads(sent[1]["body"])["error"]
        assert error["message"] == "There is no embedding model 'bge-m3'."
        assert "test-model" in error["hint"]


@pytest.mark.parametrize(("action", "status"), [("mark", 200), ("refuse", 400)])
async def test_the_door_looks_at_what_is_embedded(action: str, status: int) -> None:
    """A text with a control character is marked in the header, or refused by its place in the input."""
    door = v1_door(DoorSettings.model_validate({"v1": True, "control": action}))[1]
    sent = await ask({"input": ["x", "a\x07b"]}, door)
    assert sent[0]["status"] == status
    if status == 400:
        assert json.loads(sent[1]["body"])["error"]["param"] == "input[1]"
    else:
        assert (b"x-tidegate-door", b"control") in sent[0]["headers"]


async def ask(fields: dict[str, Any], door: Entrance | None = None) -> list[dict[str, Any]]:
    store = Memory()
    key, record = make_key(NewKey.model_validate({"tenant": "default"}))
    await store.add_key(record)
    house = House(KeyRing(store, {}, refresh_s=1.0), [], b"secret", lambda flight_id, text: b"", 1000, 10.0)
    body = json.dumps(fields).encode()
    incoming: list[dict[str, Any]] = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return incoming.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"path": "/v1/embeddings", "method": "POST", "headers": [(b"authorization", b"Bearer " + key.encode())]}
    await Exchange(house, scope, receive, send).run(EmbeddingRoute(Limits(), Embedder(), door))
    return sent
