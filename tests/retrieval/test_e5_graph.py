"""The network that we write against the engine that comes with the weights, and int8 against float32."""

from __future__ import annotations

import asyncio
import builtins
import importlib.util
from collections.abc import Iterator

import numpy as np
import pytest

from tidegate.core.errors import LocalPartError
from tidegate.retrieval.e5_graph import build_graph
from tidegate.retrieval.e5_model import E5Model
from tidegate.retrieval.e5_runtimes import missing, open_network
from tidegate.retrieval.embedder import LocalEmbedder


@pytest.fixture(scope="session")
def exact(weights, model_cache) -> Iterator[LocalEmbedder]:
    """The same embedder in float32."""
    embedder = LocalEmbedder(model_cache, load=lambda cache, threads: E5Model(weights, build_graph(weights, "float32"), threads))
    yield embedder
    asyncio.run(embedder.close())


def cosines(a, b):
    return np.sum(a * b, axis=1)


async def test_float32_agrees_with_the_engine(exact, engine, texts):
    """Cosine 0.999 or more on every text, as passage and as question."""
    assert cosines(await exact.embed(["", *texts], "passage"), engine.passage(["", *texts])).min() >= 0.999
    assert cosines(await exact.embed(texts[:3], "query"), engine.query(texts[:3])).min() >= 0.999


async def test_float32_agrees_with_the_engine_on_a_text_of_two_windows(exact, engine):
    """Windows are cut, weighted and averaged as the engine does it."""
    text = "The policy covers water damage from burst pipes. 保单承保。 " * 36
    assert engine.token_count(text) > 514
    assert cosines(await exact.embed([text], "passage"), engine.passage([text])).min() >= 0.999


async def test_int8_agrees_with_float32(embedder, exact, texts):
    """Cosine 0.99 or more on every text; 0.998 on the mean."""
    agreement = cosines(await embedder.embed(texts, "passage"), await exact.embed(texts, "passage"))
    assert agreement.min() >= 0.99
    assert agreement.mean() >= 0.998


async def test_a_texts_vector_does_not_depend_on_its_company(embedder, exact, texts):
    """Padding and neighbours change nothing: to 1e-5 in float32 and, since activations are scaled per token, in int8 too."""
    for model in (embedder, exact):
        together = await model.embed(texts, "passage")
        alone = np.concatenate([await model.embed([text], "passage") for text in texts])
        assert np.abs(together - alone).max() <= 1e-5


async def test_vectors_have_length_one(embedder, texts):
    """Every row is L2-normalised."""
    assert np.linalg.norm(await embedder.embed(texts, "query"), axis=1) == pytest.approx(1, abs=1e-5)


async def test_a_question_is_nearest_to_its_answer_across_languages(embedder):
    """What it is for: an English question finds the Chinese passage that answers it, and the other way round."""
    english = await embedder.embed(["The office closes on holidays.", "Cars are inspected yearly.", "Burst pipes are insured."], "passage")
    chinese = await embedder.embed(["办公室在公众假期关闭。", "车辆必须每年检验一次。", "水管爆裂造成的损失由家庭保单承保。"], "passage")
    asked_in_chinese = await embedder.embed(["办公室什么时候不开门？", "水管爆裂赔不赔？"], "query")
    asked_in_english = await embedder.embed(["When is the office closed?", "Is damage from a burst pipe insured?"], "query")
    assert (asked_in_chinese @ english.T).argmax(axis=1).tolist() == [0, 2]
    assert (asked_in_english @ chinese.T).argmax(axis=1).tolist() == [0, 2]


@pytest.mark.skipif(missing("openvino") is not None, reason="openvino is not installed: pip install 'tidegate[openvino]'")
async def test_vectors_of_the_runtimes_may_be_compared(model_cache, texts):
    """They share a fingerprint: an index made by one is searched with questions of the other."""
    one, other = (LocalEmbedder(model_cache, runtime=runtime) for runtime in ("onnxruntime", "openvino"))
    assert one.fingerprint == other.fingerprint
    assert cosines(await one.embed(texts, "passage"), await other.embed(texts, "passage")).min() >= 0.995
    await one.close()
    await other.close()


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_a_missing_runtime_is_met_with_the_way_out(monkeypatch: pytest.MonkeyPatch, runtime):
    """Which package, and what to do."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LocalPartError, match=f"no package {runtime}") as caught:
        open_network(b"", 1, runtime)
    assert "pip install 'tidegate[" in caught.value.hint


def test_a_missing_onnx_is_met_with_the_pip_line(weights, monkeypatch: pytest.MonkeyPatch):
    """Only the first start needs the package; without it the error says how to get it."""
    real = builtins.__import__

    def without_onnx(name, *args):
        if name == "onnx":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_onnx)
    with pytest.raises(LocalPartError) as caught:
        build_graph(weights)
    assert "pip install 'tidegate[local]'" in caught.value.hint
