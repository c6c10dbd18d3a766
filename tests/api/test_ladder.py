"""The ladder as a caller sees it: a real gateway, an engine that fails to order, another that is down."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.conftest import House, add_keys, start_gateway, start_scripted, stop, until, url_of

from tidegate.stores.migrate import migrate

INPUT = {"type": "object", "required": ["order"], "properties": {"order": {"type": "string"}}, "additionalProperties": False}
TEXT = {"type": "object", "required": ["answer", "citations"], "properties": {"answer": {"type": "string"}, "citations": {"type": "array"}}}
DECISION = {"type": "object", "required": ["decision"], "properties": {"decision": {"enum": ["accept", "refer"]}}, "additionalProperties": False}
TEMPLATE = "{% block system %}Obey.{% endblock %}{% block user %}{{ input.order }}{% endblock %}"
REST = """
[budgets]
first_token_s = 1.0
total_s = 20.0
full_share = 0.1
[faq]
file = "faq.toml"
question = "order"
[[ladder]]
rung = "faq"
note = "From the list."
[[ladder]]
rung = "message"
code = "nobody_answers"
message = "Nobody can answer just now."
"""
SMALL = '[[ladder]]\nrung = "small_model"\nmodel = "scripted"\nshare = 0.1\n'
FAQ = '[defaults]\ncitations = []\n[[entry]]\nkeywords = ["hours"]\noutput = { answer = "From nine to five." }\n'
DECIDE = '[[ladder]]\nrung = "message"\ncode = "no_decision"\nmessage = "A person will decide."\n'


def write(root: Path, name: str, manifest: str, output: object) -> None:
    folder = root / "ladder" / name
    (folder / "prompts" / "v1").mkdir(parents=True)
    (folder / "capability.toml").write_text(manifest)
    (folder / "input.schema.json").write_text(json.dumps(INPUT))
    (folder / "output.schema.json").write_text(json.dumps(output))
    (folder / "prompts" / "v1" / "template.jinja").write_text(TEMPLATE)
    (folder / "faq.toml").write_text(FAQ)


@pytest.fixture(scope="module")
def rungs(postgres_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A gateway of its own, with three capabilities that have ladders."""
    migrate(postgres_dsn)
    keys = asyncio.run(add_keys(postgres_dsn))
    data = tmp_path_factory.mktemp("rungs")
    folder = data / "capabilities"
    stages = 'stages = ["prompt", "generate", "cite"]\n'
    write(folder, "one", stages + 'model = "scripted"\n' + REST, TEXT)
    write(folder, "two", stages + 'model = "nowhere"\n' + REST.replace("[[ladder]]", SMALL + "[[ladder]]", 1), TEXT)
    write(folder, "json", 'stages = ["prompt", "generate", "contract"]\nmodel = "scripted"\n' + DECIDE, DECISION)
    engine, engine_url = start_scripted()
    # One engine fails in most of these tests, and has to be asked in the next one all the same.
    forgetful = {"TIDEGATE_FLEET__BREAKER_MIN_CALLS": "1000000", "TIDEGATE_FLEET__MAX_RETRY_AFTER_S": "0"}
    # It has one slot; nobody may wait for it whose wait is forecast to be long.
    strict = {"TIDEGATE_ENGINES__SCRIPTED__SLOTS": "1", "TIDEGATE_ADMISSION__FORECAST_S": "0.001"}
    folders = {"TIDEGATE_CAPABILITIES__FOLDERS": json.dumps([str(folder)])}
    process = start_gateway(data, postgres_dsn, engine_url, **folders, **forgetful, **strict)
    try:
        yield House(url_of(data, process), engine_url, keys, data, process)
    finally:
        stop(process)
        stop(engine)


def ask(house: House, name: str, order: str, *, stream: bool = False) -> httpx.Response:
    with house.client() as client:
        return client.post(f"/api/v1/ladder/{name}", json={"order": order}, headers={"accept": "text/event-stream"} if stream else {})


