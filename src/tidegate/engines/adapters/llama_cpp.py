"""llama.cpp's own server: the engine that `tidegate up` runs.

What is its own: a call without `stream` is never cancelled there, so every call streams; text that looks like a control token becomes one,
so it is defused; /slots, /props and /metrics tell what it is doing; /tokenize counts.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec

from tidegate.core.ask import EngineCall
from tidegate.core.errors import EngineError, TidegateError
from tidegate.core.flight import Flight
from tidegate.core.ports import EngineAnswer
from tidegate.engines.gather import Gathered
from tidegate.engines.openai_http import OpenAIHttp
from tidegate.engines.settings import EngineSettings
from tidegate.engines.stream import Stream

#: `<|im_end|>` and its kin, ASCII or with full-width bars.
_CONTROL = re.compile(r"<(?=[|｜][^<>|｜\s]{1,64}[|｜]>)")
#: Gauges of /metrics that are worth a look, and what they are called here.
_METRICS = {
    b"llamacpp:requests_processing": "requests_processing",
    b"llamacpp:requests_deferred": "requests_waiting",
    b"llamacpp:predicted_tokens_seconds": "decode_tokens_per_s",
    b"llamacpp:prompt_tokens_seconds": "prefill_tokens_per_s",
}


class LlamaCpp(OpenAIHttp):
    """llama.cpp's HTTP server."""

    async def start(self, call: EngineCall, flight: Flight) -> Stream:
        """As every engine's, with control tokens in message text defused (noted as `special_tokens_defused`)."""
        return await super().start(self.defused(call, flight), flight)

    async def whole(self, call: EngineCall, flight: Flight) -> EngineAnswer:
        """Streams from the engine, which can then be cancelled, and gives the events put together as `raw`."""
        stream = await self.start(call, flight)
        gathered = Gathered()
        text: list[str] = []
        end = None
        try:
            async for batch in stream:
                for chunk in batch:
                    if chunk.kind == "text":
                        text.append(chunk.text)
                    if chunk.raw is not None:
                        gathered.add(chunk.raw)
                    end = chunk.finish or end
        finally:
            stream.abort()
        if end is None:
            raise EngineError(f"{self.label} ended its answer without a reason.")
        return EngineAnswer("".join(text), end, stream.usage, gathered.json())

    async def ask_figures(self) -> dict[str, Any]:
        """Context per slot, slots, slots at work, and speeds. Only /health must answer; what else is silent or switched off is left out."""
        await self.get(f"{self.root}/health")
        figures: dict[str, Any] = {}
        for found in await asyncio.gather(self._props(), self._slots(), self._metrics(), return_exceptions=True):
            if isinstance(found, dict):
                figures.update(found)
        return figures

    async def count_tokens(self, text: str) -> int | None:
        """Tokens of a text, control tokens in it taken as text. None where the engine cannot say just now."""
        try:
            said = await self.post_json(f"{self.root}/tokenize", {"content": text, "parse_special": False})
        except TidegateError:
            return None
        tokens = said.get("tokens")
        return len(tokens) if isinstance(tokens, list) else None

    def body(self, call: EngineCall, *, stream: bool) -> bytes:
        """Never the caller's own bytes: they were looked through and perhaps changed."""
        return msgspec.json.encode(self.fields(call, stream=stream))

    def defused(self, call: EngineCall, flight: Flight) -> EngineCall:
        """The call with a blank put into everything in its messages that reads as a control token."""
        body = call.body if call.body or call.raw is None else msgspec.json.decode(call.raw)
        messages = body.get("messages")
        if call.kind != "chat" or messages is None:
            return call
        count = 0

        def defuse(value: Any) -> Any:
            nonlocal count
            if isinstance(value, str):
                value, n = _CONTROL.subn("< ", value)
                count += n
                return value
            if isinstance(value, list):
                return [defuse(item) for item in value]
            if isinstance(value, dict):
                return {key: defuse(item) for key, item in value.items()}
            return value

        messages = defuse(messages)
        if not count:
            return call
        flight.decide("special_tokens_defused", count=count)
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
        figures: dict[str, Any] = {}
        for line in (await self.get(f"{self.root}/metrics")).splitlines():
            name, _, value = line.partition(b" ")
            if name in _METRICS:
                figures[_METRICS[name]] = float(value)
        return figures


def build(name: str, settings: EngineSettings) -> LlamaCpp:
    """The engine of one `[engines.NAME]` section."""
    return LlamaCpp(name, settings)
