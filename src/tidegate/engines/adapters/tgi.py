"""Hugging Face's Text Generation Inference (TGI): its OpenAI-compatible messages, and its own routes beside them.

What is its own: /chat_tokenize renders messages by the model's template and /generate_stream takes a prompt, so that an answer goes on from a
text; it takes no token ids, so that this is always tokenised anew; its tokenizer reads control tokens in messages, which are defused; /info and
/metrics tell what it is doing, /tokenize counts.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import msgspec

from tidegate.core.ask import EngineAnswer, EngineCall, Said
from tidegate.core.chunk import Chunk, End
from tidegate.core.errors import CannotContinue, EngineError, TidegateError
from tidegate.core.flight import Flight
from tidegate.core.ports import EngineStream
from tidegate.engines.continuation import body_of, left_to_say, middle_impossible
from tidegate.engines.dialect import Dialect
from tidegate.engines.figures import all_told, in_metrics
from tidegate.engines.openai_http import OpenAIHttp
from tidegate.engines.prompt_ids import may_hold_control
from tidegate.engines.settings import EngineSettings
from tidegate.engines.stream import Stream
from tidegate.engines.template import guard_messages, load_template
from tidegate.engines.traits import Cannot

_METRICS = {
    b"tgi_batch_current_size": "requests_running",
    b"tgi_queue_size": "requests_waiting",
    b"tgi_request_generated_tokens_sum": "tokens_generated",
}
_INFO = {
    "model_id": "model", "version": "version", "max_input_tokens": "longest_prompt", "max_total_tokens": "context",
    "max_concurrent_requests": "slots",
}  # fmt: skip
#: Fields that /generate_stream takes under the same name.
_SAME = frozenset({"top_k", "typical_p", "repetition_penalty", "frequency_penalty", "seed"})
#: Fields that are treated by themselves, or that ask /generate_stream for nothing.
_ASIDE = frozenset({
    "messages", "prompt", "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "user", "n",
    "metadata", "store", "service_tier", "cache_prompt", "add_generation_prompt", "best_of",
})  # fmt: skip


class Tgi(OpenAIHttp):
    """TGI's HTTP server."""

    cannot: ClassVar[Cannot] = {
        "forbid": "TGI takes no bias against a token.",
        "token_ids": "TGI takes no token ids, so they would be of no use.",
        "control_text": "TGI reads control tokens in every text: those in messages are defused, refused or passed (control_tokens).",
        "cancel_prefill": "TGI does not tell when a prompt was given up.",
    }

    def __init__(self, name: str, settings: EngineSettings) -> None:
        """Raises SettingsError where the chat template is none."""
        super().__init__(name, settings)
        self.template = load_template(settings.chat_template, name) if settings.chat_template else None

    async def start(self, call: EngineCall, flight: Flight) -> Stream:
        """As every engine's, with control tokens in messages defused (or refused, or passed, as control_tokens says)."""
        return await super().start(self._guarded(call, flight), flight)

    async def whole(self, call: EngineCall, flight: Flight) -> EngineAnswer:
        """As every engine's, with control tokens treated as in `start`."""
        return await super().whole(self._guarded(call, flight), flight)

    async def continue_from(self, call: EngineCall, said: Said, flight: Flight, *, forbid: str = "") -> EngineStream:
        """See `core.ports.Engine.continue_from`. By prompt at /generate_stream: the text so far is tokenised anew, noted as `retokenised`."""
        call = self._guarded(call, flight)
        body = body_of(call)
        reason = self.cannot["forbid"].rstrip(".") if forbid else middle_impossible(body) or _unknown(body)
        left = left_to_say(self.label, body, said, reason)
        flight.engine = self.name
        prompt = await self._prompt(call, body) + said.text
        if left is None:
            left = await self._room(prompt)
        if said.text:
            flight.decide("retokenised", said=said.tokens)
        flight.lap("engine.tokenize")
        asked = {"inputs": prompt, "parameters": {**_parameters(body), "max_new_tokens": left, "details": True, "return_full_text": False}}
        return await self.open_at(f"{self.root}/generate_stream", asked, flight, Generated(self.label), prompt_bytes=len(prompt.encode()))

    async def ask_figures(self) -> dict[str, Any]:
        """The model, its bounds and the version; requests at work and waiting. Only /health must answer."""
        await self.get(f"{self.root}/health")
        return await all_told(self._info(), self._metrics())

    async def count_tokens(self, text: str) -> int | None:
        """Tokens of a text, control tokens in it read as such, as TGI would. None where the engine cannot say just now."""
        try:
            found, nothing = await asyncio.gather(self._tokenize(text), self._tokenize(""))
        except TidegateError:
            return None
        return len(found) - len(nothing)

    # --

    def _guarded(self, call: EngineCall, flight: Flight) -> EngineCall:
        body = body_of(call)
        messages = body.get("messages")
        if call.kind != "chat" or not may_hold_control(messages):
            return call
        control = [self.template.control] if self.template is not None else []
        guarded = guard_messages(messages, self.settings.control_tokens, flight, *control)
        return call if guarded is messages else EngineCall(call.kind, call.model, {**body, "messages": guarded})

    async def _prompt(self, call: EngineCall, body: dict[str, Any]) -> str:
        """The prompt's text: the caller's own, the settings' template's, or what TGI's own makes of the messages.

        /generate_stream puts the model's beginning (BOS) before every prompt, so one that the template wrote is taken off.
        """
        if call.kind == "completion":
            prompt = body.get("prompt")
            if isinstance(prompt, list) and len(prompt) == 1:
                prompt = prompt[0]
            if not isinstance(prompt, str):
                raise CannotContinue(f"{self.label} takes a prompt as text, not as token ids.", hint="Send text.", param="prompt")
            return prompt
        if self.template is not None:
            rendered = self.template.render(body["messages"], where=f"the engine {self.name!r}")
        else:
            told = await self.post_json(f"{self.root}/chat_tokenize", {"model": call.model, "messages": body["messages"]})
            rendered = told.get("templated_text", "")
            if not isinstance(rendered, str) or not rendered:
                raise CannotContinue(
                    f"{self.label} does not tell how it writes a prompt (/chat_tokenize).", hint=f"Set chat_template of [engines.{self.name}]."
                )
        begin = await self._beginning()
        return rendered.removeprefix(begin) if begin else rendered

    async def _beginning(self) -> str:
        """What TGI puts before every prompt, as text; empty where it puts nothing."""
        nothing = await self._tokenize("")
        return str(nothing[0].get("text", "")) if nothing else ""

    async def _room(self, prompt: str) -> int:
        """How many tokens an answer without a bound may have: /generate_stream has a bound of its own else."""
        info, tokens = await asyncio.gather(self.get_json(f"{self.root}/info"), self._tokenize(prompt))
        total = info.get("max_total_tokens")
        if not isinstance(total, int):
            raise EngineError(f"{self.label} answers /info without max_total_tokens.", hint="Is it TGI?")
        if total <= len(tokens):
            raise CannotContinue(f"{self.label} has no room for more: {len(tokens)} of {total} tokens are used.", hint="Ask with a shorter prompt.")
        return total - len(tokens)

    async def _info(self) -> dict[str, Any]:
        info = await self.get_json(f"{self.root}/info")
        return {ours: info[name] for name, ours in _INFO.items() if isinstance(info.get(name), int | str)}

    async def _metrics(self) -> dict[str, Any]:
        return in_metrics(await self.get(f"{self.root}/metrics"), _METRICS)

    async def _tokenize(self, text: str) -> list[dict[str, Any]]:
        found = msgspec.json.decode(await self.post(f"{self.root}/tokenize", {"inputs": text}))
        if not isinstance(found, list) or not all(isinstance(token, dict) for token in found):
            raise EngineError(f"{self.label} answers /tokenize with what cannot be read.", hint="Is it TGI?")
        return found


