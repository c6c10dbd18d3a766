"""The second look: each reranker alone, and what becomes of a search where one fails."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.engines.http_stand_in import Events, HttpStandIn

from tidegate.core.ask import Ask, Caller, Deadline, EngineAnswer, Passage
from tidegate.core.chunk import Usage
from tidegate.core.errors import EngineDown, EngineError, SettingsError, StoreDown
from tidegate.core.flight import Flight
from tidegate.core.plugins import names
from tidegate.core.search import Found, Ranking
from tidegate.retrieval.rerank import OFF, PACKAGE, RerankerParts, Second, open_rerankers
from tidegate.retrieval.rerankers import engine, features, http, onnx
from tidegate.retrieval.settings import RetrievalSettings


def found(*texts: str, title: str = "T") -> Found:
    passages = [Passage(str(at), "d.md", title, text, 0.8) for at, text in enumerate(texts)]
    return Found(passages, "1", legs=[Ranking("vector", [one.id for one in passages], [0.8] * len(passages))])


def settings(**named: Any) -> RetrievalSettings:
    return RetrievalSettings.model_validate(named)


# -- the judgement


class Judge:
    """Scores as told, or whatever else."""

    name = "judge"

    def __init__(self, scores: list[float] | Exception | None) -> None:
        self.told = scores
        self.asked = 0

    async def scores(self, question: str, found: Found, ask: Ask | None = None) -> list[float]:
        self.asked += 1
        if self.told is None:
            await asyncio.Event().wait()
        if isinstance(self.told, Exception):
            raise self.told
        assert self.told is not None
        return self.told

    async def close(self) -> None: ...


async def test_the_best_come_first_and_equals_keep_their_order() -> None:
    """Scores go with their passages."""
    assert await Second(Judge([0.5, 0.9, 0.5])).judge("q", found("a", "b", "c"), 5.0) == ([1, 0, 2], [0.9, 0.5, 0.5], "")


@pytest.mark.parametrize(
    ("scores", "why"),
    [
        (None, "slow"), (StoreDown("Gone."), "store_down"), (EngineDown("Gone."), "engine_down"), ([1.0], "wrong_scores"),
        ([1.0, math.nan, 0.0], "wrong_scores"), (RuntimeError("a plug-in's own"), "internal_error"), (TimeoutError(), "slow"),
        (["1", "2", "3"], "internal_error"),
    ],
)  # fmt: skip
async def test_a_reranker_that_fails_changes_nothing(scores: Any, why: str) -> None:
    """The order stays, the reason is a word; and it is left alone for a while, so that the next question does not lose its time too."""
    judge = Judge(scores)
    second = Second(judge)
    assert await second.judge("q", found("a", "b", "c"), 0.01) == ([0, 1, 2], [], why)
    assert await second.judge("q", found("a", "b", "c"), 0.01) == ([0, 1, 2], [], "resting")
    assert judge.asked == 1


async def test_a_caller_that_leaves_is_no_slow_reranker() -> None:
    """A time-out of somebody else's passes through."""
    second = Second(Judge(None))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await second.judge("q", found("a", "b"), 60.0)


def test_what_is_not_set_or_not_known_is_named_at_the_start() -> None:
    """An unknown reranker with the nearest known one; a known one with the setting that it misses."""
    with pytest.raises(SettingsError) as caught:
        open_rerankers(["featurs"], RerankerParts(settings()))
    assert "'features'" in str(caught.value.hint)
    for name, setting in (("http", "rerank_url"), ("onnx", "rerank_folder")):
        with pytest.raises(SettingsError, match=setting):
            open_rerankers([name], RerankerParts(settings()))
    for url in ("notaurl", "http://[bad", "ftp://x/y", "http://h:99999/x", "http://a b/", "http://u:p@h/x"):
        with pytest.raises(ValidationError, match="rerank_url"):
            settings(rerank_url=url)
    assert list(open_rerankers([OFF, "features", "features"], RerankerParts(settings()))) == ["features"]
    assert names(PACKAGE) == ["engine", "features", "http", "onnx"]


# -- features


def rows(question: str, passages: Found) -> dict[str, list[float]]:
    table = features.features(question, passages)
    return {name: [row[at] for row in table] for at, name in enumerate(features.NAMES)}


async def test_features_tell_passages_apart_by_their_figures() -> None:
    """Two passages of the same words: the one with the question's figure and unit comes first."""
    texts = found("The waiting period is 9 months for childbirth.", "The waiting period is 30 days for childbirth.")
    assert rows("Who waits 30 days?", texts)["figures"] == [0.0, 1.0]
    assert rows("Who waits 30 months?", texts)["figures"] == [0.0, 0.5]
    assert rows("premium of 1,200 EUR", found("It is 1200 EUR.", "It is 200 EUR."))["figures"] == [1.0, 0.0]
    first, second = await features.Features().scores("Who waits 30 days?", texts)
    assert second > first


