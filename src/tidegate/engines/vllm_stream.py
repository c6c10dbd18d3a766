"""vLLM's streams: the ids of their tokens beside the text, and an answer that was begun by an earlier call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from tidegate.core.chunk import Chunk, Usage
from tidegate.engines.answer import TOKEN_CHARS
from tidegate.engines.dialect import Dialect
from tidegate.engines.stream import Stream

# A quote that belongs to a text is escaped, so these bytes are members of the event wherever they stand.
_IDS = b',"token_ids":['
_PROMPT_IDS = b',"prompt_token_ids":['
_PROMPT_TEXT = b',"prompt_text":null'
_NO_LOGPROBS = b'"logprobs":null'
#: How an event ends, and how one whose last member is the ids does.
_END = b"}]}"
_END_OF_IDS = b"]" + _END

_ints = msgspec.json.Decoder(list[int]).decode


class VllmDialect(Dialect):
    """OpenAI's dialect with `return_token_ids`: ids become `Chunk.token_ids` and are taken out of `raw`, unless the caller asked for them.

    A character of several tokens comes as events without text; their ids go to the chunk that brings it, and such an event is passed on as
    one that says nothing. `forwards`: False where the engine's events are not of the kind that the caller reads. `continues`: the answer was
    begun before, so that it may end without a word more; `begun` tokens of it stand at the end of the prompt and count as completion.
    """

    __slots__ = ("_begun", "_forwards", "_held", "_shows_ids", "_tail", "_tail_size", "_tools")

    def __init__(self, label: str, *, shows_ids: bool = False, forwards: bool = True, continues: bool = False, begun: int = 0) -> None:
        super().__init__(label)
        self._shows_ids = shows_ids
        self._forwards = forwards
        self._begun = begun
        self._held: list[int] = []
        self._tail = b""  # what lies between the text and the ids of all usual events, once that is known
        self._tail_size = 0
        self._tools = False
        self.said = continues
        self.known = begun

    def chunk(self, data: bytes, at_ns: int) -> Chunk | None:
        """See `Dialect.chunk`."""
        if self._tail_size and data.startswith(self._head) and data.endswith(_END_OF_IDS):
            chunk = self._usual(data, at_ns)
            if chunk is not None:
                return chunk
        at = data.find(_IDS)
        if at < 0:
            chunk = super().chunk(self._without_prompt(data) if self._prompt is None else data, at_ns)
            if chunk is not None and not self._forwards:
                chunk.raw = None
            return chunk
        end = data.index(b"]", at) + 1
        ids = _ints(data[at + len(_IDS) - 1 : end])
        bare = data[:at] + data[end:]
        if self._prompt is None:
            bare = self._without_prompt(bare)
        guessed = self.guessed
        if not self._head_size:
            self.guessed = self.known  # by which the base counts when to look for a frame
        chunk = super().chunk(bare, at_ns)
        if chunk is None:
            return None
        self.guessed = guessed
        self.known += len(ids)
        if self._head_size and not self._tail_size and self._foot.endswith(_END) and self._forwards and not self._shows_ids:
            self._tail = self._foot[: -len(_END)] + _IDS
            self._tail_size = len(self._tail)
        if not self._forwards:
            chunk.raw = None
        elif self._shows_ids:
            chunk.raw = data
        if self._held:
            ids = self._held + ids
        if chunk.text:
            chunk.token_ids = ids
            self._held = []
        elif chunk.kind == "tool_call":
            self._tools = True
            self._held = []
        else:
            self._held = ids
            if chunk.kind == "notice" and chunk.finish is None and not self._shows_ids and _NO_LOGPROBS in bare:
                chunk.raw = None  # sent only because we asked for the ids
        return chunk

    def best_usage(self, prompt_bytes: int) -> Usage:
        """See `Answer.best_usage`. Of a tool call vLLM's parser keeps some tokens to itself, so that ids do not count them all."""
        usage = super().best_usage(prompt_bytes)
        return msgspec.structs.replace(usage, exact=False) if self._tools and self.usage is None else usage

    def _usual(self, data: bytes, at_ns: int) -> Chunk | None:
        """A piece of text in the frame of those before it, read without a decoder (see `Dialect._learn_frame`); None where it is not that plain."""
        at = data.rfind(b"[") + 1
        told = data[self._head_size : at]
        if self._held or not told.endswith(self._tail):
            return None
        told = told[: -self._tail_size]
        if not told or 34 in told or 92 in told:  # a quote, a backslash
            return None
        try:
            text = told.decode()
        except UnicodeDecodeError:
            return None
        if len(text) > TOKEN_CHARS or not text.isprintable():
            return None
        ids = _ints(data[at - 1 : -len(_END)])
        self.known += len(ids)
        self.said = True
        return Chunk(at_ns, "text", text, data[: at - len(_IDS)] + _END, None, None, None, ids)

    def count(self, prompt: int, completion: int, cached: int = 0, reasoning: int = 0) -> Usage:
        """See `Answer.count`."""
        return super().count(prompt - self._begun, completion + self._begun, cached, reasoning)

    def count_prompt(self, tokens: int) -> None:
        """See `Answer.count_prompt`."""
        super().count_prompt(tokens - self._begun)

    def _without_prompt(self, data: bytes) -> bytes:
        """The first event without the prompt's ids, which are counted. They may be many: no JSON decoder sees them."""
        at = data.find(_PROMPT_IDS)
        if at < 0:
            return data
        end = data.index(b"]", at)
        self.count_prompt(data.count(b",", at + len(_PROMPT_IDS), end) + 1)
        return data[:at] + data[end + 1 :].replace(_PROMPT_TEXT, b"", 1)


class Begun:
    """An `EngineStream` whose first chunks are there already; `rest` is the stream that goes on, None where nothing follows."""

    def __init__(self, chunks: list[Chunk], rest: Stream | None, usage: Usage) -> None:
        self._chunks = chunks
        self._rest = rest
        self._usage = usage

    @property
    def usage(self) -> Usage:
        """See `core.ports.EngineStream.usage`."""
        return self._rest.usage if self._rest is not None else self._usage

    def abort(self) -> None:
        """See `core.ports.EngineStream.abort`."""
        self._chunks = []
        if self._rest is not None:
            self._rest.abort()

    async def relay(self, take: Callable[[list[Chunk]], Awaitable[None] | None]) -> None:
        """See `core.ports.EngineStream.relay`."""
        chunks, self._chunks = self._chunks, []
        if chunks:
            waits = take(chunks)
            if waits is not None:
                await waits
        if self._rest is not None:
            await self._rest.relay(take)
