"""Capabilities over HTTP: business fields in, checked business fields out, or an error with a trace_id."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from tests.api.conftest import House, until

CONTRACT = "/api/v1/test/contract"
STREAM = "/api/v1/test/stream"
GOOD = '##json={"decision": "accept"}##'


def ask(house: House, path: str, body: Any, *, stream: bool = False, key: str = "data") -> httpx.Response:
    with house.client(key) as client:
        return client.post(path, json=body, headers={"accept": "text/event-stream"} if stream else {})


def events(answer: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    blocks = [block.split("\n") for block in answer.text.split("\n\n") if block]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


def test_a_good_answer_leaves_as_business_fields(house: House) -> None:
    """The contract's fields, the trace_id, usage, and which version of the capability answered."""
    answer = ask(house, CONTRACT, {"order": GOOD})
    body = answer.json()
    assert answer.status_code == 200
    assert body["decision"] == "accept"
    flight = house.flight(body["trace_id"])
    assert flight["capability"] == "test/contract"
    assert flight["prompt_version"] == "v1"
    assert len(flight["prompt_sha256"]) == len(body["capability_sha256"]) == 64
    assert body["usage"]["total_tokens"] > 0


@pytest.mark.parametrize(
    "order", ['##json={"decision": "maybe"}##', '##json={"decision": "accept", "more": 1}##', "##json=[]##", "##n=5##", '##json={}##']
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_broken_contract_is_422_and_never_a_200(house: House, order: str, stream: bool) -> None:
    """Whatever breaks the contract: 422, the trace_id, and nothing of the wrong body, streamed or not."""
    answer = ask(house, CONTRACT, {"order": order}, stream=stream)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (422, "output_invalid")
    flight = house.flight(error["trace_id"])
    assert (flight["http_status"], flight["error_code"]) == (422, "output_invalid")
    assert "maybe" not in answer.text


def test_a_contracted_stream_holds_everything_until_it_is_checked(house: House) -> None:
    """One event, the answer: no token of an unchecked body leaves."""
    answer = ask(house, CONTRACT, {"order": GOOD}, stream=True)
    assert [name for name, _ in events(answer)] == ["answer"]


def test_a_stream_gives_tokens_then_the_answer(house: House) -> None:
    """Tokens as they come; the answer at the end is their sum."""
    said = events(ask(house, STREAM, {"order": "##i=30,n=4##"}, stream=True))
    assert [name for name, _ in said] == ["token"] * 4 + ["answer"]
    assert "".join(data["text"] for name, data in said if name == "token").strip() == said[-1][1]["answer"]


def test_a_stream_that_breaks_ends_in_an_error_event(house: House) -> None:
    """After the first token an error is an event with its status; no answer follows."""
    said = events(ask(house, STREAM, {"order": "##n=8,m=cut,k=3##"}, stream=True))
    assert [name for name, _ in said][-1] == "error"
    assert said[-1][1]["error"]["status"] == 502
    assert house.flight(said[-1][1]["error"]["trace_id"])["end"] == "cut"


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "order", "order: is missing"),
        ({"order": 3}, "order", "type"),
        ({"order": "x", "colour": 1}, "colour", "colour: is not known"),
        ({"order": GOOD, "age": 66}, "history", "Applicants over 65 give their history"),
    ],
)
def test_an_input_that_breaks_its_contract_is_422(house: House, body: dict[str, Any], param: str, says: str) -> None:
    """The field or the cross-field rule is named, and no engine is asked."""
    before = house.stats()["requests"]
    answer = ask(house, CONTRACT, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (422, "input_invalid", param)
    assert says in error["message"]
    assert "parse" in [part for part, _ in house.flight(error["trace_id"])["laps"]]
    assert house.stats()["requests"] == before


def test_broken_json_is_400(house: House) -> None:
    """What is not JSON is not judged by a contract."""
    with house.client() as client:
        assert client.post(CONTRACT, content=b"{").json()["error"]["code"] == "bad_request"


def test_an_unknown_capability_names_the_nearest(house: House) -> None:
    """404 in the same shape."""
    answer = ask(house, "/api/v1/test/contrakt", {})
    assert answer.status_code == 404
    assert CONTRACT in answer.json()["error"]["hint"]


def test_a_wrong_method_is_405(house: House) -> None:
    """A capability takes POST."""
    with house.client() as client:
        assert client.get(CONTRACT).status_code == 405


def test_no_first_token_within_the_budget_is_504(house: House) -> None:
    """The capability's own budget ends the wait, frees the engine and says so."""
    answer = ask(house, STREAM, {"order": "##m=hang##"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "engine_stalled")
    until(lambda: house.stats()["active"] == 0, "the engine's release")


def test_text_is_kept_only_where_the_tenant_keeps_it(house: House) -> None:
    """Policy `keep` stores input and answer, sealed; its own tenant reads them; without the policy there is nothing to read."""
    kept = ask(house, CONTRACT, {"order": GOOD}, key="kept").json()["trace_id"]
    plain = ask(house, CONTRACT, {"order": GOOD}).json()["trace_id"]

    def text(flight_id: str, key: str) -> Any:
        with house.client(key) as client:
            return client.get(f"/api/v1/flights/{flight_id}", params={"text": "true"}).json().get("text")

    until(lambda: text(kept, "kept") is not None, "the kept text")
    assert text(kept, "kept")["input"] == {"order": GOOD}
    assert text(kept, "kept")["answer"] == '{"decision": "accept"}'
    assert text(plain, "data") is None
    assert text(kept, "admin") is None, "an admin manages, and does not read customers' texts"


def test_no_text_reaches_the_log_or_the_spool_unsealed(house: House) -> None:
    """Neither what was asked nor what was answered stands in any file of the data folder."""
    secret = "Zanzibar-4711"
    for key in ("data", "kept"):
        ask(house, STREAM, {"order": f"##w={secret},n=3##"}, key=key)
    house.chat(f"##w={secret},n=3##")
    found = [file for file in house.data.rglob("*") if file.is_file() and secret.encode() in file.read_bytes()]
    assert found == []
