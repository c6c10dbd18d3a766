"""Through the gateway: answers that break off are told to their end, forbidden terms never arrive, triggers bring a ticket."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.api.conftest import House, add_keys, start_gateway, start_scripted, stop, url_of

from tidegate.stores.migrate import migrate

WHOLE = " the quick brown fox jumps over lazy dogs and then café 你好"
TEMPLATE = "{% block system %}S{% endblock %}{% block user %}{{ input.order }}{% endblock %}"


def write_capability(root: Path, name: str, manifest: str, terms: str = "") -> None:
    folder = root / "guarded" / name
    (folder / "prompts" / "v1").mkdir(parents=True)
    (folder / "capability.toml").write_text(f'stages = ["prompt", "generate"]\n{manifest}')
    (folder / "input.schema.json").write_text('{"type": "object"}')
    (folder / "output.schema.json").write_text('{"type": "object"}')
    (folder / "prompts" / "v1" / "template.jinja").write_text(TEMPLATE)
    if terms:
        (folder / "terms.txt").write_text(terms)


@pytest.fixture(scope="module")
def house(postgres_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A gateway that bans `fox` and `lazy dogs` everywhere."""
    migrate(postgres_dsn)
    keys = asyncio.run(add_keys(postgres_dsn))
    engine, engine_url = start_scripted()
    data = tmp_path_factory.mktemp("guarded")
    (data / "terms.txt").write_text("# ours\nfox\nlazy dogs\n")
    capabilities = data / "capabilities"
    write_capability(capabilities, "ticket", '[[triggers]]\ntext = "[[T]]"\ninsert = "Your ticket is {given}."\n')
    manifest = '[[triggers]]\ntext = "[[T]]"\nthen = "stop"\n[guard]\nterms_file = "terms.txt"\non_term = "stop"\n'
    write_capability(capabilities, "stop", manifest, "quick\n")
    process = start_gateway(
        data, postgres_dsn, engine_url, TIDEGATE_GUARD__TERMS_FILE=str(data / "terms.txt"), TIDEGATE_GUARD__MAX_STEP_BACKS="2",
        TIDEGATE_GENERATION__MAX_RESUMES="2",
        TIDEGATE_CAPABILITIES__FOLDERS=json.dumps([str(capabilities)]),
    )
    try:
        yield House(url_of(data, process), engine_url, keys, data, process)
    finally:
        stop(process)
        stop(engine)


def told(answer: str) -> tuple[str, list[str], list[dict[str, Any]]]:
    """Of a stream: its text, its ends, and its events; it ended in [DONE]."""
    blocks = [block.removeprefix("data: ") for block in answer.split("\n\n") if block.startswith("data: ")]
    assert blocks[-1] == "[DONE]", answer[-500:]
    events = [json.loads(block) for block in blocks[:-1]]
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, [choice["finish_reason"] for choice in choices if choice.get("finish_reason")], events


def stream(house: House, order: str, **fields: Any) -> tuple[str, list[str], list[dict[str, Any]], dict[str, Any]]:
    answer = house.chat(order, stream=True, model="scripted", stream_options={"include_usage": True}, **fields)
    assert answer.status_code == 200, answer.text
    return *told(answer.text), house.flight(answer.headers["x-request-id"])


def decisions(flight: dict[str, Any], what: str) -> list[dict[str, Any]]:
    return [facts for _, name, facts in flight["decisions"] if name == what]


def test_cuts_at_random_bytes_are_not_seen(house: House) -> None:
    """Wherever the engine's connection breaks once it has said something: the same text, one end, one id, the usage of the whole, one flight."""
    clean = stream(house, "##w=word,n=12,m=none,k=600##")
    whole, usage = clean[0], clean[2][-1]["usage"]
    seed = random.Random(3)
    resumed = 0
    for at in [seed.randrange(700, 2600) for _ in range(20)]:
        text, ends, events, flight = stream(house, f"##w=word,n=12,m=cut_bytes,k={at}##")
        assert (text, ends) == (whole, ["stop"])
        assert len({event["id"] for event in events}) == 1
        resumed += len(decisions(flight, "resumed"))
        counted = events[-1]["usage"]
        assert counted["completion_tokens"] == usage["completion_tokens"] == 12
        assert flight["usage"]["completion_tokens"] == 12
    assert resumed >= 10


def test_a_term_never_arrives_and_the_answer_goes_on(house: House) -> None:
    """The model says something else in its place; the flight tells the term's number only."""
    text, ends, _, flight = stream(house, "##n=12##")
    assert text == WHOLE.replace(" fox", " other").replace("lazy dogs", "other dogs")
    assert ends == ["stop"]
    assert [facts["term"] for facts in decisions(flight, "term_banned")] == [0, 1]
    assert "fox" not in json.dumps(flight["decisions"])


def test_after_too_many_the_answer_is_filtered(house: House) -> None:
    """content_filter and [DONE], as OpenAI ends such an answer; a whole answer too."""
    order = '##json="a fox, a fox, a fox, a fox"##'
    text, ends, events, flight = stream(house, order)
    assert ends == ["content_filter"]
    assert "fox" not in text
    assert events[-1]["usage"]["exact"] in (True, False)
    assert flight["end"] == "content_filter"
    answer = house.chat(order, model="scripted").json()
    assert answer["choices"][0]["finish_reason"] == "content_filter"
    assert "fox" not in json.dumps(answer["choices"])