def test_features_weigh_rare_words_more() -> None:
    """What every candidate holds tells nothing; the word that one holds does."""
    covered = rows("policy avalanche", found("policy and more", "policy avalanche", "policy", "policy again"))["coverage"]
    assert covered[1] == 1.0
    assert covered[0] == covered[2] < 0.2


def test_features_see_codes_phrases_and_titles() -> None:
    """A code as it is written, two words that stand together, words of the document's title."""
    of = rows("What does form KX-7 say of water damage?", found("Form KX-7: water damage.", "Damage by water is in another form."))
    assert of["coverage"][0] > of["coverage"][1]
    assert of["phrases"][0] > of["phrases"][1]
    titled = Found([Passage("a", "d", "Water cover", "x", 0.8), Passage("b", "d", "Fire cover", "x", 0.8)])
    assert rows("water", titled)["coverage"] == [1.0, 0.0]


def test_features_read_what_the_legs_said() -> None:
    """Votes and cosine beside the best, BM25 as far as the best covers the question; each from 0 to 1, whatever is missing."""
    passages = [Passage("a", "d", "", "alpha", 0.8), Passage("b", "d", "", "beta", 0.75), Passage("c", "d", "", "gamma", 0.4)]
    of = rows("delta", Found(passages, legs=[Ranking("words", ["b", "a"], [8.0, 2.0], [0.75, 0.25])]))
    assert of["bm25"] == [0.1875, 0.75, 0.0]
    assert of["fused"] == [pytest.approx(0.25**2 / 62 / (0.75**2 / 61)), 1.0, 0.0]
    assert of["cosine"] == pytest.approx([1.0, 0.5, 0.0])
    assert of["coverage"] == [0.0, 0.0, 0.0]
    for question, some in (("", found("a")), ("?!", found("", "")), ("a", Found([]))):
        assert all(0 <= figure <= 1 for row in features.features(question, some) for figure in row)


# -- http


@pytest.fixture
async def stand_in() -> AsyncIterator[HttpStandIn]:
    server = await HttpStandIn({}).start()
    yield server
    await server.close()


@pytest.fixture
async def reranker(stand_in: HttpStandIn) -> AsyncIterator[http.Http]:
    made = http.build(RerankerParts(settings(rerank_url=f"{stand_in.url}/rerank", rerank_model="bge", rerank_api_key="secret")))
    yield made
    await made.close()


@pytest.mark.parametrize(
    "answer",
    [
        {"results": [{"index": 1, "relevance_score": 0.9, "document": {"text": "b"}}, {"index": 0, "relevance_score": 0.1}]},
        {"results": [{"index": 0, "score": 0.1}, {"index": 1, "score": 0.9}], "usage": {"total_tokens": 3}},
        {"data": [{"index": 1, "relevance_score": 0.9}, {"index": 0, "relevance_score": 0.1}], "object": "list"},
        [{"index": 1, "score": 0.9}, {"index": 0, "score": 0.1}],
    ],
    ids=["jina-cohere-vllm", "llama.cpp", "voyage", "tei"],
)
async def test_the_shape_of_an_answer_is_told_by_what_it_holds(stand_in: HttpStandIn, reranker: http.Http, answer: Any) -> None:
    """Whichever server: scores by the index that each names, not by their order."""
    stand_in.routes["/rerank"] = lambda _: answer
    assert await reranker.scores("q", found("a", "b")) == [0.1, 0.9]
    assert stand_in.last("/rerank") == {"query": "q", "documents": ["a", "b"], "model": "bge"}


async def test_a_server_that_wants_texts_gets_them(stand_in: HttpStandIn, reranker: http.Http) -> None:
    """TEI refuses what has no `texts`; from then on it is asked in its own way at once."""
    stand_in.routes["/rerank"] = lambda asked: [{"index": 0, "score": 0.5}] if "texts" in asked else (422, {"error": "missing field `texts`"})
    assert await reranker.scores("q", found("a")) == [0.5]
    assert await reranker.scores("q", found("b")) == [0.5]
    assert ["texts" in asked for _, asked in stand_in.asked] == [False, True, True]


