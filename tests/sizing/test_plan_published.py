"""The planner beside start-up logs that people published: every figure here was printed by a real engine on a real card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tidegate.sizing import memory
from tidegate.sizing.cards import Card, find_card
from tidegate.sizing.hf_model import from_config
from tidegate.sizing.memory import GIB, Engine
from tidegate.sizing.model_config import Model
from tidegate.sizing.plan import plan
from tidegate.sizing.rank import Stage, Wish, logged_tokens, stage_of, tightest
from tidegate.sizing.weights import stages

PUBLISHED = json.loads((Path(__file__).parent / "published_logs.json").read_text())


def model(name: str) -> Model:
    return from_config(PUBLISHED["models"][name], name, name=name)


def wish(log: dict[str, Any], **changes: Any) -> Wish:
    """What the engine of a log was started with."""
    card = find_card(log["gpu"]) if "gpu" in log else Card("card", log.get("gpu_gib", 80.0), None, "the log")
    if "gpu_gib" in log:
        card = Card(card.name, log["gpu_gib"], card.bandwidth_gbs, "the log", card.fabric)
    version = memory.version_of(log["engine"])
    step, sequences, share = memory.defaults(version, card)
    engine = Engine("vllm", version, log.get("step_tokens", step), log.get("sequences", sequences), log.get("share", share))
    asked = {
        "tp": log.get("tp", 1), "pp": log.get("pp", 1), "kv_dtype": log.get("kv_dtype", "auto"), "length": log["max_model_len"],
        "block": log.get("block", 16), "prefix_caching": log.get("prefix_caching", True), "draft_tokens": log.get("draft_tokens", 0),
    }  # fmt: skip
    return Wish(card, engine, **{**asked, **changes})


def tokens(log: dict[str, Any], stage: Stage, pool_gib: float) -> int:
    return logged_tokens(stage.cache, stage.cache.blocks_in(pool_gib * GIB), log["max_model_len"], memory.version_of(log["engine"]))


def label(log: dict[str, Any]) -> str:
    return f"{log['model']}-{log['engine']}-tp{log.get('tp', 1)}-pp{log.get('pp', 1)}-{log.get('kv_dtype', 'auto')}-{log['max_model_len']}"


with_tokens = [log for log in PUBLISHED["logs"] if "kv_tokens" in log and "kv_gib" in log and log.get("pp", 1) == 1]


@pytest.mark.parametrize("log", with_tokens, ids=label)
def test_tokens_of_a_pool_are_what_the_engine_printed(log: dict[str, Any]) -> None:
    """From the size of its KV cache, the tokens that an engine printed: to 0.3 % (the log rounds the pool), 2 % where ranks differ."""
    seen = tokens(log, tightest(model(log["model"]), wish(log)), log["kv_gib"])
    assert seen == pytest.approx(log["kv_tokens"], rel=0.02 if log["model"].startswith("Qwen3-235B") else 0.003)


@pytest.mark.parametrize("log", [log for log in with_tokens if "concurrency" in log], ids=label)
def test_requests_of_a_pool_are_what_the_engine_printed(log: dict[str, Any]) -> None:
    """"Maximum concurrency for N tokens per request", to 0.6 %: windows, states and latent caches included."""
    cache = tightest(model(log["model"]), wish(log)).cache
    requests = cache.blocks_in(log["kv_gib"] * GIB) / cache.blocks_of(log["max_model_len"])
    assert requests == pytest.approx(log["concurrency"], rel=0.006)


@pytest.mark.parametrize("log", [log for log in PUBLISHED["logs"] if log["engine"] == "0.19" and "gpu" in log], ids=label)
def test_tokens_from_the_config_alone(log: dict[str, Any]) -> None:
    """From the config, the card and the flags alone, the tokens that an engine printed: to 4 %, Llama 4 Scout to 20 %."""
    made = plan(model(log["model"]), wish(log))
    assert made.tokens == pytest.approx(log["kv_tokens"], rel=0.2 if "Scout" in log["model"] else 0.04)
    assert made.tokens_low <= log["kv_tokens"] <= made.tokens_high


#: With the sizes of each term, of the engine's present way of measuring.
with_terms = [log for log in PUBLISHED["logs"] if "gpu" in log and "weights_gib" in log and memory.version_of(log["engine"]) >= (0, 11)]


@pytest.mark.parametrize("log", with_terms, ids=label)
def test_each_term_lies_in_its_band(log: dict[str, Any]) -> None:
    """Weights, activation, non-torch memory and graphs of a first rank are within what the plan allows for; the weights within 8 %."""
    stage = stage_of(model(log["model"]), wish(log), *stages(len(model(log["model"]).layers), log.get("pp", 1))[0])
    for name, band in (("weights", stage.weights), ("activation", stage.activation), ("non_torch", stage.non_torch), ("graphs", stage.graphs)):
        if f"{name}_gib" in log:
            assert band.low / GIB - 0.005 <= log[f"{name}_gib"] <= band.high / GIB + 0.005, name
    assert log["weights_gib"] == pytest.approx(stage.weights.mid / GIB, rel=0.08)


@pytest.mark.parametrize("log", PUBLISHED["fails"], ids=label)
def test_what_did_not_start_is_a_fail(log: dict[str, Any]) -> None:
    """Where the engine said that nothing was left for its cache, the verdict is that it fails."""
    assert plan(model(log["model"]), wish(log)).verdict == "fails"


def test_every_log_has_its_address() -> None:
    """Each figure can be looked up where it was published."""
    assert len({log["source"] for log in PUBLISHED["logs"]}) > 40
    assert all(log["source"].startswith("https://github.com/") for log in PUBLISHED["logs"] + PUBLISHED["fails"])
