"""Renders the prompt version into the engine's call."""

from __future__ import annotations

from typing import Any

import jinja2

from tidegate.core.ask import Ask, EngineCall
from tidegate.core.errors import SettingsError
from tidegate.core.ports import Stage
from tidegate.pipeline.capability import Capability
from tidegate.pipeline.parts import Parts
from tidegate.pipeline.rungs import FULL


class PromptStage:
    """Fields and passages in, chat messages out."""

    name = "prompt"

    def __init__(self, capability: Capability) -> None:
        manifest = capability.manifest
        self._template = capability.template
        self._version = manifest.prompt
        self._sha256 = capability.prompt_sha256
        self._model = manifest.model
        self._params: dict[str, Any] = {"max_tokens": manifest.generate.max_tokens, "temperature": manifest.generate.temperature}
        if manifest.generate.json_schema:
            schema = {"name": capability.path.replace("/", "_"), "schema": capability.output_schema, "strict": True}
            self._params["response_format"] = {"type": "json_schema", "json_schema": schema}

    async def __call__(self, ask: Ask) -> None:
        passages = [{"n": n, "title": p.title, "page": p.page, "text": p.shown or p.text} for n, p in enumerate(ask.passages, 1)]
        rung = ask.landing.rung if ask.landing is not None else FULL
        context = self._template.new_context({
            "input": ask.input, "passages": passages, "rung": rung, "searched": bool(ask.flight.index_version),
        })
        messages = []
        for role in ("system", "user"):
            try:
                text = "".join(self._template.blocks[role](context)).strip()
            except jinja2.TemplateError as error:
                raise SettingsError(f"The prompt {self._version} cannot be rendered: {error}.", hint="Correct its template.") from error
            if text:
                messages.append({"role": role, "content": text})
        ask.call = EngineCall("chat", self._model, {"messages": messages, **self._params})
        ask.flight.prompt_version, ask.flight.prompt_sha256 = self._version, self._sha256
        ask.flight.lap("prompt")


def build(capability: Capability, parts: Parts) -> Stage:
    return PromptStage(capability)
