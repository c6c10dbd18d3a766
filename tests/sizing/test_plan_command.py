"""`tidegate plan`: what it prints, how it ends, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tidegate.cli import main

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False, "max_position_embeddings": 131072,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def run(folder: Path, *args: str) -> Result:
    return CliRunner().invoke(main, ["plan", str(folder), *args])


def test_it_prints_terms_verdict_and_changes(folder: Path) -> None:
    """A term a line, the verdict with its margin, the reserve apart, and what changes would make of it."""
    result = run(folder, "--gpu", "H100", "--length", "8192", "--concurrency", "8")
    assert result.exit_code == 0, result.output
    for words in ("weights", "activation", "non-torch", "graphs", "left for the KV cache", "margin +", "reserve of 1.35", "what if"):
        assert words in result.output
    assert "FITS: 8 x 8192 tokens" in result.output


def test_what_does_not_fit_ends_with_one(folder: Path) -> None:
    """The exit code says it to scripts, and JSON says all of it."""
    result = run(folder, "--gpu", "T4", "--json")
    assert result.exit_code == 1
    made = json.loads(result.output)
    assert made["verdict"] == "fails"
    assert made["why"]
    assert made["compared"] is None


def test_json_is_the_whole_plan(folder: Path) -> None:
    """Each term with its band, the pool, the what-ifs, the load."""
    made = json.loads(run(folder, "--gpu", "H100", "--length", "4096", "--qps", "2", "--slo", "99.9", "--json").output)
    assert [term["name"] for term in made["terms"]] == ["weights", "activation", "non-torch", "graphs"]
    assert all(term["low_gib"] <= term["gib"] <= term["high_gib"] for term in made["terms"])
    assert made["pool_low_gib"] < made["pool_gib"] < made["pool_high_gib"]
    assert made["serving"]["budget"]["minutes_a_month"] == pytest.approx(43.2)
    assert {"change", "verdict", "concurrency"} <= set(made["what_if"][0])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "--gpu"),
        (["--gpu", "H101"], "H100"),
        (["--gpu", "H100", "--engine", "tgi"], "llama.cpp"),
        (["--gpu", "H100", "--engine-version", "latest"], "latest"),
        (["--gpu", "H100", "--engine-version", "0.5"], "0.6"),
        (["--gpu", "H100", "--kv-dtype", "fp9"], "fp9"),
        (["--gpu-memory", "nan"], "nan"),
        (["--gpu-memory", "inf"], "inf"),
        (["--gpu-memory", "-4"], "-4"),
        (["--gpu-memory", "0"], "more than 0"),
        (["--gpu", "H100", "--share", "nan"], "nan"),
        (["--gpu", "H100", "--share", "1.5"], "1.5"),
        (["--gpu", "H100", "--weights", "-1"], "-1"),
        (["--gpu", "H100", "--tp", "0"], "--tp"),
        (["--gpu", "H100", "--pp", "64"], "64"),
        (["--gpu", "H100", "--length", "0"], "--length"),
        (["--gpu", "H100", "--qps", "0"], "--qps"),
        (["--gpu-memory", "80", "--qps", "1"], "bandwidth"),
        (["--gpu", "H100", "--qps", "1", "--slo", "nan"], "nan"),
        (["--gpu", "H100", "--observe", "localhost"], "localhost"),
    ],
)
def test_nonsense_is_refused_by_name(folder: Path, args: list[str], words: str) -> None:
    """Numbers that are none, cards, engines and types that are not known: the message names what was wrong, or what is known."""
    result = run(folder, *args)
    assert result.exit_code in (1, 2)
    assert words in result.output
    assert "Traceback" not in result.output
    assert "Tidegate's fault" not in result.output


def test_names_from_a_file_print_as_text(tmp_path: Path) -> None:
    """A config whose architecture holds control characters does not move the cursor."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["x\x1b[2Jy"]}))
    assert "\x1b" not in run(tmp_path, "--gpu", "H100").output