def test_a_whole_answer_steps_back_too(house: House) -> None:
    """The same text as over a stream."""
    answer = house.chat("##n=12##", model="scripted").json()
    assert answer["choices"][0]["message"]["content"] == WHOLE.replace(" fox", " other").replace("lazy dogs", "other dogs")
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("fault", ["utf8_split", "dribble", "reasoning", "tools", "multiline"])
def test_however_it_comes(house: House, fault: str) -> None:
    """Split bytes, reasoning, tool calls: the term is in no event."""
    answer = house.chat(f"##n=12,m={fault}##", stream=True, model="scripted")
    assert "fox" not in answer.text.replace('"delta":{"content":"', "").replace('"}', "")
    assert "[DONE]" in answer.text


@pytest.mark.parametrize("streamed", [False, True])
def test_a_trigger_brings_a_ticket(house: House, streamed: bool) -> None:
    """The sequence stops the model, the ticket stands in the answer, in a field and in the flight, whose id it begins."""
    with house.client() as client:
        body = {"order": '##json="Wait. [[T]] Done, for now."##'}
        answer = client.post("/api/v1/guarded/ticket", json=body, headers={"accept": "text/event-stream"} if streamed else {})
    assert answer.status_code == 200, answer.text
    last = json.loads(answer.text.split("event: answer\ndata: ")[1].split("\n")[0]) if streamed else answer.json()
    ticket = last["ticket"]
    assert last["answer"].startswith(f"Wait. Your ticket is {ticket}.")
    assert "[[" not in answer.text
    assert last["trace_id"].upper().startswith(ticket.replace("T-", "").replace("-", ""))
    flight = house.flight(last["trace_id"])
    assert decisions(flight, "ticket_created") == [{"ticket": ticket}]
    assert flight["end"] == "stop"


def test_a_capability_has_its_own_ban_and_may_stop(house: House) -> None:
    """Its own list beside the gateway's, its own way; a trigger may end the answer."""
    with house.client() as client:
        first = client.post("/api/v1/guarded/stop", json={"order": "##n=12##"}).json()
        second = client.post("/api/v1/guarded/stop", json={"order": '##json="Wait. [[T]] more"##'}).json()
    assert first["answer"].strip() == "the"
    assert house.flight(first["trace_id"])["end"] == "content_filter"
    assert second["answer"] == f"Wait. {second['ticket']}"


def until_said(pieces: Iterator[str], word: str) -> str:
    """What came of a stream, up to the piece with a word in it."""
    seen = ""
    while word not in seen:
        more = next(pieces, None)
        assert more is not None, seen
        seen += more
    return seen


def test_of_two_engines_one_may_die(house: House, postgres_dsn: str, tmp_path: Path) -> None:
    """The stream that it was telling, and every request after it, are answered by the other."""
    first, first_url = start_scripted()
    second = {"adapter": "scripted", "url": house.engine, "models": ["scripted"], "conformance": "off"}
    process = start_gateway(tmp_path, postgres_dsn, first_url, TIDEGATE_GENERATION__MAX_RESUMES="2", TIDEGATE_ENGINES__SECOND=json.dumps(second))
    try:
        two = House(url_of(tmp_path, process), first_url, house.keys, tmp_path, process)
        body = {"model": "scripted", "stream": True, "messages": [{"role": "user", "content": "##w=word,n=40,i=50##"}]}
        with two.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
            pieces = answer.iter_text()
            seen = until_said(pieces, "word")
            first.kill()
            seen += "".join(pieces)
        text, ends, _ = told(seen)
        assert (text.count("word"), ends) == (40, ["stop"])
        flight = two.flight(answer.headers["x-request-id"])
        assert (flight["engine"], len(decisions(flight, "resumed"))) == ("second", 1)
        for streamed in (False, True):
            answer = two.chat("##n=3##", model="scripted", stream=streamed)
            assert answer.status_code == 200, answer.text
            assert two.flight(answer.headers["x-request-id"])["engine"] == "second"
    finally:
        stop(process)
        stop(first)


def test_the_only_engine_may_die_and_come_back(house: House, postgres_dsn: str, tmp_path: Path) -> None:
    """The stream that it was telling waits, and goes on to its end."""
    first, first_url = start_scripted()
    process = start_gateway(tmp_path, postgres_dsn, first_url, TIDEGATE_GENERATION__MAX_RESUMES="1")
    again = None
    try:
        one = House(url_of(tmp_path, process), first_url, house.keys, tmp_path, process)
        body = {"model": "scripted", "stream": True, "messages": [{"role": "user", "content": "##w=word,n=40,i=50##"}]}
        with one.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
            pieces = answer.iter_text()
            seen = until_said(pieces, "word")
            first.kill()
            first.wait(30)
            port = first_url.rpartition(":")[2]
            again = subprocess.Popen([sys.executable, "-m", "tidegate.bench.scripted", "--port", port], stdout=subprocess.PIPE)
            seen += "".join(pieces)
        text, ends, _ = told(seen)
        assert (text.count("word"), ends) == (40, ["stop"])
        assert [facts["engine"] for facts in decisions(one.flight(answer.headers["x-request-id"]), "resumed")] == ["scripted"]
    finally:
        stop(process)
        for engine in (first, again):
            if engine is not None:
                stop(engine)
