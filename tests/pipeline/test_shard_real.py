"""A long document read in parts by the real llama.cpp, as a capability of its own folder."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.embedded_engine import needs_engine

from tidegate.core.ask import Ask, Caller, Deadline
from tidegate.core.flight import Flight
from tidegate.core.plugins import load as load_plugin
from tidegate.engines.counting import Counter
from tidegate.engines.fleet import Fleet
from tidegate.engines.settings import EngineSettings
from tidegate.pipeline.capability import load
from tidegate.pipeline.parts import Parts
from tidegate.pipeline.runner import Step, run
from tidegate.pipeline.settings import BudgetSettings

pytestmark = [
    pytest.mark.local,
    needs_engine,
]

MANIFEST = """
stages = ["shard", "prompt", "fit", "generate", "cite"]
model = "small"
[shard]
tokens = 80
parallel = 2
answer_tokens = 12
keep = 2
ask = "Repeat the sentence of the text that answers the question."
[length]
policy = "tail"
[generate]
max_tokens = 12
"""
TEMPLATE = (
    "{% block system %}You answer from the text.{% endblock %}"
    "{% block user %}{% for p in passages %}{{ p.text }}\n{% endfor %}Question: {{ input.question }}{% endblock %}"
)
FILLER = "The harbour was quiet that day and the ships lay still. Nobody spoke much, and the gulls slept on the roofs of the old houses. "
FACT = "The deductible for storm damage is 340 euros. "


@pytest.fixture
async def parts(llama_url: str, llama_key: str) -> AsyncIterator[Parts]:
    settings = EngineSettings(adapter="llama_cpp", url=llama_url, models={"small": "smollm2"}, api_key=llama_key, conformance="off")
    fleet = Fleet({"local": settings})
    yield Parts(fleet, counter=Counter({"local": settings}))
    await fleet.close()


async def test_what_stands_in_the_middle_is_found(tmp_path: Path, parts: Parts) -> None:
    """The one part of five that holds the fact is the most relevant passage, and the answer is made of passages alone."""
    folder = tmp_path / "papers" / "ask"
    (folder / "prompts" / "v1").mkdir(parents=True)
    (folder / "capability.toml").write_text(MANIFEST)
    for schema in ("input", "output"):
        (folder / f"{schema}.schema.json").write_text(json.dumps({"type": "object"}))
    (folder / "prompts" / "v1" / "template.jinja").write_text(TEMPLATE)
    capability = load(folder, BudgetSettings(profile="embedded", retrieve_s=2.0, first_token_s=30.0))
    stages = [load_plugin("tidegate.pipeline.stages", name).build(capability, parts) for name in capability.manifest.stages]
    ask = Ask(Flight("/test"), Caller("key", "tenant"), Deadline(200))
    ask.input = {"document": FILLER * 6 + FACT + FILLER * 6, "question": "What is the deductible for storm damage?"}
    await run(ask, [Step(stage, 200.0) for stage in stages])
    assert ask.notes is not None
    facts = ask.notes["shards"]
    assert (facts["parts"] >= 4, facts["unanswered"], facts["counted"]) == (True, 0, "engine")
    best = max(ask.passages, key=lambda passage: passage.score)
    number = int(best.id.rpartition("-")[2])
    assert 1 < number < facts["parts"]
    assert ask.aside is not None
    assert ask.aside.prompt_tokens > facts["tokens"]
    assert ask.answer is not None
    assert [one["passage_id"] for one in ask.answer["citations"]] == [passage.id for passage in ask.passages]
    assert [what for _, what, _ in ask.flight.decisions][:1] == ["sharded"]
