"""SGLang's OpenAI-compatible server.

What is its own: /generate takes token ids and tells them, so that an answer goes on from exactly a prefix; its tokenizer reads control tokens
in every text, so that what users type goes as ids or is defused; /get_server_info and /metrics tell what it is doing, /tokenize counts.
It renders messages only for a chat: where the prompt has to be known here, chat_template of the settings says how.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import msgspec

from tidegate.core.ask import EngineAnswer, EngineCall, Said
from tidegate.core.chunk import Chunk, End
from tidegate.core.errors import CannotContinue, EngineCut, EngineError, TidegateError
from tidegate.core.flight import Flight
from tidegate.core.ports import EngineStream
from tidegate.engines.continuation import Continuing, Step, body_of, chat_only, completion_fields, left_to_say, middle_impossible, tokens_left
from tidegate.engines.dialect import Dialect
from tidegate.engines.figures import all_told, in_metrics
from tidegate.engines.prompt_ids import Message, apart, may_hold_control, prompt_ids, texts_with_control
from tidegate.engines.settings import EngineSettings
from tidegate.engines.stream import Stream
from tidegate.engines.template import guard_messages, load_template
from tidegate.engines.traits import Cannot
from tidegate.engines.vllm_stream import VllmDialect

#: Metrics of SGLang, and what they are called here. Counts of several processes are added up.
_COUNTS = {
    b"sglang:num_running_reqs": "requests_running",
    b"sglang:num_queue_reqs": "requests_waiting",
    b"sglang:generation_tokens_total": "tokens_generated",
    b"sglang:gen_throughput": "decode_tokens_per_s",
}
_SHARES = {b"sglang:token_usage": "kv_cache_usage", b"sglang:cache_hit_rate": "cache_hit_rate"}
#: What /get_server_info is worth here.
_INFO = {
    "version": "version", "max_req_input_len": "longest_prompt", "max_total_num_tokens": "kv_cache_tokens", "max_running_requests": "slots",
}  # fmt: skip
#: A completion's field -> that of `sampling_params`.
_SAMPLING = {
    "max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed", "repeat_penalty": "repetition_penalty",
    **{name: name for name in (
        "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "stop", "stop_token_ids",
        "ignore_eos", "skip_special_tokens", "logit_bias",
    )},
}  # fmt: skip
#: Fields that ask /generate for nothing.
_ASIDE = frozenset({"stream_options", "user", "n", "best_of", "echo", "suffix", "prompt", "cache_prompt", "return_token_ids", "priority"})
#: Tokens of a /generate that sets no bound; SGLang itself would take 128.
_ENDLESS = 1 << 30
_BAN = -1e9
_CANDIDATE = re.compile(r"<[^<>]{1,80}>|\[[^\[\]]{1,80}\]")


class Sglang(Continuing):
    """SGLang's HTTP server."""

    cannot: ClassVar[Cannot] = {
        "token_ids": "SGLang's OpenAI-compatible routes tell no token ids; what was said is tokenised anew.",
        "control_text": "SGLang reads control tokens in messages: with a chat_template they go as ids, without one they are defused.",
    }

    def __init__(self, name: str, settings: EngineSettings) -> None:
        """Raises SettingsError where the chat template is none."""
        super().__init__(name, settings)
        self.template = load_template(settings.chat_template, name) if settings.chat_template else None
        self._separator: tuple[str, int] | None = None
        self._model = next(iter(settings.model_names.values()))

    # -- the port

    async def start(self, call: EngineCall, flight: Flight) -> Stream:
        """As every engine's; messages with control tokens go as ids (`prompt_as_ids`) or are defused (`special_tokens_defused`)."""
        sent = await self._safe(call, flight)
        return await super().start(sent, flight) if isinstance(sent, EngineCall) else await self._generate(*sent, flight, Generated(self.label))

    async def whole(self, call: EngineCall, flight: Flight) -> EngineAnswer:
        """As every engine's, with control tokens treated as in `start`."""
        sent = await self._safe(call, flight)
        if isinstance(sent, EngineCall):
            return await super().whole(sent, flight)
        stream = await self._generate(*sent, flight, Generated(self.label))
        chunks: list[Chunk] = []
        try:
            await stream.relay(chunks.extend)
        finally:
            stream.abort()
        end = next(chunk.finish for chunk in reversed(chunks) if chunk.finish is not None)
        return EngineAnswer("".join(chunk.text for chunk in chunks), end, stream.usage)

    async def continue_from(self, call: EngineCall, said: Said, flight: Flight, *, forbid: str = "") -> EngineStream:
        """See `core.ports.Engine.continue_from`. By ids at /generate; a chat without a chat_template as its own open last message, by text."""
        if call.kind == "completion" or self.template is not None:
            return await super().continue_from(call, said, flight, forbid=forbid)
        body = body_of(call)
        reason = middle_impossible(body)
        if forbid and not reason:
            reason = f"a token can be forbidden only where the prompt is known: set chat_template of [engines.{self.name}]"
        left = left_to_say(self.label, body, said, reason)
        messages = guard_messages(body["messages"], self.settings.control_tokens, flight)
        fields = {name: value for name, value in body.items() if name not in ("max_tokens", "max_completion_tokens")}
        fields |= {"messages": [*messages, {"role": "assistant", "content": said.text}], "continue_final_message": True}
        if said.text:
            flight.decide("retokenised", said=said.tokens)
        sent = EngineCall("chat", call.model, fields if left is None else {**fields, "max_tokens": left})
        return await self.open(sent, flight, VllmDialect(self.label, forwards=False, continues=True))

    async def ask_figures(self) -> dict[str, Any]:
        """Models and context lengths, slots, cache and speeds, requests at work. What is switched off (--enable-metrics) is left out."""
        return {**await super().ask_figures(), **await all_told(self._info(), self._metrics())}

    async def count_tokens(self, text: str) -> int | None:
        """Tokens of a text, control tokens in it read as such, as SGLang would. None where the engine cannot say just now."""
        try:
            return len((await self._read([text], special=True))[0])
        except TidegateError:
            return None

    # -- prompts as ids, for `Continuing`

    async def _tokenize(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        if special or not any(may_hold_control(text) for text in texts):
            return await self._read(texts, special=True)
        separator = await self._find_separator()

        async def read(text: str) -> list[int]:
            return (await self._read([text], special=True))[0]

        plain = apart(*separator, read)
        return list(await asyncio.gather(*(plain(text) for text in texts)))

    async def detokenize(self, ids: Sequence[int]) -> str:
        """See `Continuing.detokenize`."""
        said = await self.post_json(f"{self.root}/detokenize", {"model": self._model, "tokens": list(ids), "skip_special_tokens": False})
        text = said.get("text")
        if not isinstance(text, str):
            raise EngineError(f"{self.label} answers /detokenize without a text.", hint="Is it SGLang 0.5.3 or later?")
        return text

    async def prompt_size(self, kind: str, body: dict[str, Any]) -> int:
        """See `Continuing.prompt_size`. SGLang renders for nobody else, so it takes the template of the settings."""
        if self.template is None:
            raise CannotContinue(f"{self.label} does not tell its prompts.", hint=f"Set chat_template of [engines.{self.name}].")
        return await super().prompt_size(kind, body)

    async def render(self, body: dict[str, Any], messages: list[Message]) -> str:
        """See `Continuing.render`: by the template of the settings."""
        assert self.template is not None
        return self.template.render(messages, where=f"the engine {self.name!r}")

    async def chat_ids(self, body: dict[str, Any], foreign: Collection[str]) -> list[int] | None:
        """See `Continuing.chat_ids`. A template of a file writes the model's beginning itself, a built-in one does not."""
        assert self.template is not None

        async def render(messages: list[Message]) -> str:
            return await self.render(body, messages)

        begin = await self._begin() if self.template.built_in else []
        return await prompt_ids(body["messages"], foreign, render, self.tokenize, begin=begin)

    async def one_token(self, model: str, fields: dict[str, Any], prompt: list[int]) -> Step:
        """See `Continuing.one_token`."""
        bias = {str(token): _BAN if weight is False else weight for token, weight in dict(fields.get("logit_bias") or {}).items()}
        fields = {**fields, **({"logit_bias": bias} if bias else {}), "max_tokens": 1}
        said = await self.post_json(f"{self.root}/generate", {"input_ids": prompt, "sampling_params": self._sampling(fields)})
        ids, meta = said.get("output_ids"), said.get("meta_info")
        reason = meta.get("finish_reason") if isinstance(meta, dict) else None
        if not isinstance(ids, list):
            raise CannotContinue(f"{self.label} does not tell the ids of its tokens.", hint="SGLang does since 0.4.6.")
        stopped = isinstance(reason, dict) and reason.get("type") == "stop"
        return Step([] if stopped else ids, "" if stopped else str(said.get("text") or ""), "stop" if stopped else None, 0 if stopped else len(ids))

    async def _rest(self, sent: EngineCall, flight: Flight, begun: int = 0) -> Stream:
        return await self._generate(sent.body["prompt"], sent.body, flight, Generated(self.label, continues=True, begun=begun))

    async def _begin(self) -> list[int]:
        return (await self._read([""], special=True, begin=True))[0][:1]

    # --

    async def _generate(self, prompt: list[int], fields: dict[str, Any], flight: Flight, dialect: Generated) -> Stream:
        dialect.incremental = await self._streams_increments()
        asked = {"input_ids": prompt, "sampling_params": self._sampling(fields), "stream": True}
        return await self.open_at(f"{self.root}/generate", asked, flight, dialect, prompt_bytes=4 * len(prompt))

    def _sampling(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields in /generate's words. Raises CannotContinue, which names the field, where it has none for one."""
        sampling: dict[str, Any] = {"max_new_tokens": _ENDLESS}
        for name, value in fields.items():
            if name in _SAMPLING:
                sampling[_SAMPLING[name]] = value
            elif name not in _ASIDE and value not in (None, False, [], {}, "none"):
                raise CannotContinue(f"{self.label} takes no {name!r} with a prompt of token ids.", hint=f"Leave {name} out.", param=name)
        return sampling

    async def _safe(self, call: EngineCall, flight: Flight) -> EngineCall | tuple[list[int], dict[str, Any]]:
        """The call as it may be sent: itself, with its control tokens defused, or as a prompt of ids and fields, in which they are text."""
        body = body_of(call)
        if call.kind != "chat" or not may_hold_control(body.get("messages")):
            return call
        ids = await self._safe_ids(body)
        if ids is None:
            return self._guarded(call, body, flight)
        flight.decide("prompt_as_ids", tokens=len(ids))
        flight.lap("engine.tokenize")
        left = tokens_left(body)
        return ids, {**completion_fields(body), **({} if left is None else {"max_tokens": left})}

    async def _safe_ids(self, body: dict[str, Any]) -> list[int] | None:
        """The prompt's ids with control tokens in messages as text; None where there are none, or where it cannot be made."""
        if self.template is None or self.settings.control_tokens != "defuse" or chat_only(body):
            return None
        foreign, elsewhere = await texts_with_control(body["messages"], self.tokenize)
        if elsewhere or not foreign:
            return None
        return await self.chat_ids(body, foreign)

    def _guarded(self, call: EngineCall, body: dict[str, Any], flight: Flight) -> EngineCall:
        control = self.template.control if self.template is not None else None
        messages = body["messages"]
        guarded = guard_messages(messages, self.settings.control_tokens, flight, *([control] if control is not None else []))
        return call if guarded is messages else EngineCall(call.kind, call.model, {**body, "messages": guarded})

    async def _read(self, texts: Sequence[str], *, special: bool, begin: bool = False) -> list[list[int]]:
        """/tokenize. SGLang reads control tokens always; `begin`: with what it puts before every prompt."""
        assert special
        fields = {"model": self._model, "prompt": list(texts), "add_special_tokens": begin}
        found = (await self.post_json(f"{self.root}/tokenize", fields)).get("tokens")
        if not isinstance(found, list) or len(found) != len(texts) or not all(isinstance(ids, list) for ids in found):
            raise EngineError(f"{self.label} answers /tokenize with what cannot be read.", hint="Is it SGLang 0.5.3 or later?")
        return found

    async def _find_separator(self) -> tuple[str, int]:
        """A control token of the model, found in what its template writes. Raises CannotContinue where there is none."""
        if self._separator is None:
            written = self.template.render([{"role": "user", "content": "a"}], where=f"the engine {self.name!r}") if self.template is not None else ""
            (around_nothing,) = await self._read(["a"], special=True)
            for text in dict.fromkeys(_CANDIDATE.findall(written)):
                alone, around = await self._read([text, f"a{text}a"], special=True)
                if len(alone) == 1 and around == [*around_nothing, *alone, *around_nothing]:
                    self._separator = text, alone[0]
                    return self._separator
            raise CannotContinue(f"{self.label} cannot take control tokens as text: its template writes none.", hint="Leave them out.")
        return self._separator

    async def _streams_increments(self) -> bool:
        try:
            info = await self._server_info()
        except TidegateError:
            return False
        return bool(info.get("incremental_streaming_output"))

    async def _server_info(self) -> dict[str, Any]:
        try:
            return await self.get_json(f"{self.root}/get_server_info")
        except TidegateError:
            return await self.get_json(f"{self.root}/server_info")  # its newer name

    async def _info(self) -> dict[str, Any]:
        info = await self._server_info()
        return {ours: info[name] for name, ours in _INFO.items() if isinstance(info.get(name), int | str)}

    async def _metrics(self) -> dict[str, Any]:
        return in_metrics(await self.get(f"{self.root}/metrics"), _COUNTS, _SHARES)


class _Reason(msgspec.Struct, gc=False):
    type: str = ""
    message: str = ""
    status_code: int | None = None
    matched: Any = None


class _Meta(msgspec.Struct, gc=False):
    finish_reason: _Reason | str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class _Event(msgspec.Struct, gc=False):
    text: str = ""
    output_ids: list[int] | None = None
    meta_info: _Meta | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode
_ENDS: dict[str, End] = {"stop": "stop", "length": "length"}


class Generated(Dialect):
    """The stream of /generate: events that repeat the whole text so far, or with `incremental` only what is new.

    Ids come with either; whether they are repeated shows in their number. `continues`, `begun`: see `VllmDialect`.
    """

    __slots__ = ("_begun", "_chars", "_held", "_ids", "incremental")

    def __init__(self, label: str, *, continues: bool = False, begun: int = 0) -> None:
        super().__init__(label)
        self.said = continues
        self.known = begun
        self.incremental = False
        self._begun = begun
        self._chars = 0  # of the text so far
        self._ids = 0  # ids so far
        self._held: list[int] = []  # of a character that is not whole yet

    def chunk(self, data: bytes, at_ns: int) -> Chunk | None:
        """See `Dialect.chunk`."""
        if data == b"[DONE]":
            self.over = True
            return None
        try:
            event = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise self.broken() from None
        if event.error:
            raise self.error(event.error)
        meta = event.meta_info
        if meta is None:
            raise EngineError(f"{self.label} sent an event without meta_info.", hint="Is it SGLang's own /generate?")
        text = event.text if self.incremental else event.text[self._chars :]
        self._chars = self._chars + len(text) if self.incremental else max(self._chars, len(event.text))
        chunk = Chunk(at_ns, "notice")
        ids = event.output_ids
        if ids is not None:
            if len(ids) == meta.completion_tokens:
                ids = ids[self._ids :]
            self._ids += len(ids)
            self.known += len(ids)
            self._held += ids
        if text:
            self.said = True
            chunk.kind, chunk.text = "text", text
            if ids is not None:
                chunk.token_ids, self._held = self._held, []
        if meta.finish_reason is not None:
            self._end(meta.finish_reason, chunk)
            chunk.usage = self.count(meta.prompt_tokens - self._begun, meta.completion_tokens + self._begun, meta.cached_tokens)
            if chunk.kind == "notice":
                chunk.kind = "usage"
        return chunk

    def _end(self, reason: _Reason | str, chunk: Chunk) -> None:
        kind = reason if isinstance(reason, str) else reason.type
        if kind == "abort":
            message = reason.message if isinstance(reason, _Reason) else ""
            if message and isinstance(reason, _Reason) and reason.status_code:
                raise self.error({"message": message, "code": reason.status_code})
            said = message[:300] or "no reason given"
            raise EngineCut(f"{self.label} gave the answer up (abort): {said}", hint="The engine's log has the details.")
        chunk.finish = self.end(kind, _ENDS, frozenset())
        matched = reason.matched if isinstance(reason, _Reason) else None
        if chunk.token_ids and isinstance(matched, int) and chunk.token_ids[-1] == matched:
            chunk.token_ids = chunk.token_ids[:-1]  # what ended the answer is no part of it
        elif isinstance(matched, str):
            chunk.token_ids = None  # the text was cut before the stop string, the ids were not


def build(name: str, settings: EngineSettings) -> Sglang:
    """The engine of one `[engines.NAME]` section."""
    return Sglang(name, settings)
