"""An engine that fails a check: the gateway shows it everywhere and does not use it."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path

import httpx

from tidegate.engines.conformance import check_url

from .conftest import House, start_gateway, stop, until, url_of


def test_an_engine_that_fails_a_must_is_shown_and_not_used(house: House, postgres_dsn: str, tmp_path: Path) -> None:
    """Its tokenizer is not the configured one: 503 says which check failed, /health, /metrics and the log too; other models go on."""
    vocabulary = tmp_path / "other.gguf"
    vocabulary.write_bytes(_vocabulary())
    gateway = start_gateway(
        tmp_path, postgres_dsn, house.engine,
        TIDEGATE_ENGINES__SCRIPTED__CONFORMANCE="must", TIDEGATE_ENGINES__SCRIPTED__TOKENIZER=str(vocabulary),
    )
    try:
        url = url_of(tmp_path, gateway)
        until(lambda: not httpx.get(url + "/health").json()["engines"]["scripted"]["admitted"], "the failure of the check")
        body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
        answer = httpx.post(url + "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {house.keys['data']}"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "engine_not_admitted")
        assert "failed the check tokenizer" in error["message"]
        assert answer.headers["retry-after"]
        health = httpx.get(url + "/health").json()
        assert health["engines"]["scripted"]["conformance"] == "failed"
        assert any("tokenizer" in why for why in health["why"])
        assert 'tidegate_engine_admitted{engine="scripted"} 0.0' in httpx.get(url + "/metrics").text
    finally:
        stop(gateway)
    assert "failed the check tokenizer" in (tmp_path / "gateway.log").read_text()


def test_a_gateway_keeps_the_promises_of_its_engine(house: House) -> None:
    """The gateway checked as an engine: no must fails behind it, and a caller's mistakes are refused as such."""
    report = asyncio.run(check_url(house.url, api_key=house.keys["data"], model="scripted"))
    found = {one.name: one for one in report.findings}
    assert (report.adapter, report.failed_musts) == ("openai", [])
    for name in ("done", "usage", "eos", "stop", "utf8", "errors"):
        assert found[name].verdict == "pass", found[name]


def _vocabulary() -> bytes:
    """A GGUF file of one token."""
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    pairs = text("tokenizer.ggml.model") + struct.pack("<I", 8) + text("llama")
    pairs += text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 1) + text("a")
    pairs += text("tokenizer.ggml.scores") + struct.pack("<IIQf", 9, 6, 1, 0.0)
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 3) + pairs