def events(answer: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    blocks = [block.split("\n") for block in answer.text.split("\n\n") if block and not block.startswith(":")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


def decisions(house: House, trace_id: str, what: str) -> list[dict[str, Any]]:
    return [facts for _, name, facts in house.flight(trace_id)["decisions"] if name == what]


def test_a_full_answer_says_its_rung_in_a_header_alone(rungs: House) -> None:
    """Nothing else changes for who has a ladder and does not need it."""
    answer = ask(rungs, "one", "##n=3##")
    assert (answer.status_code, answer.headers["x-tidegate-rung"]) == (200, "full")
    assert "ladder" not in answer.json()


@pytest.mark.parametrize("fault", ["oom", "server_error", "overloaded", "rate_limit", "die", "refuse_key", "hang", "empty", "cut,k=0"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_is_answered_from_the_faq(rungs: House, fault: str, stream: bool) -> None:
    """Out of memory, 500, 503, 429, a dead connection, silence, nothing said: 200 from the list, which rung and why in header, body and flight."""
    answer = ask(rungs, "one", f"Your hours? ##m={fault}##", stream=stream)
    assert (answer.status_code, answer.headers["x-tidegate-rung"]) == (200, "faq")
    body = answer.json() if not stream else events(answer)[-1][1]
    assert body["answer"] == "From nine to five."
    assert (body["ladder"]["rung"], body["ladder"]["note"]) == ("faq", "From the list.")
    if stream:
        assert [name for name, _ in events(answer)] == ["rung", "answer"]
    (step,) = decisions(rungs, body["trace_id"], "stepped_down")
    assert step == {"rung": "full", "to": "faq", "cause": body["ladder"]["cause"]}
    flight = rungs.flight(body["trace_id"])
    assert (flight["end"], flight["http_status"], "faq" in [part for part, _ in flight["laps"]]) == ("stop", 200, True)


@pytest.mark.parametrize("stream", [False, True])
def test_the_last_rung_is_a_message_with_a_ticket(rungs: House, stream: bool) -> None:
    """503, the business code and message, the trace_id, the ticket that leads to the flight, and when to come back; never 200."""
    answer = ask(rungs, "one", "The price? ##m=rate_limit##", stream=stream)
    error = answer.json()["error"]
    assert (answer.status_code, answer.headers["x-tidegate-rung"], answer.headers["retry-after"]) == (503, "message", "7")
    assert (error["code"], error["message"], error["rung"]) == ("nobody_answers", "Nobody can answer just now.", "message")
    assert error["cause"] == "rate_limit_exceeded"
    assert error["ticket"].removeprefix("T-").replace("-", "").lower() == error["trace_id"][:18]
    flight = rungs.flight(error["trace_id"])
    assert (flight["http_status"], flight["error_code"], flight["end"]) == (503, "nobody_answers", "error")
    assert [facts["to"] for facts in decisions(rungs, error["trace_id"], "stepped_down")] == ["faq", "message"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_small_model_answers_for_an_engine_that_is_down(rungs: House, stream: bool) -> None:
    """The model `nowhere` refuses connections: the other one's tokens come, streamed behind the event that names the rung."""
    answer = ask(rungs, "two", "##n=3##", stream=stream)
    assert (answer.status_code, answer.headers["x-tidegate-rung"]) == (200, "small_model")
    body = answer.json() if not stream else events(answer)[-1][1]
    assert body["ladder"] == {"rung": "small_model", "note": "A smaller model gave this answer.", "cause": "engine_down"}
    assert rungs.flight(body["trace_id"])["model"] == "scripted"
    if stream:
        names = [name for name, _ in events(answer)]  # tokens that were read together leave together
        assert (names[0], set(names[1:-1]), names[-1]) == ("rung", {"token"}, "answer")


@pytest.mark.parametrize("name", ["one", "two"])
def test_where_all_slots_are_taken_a_lower_rung_answers(rungs: House, name: str) -> None:
    """Whether the full answer's model is full or, behind an engine that is down, the small one's: the wait is refused, or ends with the rung's share
    of the time where it was forecast to be short (that for a first token), and nobody is sent away whom the list can answer."""
    body = {"messages": [{"role": "user", "content": "##t=1,i=50,n=20000##"}], "stream": True}
    with rungs.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as long:
        pieces = long.iter_raw()  # to be held: one that is collected closes its connection
        next(pieces)
        known, unknown = ask(rungs, name, "Your hours?"), ask(rungs, name, "The price?")
    assert (known.status_code, known.headers["x-tidegate-rung"]) == (200, "faq")
    assert known.json()["ladder"]["cause"] == ("busy" if name == "one" else "engine_down")
    assert (unknown.status_code, unknown.headers["x-tidegate-rung"]) == (503, "message")
    until(lambda: rungs.stats()["active"] == 0, "the slot's release")


def test_nobody_waits_for_a_slot_that_is_forecast_too_late(postgres_dsn: str, tmp_path: Path) -> None:
    """The gate would let it wait for an hour, but the first token is wanted within a second, and an answer was seen to take two: the list answers at
    once. Without a ladder the same request waits for its turn."""
    migrate(postgres_dsn)
    keys = asyncio.run(add_keys(postgres_dsn))
    stages = 'stages = ["prompt", "generate", "cite"]\nmodel = "scripted"\n'
    write(tmp_path / "capabilities", "one", stages + REST.replace("full_share = 0.1\n", ""), TEXT)
    engine, engine_url = start_scripted()
    folders = {"TIDEGATE_CAPABILITIES__FOLDERS": json.dumps([str(tmp_path / "capabilities")])}
    patient = {"TIDEGATE_ENGINES__SCRIPTED__SLOTS": "1", "TIDEGATE_ADMISSION__FORECAST_S": "3600"}
    process = start_gateway(tmp_path, postgres_dsn, engine_url, **folders, **patient)
    try:
        house = House(url_of(tmp_path, process), engine_url, keys, tmp_path, process)
        assert house.chat("##t=2000,n=2##").status_code == 200
        body = {"messages": [{"role": "user", "content": "##t=1,i=50,n=20000##"}], "stream": True}
        with house.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as long:
            pieces = long.iter_raw()
            next(pieces)
            known = ask(house, "one", "Your hours?")
        assert (known.headers["x-tidegate-rung"], known.json()["ladder"]["cause"]) == ("faq", "busy")
        flight = house.flight(known.json()["trace_id"])
        assert [what for _, what, _ in flight["decisions"] if what in ("queued", "not_queued")] == ["not_queued"]
        assert "queue" not in {part for part, _ in flight["laps"]}
    finally:
        stop(process)
        stop(engine)


def test_a_stream_that_broke_after_its_first_text_is_not_begun_again(rungs: House) -> None:
    """The error event that it was before; no second answer behind the first."""
    said = events(ask(rungs, "one", "Your hours? ##n=8,m=cut,k=3##", stream=True))
    names = [name for name, _ in said]
    assert (set(names[:-1]), names[-1]) == ({"token"}, "error")
    assert said[-1][1]["error"]["code"] == "engine_cut"


@pytest.mark.parametrize("stream", [False, True])
def test_broken_output_is_422_with_the_business_code(rungs: House, stream: bool) -> None:
    """What the contract stopped is no 503: it would be the same again."""
    answer = ask(rungs, "json", '##json={"decision": "maybe"}##', stream=stream)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["cause"]) == (422, "no_decision", "output_invalid")
    assert error["ticket"]
    assert "maybe" not in answer.text


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [({"order": 3}, 422, "input_invalid"), ({}, 422, "input_invalid"), ({"order": "##m=image_llama##"}, 400, "server_error")],
)
def test_a_callers_mistake_keeps_its_own_answer(rungs: House, body: dict[str, Any], status: int, code: str) -> None:
    """A wrong field, a 400 of the engine: told as before, on no rung."""
    with rungs.client() as client:
        answer = client.post("/api/v1/ladder/one", json=body)
    assert (answer.status_code, answer.json()["error"]["code"], "x-tidegate-rung" in answer.headers) == (status, code, False)


def test_a_wrong_key_and_a_used_up_limit_step_nowhere(rungs: House) -> None:
    """401 and the caller's own 429 are no failures of ours."""
    assert httpx.post(rungs.url + "/api/v1/ladder/one", json={"order": "hours"}).status_code == 401
    with rungs.client("two") as client:
        statuses = [client.post("/api/v1/ladder/one", json={"order": "##n=1##"}).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]
