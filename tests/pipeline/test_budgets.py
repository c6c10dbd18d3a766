"""What each part of a capability's one deadline may take, and the fallback that is declared for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.pipeline.test_ladder import MANIFEST, MESSAGE, write

from tidegate.pipeline.budgets import Budget, described
from tidegate.pipeline.settings import BudgetSettings

OURS = BudgetSettings(profile="gpu", retrieve_s=0.2, first_token_s=0.8)


def table(folder: Path, manifest: str) -> dict[str, Budget]:
    capability = write(folder, manifest, budgets=OURS)
    return {row.part: row for row in described(capability, 3.0, lambda name: f"where {name} is set")}


def test_each_part_has_its_time_what_set_it_and_a_fallback(tmp_path: Path) -> None:
    """The capability's own time wins; what it does not say comes from the settings."""
    rows = table(tmp_path, MANIFEST)
    assert rows["forecast of the wait for a slot"][1:] == (3.0, "where admission.forecast_s is set", "small_model")
    assert rows["wait for a slot"][1:] == (0.8, "where budgets.first_token_s is set", "small_model")
    assert rows["retrieve"][1:] == (0.2, "capability.toml", "no_retrieval")
    assert rows["generate, to the first token"][1:] == (0.8, "where budgets.first_token_s is set", "another engine, then small_model")
    assert rows["the full answer, to its first text"][1:] == (18.0, "default: 60% of the whole", "small_model")
    assert rows["the whole"][1:] == (30.0, "capability.toml", "message")


def test_without_a_ladder_the_fallback_is_an_error(tmp_path: Path) -> None:
    """It says which."""
    rows = table(tmp_path, 'stages = ["retrieve", "prompt", "generate"]\n')
    assert {part: row.otherwise for part, row in rows.items()} == {
        "forecast of the wait for a slot": "error 429 with Retry-After", "retrieve": "error 504",
        "generate, to the first token": "another engine, then error 504", "the whole": "error 504",
    }


@pytest.mark.parametrize(
    ("rungs", "retrieve"),
    [("small_model", "message"), ("small_model no_retrieval", "small_model"), ("faq", "faq"), ("small_model faq", "faq")],
)
def test_the_fallback_of_a_search_does_not_search(tmp_path: Path, rungs: str, retrieve: str) -> None:
    """A smaller model takes over only where the capability may answer without documents."""
    ladder = {
        "small_model": '[[ladder]]\nrung = "small_model"\nmodel = "small"\n', "no_retrieval": '[[ladder]]\nrung = "no_retrieval"\n',
        "faq": '[[ladder]]\nrung = "faq"\n',
    }
    written = "".join(ladder[rung] for rung in rungs.split())
    rows = table(tmp_path, f'stages = ["retrieve", "prompt", "generate", "cite"]\n[faq]\nfile = "faq.toml"\n{written}{MESSAGE}')
    assert rows["retrieve"].otherwise == retrieve


def test_stages_with_times_of_their_own_are_listed(tmp_path: Path) -> None:
    """The parts of a document, and a summary."""
    manifest = 'stages = ["shard", "prompt", "fit", "generate"]\n[shard]\nbudget_s = 7\n[length]\npolicy = "compress"\ncompress_s = 4\n'
    rows = table(tmp_path, manifest)
    assert rows["shard"][1:] == (7.0, "capability.toml", "goes on with what was read by then")
    assert rows["fit"][1:] == (4.0, "capability.toml", "length.compress_else: middle")