@pytest.mark.parametrize(
    "answer",
    [
        {"results": [{"index": 0, "relevance_score": 0.1}]}, {"results": "none"}, [], [{"index": "x", "score": 1}], [{"index": 0}], {}, b"not json",
        b"[" * 200_000, (500, {"error": "out of memory"}), (429, {}), (404, {}), [{"index": 0, "score": None}, {"index": 1, "score": 1}],
    ],
)  # fmt: skip
async def test_a_server_without_a_score_for_each_is_down(stand_in: HttpStandIn, reranker: http.Http, answer: Any) -> None:
    """Whatever it says instead; its words are not repeated."""
    stand_in.routes["/rerank"] = lambda _: answer
    with pytest.raises(StoreDown) as caught:
        await reranker.scores("q", found("a", "b"))
    assert "memory" not in caught.value.message


async def test_a_server_that_is_not_there_is_down() -> None:
    """A refused connection is no error of the caller's."""
    gone = await HttpStandIn({}).start()
    await gone.close()
    made = http.Http(f"{gone.url}/rerank")
    with pytest.raises(StoreDown, match="ConnectError"):
        await made.scores("q", found("a"))
    assert await made.scores("q", Found([])) == []
    await made.close()


async def test_a_server_that_hangs_costs_its_share_of_the_time(stand_in: HttpStandIn, reranker: http.Http) -> None:
    """The order stays, and the connection is closed."""
    stand_in.routes["/rerank"] = lambda _: Events(hangs=True)
    judged = await Second(reranker).judge("q", found("a", "b"), 0.3)
    assert (judged.order, judged.why) == ([0, 1], "slow")


# -- onnx


VOCABULARY = ["storm", "[SEP]", "[CLS]", "[UNK]", "harbour", "calm", "when", "was", "the"]


@pytest.fixture
def cross_encoder(tmp_path: Path) -> Path:
    """A folder with the smallest cross-encoder there can be: its score is how often the pair says `storm`. That is token 0, as padding is."""
    return write_cross_encoder(tmp_path)


def write_cross_encoder(folder: Path, outputs: int = 1, inputs: Sequence[str] = ("input_ids", "attention_mask")) -> Path:
    from onnx import TensorProto, helper, save
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(VOCABULARY)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    nodes = [
        helper.make_node("Equal", ["input_ids", "storm"], ["is_storm"]),
        helper.make_node("Cast", ["is_storm"], ["ones"], to=TensorProto.INT64),
        helper.make_node("Mul", ["ones", "attention_mask"], ["seen"]),
        helper.make_node("ReduceSum", ["seen", "axis"], ["count"], keepdims=1),
        helper.make_node("Cast", ["count"], ["score"], to=TensorProto.FLOAT),
        helper.make_node("Neg", ["score"], ["not"]),
        helper.make_node("Concat", ["not", "score"] if outputs == 2 else ["score"], ["logits"], axis=1),
    ]
    initial = [
        helper.make_tensor("storm", TensorProto.INT64, [], [0]), helper.make_tensor("axis", TensorProto.INT64, [1], [1]),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info(name, TensorProto.INT64, ["b", "n"]) for name in inputs],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", outputs])], initial,
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "model.onnx")
    return folder


PASSAGES = ("the harbour was calm", "storm storm the storm", "when the storm was", *["calm"] * onnx.BATCH)


@pytest.mark.parametrize(("outputs", "expected"), [(1, [0, 3, 1]), (2, [0, 6, 2])])
async def test_a_mounted_cross_encoder_reads_question_and_passage_together(tmp_path: Path, outputs: int, expected: list[float]) -> None:
    """Scores are in the order of the passages, whatever the batches; padding is masked; of two classes the second minus the first counts."""
    made = onnx.build(RerankerParts(settings(rerank_folder=write_cross_encoder(tmp_path, outputs))))
    assert await made.scores("when was the harbour calm", found(*PASSAGES)) == expected + [0] * onnx.BATCH
    one = 1 * outputs
    assert await made.scores("storm", found("calm", "storm")) == [one, 2 * one]
    await made.close()


async def test_a_long_passage_is_cut_and_the_question_is_not(cross_encoder: Path) -> None:
    """What stands beyond the model's length is not read."""
    made = onnx.Onnx(cross_encoder)
    assert await made.scores("storm", found("calm " * onnx.MOST_TOKENS + "storm", "storm " * 3)) == [1, 4]
    await made.close()


async def test_a_question_that_is_given_up_stops_after_the_batch_that_runs(cross_encoder: Path, until: Callable[..., Awaitable[None]]) -> None:
    """Nobody waits for it any more: the batches that are left do not run, and the next question is answered."""
    made = onnx.Onnx(cross_encoder)
    begun, go_on, ran = threading.Event(), threading.Event(), []
    batch = made._batch

    def held(pairs: list[Any]) -> list[float]:
        ran.append(len(pairs))
        begun.set()
        assert go_on.wait(20)
        return batch(pairs)

    made._batch = held  # type: ignore[method-assign]
    task = asyncio.create_task(made.scores("storm", found(*["calm"] * (onnx.BATCH * 4))))
    await until(begun.is_set)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    go_on.set()
    assert await made.scores("storm", found("storm")) == [2]
    assert ran == [onnx.BATCH, 1]
    await made.close()


