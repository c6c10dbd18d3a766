"""EvaluationStore: one suite over every system that serves it."""

from __future__ import annotations

import msgspec

from tidegate.core.ports import Evaluation, EvaluationStore


def of(collection: str, at_unix_s: float) -> Evaluation:
    return Evaluation(at_unix_s, collection, "7-a", "bank.jsonl", "0" * 64, b'{"mrr": 0.5, "orders": {"final": [1]}}')


async def test_evaluations_come_back_newest_first(store: EvaluationStore) -> None:
    """Those of the collection, as they were written."""
    for one in (of("c", 1.0), of("c", 3.0), of("d", 2.0)):
        await store.add_evaluation(one)
    found = await store.list_evaluations("c")
    assert [one.at_unix_s for one in found] == [3.0, 1.0]
    assert msgspec.json.decode(found[0].report) == msgspec.json.decode(of("c", 3.0).report)
    assert (found[0].index_version, found[0].set_name, found[0].set_sha256) == ("7-a", "bank.jsonl", "0" * 64)
    assert [one.at_unix_s for one in await store.list_evaluations("c", limit=1)] == [3.0]
    assert await store.list_evaluations("none") == []
