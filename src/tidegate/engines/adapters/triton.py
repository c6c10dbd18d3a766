"""NVIDIA Triton over gRPC: language models of its vLLM and TensorRT-LLM backends, and models in Python that keep to their tensor names.

What is its own: Triton takes a prompt, so messages are rendered here by the chat template of the settings; what a model takes is read from its
configuration at first use, and a field that it has no input for is refused by name; an answer is continued by prompt, tokenised anew there.
"""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

from tidegate.core.ask import EngineAnswer, EngineCall, Said
from tidegate.core.chunk import Chunk, End
from tidegate.core.errors import BadRequest, CannotContinue, EngineError, EngineRefused
from tidegate.core.flight import Flight
from tidegate.engines.continuation import body_of
from tidegate.engines.figures import FIGURES_S, up_or_why
from tidegate.engines.settings import EngineSettings
from tidegate.engines.template import guard_messages, load_template
from tidegate.engines.traits import Cannot
from tidegate.engines.triton_client import TritonClient
from tidegate.engines.triton_model import TritonModel
from tidegate.engines.triton_stream import TritonStream
from tidegate.engines.wire import Patience

_RUNS_ON = "Triton hands a cancel to the model, and only the model can stop: its vLLM and TensorRT-LLM backends do, models of pytriton run on."


