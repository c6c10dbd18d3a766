"""Through the gateway: a prompt that is too long is cut, and the caller is told so in a header and in the answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.api.conftest import House, add_keys, start_gateway, start_scripted, stop, url_of

from tidegate.stores.migrate import migrate

LIMIT = 80
LONG = [
    {"role": "system", "content": "Obey."},
    *({"role": role, "content": f"turn {n} says much " * 6} for n in range(6) for role in ("user", "assistant")),
    {"role": "user", "content": "##n=3##"},
]
TEMPLATE = "{% block system %}S{% endblock %}{% block user %}{{ input.order }}{% endblock %}"

PASSAGES = "{% block system %}S{% endblock %}{% block user %}{% for p in passages %}{{ p.text }} {% endfor %}{{ input.question }}{% endblock %}"


@pytest.fixture(scope="module")
def house(postgres_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A gateway that cuts prompts of /v1 to 80 tokens, and has a capability that refuses them and one that cuts them."""
    migrate(postgres_dsn)
    keys = asyncio.run(add_keys(postgres_dsn))
    engine, engine_url = start_scripted()
    data = tmp_path_factory.mktemp("length")
    for name, policy in (("refuses", "refuse"), ("cuts", "tail")):
        folder = data / "capabilities" / "long" / name
        (folder / "prompts" / "v1").mkdir(parents=True)
        (folder / "capability.toml").write_text(
            f'stages = ["prompt", "fit", "generate"]\n[length]\npolicy = "{policy}"\nmax_prompt_tokens = {LIMIT}\nmarker = "~"\n'
        )
        for schema in ("input", "output"):
            (folder / f"{schema}.schema.json").write_text('{"type": "object"}')
        (folder / "prompts" / "v1" / "template.jinja").write_text(TEMPLATE)
    folder = data / "capabilities" / "long" / "reads"
    (folder / "prompts" / "v1").mkdir(parents=True)
    (folder / "capability.toml").write_text('stages = ["shard", "prompt", "generate"]\n[shard]\ntokens = 64\nkeep = 2\nparallel = 3\n')
    for schema in ("input", "output"):
        (folder / f"{schema}.schema.json").write_text('{"type": "object"}')
    (folder / "prompts" / "v1" / "template.jinja").write_text(PASSAGES)
    process = start_gateway(
        data, postgres_dsn, engine_url, TIDEGATE_LENGTH__POLICY="head", TIDEGATE_LENGTH__MAX_PROMPT_TOKENS=str(LIMIT),
        TIDEGATE_CAPABILITIES__FOLDERS=json.dumps([str(data / "capabilities")]),
    )
    try:
        yield House(url_of(data, process), engine_url, keys, data, process)
    finally:
        stop(process)
        stop(engine)


def test_the_caller_is_told_in_a_header_and_in_the_answer(house: House) -> None:
    """The same facts in both and in the flight; the rest of the answer is the engine's own, whose count is what was told."""
    with house.client() as client:
        answer = client.post("/v1/chat/completions", json={"messages": LONG})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    facts = body["tidegate"]["cut"]
    assert facts["from"] > LIMIT >= facts["to"]
    assert (facts["policy"], facts["counted"], facts["limit"]) == ("head", "engine", LIMIT)
    assert answer.headers["x-tidegate-cut"].startswith("policy=head; messages_dropped=")
    assert f"to={facts['to']}" in answer.headers["x-tidegate-cut"]
    assert body["choices"][0]["message"]["content"]
    flight = house.flight(answer.headers["x-request-id"])
    assert [told for _, what, told in flight["decisions"] if what == "length_cut"] == [facts]
    assert "fit" in [part for part, _ in flight["laps"]]


def test_a_stream_tells_it_before_its_end(house: House) -> None:
    """An event without a choice between the answer and [DONE], of the same id as the others; the header is there too."""
    with house.client() as client:
        answer = client.post("/v1/chat/completions", json={"messages": LONG, "stream": True})
    assert "policy=head" in answer.headers["x-tidegate-cut"]
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    events: list[dict[str, Any]] = [json.loads(line) for line in lines[:-1]]
    assert events[-1]["choices"] == []
    assert events[-1]["tidegate"]["cut"]["limit"] == LIMIT
    assert {event["id"] for event in events} == {events[0]["id"]}
    assert all("tidegate" not in event for event in events[:-1])


def test_a_prompt_that_fits_is_left_alone(house: House) -> None:
    """No header, no member."""
    answer = house.chat("##n=3##")
    assert "x-tidegate-cut" not in answer.headers
    assert "tidegate" not in answer.json()


def test_a_plain_prompt_is_cut_too(house: House) -> None:
    """/v1/completions has the same bound."""
    with house.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "much to say " * 60 + "##n=3##"})
    assert answer.json()["tidegate"]["cut"]["texts_cut"] == 1


def test_a_capability_cuts_and_tells_among_its_fields(house: House) -> None:
    """Its own policy and bound; the answer has a field `cut`, streamed as well."""
    with house.client() as client:
        answer = client.post("/api/v1/long/cuts", json={"order": "##n=3## " + "much to say " * 60})
        assert answer.json()["cut"]["policy"] == "tail"
        assert "policy=tail" in answer.headers["x-tidegate-cut"]
        streamed = client.post("/api/v1/long/cuts", json={"order": "##n=3## " + "much to say " * 60}, headers={"accept": "text/event-stream"})
    last = [block for block in streamed.text.split("\n\n") if block.startswith("event: answer")]
    assert json.loads(last[0].split("data: ", 1)[1])["cut"]["policy"] == "tail"


def test_a_capability_refuses(house: House) -> None:
    """With `refuse` the engine is not asked, and the error is the one for prompts that are too long."""
    before = house.stats()["requests"]
    with house.client() as client:
        answer = client.post("/api/v1/long/refuses", json={"order": "##n=3## " + "much to say " * 60})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert f"more than {LIMIT}" in answer.json()["error"]["message"]
    assert house.stats()["requests"] == before


def test_a_long_document_is_read_in_parts_and_the_caller_is_told(house: House) -> None:
    """Every part is a call to the engine beside the answer's own; header, answer and flight have the same figures; so has a stream."""
    before = house.stats()["requests"]
    fields = {"document": "The pipe burst on a Monday and the cellar stood under water. " * 20, "question": "##n=4## What of the pipe?"}
    with house.client() as client:
        answer = client.post("/api/v1/long/reads", json=fields)
        assert answer.status_code == 200, answer.text
        asked = house.stats()["requests"] - before
        streamed = client.post("/api/v1/long/reads", json=fields, headers={"accept": "text/event-stream"})
    facts = answer.json()["shards"]
    assert facts["parts"] > 3
    assert asked == facts["parts"] + 1
    assert (facts["kept"], facts["unanswered"], facts["counted"]) == (2, 0, "engine")
    assert answer.headers["x-tidegate-shards"] == "; ".join(f"{name}={value}" for name, value in facts.items())
    flight = house.flight(answer.headers["x-request-id"])
    told = next(told for _, what, told in flight["decisions"] if what == "sharded")
    assert told["prompt_tokens"] >= facts["tokens"]
    assert "pipe" not in json.dumps(flight)
    last = [block for block in streamed.text.split("\n\n") if block.startswith("event: answer")]
    assert json.loads(last[0].split("data: ", 1)[1])["shards"] == facts
    assert "event: passages" in streamed.text
