"""The checks against the real engine with the packaged model: what llama.cpp promises, it keeps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.embedded_engine import KEY, engine_child, needs_engine

from tidegate.engines.conformance import check_url
from tidegate.engines.fleet import Fleet
from tidegate.engines.settings import EngineSettings
from tidegate.local.engine import find_model

pytestmark = [
    pytest.mark.local,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    needs_engine,
    pytest.mark.asyncio(loop_factories=["uvloop"]),
]

CONTEXT = 512


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The engine's child process, as the product runs it, with a small context."""
    with engine_child(3, CONTEXT) as url:
        yield url


async def test_the_embedded_engine_keeps_what_the_gateway_relies_on(url: str) -> None:
    """No must fails; tokens, ends and places are proven by the engine's own ids and counts. Whatever its speed, nothing is guessed."""
    report = await check_url(url, api_key=KEY, tokenizer=find_model(""), limit_s=150)
    found = {one.name: one for one in report.findings}
    assert (report.adapter, report.model, report.failed_musts) == ("llama_cpp", "smollm2", [])
    for name in ("streaming", "done", "length", "usage", "eos", "stop", "special_tokens", "utf8", "tokenizer", "logprobs", "seed"):
        assert found[name].verdict == "pass", found[name]
    for name in ("cancel", "cancel_whole"):
        assert found[name].verdict == "pass", found[name]
        assert "by the engine's own count" in found[name].evidence
    assert "<|im_end|> (2) ends it" in found["eos"].evidence
    assert found["tokenizer"].evidence == "14 of 14 texts become the configured vocabulary's ids"
    assert f"of {CONTEXT} claimed tokens pass" in found["context"].evidence


async def test_the_embedded_engine_is_admitted(url: str) -> None:
    """By the checks of a registration."""
    fleet = Fleet({"local": EngineSettings(adapter="llama_cpp", url=url, models=["smollm2"], api_key=KEY)})
    try:
        assert await fleet.check(fleet.members["local"])
        assert fleet.members["local"].state == "passed", fleet.figures()
    finally:
        await fleet.close()