def _unknown(body: dict[str, Any]) -> str:
    """Why /generate_stream cannot answer as the call's own route would; "" where it can."""
    for name, value in body.items():
        if name not in _SAME and name not in _ASIDE and value not in (None, False, 0, [], {}, "none", {"type": "text"}):
            return f"{name} is understood by the chat route only"
    return ""


def _parameters(body: dict[str, Any]) -> dict[str, Any]:
    """The call's fields in /generate_stream's words. Like TGI's chat: it samples unless temperature is 0."""
    parameters = {name: value for name, value in body.items() if name in _SAME and value is not None}
    temperature, top_p, stop = body.get("temperature"), body.get("top_p"), body.get("stop")
    parameters["do_sample"] = temperature != 0
    if temperature:
        parameters["temperature"] = temperature
    if top_p is not None and top_p < 1:
        parameters["top_p"] = top_p
    if stop:
        parameters["stop"] = [stop] if isinstance(stop, str) else stop
    return parameters


class _Token(msgspec.Struct, gc=False):
    id: int = 0
    text: str = ""
    special: bool = False


class _Details(msgspec.Struct, gc=False):
    finish_reason: str = ""
    generated_tokens: int = 0
    input_length: int | None = None


class _Event(msgspec.Struct, gc=False):
    token: _Token | None = None
    details: _Details | None = None
    error: Any = None
    error_type: str | None = None


_decode = msgspec.json.Decoder(_Event).decode
_ENDS: dict[str, End] = {"eos_token": "stop", "stop_sequence": "stop", "length": "length"}


class Generated(Dialect):
    """The stream of /generate_stream: a token an event, the last with the details of the whole. It has no other last word."""

    __slots__ = ()

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self.said = True  # the answer was begun before: it may end without a word more

    def chunk(self, data: bytes, at_ns: int) -> Chunk | None:
        """See `Dialect.chunk`."""
        if data.strip() == b"[DONE]":
            self.over = True
            return None
        try:
            event = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise self.broken() from None
        if event.error:
            raise self.error({"message": event.error, "type": event.error_type} if isinstance(event.error, str) else event.error)
        token, details = event.token, event.details
        if token is None:
            raise EngineError(f"{self.label} sent an event without a token.", hint="Is it TGI's own /generate_stream?")
        text = "" if token.special else token.text
        self.known += 1
        chunk = Chunk(at_ns, "text" if text else "notice", text)
        if details is None:
            return chunk
        chunk.finish = self.end(details.finish_reason, _ENDS, frozenset())
        if details.input_length is not None:
            chunk.usage = self.count(details.input_length, details.generated_tokens)
        self.over = True
        self.ready.append(chunk)
        return None


def build(name: str, settings: EngineSettings) -> Tgi:
    """The engine of one `[engines.NAME]` section."""
    return Tgi(name, settings)
