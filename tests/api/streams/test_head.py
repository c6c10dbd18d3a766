"""When a stream's head leaves: with the engine's answer, or after a while alone, and then errors come as events."""

from __future__ import annotations

from typing import Any

import pytest
from tests.api.streams.conftest import Open, until

from tidegate.pipeline.capability import load


async def test_a_refusal_keeps_its_status(open_gateway: Open) -> None:
    """While the head waits, an engine's 429 is the client's 429, with its `Retry-After`."""
    gateway = await open_gateway()
    client = await gateway.ask("##m=rate_limit##")
    await client.rest()
    assert (client.status, client.headers["retry-after"]) == (429, "7")
    assert client.error()["retry_after_s"] == 7


async def test_a_head_does_not_wait_for_ever(open_gateway: Open) -> None:
    """After `head_wait_s` a slow engine's stream begins with its head and a comment, and goes on as any."""
    gateway = await open_gateway(head_wait_s=0.1)
    client = await gateway.ask("##t=800,n=4##")
    await client.until(lambda: client.status == 200)
    assert not client.events
    await client.rest()
    assert client.body.startswith(b": waiting for the engine\n\n")
    assert client.body.endswith(b"data: [DONE]\n\n")
    assert gateway.notes.last.end == "stop"


@pytest.mark.parametrize(
    ("fault", "status", "code", "retry_after_s"), [("die", 503, "engine_down", None), ("rate_limit", 429, "rate_limit_exceeded", 7.0)]
)
async def test_a_late_error_is_an_event(open_gateway: Open, fault: str, status: int, code: str, retry_after_s: float | None) -> None:
    """After the head, an error is an event with its status, code, time to wait and trace_id, and no `[DONE]` follows."""
    gateway = await open_gateway(head_wait_s=0.1)
    client = await gateway.ask(f"##m={fault},t=700##")
    await client.until(lambda: client.status == 200)
    await client.rest()
    error = client.error()
    assert (error["status"], error["code"], error.get("retry_after_s")) == (status, code, retry_after_s)
    assert error["trace_id"] == client.headers["x-request-id"]
    assert b"[DONE]" not in client.body
    assert gateway.notes.last.http_status == 200


async def test_silence_is_filled_with_comments(open_gateway: Open) -> None:
    """While nothing else is written for `keepalive_s`, comments are; while tokens come, none."""
    gateway = await open_gateway(keepalive_s=0.3)
    silent = await gateway.ask("##m=stall,k=3,n=6##")
    await silent.until(lambda: silent.body.count(b": keep-alive\n\n") >= 2)
    busy = await gateway.ask("##i=50,n=20##")
    await busy.rest()
    assert b"keep-alive" not in busy.body
    silent.leave()
    await gateway.settled(2)


async def test_a_whole_answer_has_no_comments(open_gateway: Open) -> None:
    """Only streams begin early: a whole answer is JSON from its first byte."""
    gateway = await open_gateway(head_wait_s=0.0, keepalive_s=0.1)
    client = await gateway.ask("##t=700,n=2##", stream=False)
    await client.rest()
    assert client.body.startswith(b"{")


async def test_what_is_held_back_keeps_the_connection(open_gateway: Open, tmp_path: Any) -> None:
    """A capability whose answer is judged as a whole streams nothing for long: its head and comments come all the same."""
    folder = tmp_path / "test" / "held"
    (folder / "prompts" / "v1").mkdir(parents=True)
    (folder / "capability.toml").write_text('stages = ["prompt", "generate", "contract"]\nmodel = "scripted"\n')
    (folder / "input.schema.json").write_text('{"type": "object"}')
    (folder / "output.schema.json").write_text('{"type": "object"}')
    (folder / "prompts" / "v1" / "template.jinja").write_text("{% block system %}s{% endblock %}{% block user %}{{ input.order }}{% endblock %}")
    gateway = await open_gateway(load(folder), head_wait_s=0.1, keepalive_s=0.3)
    client = await gateway.client()
    order = '##i=500## ##json={"premium": 12345678}##'
    await client.post({"order": order}, path="/api/v1/test/held", headers="Accept: text/event-stream\r\n")
    await client.rest()
    assert client.body.startswith(b": waiting for the engine\n\n: keep-alive\n\n")
    assert client.events[-1].startswith(b"event: answer\n")


@pytest.mark.parametrize("policy", ["block", "coalesce", "drop"])
async def test_a_deadline_ends_a_stream_that_nobody_reads(open_gateway: Open, policy: str) -> None:
    """A client that reads nothing does not keep its request beyond the deadline and `slow_reader_s`."""
    gateway = await open_gateway(slow_reader=policy, slow_reader_s=0.3, deadline_s=0.6)
    client = await gateway.ask(f"##i=0.05,n=100000,w={'x' * 180}##", receive_buffer=4096)
    await gateway.settled(1)
    assert gateway.notes.booked == 1
    assert gateway.notes.last.error_code in ("deadline_exceeded", "slow_reader")
    await until(lambda: not gateway.state.tasks)
    client.leave()
