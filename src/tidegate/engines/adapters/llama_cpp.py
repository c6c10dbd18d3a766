"""llama.cpp's own server: the engine that `tidegate up` runs.

What is its own: a call without `stream` is never cancelled there, so every call streams; text in messages that reads as a control token becomes
one, so such a prompt goes as token ids; an answer can go on from the middle; /slots, /props and /metrics tell what it is doing; /tokenize counts.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from tidegate.core.ask import EngineCall
from tidegate.core.errors import CannotContinue, EngineError, EngineRefused, TidegateError
from tidegate.core.flight import Flight
from tidegate.core.ports import EngineAnswer
from tidegate.engines.continuation import Continuing, Step, body_of, by_ids, chat_only, completion_fields, tokens_left
from tidegate.engines.figures import all_told, in_metrics
from tidegate.engines.gather import Gathered
from tidegate.engines.prompt_ids import MAY_BE_CONTROL, may_hold_control, texts_with_control
from tidegate.engines.settings import EngineSettings
from tidegate.engines.stream import Stream
from tidegate.engines.template import guard_messages
from tidegate.engines.traits import Cannot
from tidegate.engines.vllm_stream import VllmDialect

#: Gauges of /metrics that are worth a look, and what they are called here.
_METRICS = {
    b"llamacpp:requests_processing": "requests_processing",
    b"llamacpp:requests_deferred": "requests_waiting",
    b"llamacpp:tokens_predicted_total": "tokens_generated",
    b"llamacpp:predicted_tokens_seconds": "decode_tokens_per_s",
    b"llamacpp:prompt_tokens_seconds": "prefill_tokens_per_s",
}
#: Statuses by which a server says that it has no /tokenize, or that somebody before it does not let us there.
_NO_SUCH_ROUTE = (403, 404, 405, 501)


class LlamaCpp(Continuing):
    """llama.cpp's HTTP server."""

    cannot: ClassVar[Cannot] = {
        "token_ids": "llama.cpp's chat streams tell no token ids, and its own streams leave out those of characters that take several tokens.",
        "cancel_whole": "llama.cpp works on a non-streaming call to its end, whoever left.",
        "cancel_prefill": "llama.cpp looks for clients that left between the tokens of an answer only.",
    }

    async def start(self, call: EngineCall, flight: Flight) -> Stream:
        """As every engine's. A chat whose messages hold text that reads as a control token goes as token ids (noted as `special_tokens_as_text`), or
        where only the chat route can answer it with that text changed (`special_tokens_defused`)."""
        if call.kind == "chat" and may_hold_control(body_of(call).get("messages")):
            flight.engine = self.name
            call, ids = await self._as_text(call, flight)
            flight.lap("engine.tokenize")
            if ids is not None:
                sent = by_ids(call.model, completion_fields(call.body), ids, tokens_left(call.body))
                return await self.open(sent, flight, VllmDialect(self.label, forwards=False))
        return await super().start(call, flight)

    async def whole(self, call: EngineCall, flight: Flight) -> EngineAnswer:
        """Streams from the engine, which can then be cancelled, and gives the events put together as `raw`."""
        stream = await self.start(EngineCall(call.kind, call.model, body_of(call)), flight)
        gathered = Gathered()
        text: list[str] = []
        end = None
        made = False  # chunks without the engine's own event: the door makes the answer
        try:
            async for batch in stream:
                for chunk in batch:
                    if chunk.kind == "text":
                        text.append(chunk.text)
                    if chunk.raw is not None:
                        gathered.add(chunk.raw)
                    else:
                        made = made or chunk.kind == "text" or chunk.finish is not None
                    end = chunk.finish or end
        finally:
            stream.abort()
        if end is None:
            raise EngineError(f"{self.label} ended its answer without a reason.")
        return EngineAnswer("".join(text), end, stream.usage, None if made else gathered.json())

    async def ask_figures(self) -> dict[str, Any]:
        """Context per slot, slots, slots at work, and speeds. Only /health must answer; what else is silent or switched off is left out."""
        await self.get(f"{self.root}/health")
        return await all_told(self._props(), self._slots(), self._metrics())

    async def count_tokens(self, text: str) -> int | None:
        """Tokens of a text, control tokens in it taken as text. None where the engine cannot say just now."""
        try:
            said = await self.post_json(f"{self.root}/tokenize", {"content": text, "parse_special": False})
        except TidegateError:
            return None
        tokens = said.get("tokens")
        return len(tokens) if isinstance(tokens, list) else None

    def body(self, call: EngineCall, *, stream: bool) -> bytes:
        """The caller's own bytes where they ask for a stream already; `whole` never has them."""
        if call.raw is not None:
            return call.raw
        return msgspec.json.encode(self.fields(call, stream=stream))

    async def one_token(self, model: str, fields: dict[str, Any], prompt: list[int]) -> Step:
        """See `Continuing.one_token`. The whole answer of one token, because a stream leaves out the id of half a character."""
        stop = fields.get("stop")
        asked = {**fields, "prompt": prompt, "n_predict": 1, "stream": False, "return_tokens": True, "cache_prompt": True}
        if isinstance(stop, str):
            asked["stop"] = [stop]
        said = await self.post_json(f"{self.root}/completion", {**asked, "model": model})
        why = said.get("stop_type")
        if why == "eos":
            return Step([], "", "stop", 0)
        ids = [token for token in said.get("tokens") or () if isinstance(token, int)]
        if why == "word":
            return Step(ids, str(said.get("content") or ""), "stop")
        if len(ids) != 1:
            raise CannotContinue(f"{self.label} does not tell the id of a token.", hint="Its version is too old: /completion lacks return_tokens.")
        return Step(ids, str(said.get("content") or ""), None)

    async def why_not_by_ids(self, prompt: str) -> str:
        """A model that thinks before it answers: only the chat route parts its thoughts from the answer."""
        template = str((await self.get_json(f"{self.root}/props")).get("chat_template") or "")
        if ("think" in template or "<|channel|>" in template) and not prompt.rstrip().endswith("</think>"):
            return "its model may think before it answers, which only the chat route tells apart"
        return ""

    async def _as_text(self, call: EngineCall, flight: Flight) -> tuple[EngineCall, list[int] | None]:
        """The call as it is safe to send, and the ids of its prompt where it has to go as ids."""
        body = body_of(call)
        messages = body["messages"]
        try:
            foreign, elsewhere = await texts_with_control(messages, self.tokenize)
        except EngineRefused as error:
            if error.engine_status not in _NO_SUCH_ROUTE:
                raise
            # nobody can say what is a control token, so everything that looks like one is changed
            return self._defused(call, body, flight, "no /tokenize"), None
        if not foreign and not elsewhere:
            return call, None
        reason = "a control token stands in a name or a tool call" if elsewhere else chat_only(body)
        if not reason:
            try:
                ids = await self.chat_ids(body, foreign)
            except CannotContinue as error:
                reason = error.message
            else:
                if ids is not None:
                    flight.decide("special_tokens_as_text", count=len(foreign), tokens=len(ids))
                    return EngineCall(call.kind, call.model, body), ids
                reason = "the chat template changes the texts of messages"
        return self._defused(call, body, flight, reason), None

    def _defused(self, call: EngineCall, body: dict[str, Any], flight: Flight, reason: str) -> EngineCall:
        """The call with a blank put into everything in its messages that may be a control token of some model."""
        flight.decide("special_tokens_not_as_text", reason=reason)
        messages = guard_messages(body["messages"], "defuse", flight, MAY_BE_CONTROL)
        return EngineCall(call.kind, call.model, {**body, "messages": messages})

    async def _props(self) -> dict[str, Any]:
        props = await self.get_json(f"{self.root}/props")
        generation = props.get("default_generation_settings")
        context = generation.get("n_ctx") if isinstance(generation, dict) else None
        return {"context": context, "slots": props.get("total_slots"), "model": props.get("model_alias")}

    async def _slots(self) -> dict[str, Any]:
        slots = msgspec.json.decode(await self.get(f"{self.root}/slots"), type=list[dict[str, Any]])
        return {"slots_busy": sum(bool(slot.get("is_processing")) for slot in slots)}

    async def _metrics(self) -> dict[str, Any]:
        return in_metrics(await self.get(f"{self.root}/metrics"), _METRICS)


def build(name: str, settings: EngineSettings) -> LlamaCpp:
    """The engine of one `[engines.NAME]` section."""
    return LlamaCpp(name, settings)
