"""One event's JSON -> chunks: OpenAI's streaming dialect, as its many speakers speak it, and by its first event any other that `dialects/` knows.

Decoding is typed and partial: only what decides something is looked at, and the payload itself travels on as `Chunk.raw`.
"""

from __future__ import annotations

import json
import re
from typing import Any, Protocol

import msgspec

from tidegate.core.chunk import Chunk, End, ToolDelta, Usage
from tidegate.core.errors import EngineError
from tidegate.engines.answer import TOKEN_CHARS, Answer, tokens_in, whole_number
from tidegate.engines.answer import estimate_tokens as estimate_tokens
from tidegate.engines.dialects import anthropic, cohere, gemini, responses

#: Finish reasons as engines name them -> ours.
_ENDS: dict[str, End] = {
    "stop": "stop", "eos": "stop", "eos_token": "stop", "stop_sequence": "stop", "end_turn": "stop",
    "length": "length", "max_tokens": "length", "model_length": "length",
    "tool_calls": "tool_calls", "function_call": "tool_calls", "tool_use": "tool_calls",
    "content_filter": "content_filter",
}  # fmt: skip
#: Finish reasons by which an engine says that it gave up.
_GIVEN_UP = frozenset({"abort", "error", "cancelled", "insufficient_system_resource"})
#: A pair of surrogates, half a pair, or an escaped backslash (after which `ud800` is text), in JSON's escapes.
_SURROGATES = re.compile(rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


class _Delta(msgspec.Struct, gc=False):
    # `content` is a string nearly everywhere, a list of parts with one provider
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    delta: _Delta | None = None
    message: _Delta | None = None
    text: Any = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    # where two providers put them
    cached_tokens: int | None = None
    prompt_cache_hit_tokens: int | None = None


class _Timings(msgspec.Struct, gc=False):
    """llama.cpp's own count of tokens so far, partial characters included."""

    cache_n: int | None = None
    prompt_n: int | None = None
    predicted_n: int | None = None


class _Payload(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    timings: _Timings | None = None
    prompt_token_ids: list[int] | None = None


_decode = msgspec.json.Decoder(_Payload).decode

#: Where a delta's text begins, as most engines write it.
_CONTENT = b'"content":"'
#: Put in place of the text, to see whether an event's other bytes are a frame. No JSON escapes it.
_PROBE = "probe"
#: No answer has more tokens: what says so is no count.
_MOST = 1 << 53
#: A tool call's number from here on is an engine's mistake.
_MOST_CALLS = 1 << 16
#: Tries after which an answer whose events have no common frame is no longer asked for one.
_PATIENCE = 4


class _Reader(Protocol):
    """See `engines/dialects`."""

    def read(self, event: dict[str, Any], data: bytes, at_ns: int) -> None: ...


class Dialect(Answer):
    """Reads one answer, event by event or whole, and remembers what is needed to judge its end."""

    __slots__ = ("_foot", "_foot_size", "_head", "_head_size", "_misses", "_reader", "_tool_ids", "surrogates")

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self._reader: _Reader | None = None
        # What all usual events of this answer begin and end with, where they do: then their text is what lies between, and nothing is decoded.
        self._head = b"\0"
        self._foot = b""
        self._head_size = self._foot_size = self._misses = 0
        self._tool_ids: list[str] = []  # calls of a speaker that does not number them
        self.surrogates = 0  # halves of surrogate pairs that were replaced

    def chunk(self, data: bytes, at_ns: int) -> Chunk | None:
        """The chunk of one event. None where the event is more or less than one chunk: they are in `ready` then, and `over` says whether it was
        the last word (`[DONE]`, or the dialect's own).

        Raises EngineRefused (or what else it means) for an error that the engine reports, EngineError for broken JSON, EngineCut where the engine
        gave up, EngineEmpty where it said nothing.
        """
        if data.startswith(self._head) and data.endswith(self._foot):
            told = data[self._head_size : -self._foot_size]
            if told and 34 not in told and 92 not in told:  # no quote, no backslash
                try:
                    text = told.decode()
                except UnicodeDecodeError:
                    raise self.broken() from None
                if len(text) <= TOKEN_CHARS and text.isprintable():  # what cannot be printed may want an escape in JSON
                    self.said = True
                    self.guessed += 1
                    return Chunk(at_ns, "text", text, data)
        if data == b"[DONE]":
            self.over = True
            return None
        if self._reader is not None:
            self._foreign(data, at_ns)
            return None
        try:
            payload = _decode(data)
            if not data.isascii():
                data.decode()  # what is not looked at is not judged by the decoder, but the client gets it too
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return self._odd(data, at_ns, error)
        choices = payload.choices
        if not choices or len(choices) > 1 or payload.usage is not None or payload.timings is not None or payload.error:
            return self._unusual(payload, data, at_ns)
        choice = choices[0]
        delta = choice.delta
        # The usual event: a piece of text and nothing else. With n > 1 the others travel in `raw` only: one flight has one text.
        if delta is not None and not choice.index:
            text = delta.content
            if (
                text.__class__ is str and text and delta.tool_calls is None and choice.finish_reason is None and choice.token_ids is None
                and delta.function_call is None and len(text) <= TOKEN_CHARS
            ):  # fmt: skip
                self.said = True
                self.guessed += 1
                if self.guessed & 7 == 0 and self._misses < _PATIENCE:
                    self._learn_frame(payload, data, text)
                return Chunk(at_ns, "text", text, data)
        return self._unusual(payload, data, at_ns)

    def whole(self, body: bytes) -> str:
        """The text of a non-streamed answer; sets finish and usage. Raises as `chunk` does."""
        payload = None
        try:
            payload = _decode(body)
            if not body.isascii():
                body.decode()
        except msgspec.ValidationError:
            payload = _loosely(body) if _is_json(body) else None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            payload = None
        if payload is None:
            raise EngineError(f"{self.label} did not answer with an OpenAI-shaped JSON object.", hint="Check url.")
        if payload.error:
            raise self.error(payload.error)
        if not payload.choices:
            raise EngineError(f"{self.label} answered without choices.", hint="Is this an OpenAI-compatible engine?")
        chunk = Chunk(0, "notice")
        choice = payload.choices[0]
        if choice.index:
            choice = next((c for c in payload.choices if c.index == 0), choice)
        choice.finish_reason = choice.finish_reason or "stop"
        self._read_choice(choice, choice.message, chunk)
        self._read_counts(payload)
        self.over = True
        return chunk.text if chunk.kind == "text" else ""

    def _learn_frame(self, payload: _Payload, data: bytes, text: str) -> None:
        """Take what lies around the text of this event for the frame of the next, if another text in it would be read as this one was.

        Every eighth event is tried, so that short answers do not pay for it.
        """
        self._misses += 1
        at = data.find(_CONTENT) + len(_CONTENT)
        said = text.encode()
        if at < len(_CONTENT) or not text.isprintable() or data[at : at + len(said) + 1] != said + b'"':
            return
        head, foot = data[:at], data[at + len(said) :]
        try:
            probed = _decode(head + _PROBE.encode() + foot)
        except msgspec.DecodeError:
            return
        if payload.choices and payload.choices[0].delta is not None:
            payload.choices[0].delta.content = _PROBE
        if probed == payload:
            self._head, self._foot, self._head_size, self._foot_size = head, foot, len(head), len(foot)

    # -- events that are not the usual one

    def _odd(self, data: bytes, at_ns: int, error: Exception) -> Chunk | None:
        """What did not decode: the last word with blanks, half a surrogate pair, JSON of an odd shape, or no JSON at all."""
        if data.strip() == b"[DONE]":
            self.over = True
            return None
        whole = self._whole_surrogates(data)
        if whole is not data:
            return self.chunk(whole, at_ns)
        if not isinstance(error, msgspec.ValidationError) or not _is_json(data):
            raise self.broken() from None
        return self._unusual(_loosely(data), data, at_ns)

    def _whole_surrogates(self, data: bytes) -> bytes:
        """Halves of surrogate pairs are no characters: they cannot be written as UTF-8, and many JSON readers refuse them. U+FFFD stands for each."""
        if b"\\ud" not in data and b"\\uD" not in data:
            return data
        count = 0

        def mend(found: re.Match[bytes]) -> bytes:
            nonlocal count
            if len(found[0]) != 6:
                return found[0]
            count += 1
            return b"\\ufffd"

        mended = _SURROGATES.sub(mend, data)
        self.surrogates += count
        return mended if count else data

    def _unusual(self, payload: _Payload, data: bytes, at_ns: int) -> Chunk | None:
        if payload.error:
            raise self.error(payload.error)
        if payload.choices is None and not self.said and not self.thought and self.finish is None and self._recognise(data):
            self._foreign(data, at_ns)
            return None
        chunk = Chunk(at_ns, "notice", "", data)
        for choice in payload.choices or ():
            if choice.index == 0:
                self._read_choice(choice, choice.delta or choice.message, chunk)
        usage = self._read_counts(payload)
        if usage is not None:
            chunk.usage = usage
            if chunk.kind == "notice" and payload.usage is not None:
                chunk.kind = "usage"
        return chunk

    def _recognise(self, data: bytes) -> bool:
        """Whether this first event is that of another dialect; from then on that is the one."""
        event = _object(data)
        if event is None:
            return False
        for dialect in (anthropic, responses, gemini, cohere):
            if dialect.begins(event):
                self._reader = dialect.Reader(self)
                return True
        return False

    def _foreign(self, data: bytes, at_ns: int) -> None:
        reader = self._reader
        assert reader is not None
        event = _object(data)
        if event is None:
            if data.strip() == b"[DONE]":
                self.over = True
                return
            data = self._whole_surrogates(data)
            event = _object(data)
        if event is None:
            if not _is_json(data):
                raise self.broken()
            self.pass_on(at_ns, data, says=False)
            return
        reader.read(event, data, at_ns)

    # -- OpenAI's parts

    def _read_choice(self, choice: _Choice, delta: _Delta | None, chunk: Chunk) -> None:
        text = choice.text
        thoughts: Any = None
        calls: list[ToolDelta] = []
        if delta is not None:
            text = delta.content or delta.refusal
            thoughts = delta.reasoning_content or delta.reasoning
            calls = self._read_tools(delta)
        if text and not isinstance(text, str):
            text, thoughts = _text_of_parts(text, "text"), thoughts or _text_of_parts(text, "thinking")
        tokens = 0
        if calls:
            self.said = True
            chunk.kind, chunk.tools = "tool_call", calls
            tokens = max(1, sum(tokens_in(call.arguments) for call in calls))
        if isinstance(thoughts, str) and thoughts:
            self.thought = True
            tokens += tokens_in(thoughts)
            if not text:
                if not calls:
                    chunk.kind = "reasoning"
                chunk.text = thoughts if not calls else ""
        if text:
            self.said = True
            tokens += tokens_in(text)
            if not calls:
                chunk.kind, chunk.text = "text", text
        if choice.token_ids is not None:
            self.known += len(choice.token_ids)
            chunk.token_ids = choice.token_ids
        else:
            self.guessed += tokens
        if choice.prompt_token_ids:
            self.count_prompt(len(choice.prompt_token_ids))
        if choice.finish_reason:
            chunk.finish = self.end(choice.finish_reason, _ENDS, _GIVEN_UP)

    def _read_tools(self, delta: _Delta) -> list[ToolDelta]:
        pieces = delta.tool_calls
        calls: list[ToolDelta] = []
        for piece in pieces if isinstance(pieces, list) else ():
            if isinstance(piece, dict):
                function = piece.get("function") or piece.get("custom")
                call = _tool(function if isinstance(function, dict) else {}, piece.get("id"))
                call.index = self._tool_index(piece.get("index"), call)
                calls.append(call)
        if isinstance(delta.function_call, dict):
            calls.append(_tool(delta.function_call, None))
        return calls

    def _tool_index(self, told: Any, call: ToolDelta) -> int:
        """The call's number; where nobody tells it, a piece with a new id (or a name and no id) is the next call, any other goes on with the last."""
        if isinstance(told, int) and 0 <= told < _MOST_CALLS:
            return told
        ids = self._tool_ids
        if call.id and call.id in ids:
            return ids.index(call.id)
        if call.id or call.name or not ids:
            ids.append(call.id)
        return len(ids) - 1

    def _read_counts(self, payload: _Payload) -> Usage | None:
        usage, timings = payload.usage, payload.timings
        if payload.prompt_token_ids:
            self.count_prompt(len(payload.prompt_token_ids))
        if usage is not None and (usage.completion_tokens is not None or usage.prompt_tokens is not None):
            return self._read_usage(usage)
        if timings is not None and timings.predicted_n is not None:
            cached = whole_number(timings.cache_n)
            return self.count(whole_number(timings.prompt_n) + cached, whole_number(timings.predicted_n), cached)
        return None

    def _read_usage(self, usage: _Usage) -> Usage:
        prompt, completion, total = usage.prompt_tokens or 0, usage.completion_tokens or 0, usage.total_tokens
        asked, answered = usage.prompt_tokens_details, usage.completion_tokens_details
        cached = (asked.cached_tokens if asked is not None else None) or usage.cached_tokens or usage.prompt_cache_hit_tokens or 0
        reasoning = (answered.reasoning_tokens if answered is not None else None) or 0
        if not 0 <= prompt <= _MOST or not 0 <= completion <= _MOST or not 0 <= cached <= _MOST or not 0 <= reasoning <= _MOST:
            prompt, completion, cached, reasoning = (whole_number(n) for n in (prompt, completion, cached, reasoning))
        if reasoning and total == prompt + completion + reasoning:
            completion += reasoning  # one provider counts them apart, and its total says so
        return self.count(prompt, completion, cached, reasoning)


def _tool(function: dict[str, Any], id: Any) -> ToolDelta:
    name, arguments = function.get("name"), function.get("arguments") or function.get("input")
    if isinstance(arguments, dict):  # the whole call, its arguments not as text
        arguments = msgspec.json.encode(arguments).decode()
    return ToolDelta(
        0, id if isinstance(id, str) else "", name if isinstance(name, str) else "", arguments if isinstance(arguments, str) else ""
    )


def _text_of_parts(parts: Any, kind: str) -> str:
    """The text of a `content` that is a list of parts: `{"type": "text", "text": ...}`, `{"type": "thinking", "thinking": [parts]}`."""
    if not isinstance(parts, list):
        return ""
    found: list[str] = []
    for part in parts:
        value = part.get(kind) if isinstance(part, dict) else None
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, list) and kind == "thinking":
            found.append(_text_of_parts(value, "text"))
    return "".join(found)


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        event = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def _is_json(data: bytes) -> bool:
    """Whether it is JSON from its beginning to its end; numbers that no reader can hold are JSON too."""
    try:
        msgspec.json.decode(data)
    except msgspec.ValidationError:
        try:
            json.loads(data, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return False
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _loosely(data: bytes) -> _Payload:
    """A payload of which one member is of an odd type: what can be understood of the others."""
    event = _object(data)
    payload = _Payload()
    if event is None:
        return payload
    payload.error = event.get("error")
    choices = event.get("choices")
    if isinstance(choices, list):
        payload.choices = [choice for choice in map(_loose_choice, choices) if choice is not None]
    usage = event.get("usage")
    if isinstance(usage, dict):
        asked, answered = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
        prompt, completion, total = (
            whole_number(usage[name]) if name in usage else None for name in ("prompt_tokens", "completion_tokens", "total_tokens")
        )
        payload.usage = _Usage(
            prompt, completion, total,
            _Details(whole_number(asked.get("cached_tokens"))) if isinstance(asked, dict) else None,
            _Details(None, whole_number(answered.get("reasoning_tokens"))) if isinstance(answered, dict) else None,
        )  # fmt: skip
    return payload


def _loose_choice(value: Any) -> _Choice | None:
    if not isinstance(value, dict):
        return None
    index, reason = value.get("index", 0), value.get("finish_reason")
    if index is None:
        index = 0
    if not isinstance(index, int):
        return None
    parts = {name: _Delta(**{key: part.get(key) for key in _Delta.__struct_fields__}) if isinstance(part := value.get(name), dict) else None
             for name in ("delta", "message")}  # fmt: skip
    return _Choice(index, parts["delta"], parts["message"], value.get("text"), reason if isinstance(reason, str) else None)
