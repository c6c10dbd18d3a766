"""The recorded streams of ../shared/data, one JSON payload a line, cut into their answers: some recordings hold several, one after the other."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from tidegate.core.chunk import Chunk
from tidegate.core.errors import TidegateError
from tidegate.engines.dialect import Dialect
from tidegate.engines.sse import SseParser

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "streaming" / "recorded_chunks"
#: By these an answer ends in dialects that have a last word.
_ENDS = (b'"type":"message_stop"', b'"type":"response.completed"', b'"type":"message-end"')


def payloads(name: str) -> list[bytes]:
    return [line for line in (FOLDER / f"{name}.chunks.txt").read_bytes().splitlines() if line.strip()]


def answers(name: str) -> list[list[bytes]]:
    """The payloads of each answer of a recording."""
    found: list[list[bytes]] = [[]]
    for payload in payloads(name):
        found[-1].append(payload)
        if any(end in payload for end in _ENDS):
            found.append([])
    return [one for one in found if one and not (len(one) == 1 and any(end in one[0] for end in _ENDS))]  # a last word said twice is no answer


def read(events: list[bytes]) -> tuple[list[Chunk], Dialect, TidegateError | None]:
    """All chunks of an answer's events, and the error that ended it."""
    dialect = Dialect("E")
    chunks: list[Chunk] = []
    for event in events:
        try:
            chunk = dialect.chunk(event, 7)
        except TidegateError as error:
            return chunks + dialect.ready, dialect, error
        chunks += dialect.ready if chunk is None else [chunk]
        dialect.ready.clear()
    return chunks, dialect, None


def summary(chunks: list[Chunk], error: TidegateError | None) -> dict[str, Any]:
    """What an answer says, in short: what is empty is left out."""
    text = "".join(chunk.text for chunk in chunks if chunk.kind == "text")
    usage = next((chunk.usage for chunk in reversed(chunks) if chunk.usage is not None), None)
    passed = sum(b'"tidegate"' in chunk.raw for chunk in chunks if chunk.kind == "notice" and chunk.raw is not None)
    found: dict[str, Any] = {
        "text": (len(text), hashlib.sha256(text.encode()).hexdigest()[:12]) if text else None,
        "reasoning": sum(len(chunk.text) for chunk in chunks if chunk.kind == "reasoning"),
        "tools": tools_of(chunks),
        "usage": (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.reasoning_tokens) if usage is not None else None,
        "passed": passed,
        "finish": "/".join(chunk.finish for chunk in chunks if chunk.finish),
        "error": type(error).__name__ if error is not None else None,
    }
    return {key: value for key, value in found.items() if value}


def tools_of(chunks: list[Chunk]) -> list[tuple[str, str, Any]]:
    """Each call: id, name, and its arguments as JSON, or as text where they are none."""
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        for piece in chunk.tools or ():
            call = calls.setdefault(piece.index, ["", "", ""])
            call[0] += piece.id
            call[1] += piece.name
            call[2] += piece.arguments
    return [(id, name, _parsed(arguments)) for _, (id, name, arguments) in sorted(calls.items())]


def _parsed(arguments: str) -> Any:
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments


def relay(reads: list[bytes]) -> tuple[list[Chunk], TidegateError | None]:
    """All chunks of a stream's bytes, and the error that ended it, as `engines.stream` takes them."""
    parser, dialect = SseParser(), Dialect("E")
    chunks: list[Chunk] = []
    try:
        for read in reads:
            for event in parser.feed(read):
                chunk = dialect.chunk(event.data, 7)
                chunks += dialect.ready if chunk is None else [chunk]
                dialect.ready.clear()
    except TidegateError as error:
        return chunks + dialect.ready, error
    return chunks, None
