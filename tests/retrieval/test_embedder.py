"""The embedder in this process: order of work, windows, cancels and errors."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from tidegate.core.errors import BadRequest, EmbedderDown, LocalPartError, StoreDown
from tidegate.retrieval.e5_model import Window, batches
from tidegate.retrieval.embedder import LocalEmbedder

NOWHERE = Path("/nowhere")


def test_batches_hold_like_lengths_and_stay_within_their_tokens():
    """Sorted by length; count times longest never exceeds the bound, except for a single longer window."""
    windows = [Window(0, [0] * size, size) for size in (3, 90, 4, 5, 40, 600, 41, 6)]
    cut = list(batches(windows, 100))
    assert [[len(window.ids) for window in batch] for batch in cut] == [[3, 4, 5, 6], [40, 41], [90], [600]]


async def test_rows_come_in_the_order_of_the_texts(stand_in):
    """Sorting by length is the embedder's own business."""
    embedder = LocalEmbedder(NOWHERE, batch_tokens=32, load=stand_in())
    texts = ["x" * size for size in (50, 3, 20, 7, 100)]
    vectors = await embedder.embed(texts, "passage")
    slope = vectors[:, 0] / vectors[:, 1]
    assert slope == pytest.approx([len("passage: ") + len(text) for text in texts])
    await embedder.close()