async def test_a_folder_that_is_no_cross_encoder_is_refused_at_the_start(cross_encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is missing or broken is named."""
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(SettingsError, match=r"model\.onnx"):
        onnx.Onnx(empty)
    (cross_encoder / "tokenizer.json").write_text("{}")
    with pytest.raises(SettingsError, match="cannot be loaded"):
        onnx.Onnx(cross_encoder)
    with pytest.raises(SettingsError, match="pixels"):
        onnx.Onnx(write_cross_encoder(cross_encoder, inputs=("input_ids", "attention_mask", "pixels")))


async def test_a_model_that_fails_while_it_runs_is_down(cross_encoder: Path) -> None:
    """Its tokenizer gives what it cannot read: the search goes on without it."""
    made = onnx.Onnx(cross_encoder)
    made._inputs = {"input_ids"}
    with pytest.raises(StoreDown, match="cross-encoder failed"):
        await made.scores("storm", found("storm"))
    await made.close()


# -- engine


def answer(yes: float, no: float, *, tokens: tuple[str, str] = (" Yes", "no")) -> EngineAnswer:
    top = [{"token": token, "logprob": math.log(p)} for token, p in zip(tokens, (yes, no), strict=True) if p]
    raw = json.dumps({"choices": [{"logprobs": {"content": [{"token": "x", "logprob": -1, "top_logprobs": top}]}}]}).encode()
    return EngineAnswer("x", "stop", Usage(5, 1), raw)


class Told:
    """Answers as told, whatever is asked."""

    def __init__(self, *answers: EngineAnswer | None) -> None:
        self.answers = list(answers)
        self.bodies: Sequence[dict[str, Any]] = []

    async def __call__(self, model: str, bodies: Sequence[dict[str, Any]], ask: Ask) -> list[EngineAnswer | None]:
        self.bodies = bodies
        return self.answers


@pytest.fixture
def ask() -> Ask:
    return Ask(Flight("/test"), Caller("key", "tenant"), Deadline(100))


async def test_an_engine_judges_by_how_probable_yes_is(ask: Ask) -> None:
    """Beside `no`, whatever else it might have said; a passage that it said nothing of goes behind."""
    told = Told(answer(0.1, 0.3), answer(0.2, 0), None, answer(0.3, 0.1, tokens=("是", "否")))
    made = engine.ByEngine(told, "judge")
    assert await made.scores("q?", found("a", "b", "c", "d"), ask) == pytest.approx([0.25, 1.0, -1.0, 0.75])
    body = told.bodies[0]
    assert (body["max_tokens"], body["logprobs"], body["temperature"]) == (1, True, 0)
    assert body["messages"][1]["content"].startswith("Passage:\na\n\nQuestion: q?")


async def test_an_engine_judges_only_the_first(ask: Ask) -> None:
    """Each costs a prompt: those behind keep their order, behind those that were judged."""
    made = engine.ByEngine(Told(*[answer(0.1, 0.9)] * engine.MOST), "judge")
    judged = await Second(made).judge("q", found(*"abcdefghijkl"), 5.0, ask)
    assert judged.order == list(range(12))
    assert judged.scores == pytest.approx([0.1] * engine.MOST + [-1.0] * (12 - engine.MOST))


@pytest.mark.parametrize(
    "raw",
    [
        None, b"", b"{}", b"[]", b'{"choices": [{"logprobs": null}]}', b'{"choices": [{"logprobs": {"content": []}}]}', b"[" * 200_000,
        b'{"choices": [{"logprobs": {"content": [{"top_logprobs": [{"token": "yes", "logprob": 1e9}]}]}}]}',
    ],
    ids=range(8),
)  # fmt: skip
async def test_an_engine_that_tells_no_probabilities_judges_nothing(ask: Ask, raw: bytes | None) -> None:
    """The fused order stands."""
    with pytest.raises(EngineError, match="no probability"):
        await engine.ByEngine(Told(EngineAnswer("yes", "stop", Usage(5, 1), raw)), "judge").scores("q", found("a"), ask)


async def test_where_no_request_searches_no_engine_is_asked() -> None:
    """On the command line there is nobody in whose name."""
    made = engine.build(RerankerParts(settings()))
    with pytest.raises(StoreDown, match="No engine"):
        await made.scores("q", found("a"))
