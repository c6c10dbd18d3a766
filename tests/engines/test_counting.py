"""Who counts tokens: the engine, the vocabulary of its file, or nobody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.api.conftest import start_scripted, stop

from tidegate.bench.tokens import encode
from tidegate.core.ask import EngineCall
from tidegate.core.plugins import load
from tidegate.core.ports import Engine
from tidegate.engines.counting import Counter, estimate
from tidegate.engines.settings import EngineSettings

VOCABULARY = Path(__file__).parents[2].parent / "shared" / "data" / "tokenizers" / "gguf_vocab"
NOBODY = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def scripted() -> Iterator[str]:
    process, url = start_scripted()
    yield url
    stop(process)


def engine_of(adapter: str, url: str, **more: Any) -> tuple[Engine, Counter]:
    settings = EngineSettings(adapter=adapter, url=url, models=["m"], **more)
    engine: Engine = load("tidegate.engines.adapters", adapter).build("e", settings)
    return engine, Counter({"e": settings})


async def test_the_engine_counts(scripted: str) -> None:
    """Texts, a chat with its template, a prompt and its context, each by one of the engine's own routes."""
    engine, counter = engine_of("llama_cpp", scripted)
    try:
        texts = ["hello world", "", "你好"]
        assert await counter.texts(engine, texts) == ([len(encode(text, special=False)) for text in texts], "engine")
        chat = await counter.prompt(engine, EngineCall("chat", "m", {"messages": [{"role": "user", "content": "hello world"}]}))
        assert chat.how == "engine"
        assert chat.tokens > len(encode("hello world", special=False))
        plain = await counter.prompt(engine, EngineCall("completion", "m", {"prompt": "hello world"}))
        assert (plain.how, plain.tokens < chat.tokens) == ("engine", True)
        assert await counter.context(engine, "m") > 0
    finally:
        await engine.close()


async def test_token_ids_need_nobody() -> None:
    """A prompt of ids has as many tokens as ids, whoever is there."""
    engine, counter = engine_of("openai", NOBODY)
    assert await counter.prompt(engine, EngineCall("completion", "m", {"prompt": [1, 2, 3]})) == (await counter.prompt(
        engine, EngineCall("completion", "m", {"prompt": [3, 2, 1]})
    ))
    await engine.close()


@pytest.mark.parametrize("adapter", ["openai", "llama_cpp", "vllm", "sglang", "tgi"])
async def test_where_nobody_can_count_it_is_an_estimate(adapter: str) -> None:
    """No engine, or one without a tokenizer to ask: a number that leans high, called an estimate."""
    engine, counter = engine_of(adapter, NOBODY)
    counts, how = await counter.texts(engine, ["a word or two", "你好世界"])
    assert (counts, how) == ([estimate("a word or two"), estimate("你好世界")], "estimate")
    chat = await counter.prompt(engine, EngineCall("chat", "m", {"messages": [{"role": "user", "content": "a word or two"}]}))
    assert (chat.how, chat.tokens > counts[0]) == ("estimate", True)
    assert await counter.context(engine, "m") == 0
    await engine.close()


async def test_the_vocabulary_of_a_file_counts_where_the_engine_does_not(tmp_path: Path) -> None:
    """Texts are counted as llama.cpp's own test vectors say; a chat around them is an estimate, because nobody knows its template."""
    found = sorted(VOCABULARY.glob("*qwen2*.gguf*")) if VOCABULARY.is_dir() else []
    files = [file for file in found if file.suffix in (".gguf", ".gz") and ".gguf." not in file.name.removesuffix(".gz")]
    if not files:
        pytest.skip("the data of the tests is not here: ../shared/data")
    inputs = next(file for file in found if file.name.endswith(".inp")).read_text("utf-8").split("\n__ggml_vocab_test__\n")
    ids = [line.split() for line in next(file for file in found if file.name.endswith(".out")).read_text("ascii").splitlines()]
    engine, counter = engine_of("openai", NOBODY, tokenizer=str(files[0]))
    counts, how = await counter.texts(engine, inputs[: len(ids)])
    assert (counts, how) == ([len(one) for one in ids], "vocabulary")
    prompt = await counter.prompt(engine, EngineCall("completion", "m", {"prompt": inputs[0]}))
    assert prompt.how == "vocabulary"
    chat = await counter.prompt(engine, EngineCall("chat", "m", {"messages": [{"role": "user", "content": inputs[0]}]}))
    assert chat.how == "estimate"
    await engine.close()


async def test_a_broken_vocabulary_is_no_vocabulary(tmp_path: Path) -> None:
    """A file that cannot be read is passed over: the estimate stands in, and says so."""
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF\x00")
    engine, counter = engine_of("openai", NOBODY, tokenizer=str(file))
    assert (await counter.texts(engine, ["a"]))[1] == "estimate"
    await engine.close()


@pytest.mark.parametrize(("text", "least", "most"), [("", 0, 0), ("word " * 100, 100, 200), ("字" * 100, 60, 150)])
def test_an_estimate_leans_high(text: str, least: int, most: int) -> None:
    """For usual texts between what tokenizers make of them and twice that."""
    assert least <= estimate(text) <= most




async def test_vllm_counts_by_its_own_routes(scripted: str) -> None:
    """The same texts, chat and prompt over vLLM's /tokenize; the chat counts as many tokens as llama.cpp's way finds for the same template."""
    engine, counter = engine_of("vllm", scripted)
    other, as_llama = engine_of("llama_cpp", scripted)
    chat = EngineCall("chat", "m", {"messages": [{"role": "user", "content": "hello world"}]})
    try:
        assert await counter.texts(engine, ["hello world"]) == await as_llama.texts(other, ["hello world"])
        assert await counter.prompt(engine, chat) == await as_llama.prompt(other, chat)
        assert (await counter.prompt(engine, EngineCall("completion", "m", {"prompt": "hello world"}))).how == "engine"
        assert await counter.context(engine, "scripted") > 0
    finally:
        await engine.close()
        await other.close()