async def test_a_question_never_waits_for_passages(stand_in, until):
    """It is answered while the first of their batches still runs."""
    model = stand_in(held=("passage",))
    embedder = LocalEmbedder(NOWHERE, batch_tokens=16, load=model)
    ingest = asyncio.ensure_future(embedder.embed(["passage of some length"] * 10, "passage"))
    await until(lambda: model.begun == 1)
    assert (await embedder.embed(["question"], "query")).shape == (1, 384)
    assert await embedder.count_tokens(["question"]) == [len("passage: question") // 4 + 2]
    assert model.ran == [[len("query: question")]]
    assert not ingest.done()
    model.permit(20)
    assert (await ingest).shape == (10, 384)
    await embedder.close()


async def test_counting_a_document_is_not_urgent(stand_in, until):
    """It waits with the passages it is for: a question would notice."""
    model = stand_in(held=("passage",))
    embedder = LocalEmbedder(NOWHERE, batch_tokens=16, load=model)
    ingest = asyncio.ensure_future(embedder.embed(["passage"], "passage"))
    await until(lambda: model.begun == 1)
    counting = asyncio.ensure_future(embedder.count_tokens(["sentence " * 20] * 20))
    await embedder.embed(["question"], "query")
    assert not counting.done()
    model.permit(1)
    assert len(await counting) == 20
    await ingest
    await embedder.close()


async def test_passages_are_computed_at_a_lower_priority(stand_in):
    """Where processors are short, the passages wait, and not the questions or whatever else runs here."""
    nice: dict[str, int] = {}
    model = stand_in()
    right = model.encode

    def encode(text):
        nice[text.split(":")[0]] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        return right(text)

    model.encode = encode
    embedder = LocalEmbedder(NOWHERE, load=model)
    await embedder.embed(["x"], "passage")
    await embedder.embed(["x"], "query")
    assert nice["query"] == os.getpriority(os.PRIO_PROCESS, 0)
    assert nice["passage"] == min(19, nice["query"] + 10)
    await embedder.close()


async def test_callers_of_one_kind_take_turns(stand_in, until):
    """A small ingest beside a large one does not wait for its end."""
    model = stand_in(held=True)
    embedder = LocalEmbedder(NOWHERE, batch_tokens=16, load=model)
    large = asyncio.ensure_future(embedder.embed(["a passage of some length"] * 50, "passage"))
    await until(lambda: model.begun == 1)
    small = asyncio.ensure_future(embedder.embed(["another passage, small"], "passage"))
    await asyncio.sleep(0)
    model.permit(6)
    await small
    assert not large.done()
    model.permit(100)
    await large
    await embedder.close()


async def test_a_cancelled_call_stops_at_its_next_step(stand_in, until):
    """Nobody waits, so nothing more is computed, and the next caller is served."""
    model = stand_in(held=True)
    embedder = LocalEmbedder(NOWHERE, batch_tokens=16, load=model)
    ingest = asyncio.ensure_future(embedder.embed(["passage of some length"] * 50, "passage"))
    await until(lambda: model.begun == 1)
    ingest.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ingest
    model.permit(60)
    await embedder.embed(["next"], "passage")
    await embedder.embed(["last"], "passage")
    assert len(model.ran) == 3
    await embedder.close()


async def test_an_error_in_the_model_reaches_its_caller_and_nobody_else(stand_in):
    """The thread lives on."""
    model = stand_in()
    embedder = LocalEmbedder(NOWHERE, load=model)
    right = model.run

    def wrong(windows):
        raise RuntimeError("broken")

    model.run = wrong
    with pytest.raises(RuntimeError, match="broken"):
        await embedder.embed(["text"], "query")
    model.run = right
    assert (await embedder.embed(["text"], "query")).shape == (1, 384)
    await embedder.close()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
async def test_what_is_no_number_is_never_a_vector(stand_in, number):
    """It is an error: in an index it would be compared with every question."""
    model = stand_in()
    model.run = lambda windows: np.full((len(windows), 384), number, np.float32)
    embedder = LocalEmbedder(NOWHERE, load=model)
    with pytest.raises(EmbedderDown, match="no number"):
        await embedder.embed(["text"], "passage")
    await embedder.close()


async def test_a_hundred_thousand_texts_have_a_hundred_thousand_rows(stand_in):
    """In one call, and questions are answered meanwhile."""
    embedder = LocalEmbedder(NOWHERE, load=stand_in())
    ingest = asyncio.ensure_future(embedder.embed(["passage"] * 100_000, "passage"))
    await embedder.embed(["question"], "query")
    assert not ingest.done()
    assert (await ingest).shape == (100_000, 384)
    await embedder.close()


async def test_a_model_that_cannot_be_loaded_is_an_error_of_every_call():
    """`start` and `embed` say the same, with the way out."""

    def load(cache, threads):
        raise LocalPartError("no package", hint="pip install 'tidegate[local]'")

    embedder = LocalEmbedder(NOWHERE, load=load)
    for call in (embedder.start(), embedder.embed(["x"], "query")):
        with pytest.raises(LocalPartError) as caught:
            await call
        assert "pip install" in caught.value.hint
    await embedder.close()


async def test_closing_answers_those_who_wait(stand_in, until):
    """The running step ends; who waits gets StoreDown, and so does who comes later."""
    model = stand_in(held=True)
    embedder = LocalEmbedder(NOWHERE, batch_tokens=16, load=model)
    waiting = [asyncio.ensure_future(embedder.embed(["passage of some length"] * 5, "passage")) for _ in range(2)]
    await until(lambda: model.begun == 1)
    closing = asyncio.ensure_future(embedder.close())
    await asyncio.sleep(0)
    model.permit(1)
    await closing
    for call in [*waiting, embedder.embed(["late"], "query")]:
        with pytest.raises(StoreDown):
            await call


@pytest.mark.parametrize(("text", "says"), [
    ("a\ud800b", "lone surrogate at character 1"),
    ("x" * 100_001, "100,001 characters"),
    ("x" * 1_000_000, "1,000,000 characters"),
])
async def test_a_text_that_cannot_be_embedded_is_named(embedder, text, says):
    """The error says which text and why."""
    for call in (embedder.embed(["fine", text], "passage"), embedder.count_tokens(["fine", text])):
        with pytest.raises(BadRequest, match=f"Text 1 .*{says}"):
            await call


async def test_no_texts_no_vectors(embedder):
    """An empty list is no error."""
    assert (await embedder.embed([], "passage")).shape == (0, 384)
    assert await embedder.count_tokens([]) == []


async def test_empty_and_odd_texts_have_vectors(embedder):
    """Empty, NUL, only spaces, ten thousand characters: each has a unit vector."""
    vectors = await embedder.embed(["", "\0", "   ", "insurance " * 1_000], "query")
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)
    assert np.abs(vectors[0] - vectors[1]).max() < 1e-6


async def test_nothing_of_a_long_text_is_ignored(embedder):
    """What stands behind the first 512 tokens moves the vector."""
    filler = "The policy covers water damage from burst pipes. " * 55
    vectors = await embedder.embed([filler, filler + "猫は毎日魚を食べます。" * 50], "passage")
    assert vectors[0] @ vectors[1] < 0.99


async def test_counts_include_the_markers_and_prefix(embedder):
    """What the model reads: a text fits in one window where its count is at most max_length."""
    (alone, longer) = await embedder.count_tokens(["water", "water water"])
    assert longer == alone + 1
    assert alone == len(["<s>", "passage", ":", "water", "</s>"])


async def test_figures_tell_what_runs(embedder):
    """For /health: figures, not "ok"."""
    await embedder.embed(["x"], "query")
    figures = await embedder.figures()
    assert figures["up"] is True
    assert figures["queries"] >= 1
    assert figures["calls"] == 0
    assert figures["rss_bytes"] > 50_000_000
