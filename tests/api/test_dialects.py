"""What engines of all dialects say, at the door: events that OpenAI's own client reads, with nothing lost."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from openai._models import construct_type
from openai.types.chat import ChatCompletionChunk
from tests.engines import recorded

from tidegate.api.openai import Relay
from tidegate.core.flight import Flight
from tidegate.engines.sse import SseParser

TABLE: dict[str, list[dict[str, Any]]] = msgspec.json.decode((Path(__file__).parents[1] / "engines" / "recorded.json").read_bytes())
#: OpenAI's chat dialect passes as it came, and its plain completions are no chats.
FOREIGN = sorted(name for name in TABLE if name.startswith(("anthropic", "cohere", "google")) or "responses" in name or "azure__azure-t" in name)


class Exchange:
    """Keeps what would be written."""

    def __init__(self) -> None:
        self.flight = Flight("test")
        self.started = False
        self.written = b""

    def start_stream(self, piece: bytes, headers: object) -> None:
        self.started = True
        self.written += piece

    def write(self, piece: bytes) -> None:
        self.written += piece


@pytest.mark.skipif(not recorded.FOLDER.is_dir(), reason="no ../shared/data beside this checkout")
@pytest.mark.parametrize("name", FOREIGN)
def test_openai_s_client_reads_every_dialect(name: str) -> None:
    """Text, tool calls, finish and usage of a recorded answer reach the SDK's own models as the table has them; what else came stays there too."""
    expected = TABLE[name][0]
    chunks, _, _ = recorded.read(recorded.answers(name)[0])
    exchange = Exchange()
    ticket, ask = types.SimpleNamespace(headers=list), types.SimpleNamespace(shows_usage="final", running=None)
    relay = Relay("chat", cast(Any, exchange), cast(Any, ticket), cast(Any, ask))
    for chunk in chunks:
        relay.emit([chunk])
    text, finish, passed, usage = "", "", 0, None
    calls: dict[int, list[str]] = {}
    for event in SseParser().feed(exchange.written):
        said = cast(ChatCompletionChunk, construct_type(type_=ChatCompletionChunk, value=msgspec.json.decode(event.data)))
        usage = (said.usage.prompt_tokens, said.usage.completion_tokens) if said.usage is not None else usage
        passed += not said.choices and said.usage is None
        for choice in said.choices:
            text += choice.delta.content or ""
            finish += choice.finish_reason or ""
            for piece in choice.delta.tool_calls or ():
                call = calls.setdefault(piece.index, ["", "", ""])
                assert piece.function is not None
                call[0] += piece.id or ""
                call[1] += piece.function.name or ""
                call[2] += piece.function.arguments or ""
    assert len(text) == expected.get("text", [0])[0]
    assert finish == expected.get("finish", "")
    assert passed == expected.get("passed", 0)
    assert usage == (tuple(expected["usage"][:2]) if "usage" in expected else None)
    assert [call[:2] for call in calls.values()] == [call[:2] for call in expected.get("tools", ())]
    if "error" not in expected:
        assert [msgspec.json.decode(call[2]) for call in calls.values()] == [call[2] for call in expected.get("tools", ())]
