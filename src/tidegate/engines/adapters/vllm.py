"""vLLM's OpenAI-compatible server.

What is its own: streams tell the ids of their tokens, so an answer goes on from exactly what was said; text in messages that reads as a control
token becomes one, so such a prompt goes as token ids; non-streaming calls end when their connection does; /metrics tells what it is doing,
/tokenize counts.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, ClassVar

import msgspec

from tidegate.core.ask import EngineCall, Said
from tidegate.core.chunk import Chunk
from tidegate.core.errors import CannotContinue, EngineError, TidegateError
from tidegate.core.flight import Flight
from tidegate.core.ports import EngineAnswer, EngineStream
from tidegate.engines.continuation import Continuing, Step, body_of, by_ids, chat_only, completion_fields, tokens_left
from tidegate.engines.figures import in_metrics
from tidegate.engines.prompt_ids import MAY_BE_CONTROL, Message, apart, may_hold_control, prompt_ids, texts_with_control
from tidegate.engines.settings import EngineSettings
from tidegate.engines.stream import Stream
from tidegate.engines.template import guard_messages
from tidegate.engines.traits import Cannot
from tidegate.engines.vllm_stream import VllmDialect

#: Counters and gauges of /metrics that are worth a look, by their new and their old names, and what they are called here.
_COUNTS = {
    b"vllm:num_requests_running": "requests_running",
    b"vllm:num_requests_waiting": "requests_waiting",
    b"vllm:generation_tokens_total": "tokens_generated",
}
_SHARES = {b"vllm:kv_cache_usage_perc": "kv_cache_usage", b"vllm:gpu_cache_usage_perc": "kv_cache_usage"}

#: Fields of a chat that its template reads, besides the messages.
_TEMPLATE = ("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "add_special_tokens")
#: Tokens of a completion that sets no bound.
_DEFAULT_LIMIT = 16

#: Everything in a text that may be a control token.
_CANDIDATES = (re.compile(r"<[^<>]{1,80}>"), re.compile(r"\[[^\[\]]{1,80}\]"))
#: Verdicts on candidates that are remembered.
_MOST_VERDICTS = 4096
#: Ids at the end of what was said that may stand for text which nobody saw: it was held back for a stop string or for half a character.
_MOST_HELD = 16


class Vllm(Continuing):
    """vLLM's HTTP server."""

    cannot: ClassVar[Cannot] = {}

    def __init__(self, name: str, settings: EngineSettings) -> None:
        super().__init__(name, settings)
        self._model = next(iter(settings.model_names.values()))
        self._context = 0  # tokens, as /tokenize tells them
        self._control: dict[str, bool] = {}  # candidate -> whether the engine reads it as a control token
        self._separator: tuple[str, int] | None = None  # a control token of the model
        self._separator_sought = False
        self._thinks = False

    # -- the port

    async def start(self, call: EngineCall, flight: Flight) -> Stream:
        """As every engine's. A chat whose messages hold text that reads as a control token goes as token ids (noted as `special_tokens_as_text`), or
        where only the chat route can answer it with that text changed (`special_tokens_defused`)."""
        sent = await self._safe(call, flight)
        dialect = _Watching(self, shows_ids=bool(sent.body.get("return_token_ids")), forwards=sent.kind == call.kind)
        return await self.open(sent, flight, dialect)

    async def whole(self, call: EngineCall, flight: Flight) -> EngineAnswer:
        """As every engine's, with control tokens treated as in `start`."""
        sent = await self._safe(call, flight)
        answer = await super().whole(sent, flight)
        return answer if sent.kind == call.kind else EngineAnswer(answer.text, answer.end, answer.usage)

    async def continue_from(self, call: EngineCall, said: Said, flight: Flight, *, forbid: str = "") -> EngineStream:
        """See `core.ports.Engine.continue_from`."""
        body = dict(body_of(call))
        if call.kind == "completion" and tokens_left(body) is None:
            body["max_tokens"] = _DEFAULT_LIMIT
        if isinstance(body.get("min_tokens"), int):
            body["min_tokens"] = max(0, body["min_tokens"] - said.tokens)
        return await super().continue_from(EngineCall(call.kind, call.model, body), said, flight, forbid=forbid)

    async def ask_figures(self) -> dict[str, Any]:
        """Models and context lengths; answers being made and waiting, tokens made since the start, and the share of the KV cache in use. What is
        switched off is left out."""
        models = await super().ask_figures()
        try:
            return {**models, **await self._gauges()}
        except TidegateError:
            return models

    async def count_tokens(self, text: str) -> int | None:
        """Tokens of a text, control tokens in it taken as text. None where the engine cannot say just now."""
        try:
            return len((await self.tokenize([text], False))[0])
        except TidegateError:
            return None

    # -- what is sent

    def body(self, call: EngineCall, *, stream: bool) -> bytes:
        """The request's body; a stream asks for token ids, which are put into the caller's own bytes."""
        if call.raw is None or _renames(call.body):
            return msgspec.json.encode(self.fields(call, stream=stream))
        if not stream:
            return call.raw
        at = call.raw.index(b"{") + 1
        return b'%b"return_token_ids":true,%b' % (call.raw[:at], call.raw[at:])

    def fields(self, call: EngineCall, *, stream: bool) -> dict[str, Any]:
        """As every engine's, with token ids asked for in a stream, and vLLM's name for a usage that is told with each event."""
        fields = super().fields(call, stream=stream)
        fields.pop("cache_prompt", None)  # llama.cpp's word for what vLLM always does
        if stream:
            fields["return_token_ids"] = True
            options = fields["stream_options"]
            if _renames(fields):
                others = {key: value for key, value in options.items() if key != "continuous_usage"}
                fields["stream_options"] = {**others, "continuous_usage_stats": options["continuous_usage"]}
        return fields

    async def _rest(self, sent: EngineCall, flight: Flight, begun: int = 0) -> Stream:
        return await super()._rest(await self._bounded(sent), flight, begun)

    async def _bounded(self, sent: EngineCall) -> EngineCall:
        """A completion that ends as a chat does where nobody bounds it: at the end of the context."""
        if "max_tokens" not in sent.body:
            context = self._context or (await self._ask_tokenize(prompt="")).max_model_len
            sent.body["max_tokens"] = max(1, context - len(sent.body["prompt"]))
        return sent

    # -- control tokens in messages

    async def _safe(self, call: EngineCall, flight: Flight) -> EngineCall:
        """The call itself where no text of its messages holds a control token, else one in which they are text."""
        if call.kind != "chat":
            return call
        body = body_of(call)
        messages: list[dict[str, Any]] = body.get("messages") or []
        if not may_hold_control(messages):
            return call
        flight.engine = self.name
        try:
            if not await self._holds_control(messages):
                return call
            reason = chat_only(body) or await self.why_not_by_ids("")
            foreign, elsewhere = await texts_with_control(messages, self.tokenize)
            if elsewhere:
                reason = reason or "a control token stands in a name or a tool call"
            if not reason:
                ids = await self.chat_ids(body, foreign)
                if ids is not None:
                    flight.decide("special_tokens_as_text", count=len(foreign), tokens=len(ids))
                    return await self._bounded(by_ids(call.model, _answering(body), ids, tokens_left(body)))
                reason = "the chat template changes the texts of messages"
        except TidegateError:  # no /tokenize: nobody can say what is a control token, so everything that looks like one is changed
            reason = "no /tokenize"
        finally:
            flight.lap("engine.tokenize")
        flight.decide("special_tokens_not_as_text", reason=reason)
        return EngineCall(call.kind, call.model, {**body, "messages": guard_messages(messages, "defuse", flight, MAY_BE_CONTROL)})

    async def _holds_control(self, messages: Any) -> bool:
        """Whether the engine reads a control token in any text of the messages. Asks it once for each thing that looks like one."""
        candidates = dict.fromkeys(found for text in _texts(messages) for pattern in _CANDIDATES for found in pattern.findall(text))
        fresh = [one for one in candidates if one not in self._control]
        if fresh:
            # a line each: what the engine reads as one token is either a control token or a word that is the same token as text
            told = await self._ask_tokenize(prompt="\n".join(fresh), add_special_tokens=False, return_token_strs=True)
            whole = set(told.token_strs or ())
            if len(self._control) + len(fresh) > _MOST_VERDICTS:
                self._control.clear()
            self._control.update((one, one in whole) for one in fresh)
            return any(one in whole for one in fresh) or any(self._control.get(one) for one in candidates)
        return any(self._control[one] for one in candidates)

    async def why_not_by_ids(self, prompt: str) -> str:
        """See `Continuing.why_not_by_ids`."""
        return "the engine parts reasoning from text, which only the chat route does" if self._thinks else ""

    def note_reasoning(self) -> None:
        """A chat's stream told reasoning apart from text."""
        self._thinks = True

    # -- prompts and tokens, by vLLM's routes

    async def chat_ids(self, body: dict[str, Any], foreign: Collection[str]) -> list[int] | None:
        """See `Continuing.chat_ids`. Where nothing is foreign, the ids are those that the engine itself makes of the messages."""
        why = await self.why_not_by_ids("")
        if why:
            raise CannotContinue(f"{self.label} cannot take this chat as token ids: {why}.", hint="Ask again from the beginning.")
        if not foreign:
            return (await self._ask_tokenize(messages=body["messages"], **_template_fields(body))).tokens

        async def render(messages: list[Message]) -> str:
            return await self.detokenize((await self._ask_tokenize(messages=messages, **_template_fields(body))).tokens)

        return await prompt_ids(body["messages"], foreign, render, self.tokenize)

    async def prompt_size(self, kind: str, body: dict[str, Any]) -> int:
        """See `Continuing.prompt_size`."""
        if kind == "completion":
            return await super().prompt_size(kind, body)
        tools = {"tools": body["tools"]} if body.get("tools") else {}
        return len((await self._ask_tokenize(messages=body["messages"], **tools, **_template_fields(body))).tokens)

    async def detokenize(self, ids: Sequence[int]) -> str:
        """See `Continuing.detokenize`."""
        if not ids:
            return ""
        return str((await self.post_json(f"{self.root}/detokenize", {"model": self._model, "tokens": ids})).get("prompt", ""))

    async def _tokenize(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        if special or not any(may_hold_control(text) for text in texts):
            return list(await asyncio.gather(*(self._read(text) for text in texts)))
        separator = await self._find_separator()
        plain = apart(*separator, self._read) if separator is not None else self._in_pieces
        return list(await asyncio.gather(*(plain(text) for text in texts)))

    async def _read(self, text: str) -> list[int]:
        return (await self._ask_tokenize(prompt=text, add_special_tokens=False)).tokens

    async def _in_pieces(self, text: str) -> list[int]:
        """Plain text where no control token is known that could keep its pieces apart: one question for each."""
        pieces = await asyncio.gather(*(self._read(piece) for piece in re.split(r"(?<=[<\[])", text) if piece))
        return [token for ids in pieces for token in ids]

    async def _find_separator(self) -> tuple[str, int] | None:
        """A control token of the model, found in what its template writes; None where it writes none."""
        if not self._separator_sought:
            told = await self._ask_tokenize(messages=[{"role": "user", "content": "a"}], return_token_strs=True)
            for text, token in dict(zip(told.token_strs or (), told.tokens, strict=False)).items():
                if len(text) > 2 and any(pattern.fullmatch(text) for pattern in _CANDIDATES):
                    alone = await self._read("a")
                    if await self._read(f"a{text}a") == [*alone, token, *alone]:
                        self._separator = text, token
                        break
            self._separator_sought = True
        return self._separator

    async def _prompt(self, kind: str, body: dict[str, Any], flight: Flight) -> list[int]:
        prompt = body.get("prompt")
        if kind == "completion" and isinstance(prompt, str):
            return (await self._ask_tokenize(prompt=prompt, add_special_tokens=body.get("add_special_tokens", True))).tokens
        return await super()._prompt(kind, body, flight)

    async def _said_ids(self, said: Said, flight: Flight) -> list[int]:
        """The ids of exactly the text that was said: those that the engine told, less those of what nobody saw, else tokenised anew."""
        ids = said.token_ids or []
        for size in range(len(ids), max(0, len(ids) - _MOST_HELD), -1):
            text = await self.detokenize(ids[:size])
            if text == said.text or " " + text == said.text:  # some tokenizers lose a blank at the beginning of a text
                return ids[:size]
        return await super()._said_ids(Said(said.text, said.tokens), flight)

    async def one_token(self, model: str, fields: dict[str, Any], prompt: list[int]) -> Step:
        """See `Continuing.one_token`."""
        bias = {token: -100 if value is False else value for token, value in (fields.get("logit_bias") or {}).items()}
        asked = {**fields, "logit_bias": bias, "min_tokens": 0, "return_token_ids": True}
        asked.pop("stream_options", None)
        told = await self.post_json(f"{self.base}/completions", self.fields(by_ids(model, asked, prompt, 1), stream=False))
        choice = (told.get("choices") or [{}])[0]
        ids = choice.get("token_ids")
        if not isinstance(ids, list):
            raise CannotContinue(f"{self.label} does not tell the ids of its tokens.", hint="It is too old: vLLM learned return_token_ids in 0.10.2.")
        if choice.get("finish_reason") == "length":
            return Step(ids, await self.detokenize(ids), None)
        return Step([], str(choice.get("text") or ""), "stop", len(ids))

    async def _ask_tokenize(self, **fields: Any) -> _Tokens:
        told = await self.post_json(f"{self.root}/tokenize", {"model": self._model, **fields})
        try:
            tokens = msgspec.convert(told, _Tokens)
        except msgspec.ValidationError as error:
            raise EngineError(f"{self.label} answers /tokenize with what cannot be read: {error}.", hint="Is it vLLM?") from None
        self._context = tokens.max_model_len or self._context
        return tokens

    async def _gauges(self) -> dict[str, Any]:
        return in_metrics(await self.get(f"{self.root}/metrics"), _COUNTS, _SHARES)


class _Watching(VllmDialect):
    """Tells the engine where reasoning comes apart from text."""

    __slots__ = ("_engine",)

    def __init__(self, engine: Vllm, **more: Any) -> None:
        super().__init__(engine.label, **more)
        self._engine = engine

    def chunk(self, data: bytes, at_ns: int) -> Chunk | None:
        chunk = super().chunk(data, at_ns)
        if self.thought:
            self._engine.note_reasoning()
        return chunk


class _Tokens(msgspec.Struct):
    tokens: list[int]
    max_model_len: int = 0
    token_strs: list[str] | None = None


def _answering(body: dict[str, Any]) -> dict[str, Any]:
    """The fields of a completion that answers as this chat would. vLLM knows OpenAI's `response_format` there too."""
    fields = completion_fields(body)
    fields.pop("json_schema", None)
    return {**fields, "response_format": body["response_format"]} if body.get("response_format") else fields


def _template_fields(body: dict[str, Any]) -> dict[str, Any]:
    return {name: body[name] for name in _TEMPLATE if body.get(name) is not None}


def _renames(body: dict[str, Any]) -> bool:
    options = body.get("stream_options")
    return isinstance(options, dict) and "continuous_usage" in options


def _texts(value: Any) -> Iterator[str]:
    """Every text below `value`; texts in one list also together, because a template may put them together."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list):
        parts = [part["text"] for part in value if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if len(parts) > 1:
            yield "".join(parts)
        for one in value:
            yield from _texts(one)


def build(name: str, settings: EngineSettings) -> Vllm:
    """The engine of one `[engines.NAME]` section."""
    return Vllm(name, settings)
