"""One answer as it comes in, whatever the dialect: what was said, how many tokens it took, how it ended, and the judgement of that end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tidegate.core.chunk import Chunk, End, ToolDelta, Usage
from tidegate.core.errors import EngineCut, EngineEmpty, EngineError, TidegateError
from tidegate.engines.refusal import reported

#: An event of more characters than this is no single token. The longest words of vocabularies are shorter, save for runs of blanks.
TOKEN_CHARS = 32


def estimate_tokens(text_bytes: int) -> int:
    """Tokens of a text of so many UTF-8 bytes: four bytes each, about right for English and Chinese alike. Always marked as an estimate."""
    return (text_bytes + 3) // 4


def tokens_in(text: str) -> int:
    """Tokens of one event's text, estimated: engines stream token by token, so a short one is one, a long one four bytes each."""
    return 1 if len(text) <= TOKEN_CHARS else estimate_tokens(len(text) if text.isascii() else len(text.encode("utf-8", "replace")))


class Answer:
    """What is remembered of an answer to judge its end and to book its tokens.

    `finish` is set once the engine said how it ended, `over` once it said that nothing more comes. `ready` holds the chunks of events that
    are more or less than one chunk. `ends_with_body`: the dialect has no last word, the body's end is the end.
    """

    __slots__ = (
        "_counted", "_prompt", "_usage", "ends_with_body", "finish", "guessed", "known", "label", "odd_finish", "over", "ready", "said", "thought",
    )  # fmt: skip

    def __init__(self, label: str) -> None:
        self.label = label
        self.finish: End | None = None
        self.odd_finish: str | None = None
        self.over = False
        self.ends_with_body = False
        self.said = False  # text or a tool call
        self.thought = False  # reasoning
        self.guessed = 0  # tokens of events whose token ids were not told
        self.known = 0  # tokens of events whose token ids were told
        self.ready: list[Chunk] = []
        self._prompt: int | None = None  # tokens of the prompt, as the engine told them
        self._usage: Usage | None = None
        self._counted = 0  # guessed + known when usage was told

    # -- tokens

    @property
    def usage(self) -> Usage | None:
        """What the engine counted, as long as nothing was said since; else None."""
        usage = self._usage
        return usage if usage is not None and self._counted == self.guessed + self.known else None

    @usage.setter
    def usage(self, usage: Usage) -> None:
        self._prompt = usage.prompt_tokens
        self._counted = self.guessed + self.known
        self._usage = usage

    def count(self, prompt: int, completion: int, cached: int = 0, reasoning: int = 0) -> Usage:
        """The engine told its figures: they hold for everything that was said so far, the event that carries them included.

        No tokens for an answer that has some is no figure: told too early, or not counted. The estimate is given then.
        """
        if not completion and self.guessed + self.known:
            if prompt:
                self.count_prompt(prompt)
            return self.best_usage(0)
        self.usage = told = Usage(prompt, completion, cached, True, reasoning)
        return told

    def count_prompt(self, tokens: int) -> None:
        """The engine told the prompt's tokens, and nothing yet of the answer's."""
        self._prompt = tokens

    def best_usage(self, prompt_bytes: int) -> Usage:
        """The engine's own figures where they cover all that was said, or its token ids where it told those of every event; then `exact`.

        Else an estimate, marked as such: the last figures told and, for what came after them, a token for each event (four bytes each where
        an event is too long to be one token); the prompt by its bytes where the engine did not tell its tokens.
        """
        usage, said = self._usage, self.guessed + self.known
        prompt = self._prompt
        if usage is not None:
            since = said - self._counted
            if not since:
                return usage
            return Usage(usage.prompt_tokens, usage.completion_tokens + since, usage.cached_tokens, False, usage.reasoning_tokens)
        exact = prompt is not None and self.known > 0 and not self.guessed
        return Usage(estimate_tokens(prompt_bytes) if prompt is None else prompt, said, exact=exact)

    # -- how it ends

    def end(self, reason: str, ends: Mapping[str, End], given_up: frozenset[str]) -> End:
        """The end that the engine's word for it means; a word that nobody knows is a stop, and remembered as `odd_finish`.

        Raises EngineCut where it means that the engine gave up, EngineEmpty where the answer ended well and said nothing.
        """
        if reason in given_up:
            raise EngineCut(f"{self.label} gave the answer up (finish_reason {reason[:64]!r}).", hint="The engine's log has the details.")
        end = ends.get(reason)
        if end is None:
            end = "stop"
            self.odd_finish = reason
        if end in ("stop", "tool_calls") and not self.said:
            raise self.empty()
        self.finish = end
        return end

    def empty(self) -> EngineEmpty:
        """The EngineEmpty of this engine."""
        return EngineEmpty(f"{self.label} ended its answer without saying anything.", hint="Look at the prompt and the stop strings.")

    def error(self, error: Any) -> TidegateError:
        """The error that an `error` member reports, whatever its shape; see `refusal.reported`."""
        return reported(self.label, error)

    def error_event(self, data: bytes) -> TidegateError:
        """The error that an event named `error` reports."""
        try:
            said = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            said = data.decode("utf-8", "replace")
        return self.error(said.get("error") or said if isinstance(said, dict) else said)

    def broken(self) -> EngineError:
        """The EngineError for an event that cannot be read."""
        return EngineError(f"{self.label} sent an event that is not JSON.", hint="Its log may say why.")

    # -- for dialects other than OpenAI's, whose chunks the door renders

    def add_text(self, at_ns: int, text: str) -> None:
        """A piece of the answer; an empty one is none."""
        if text:
            self.said = True
            self.guessed += tokens_in(text)
            self.ready.append(Chunk(at_ns, "text", text))

    def add_reasoning(self, at_ns: int, text: str) -> None:
        """A piece of what the model thinks before or between."""
        if text:
            self.thought = True
            self.guessed += tokens_in(text)
            self.ready.append(Chunk(at_ns, "reasoning", text))

    def add_tool(self, at_ns: int, index: int, *, id: str = "", name: str = "", arguments: str = "") -> None:
        """What an event adds to a call of a tool that the client is to make."""
        if id or name or arguments:
            self.said = True
            self.guessed += tokens_in(arguments)
            self.ready.append(Chunk(at_ns, "tool_call", tools=[ToolDelta(index, id, name, arguments)]))

    def pass_on(self, at_ns: int, data: bytes, *, says: bool = True) -> None:
        """An event that has no place in OpenAI's shape, as a chunk without choices that carries it in `tidegate.engine_event`.

        `says`: whether an answer of nothing else would have said something.
        """
        self.said = self.said or says
        data = data.replace(b"\n", b" ")  # it leaves on one line
        self.ready.append(Chunk(at_ns, "notice", "", b'{"choices":[],"object":"chat.completion.chunk","tidegate":{"engine_event":%b}}' % data))

    def add_end(self, at_ns: int, end: End) -> None:
        """How the answer ended, as `end` judged it."""
        self.ready.append(Chunk(at_ns, "notice", finish=end))

    def add_usage(self, at_ns: int, usage: Usage) -> None:
        """The engine's figures, as `count` took them; once, behind the end."""
        self.ready.append(Chunk(at_ns, "usage", usage=usage))


def whole_number(value: Any) -> int:
    """A count as engines tell it: 0 where it is none."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 53 else 0


def text_at(value: Any, *path: str) -> str:
    """The text at a path of member names; empty where there is none."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""


def dict_at(value: Any, *path: str) -> dict[str, Any]:
    """The object at a path of member names; empty where there is none."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}
