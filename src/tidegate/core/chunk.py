"""What a model says, piece by piece, whatever the engine's dialect."""

from __future__ import annotations

from typing import Literal

import msgspec

#: How a generation ended. `refused` is a request that never reached an engine.
End = Literal[
    "stop", "length", "tool_calls", "content_filter",
    "client_gone", "cut", "stalled", "error", "empty", "refused",
]

#: The ends that are a success.
CLEAN_ENDS: frozenset[str] = frozenset({"stop", "length", "tool_calls", "content_filter"})

Kind = Literal["text", "reasoning", "tool_call", "usage", "notice"]


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one run. `exact` is false where the engine did not say and the count is an estimate.

    `cached_tokens` are part of the prompt's, `reasoning_tokens` part of the completion's.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    exact: bool = True
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def plus(self, other: Usage) -> Usage:
        """Of two runs together."""
        return Usage(
            self.prompt_tokens + other.prompt_tokens, self.completion_tokens + other.completion_tokens, self.cached_tokens + other.cached_tokens,
            self.exact and other.exact, self.reasoning_tokens + other.reasoning_tokens,
        )


class ToolDelta(msgspec.Struct, gc=False):
    """What a piece adds to the tool call number `index`: its id and name come once, its arguments (JSON text) grow."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Chunk(msgspec.Struct, gc=False):
    """One piece of an answer.

    `at_ns` is the monotonic instant at which its last byte was read from the engine's socket. `text` is what this piece adds to the answer
    (for `kind="reasoning"`, to the reasoning). `raw` is the event's JSON payload exactly as the engine sent it, so that what we do not
    know is passed on and never dropped; None where the engine's dialect is not OpenAI's or where we made the piece ourselves (the door then
    makes the event). `finish` is set on the chunk that says how it ended. `tools` goes with `kind="tool_call"`. `token_ids` are the ids of
    exactly the tokens of this piece, where the engine tells them.
    """

    at_ns: int
    kind: Kind = "text"
    text: str = ""
    raw: bytes | None = None
    finish: End | None = None
    usage: Usage | None = None
    tools: list[ToolDelta] | None = None
    token_ids: list[int] | None = None
