"""vLLM's OpenAI-compatible server.

What is its own: streams tell the ids of their tokens, so an answer can go on from exactly a prefix (a completion whose prompt is ids); text
that holds a control token goes as ids too, because vLLM reads control tokens in messages; non-streaming calls end when their connection does;
/metrics tells what it is doing, /tokenize counts.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import msgspec

from tidegate.core.ask import EngineCall, Said
from tidegate.core.chunk import Chunk, Usage
from tidegate.core.errors import CannotContinue, EngineEmpty, EngineError, TidegateError
from tidegate.core.flight import Flight
from tidegate.core.ports import EngineAnswer, EngineStream
from tidegate.engines.openai_http import OpenAIHttp
from tidegate.engines.prompt_ids import apart, first_tokens, may_hold_control, prompt_ids, texts_with_control
from tidegate.engines.settings import EngineSettings
from tidegate.engines.stream import Stream
from tidegate.engines.template import guard_messages
from tidegate.engines.traits import Cannot
from tidegate.engines.vllm_stream import Begun, VllmDialect

#: Gauges of /metrics, by their new and their old names, and what they are called here. Counts of several engine processes are added up.
_COUNTS = {
    b"vllm:num_requests_running": "requests_running",
    b"vllm:num_requests_waiting": "requests_waiting",
    b"vllm:generation_tokens_total": "tokens_generated",
}
_SHARES = {b"vllm:kv_cache_usage_perc": "kv_cache_usage", b"vllm:gpu_cache_usage_perc": "kv_cache_usage"}

#: Fields that mean the same to a chat and to a completion. A chat with any other, unless it asks for nothing, cannot go by ids.
_SAME = frozenset({
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "length_penalty", "logit_bias", "ignore_eos", "min_tokens", "bad_words", "allowed_token_ids", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "priority", "user", "stream_options", "cache_salt", "request_id",
    "vllm_xargs", "response_format", "structured_outputs", "return_token_ids",
})  # fmt: skip
#: Fields that the template reads: they are given to /tokenize.
_TEMPLATE = frozenset({
    "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "add_special_tokens", "mm_processor_kwargs",
})
#: Fields that an engine does not need to answer.
_ASIDE = frozenset({"messages", "prompt", "model", "stream", "max_tokens", "max_completion_tokens", "metadata", "store", "service_tier"})
#: Values by which a field asks for nothing.
_NOTHING: tuple[Any, ...] = (None, [], {}, "none")
#: Fields that ask for nothing where they are one.
_HOW_MANY = ("n", "best_of")
#: What shapes the whole answer, so that it cannot begin in the middle of one.
_SHAPES = ("response_format", "structured_outputs")

#: Everything in a text that may be a control token.
_CANDIDATES = (re.compile(r"<[^<>]{1,80}>"), re.compile(r"\[[^\[\]]{1,80}\]"))
#: Verdicts on candidates that are remembered.
_MOST_VERDICTS = 4096
#: Tokens that one character can take.
_TOKENS_OF_A_CHARACTER = 4


class Vllm(OpenAIHttp):
    """vLLM's HTTP server."""

    cannot: ClassVar[Cannot] = {}

    def __init__(self, name: str, settings: EngineSettings) -> None:
        super().__init__(name, settings)
        self._control: dict[str, bool] = {}  # candidate -> whether the engine reads it as a control token
        self._separators: dict[str, tuple[str, int] | None] = {}  # model -> a control token of it
        self._thinks = False  # the engine parts reasoning from text: a completion would not

    # -- the port

    async def start(self, call: EngineCall, flight: Flight) -> Stream:
        """As every engine's; messages that hold control tokens go as ids (`prompt_as_ids`) or are defused (`special_tokens_defused`)."""
        sent = await self._safe(call, flight)
        return await self._stream(sent, flight, forwards=sent.kind == call.kind)

    async def whole(self, call: EngineCall, flight: Flight) -> EngineAnswer:
        """As every engine's, with control tokens treated as in `start`."""
        sent = await self._safe(call, flight)
        answer = await super().whole(sent, flight)
        return answer if sent.kind == call.kind else EngineAnswer(answer.text, answer.end, answer.usage)

    async def continue_from(self, call: EngineCall, said: Said, flight: Flight, *, forbid: str = "") -> EngineStream:
        """See `core.ports.Engine.continue_from`: a completion whose prompt is the ids of the first prompt and of what was said."""
        reason = self._not_by_ids(call, middle=True)
        if reason:
            raise CannotContinue(f"{self.label} cannot go on from the middle of this answer: {reason}.", hint="Ask again from the beginning.")
        flight.engine = self.name
        prompt, room = await self._prompt(call)
        prompt += await self._said_ids(call.model, said, flight)
        left = self._limit(call, room - len(prompt) + said.tokens) - said.tokens
        if left < 1:
            raise CannotContinue(f"{self.label} has no token left to say: max_tokens was reached.", hint="Raise max_tokens.")
        body = self._completion_fields(call.body)
        if isinstance(body.get("min_tokens"), int):
            body["min_tokens"] = max(0, body["min_tokens"] - said.tokens)
        if not forbid:
            return await self._stream(_by_ids(call.model, body, prompt, left), flight, forwards=False, continues=bool(said.text))
        return await self._continue_without(forbid, call.model, body, prompt, left, bool(said.text), flight)

    async def ask_figures(self) -> dict[str, Any]:
        """Models and context lengths; answers being made and waiting, and the share of the KV cache in use. What is switched off is left out."""
        models = await super().ask_figures()
        try:
            return {**models, **await self._gauges()}
        except TidegateError:
            return models

    async def count_tokens(self, text: str) -> int | None:
        """Tokens of a text, control tokens in it taken as text. None where the engine cannot say just now."""
        try:
            return len((await self._tokenize(self._own_model(), [text], False))[0])
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
        if stream:
            fields["return_token_ids"] = True
            options = fields["stream_options"]
            if _renames(fields):
                fields["stream_options"] = {
                    **{key: value for key, value in options.items() if key != "continuous_usage"},
                    "continuous_usage_stats": options["continuous_usage"],
                }
        return fields

    # -- streams

    async def _stream(self, call: EngineCall, flight: Flight, *, forwards: bool, continues: bool = False, begun: int = 0) -> Stream:
        shows_ids = bool(call.body.get("return_token_ids"))
        dialect = _Watching(self, shows_ids=shows_ids, forwards=forwards, continues=continues, begun=begun)
        return await self.open(call, flight, dialect)

    async def _continue_without(
        self, forbid: str, model: str, body: dict[str, Any], prompt: list[int], left: int, said: bool, flight: Flight
    ) -> EngineStream:
        """The first token alone with a bias against what is forbidden, then the rest without: a bias holds for a whole call."""
        banned = await first_tokens(forbid, lambda texts, special: self._tokenize(model, texts, special))
        banned += [ids[0] for ids in await self._tokenize(model, [forbid], False) if ids]
        flight.decide("continue_without", banned=len(set(banned)))
        bias = body.get("logit_bias") or {}
        first = {**body, "logit_bias": {**bias, **{str(token): -100 for token in banned}}}
        fresh: list[int] = []
        while True:
            step = await self._step(model, first if not fresh else body, [*prompt, *fresh], flight)
            fresh += step.ids
            text = await self._text(model, fresh) if step.finish == "length" else step.text
            # half a character at the end of a prompt makes vLLM lose its place in the text
            if step.finish != "length" or len(fresh) >= left or not text.endswith("\ufffd") or len(fresh) >= _TOKENS_OF_A_CHARACTER:
                break
        at_ns = time.perf_counter_ns()
        usage = Usage(len(prompt), len(fresh))
        done = step.finish != "length" or len(fresh) >= left
        chunks = [Chunk(at_ns, "text", text, token_ids=fresh)] if text and fresh else []
        if done and not chunks and not said:
            raise EngineEmpty(f"{self.label} ended its answer without saying anything.", hint="Look at the prompt and the stop strings.")
        if done:
            return Begun([*chunks, Chunk(at_ns, "notice", finish=step.finish), Chunk(at_ns, "usage", usage=usage)], None, usage)
        call = _by_ids(model, body, [*prompt, *fresh], left - len(fresh))
        rest = await self._stream(call, flight, forwards=False, continues=True, begun=len(fresh))
        return Begun(chunks, rest, usage)

    async def _step(self, model: str, body: dict[str, Any], prompt: list[int], flight: Flight) -> _Step:
        """One token."""
        call = _by_ids(model, {**body, "return_token_ids": True, "min_tokens": 0}, prompt, 1)
        call.body.pop("stream_options", None)
        answer = await self.post_json(f"{self.base}/completions", self.fields(call, stream=False))
        choice = (answer.get("choices") or [{}])[0]
        ids = choice.get("token_ids")
        if not isinstance(ids, list):
            raise CannotContinue(f"{self.label} does not tell the ids of its tokens.", hint="vLLM does since 0.10.2.")
        finish = choice.get("finish_reason")
        if finish != "length":
            ids = []  # the token that ends an answer is no part of it
        return _Step(ids, str(choice.get("text") or ""), "length" if finish == "length" else "stop")

    # -- prompts as ids

    async def _safe(self, call: EngineCall, flight: Flight) -> EngineCall:
        """The call itself where no text of its messages holds a control token, else one in which they are text."""
        if call.kind != "chat":
            return call
        body = call.body if call.body or call.raw is None else msgspec.json.decode(call.raw)
        messages = body.get("messages")
        if not may_hold_control(messages) or not await self._holds_control(call.model, messages):
            return call
        call = EngineCall(call.kind, call.model, body)
        if not self._not_by_ids(call, middle=False):
            prompt, room = await self._prompt(call, foreign_only=True)
            if prompt:
                flight.decide("prompt_as_ids", tokens=len(prompt))
                return _by_ids(call.model, self._completion_fields(body), prompt, self._limit(call, room - len(prompt)))
        return EngineCall(call.kind, call.model, {**body, "messages": guard_messages(messages, "defuse", flight)})

    def _not_by_ids(self, call: EngineCall, *, middle: bool) -> str:
        """Why the call cannot go as a completion with a prompt of ids; "" where it can. `middle`: from the middle of its answer."""
        body = call.body
        if self._thinks:
            return "the engine parts reasoning from the text, which it does not do for a prompt of token ids"
        if middle:
            shape = next((name for name in _SHAPES if body.get(name) not in (*_NOTHING, {"type": "text"})), None)
            if shape:
                return f"{shape} shapes the whole answer"
        if call.kind == "completion":
            prompt = body.get("prompt")
            if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)):
                return "it has several prompts"
            odd = next((name for name in ("echo", "suffix", "logprobs", "n", "best_of", "use_beam_search") if _asks(body, name)), None)
        else:
            if any(_has_media(message) for message in body.get("messages") or ()):
                return "a message holds more than text"
            odd = next((name for name in body if name not in _SAME | _TEMPLATE | _ASIDE and _asks(body, name)), None)
        return f"{odd} is of no use with a prompt of token ids" if odd else ""

    def _completion_fields(self, body: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in body.items() if name in _SAME}

    async def _prompt(self, call: EngineCall, *, foreign_only: bool = False) -> tuple[list[int], int]:
        """The prompt's ids, and how many tokens the model's context holds. `foreign_only`: no ids where nothing in it had to be kept apart."""
        if call.kind == "completion":
            prompt = call.body.get("prompt")
            special = call.body.get("add_special_tokens", True)
            told = await self._ask_tokenize(call.model, prompt=prompt if isinstance(prompt, str) else "", add_special_tokens=special)
            return (list(prompt) if isinstance(prompt, list) else told.tokens), told.max_model_len
        fields = {name: value for name, value in call.body.items() if name in _TEMPLATE}
        messages = call.body["messages"]
        foreign: set[str] = set()

        async def tokenize(texts: Sequence[str], special: bool) -> list[list[int]]:
            return await self._tokenize(call.model, texts, special)

        if may_hold_control(messages) and await self._holds_control(call.model, messages):
            foreign, elsewhere = await texts_with_control(messages, tokenize)
            if elsewhere:
                if foreign_only:
                    return [], 0
                raise CannotContinue(f"{self.label} cannot go on: a control token stands in a name of a message.", hint="Leave it out.")
        told = await self._ask_tokenize(call.model, messages=messages, **fields)
        if not foreign:
            return ([] if foreign_only else told.tokens), told.max_model_len

        async def render(marked: list[dict[str, Any]]) -> str:
            return await self._text(call.model, (await self._ask_tokenize(call.model, messages=marked, **fields)).tokens)

        ids = await prompt_ids(messages, foreign, render, tokenize)
        if ids is None and not foreign_only:
            raise CannotContinue(f"{self.label} cannot go on: its chat template changes texts.", hint="Ask again from the beginning.")
        return ids or [], told.max_model_len

    def _limit(self, call: EngineCall, room: int) -> int:
        """The most tokens that the answer may have; a completion without a limit would end after sixteen."""
        named = call.body.get("max_completion_tokens") or call.body.get("max_tokens")
        if named is None and call.kind == "completion":
            named = 16
        return named if isinstance(named, int) else max(1, room)

    async def _said_ids(self, model: str, said: Said, flight: Flight) -> list[int]:
        """The ids of exactly the text that was said: those that the engine told, less those of what was not shown, else tokenised anew."""
        if not said.text:
            return []
        ids = said.token_ids or []
        for size in range(len(ids), max(0, len(ids) - 16), -1):
            text = await self._text(model, ids[:size])
            if text == said.text or " " + text == said.text:  # some tokenizers lose a blank at the beginning of a text
                return ids[:size]
        flight.decide("retokenised", told=len(ids), chars=len(said.text))
        return (await self._tokenize(model, [said.text], False))[0]

    async def _holds_control(self, model: str, messages: Any) -> bool:
        """Whether the engine reads a control token in any text of the messages. Asks it once for each thing that looks like one."""
        candidates = dict.fromkeys(found for text in _texts(messages) for pattern in _CANDIDATES for found in pattern.findall(text))
        fresh = [one for one in candidates if one not in self._control]
        if fresh:
            # a line each: what the engine reads as one token is either a control token or a word that is the same token as text
            told = await self._ask_tokenize(model, prompt="\n".join(fresh), add_special_tokens=False, return_token_strs=True)
            whole = set(told.token_strs or ())
            if len(self._control) + len(fresh) > _MOST_VERDICTS:
                self._control.clear()
            self._control.update((one, one in whole) for one in fresh)
            return any(one in whole for one in fresh) or any(self._control.get(one) for one in candidates)
        return any(self._control[one] for one in candidates)

    # -- the engine's tokenizer

    async def _tokenize(self, model: str, texts: Sequence[str], special: bool) -> list[list[int]]:
        """The ids of each text; `special`: control tokens are read as such."""

        async def read(text: str) -> list[int]:
            return (await self._ask_tokenize(model, prompt=text, add_special_tokens=False)).tokens

        if special or not any(may_hold_control(text) for text in texts):
            return list(await asyncio.gather(*(read(text) for text in texts)))
        separator = await self._separator(model)
        if separator is None:
            return list(await asyncio.gather(*(self._in_pieces(text, read) for text in texts)))
        plain = apart(*separator, read)
        return list(await asyncio.gather(*(plain(text) for text in texts)))

    async def _in_pieces(self, text: str, read: Any) -> list[int]:
        pieces = re.split(r"(?<=[<\[])", text)
        return [token for ids in await asyncio.gather(*(read(piece) for piece in pieces if piece)) for token in ids]

    async def _separator(self, model: str) -> tuple[str, int] | None:
        """A control token of the model, found in what its template writes; None where it writes none."""
        if model not in self._separators:
            found = None
            told = await self._ask_tokenize(model, messages=[{"role": "user", "content": "a"}], return_token_strs=True)
            for text, token in dict(zip(told.token_strs or (), told.tokens, strict=False)).items():
                if len(text) > 2 and any(pattern.fullmatch(text) for pattern in _CANDIDATES):
                    around = (await self._ask_tokenize(model, prompt=f"a{text}a", add_special_tokens=False)).tokens
                    alone = (await self._ask_tokenize(model, prompt="a", add_special_tokens=False)).tokens
                    if around == [*alone, token, *alone]:
                        found = text, token
                        break
            self._separators[model] = found
        return self._separators[model]

    async def _text(self, model: str, ids: list[int]) -> str:
        if not ids:
            return ""
        told = await self.post_json(f"{self.root}/detokenize", {"model": model, "tokens": ids})
        return str(told.get("prompt", ""))

    async def _ask_tokenize(self, model: str, **fields: Any) -> _Tokens:
        told = await self.post_json(f"{self.root}/tokenize", {"model": model, **fields})
        try:
            return msgspec.convert(told, _Tokens)
        except msgspec.ValidationError as error:
            raise EngineError(f"{self.label} answers /tokenize with what cannot be read: {error}.", hint="Is it vLLM?") from None

    def _own_model(self) -> str:
        return next(iter(self.settings.model_names.values()))

    async def _gauges(self) -> dict[str, Any]:
        figures: dict[str, float] = {}
        for line in (await self.get(f"{self.root}/metrics")).splitlines():
            name, _, rest = line.partition(b"{")
            if name in _COUNTS:
                key = _COUNTS[name]
                figures[key] = figures.get(key, 0.0) + float(rest.rpartition(b" ")[2])
            elif name in _SHARES:
                figures[_SHARES[name]] = max(figures.get(_SHARES[name], 0.0), float(rest.rpartition(b" ")[2]))
        return figures

    def note_reasoning(self) -> None:
        """A chat's stream told reasoning apart from text."""
        self._thinks = True


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


class _Step(msgspec.Struct):
    ids: list[int]
    text: str
    finish: Any


def _by_ids(model: str, body: dict[str, Any], prompt: list[int], limit: int) -> EngineCall:
    return EngineCall("completion", model, {**body, "prompt": prompt, "max_tokens": limit})


def _asks(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    return value not in _NOTHING and value is not False and not (name in _HOW_MANY and value == 1)


def _renames(body: dict[str, Any]) -> bool:
    options = body.get("stream_options")
    return isinstance(options, dict) and "continuous_usage" in options


def _has_media(message: Any) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    return isinstance(content, list) and any(not isinstance(part, dict) or part.get("type") != "text" for part in content)


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
