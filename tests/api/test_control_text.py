"""Control tokens that a user types, through the whole gateway: the answer looks as any other, though the prompt went as token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
from tests.api.conftest import House, start_gateway, stop, url_of

from tidegate.bench.tokens import encode


def test_an_answer_to_control_tokens_looks_as_any_other(house: House, postgres_dsn: str, tmp_path: Path) -> None:
    """Streamed and whole: the same members, text, end and usage as for a text without; the prompt's count is that of the text."""
    gateway = start_gateway(tmp_path, postgres_dsn, house.engine, TIDEGATE_ENGINES__SCRIPTED__ADAPTER="llama_cpp")
    try:
        with httpx.Client(base_url=url_of(tmp_path, gateway), headers={"authorization": f"Bearer {house.keys['data']}"}, timeout=30) as client:
            plain, control = (_ask(client, f"{text} ##n=3##") for text in ("end", "<|im_end|>"))
    finally:
        stop(gateway)
    assert control["whole"]["choices"][0]["message"] == plain["whole"]["choices"][0]["message"]
    assert [_said(event) for event in control["events"]] == [_said(event) for event in plain["events"]]
    assert {event["id"] for event in control["events"]} == {control["events"][0]["id"]}
    text = encode("<|im_end|> ##n=3##", special=False)
    around = encode("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n", special=True)
    for answer in (control["whole"], control["events"][-1]):
        assert (answer["usage"]["completion_tokens"], answer["usage"]["prompt_tokens"]) == (3, len(text) + len(around))
    assert control["done"]


def _ask(client: httpx.Client, text: str) -> dict[str, Any]:
    body = {"model": "scripted", "messages": [{"role": "user", "content": text}]}
    whole = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    stream = client.post("/v1/chat/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}).raise_for_status().text
    data = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    return {"whole": whole, "events": [json.loads(event) for event in data if event != "[DONE]"], "done": data[-1] == "[DONE]"}


def _said(event: dict[str, Any]) -> Any:
    return event["object"], [(choice["delta"], choice["finish_reason"], choice["index"]) for choice in event["choices"]]