class Triton:
    """An `Engine` behind Triton's gRPC port."""

    cannot: ClassVar[Cannot] = {
        "forbid": "Triton takes no token ids, and no backend forbids a token at one place only.",
        "token_ids": "Triton's language models give text, no token ids.",
        "control_text": "Triton takes a prompt as text: what reads as a control token in a message is defused, refused or passed (control_tokens).",
        "cancel_whole": _RUNS_ON,
        "cancel_prefill": _RUNS_ON,
        "running": "Triton tells running requests at its metrics port only, not over gRPC.",
    }

    def __init__(self, name: str, settings: EngineSettings) -> None:
        """Raises SettingsError where the extra `triton` is missing or the chat template is none."""
        self.name = name
        self.models = tuple(settings.model_names)
        self.label = f"The engine {name!r}"
        self.where = f"the engine {name!r}"
        self.settings = settings
        self.patience = Patience(
            settings.connect_s, settings.first_token_s, settings.inter_token_s, settings.total_s, settings.keepalive_s
        )
        self.template = load_template(settings.chat_template, name) if settings.chat_template else None
        self.client = TritonClient(name, self.label, settings)
        self._known: dict[str, TritonModel] = {}

    # -- the port

    async def start(self, call: EngineCall, flight: Flight) -> TritonStream:
        """See `core.ports.Engine.start`. Waits for the first message, so that a refusal keeps its status."""
        body = body_of(call)
        return await self._send(call.model, self._prompt(call.kind, body, flight), body, flight)

    async def whole(self, call: EngineCall, flight: Flight) -> EngineAnswer:
        """See `core.ports.Engine.whole`. Streams from the engine all the same, so that cancelling is the same."""
        stream = await self.start(call, flight)
        text: list[str] = []
        ends: list[End] = []

        def take(batch: list[Chunk]) -> None:
            for chunk in batch:
                text.append(chunk.text)
                if chunk.finish is not None:
                    ends.append(chunk.finish)

        try:
            await stream.relay(take)
        finally:
            stream.abort()
        return EngineAnswer("".join(text), ends[-1], stream.usage)

    async def continue_from(self, call: EngineCall, said: Said, flight: Flight, *, forbid: str = "") -> TritonStream:
        """See `core.ports.Engine.continue_from`. By prompt: the text so far is tokenised anew, noted as `retokenised`."""
        if forbid:
            raise CannotContinue(f"{self.label} cannot forbid a token: {self.cannot['forbid']}", hint="Cut further back, or take another engine.")
        body = body_of(call)
        prompt = self._prompt(call.kind, body, flight) + said.text
        name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
        if body.get(name) is not None:
            if int(body[name]) <= said.tokens:
                raise CannotContinue(f"The answer has {said.tokens} tokens already, and {name} is {body[name]}.", hint=f"Raise {name}.", param=name)
            body = {**body, name: int(body[name]) - said.tokens}
        if said.text:
            flight.decide("retokenised", said=said.tokens)
        return await self._send(call.model, prompt, body, flight, continues=bool(said.text))

    async def figures(self) -> dict[str, Any]:
        """See `core.ports.Engine.figures`."""
        return await up_or_why(self.label, self._ask_figures())

    async def count_tokens(self, text: str) -> int | None:
        """Triton has no tokenizer to ask: None."""
        return None

    async def close(self) -> None:
        """Close the channel; calls that run are cancelled."""
        await self.client.close()

    # --

    async def _send(self, name: str, prompt: str, body: dict[str, Any], flight: Flight, *, continues: bool = False) -> TritonStream:
        flight.engine = self.name
        model = self._known.get(name)
        if model is None:
            model = self._known[name] = await self.client.model(name)
        given = model.given(prompt, body, self.where)
        try:
            call, first, at_ns = await self.client.generate(model, given, flight)
        except EngineRefused as error:
            if error.engine_status in (400, 404):
                self._known.pop(name, None)  # perhaps it was loaded anew, with other tensors
            raise
        bound = body.get("max_completion_tokens") or body.get("max_tokens")
        return TritonStream(
            self.client, call, (first, at_ns), model, flight, self.patience,
            prompt_bytes=len(prompt.encode("utf-8", "replace")), max_tokens=int(bound) if bound else None, continues=continues,
        )  # fmt: skip

    def _prompt(self, kind: str, body: dict[str, Any], flight: Flight) -> str:
        """The text that the model gets. Whoever sends a prompt writes the template; messages are rendered here."""
        if kind == "completion":
            prompt = body.get("prompt")
            if isinstance(prompt, list) and len(prompt) == 1:
                prompt = prompt[0]
            if not isinstance(prompt, str):
                raise BadRequest(f"{self.label} takes a prompt as text, not as token ids.", hint="Send text.", param="prompt")
            return prompt
        if self.template is None:
            raise EngineError(
                f"{self.label} takes prompts only, and it is not said how messages become one.",
                hint=f"Set chat_template of [engines.{self.name}]: chatml, llama3, or a file. Or ask /v1/completions.",
            )
        messages = guard_messages(body.get("messages") or [], self.settings.control_tokens, flight, self.template.control)
        return self.template.render(messages, where=self.where)

    async def _ask_figures(self) -> dict[str, Any]:
        """Triton's version, and of each model whether it is ready, how it answers, and what it has done. Only that it is ready must be told:
        a server can keep the rest to itself."""
        messages = self.client.protocol.messages
        ready = await self.client.ask("ServerReady", messages.ServerReadyRequest(), FIGURES_S)
        figures: dict[str, Any] = {"ready": ready.ready}
        with contextlib.suppress(EngineError):
            figures["version"] = (await self.client.ask("ServerMetadata", messages.ServerMetadataRequest(), FIGURES_S)).version
        figures["models"] = {name: await self._model_figures(name) for name in self.settings.model_names.values()}
        return figures

    async def _model_figures(self, name: str) -> dict[str, Any]:
        messages = self.client.protocol.messages
        figures: dict[str, Any] = {}
        with contextlib.suppress(EngineError):
            figures["ready"] = (await self.client.ask("ModelReady", messages.ModelReadyRequest(name=name), FIGURES_S)).ready
        model = self._known.get(name)
        if model is not None:
            figures["streams"] = model.decoupled
        with contextlib.suppress(EngineError):
            said = await self.client.ask("ModelStatistics", messages.ModelStatisticsRequest(name=name), FIGURES_S)
            figures["requests"] = sum(one.inference_stats.success.count for one in said.model_stats)
            figures["failed"] = sum(one.inference_stats.fail.count for one in said.model_stats)
        return figures


def build(name: str, settings: EngineSettings) -> Triton:
    """The engine of one `[engines.NAME]` section."""
    return Triton(name, settings)
