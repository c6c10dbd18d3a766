"""How far `tidegate plan` is off, on start-up logs of vLLM that people published.

    .venv/bin/python benchmarks/plan.py

Reads tests/sizing/published_logs.json (figures and addresses) and computes, for each log, the tokens of the KV cache in two ways: *given* the sizes
that the log prints (total, weights, activation, non-torch; or the pool itself), and from the *config* alone (shapes, card, flags). Writes every error
to benchmarks/results/plan.json. Hybrid models stand apart, and so do the logs from which the constants of the activation term were read off.
"""

from __future__ import annotations

import json
from statistics import mean, median
from typing import Any

from common import ROOT, record

from tidegate.sizing import memory
from tidegate.sizing.cache import Layout
from tidegate.sizing.cards import Card, find_card
from tidegate.sizing.hf_model import from_config
from tidegate.sizing.memory import GIB, Engine
from tidegate.sizing.rank import Stage, Wish, logged_tokens, tightest

LOGS = ROOT / "tests" / "sizing" / "published_logs.json"
#: The planner refuses vLLM before this version; its logs are shown, and counted nowhere.
OLDEST = (0, 6)


def wish(log: dict[str, Any]) -> Wish:
    card = find_card(log["gpu"]) if "gpu" in log else Card("unknown", log.get("gpu_gib", 80.0), None, "the log")
    card = Card(card.name, log.get("gpu_gib", card.visible_gib), None, "the log", card.fabric)
    version = memory.version_of(log["engine"])
    step, sequences, share = memory.defaults(version, card)
    engine = Engine("vllm", version, log.get("step_tokens", step), log.get("sequences", sequences), log.get("share", share))
    return Wish(
        card, engine, tp=log.get("tp", 1), pp=log.get("pp", 1), kv_dtype=log.get("kv_dtype", "auto"), length=log["max_model_len"],
        block=log.get("block", 16), prefix_caching=log.get("prefix_caching", True), draft_tokens=log.get("draft_tokens", 0),
    )  # fmt: skip


def tokens(log: dict[str, Any], stage: Stage, pool_gib: float) -> int:
    return logged_tokens(stage.cache, stage.cache.blocks_in(pool_gib * GIB), log["max_model_len"], memory.version_of(log["engine"]))


def given_pool(log: dict[str, Any]) -> float | None:
    """The pool by the log's own sizes, or as it prints it."""
    if all(name in log for name in ("gpu_gib", "share", "weights_gib", "activation_gib", "non_torch_gib")):
        return float(log["gpu_gib"] * log["share"] - log["weights_gib"] - log["activation_gib"] - log["non_torch_gib"])
    return log.get("kv_gib")


def percent(planned: float, seen: float) -> float:
    return round(100 * (planned / seen - 1), 2)


def one(log: dict[str, Any], configs: dict[str, Any]) -> dict[str, Any]:
    stage = tightest(from_config(configs[log["model"]], log["model"], name=log["model"]), wish(log))
    assert isinstance(stage.cache, Layout)
    row: dict[str, Any] = {
        "model": log["model"], "source": log["source"], "engine": log["engine"], "gpu": log.get("gpu"), "tp": log.get("tp", 1),
        "pp": log.get("pp", 1), "hybrid": len(stage.cache.groups) > 1, "calibration": log["calibration"],
        "planned": memory.version_of(log["engine"]) >= OLDEST,
    }  # fmt: skip
    pool = given_pool(log)
    if "kv_tokens" in log:
        row["tokens"] = log["kv_tokens"]
        if pool is not None:
            row["given_tokens"] = tokens(log, stage, pool)
            row["given_error"] = percent(row["given_tokens"], log["kv_tokens"])
    else:
        row["tokens"] = tokens(log, stage, log["kv_gib"])
        row["tokens_by"] = "the pool that the log prints"
    if "gpu" in log and "share" in log:
        row["config_tokens"] = tokens(log, stage, max(stage.pool.mid, 0) / GIB)
        row["config_error"] = percent(row["config_tokens"], row["tokens"])
        low, high = (tokens(log, stage, max(end, 0) / GIB) for end in (stage.pool.low, stage.pool.high))
        if "kv_gib" in log:
            row["pool_error_of_card"] = round(100 * (stage.pool.mid / GIB - log["kv_gib"]) / wish(log).card.visible_gib, 2)
        row["inside_the_band"] = low <= row["tokens"] <= high
    if "weights_gib" in log and log.get("pp", 1) == 1:
        row["weights_error"] = percent(stage.weights.mid / GIB, log["weights_gib"])
        row["activation_error"] = percent(stage.activation.mid / GIB, log["activation_gib"])
    return row


def summary(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    errors = [abs(row[name]) for row in rows if name in row]
    if not errors:
        return {"logs": 0}
    return {"logs": len(errors), "mean_absolute": round(mean(errors), 2), "median": round(median(errors), 2), "worst": max(errors)}


def main() -> None:
    published = json.loads(LOGS.read_text())
    rows = [one(log, published["models"]) for log in published["logs"]]
    counted = [row for row in rows if row["planned"]]
    plain, hybrid = [row for row in counted if not row["hybrid"]], [row for row in counted if row["hybrid"]]
    body = {
        "percent_of_tokens": {
            "given_sizes": {"plain": summary(plain, "given_error"), "hybrid": summary(hybrid, "given_error")},
            "config_alone": {
                "plain": summary(plain, "config_error"),
                "plain_not_used_for_the_constants": summary([row for row in plain if not row["calibration"]], "config_error"),
                "hybrid": summary(hybrid, "config_error"),
                "hybrid_not_used_for_the_constants": summary([row for row in hybrid if not row["calibration"]], "config_error"),
            },
        },
        "inside_the_band": {
            "logs": sum("inside_the_band" in row for row in counted),
            "inside": sum(bool(row.get("inside_the_band")) for row in counted),
        },
        "percent_of_the_card": {"plain": summary(plain, "pool_error_of_card"), "hybrid": summary(hybrid, "pool_error_of_card")},
        "percent_of_terms": {"weights": summary(counted, "weights_error"), "activation": summary(counted, "activation_error")},
        "older_than_planned": [row for row in rows if not row["planned"]],
        "logs": [{key: value for key, value in row.items() if key != "planned"} for row in counted],
    }
    print(record("plan", body))
    print(json.dumps({key: body[key] for key in ("percent_of_tokens", "inside_the_band", "percent_of_the_card", "percent_of_terms")}, indent=1))


if __name__ == "__main__":
    main()
