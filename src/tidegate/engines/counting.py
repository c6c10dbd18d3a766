"""Counts the tokens of texts and prompts with the tokenizer of the engine that will read them, or says that it only estimates.

The engine's own /tokenize comes first, with the prompt as its own template makes it; then the vocabulary of a GGUF file (`tokenizer` of
[engines.NAME]); then an estimate.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tidegate.core.ask import EngineCall
from tidegate.core.errors import TidegateError
from tidegate.core.ports import Counted, Engine, How
from tidegate.engines.continuation import Continuing, body_of
from tidegate.engines.member import Member
from tidegate.engines.settings import EngineSettings
from tidegate.engines.vocabulary import Vocabulary, read_vocabulary

#: Seconds for which an engine's context length is believed: it may be started anew with another.
_CONTEXT_S = 60.0
#: Tokens that a template puts around each message, and around the whole, where nobody can render it. ChatML takes 5 and 3.
_AROUND_MESSAGE, _AROUND_ALL = 6, 8
#: Characters of ASCII to a token, and tokens to any other character: leaning high, because what is too long is refused by the engine.
_ASCII_PER_TOKEN, _TOKENS_PER_OTHER = 3.5, 1.1


class Counter:
    """The tokenizers of a fleet. See `core.ports.TokenCounter`."""

    def __init__(self, sections: Mapping[str, EngineSettings]) -> None:
        self._sections = sections
        self._vocabularies: dict[str, Vocabulary | None] = {}
        self._contexts: dict[tuple[str, str], tuple[int, int]] = {}

    async def texts(self, engine: Engine, texts: Sequence[str]) -> tuple[list[int], How]:
        """The tokens of each text, control tokens in it taken as text."""
        engine = _bare(engine)
        if isinstance(engine, Continuing):
            try:
                return [len(ids) for ids in await engine.tokenize(list(texts), False)], "engine"
            except TidegateError:
                pass
        else:
            count_tokens = getattr(engine, "count_tokens", None)
            told = await asyncio.gather(*(count_tokens(text) for text in texts)) if count_tokens is not None else [None]
            if None not in told:
                return list(told), "engine"
        vocabulary = await self._vocabulary(engine.name)
        if vocabulary is not None:
            return await asyncio.to_thread(lambda: [len(vocabulary.encode(text)) for text in texts]), "vocabulary"
        return [estimate(text) for text in texts], "estimate"

    async def prompt(self, engine: Engine, call: EngineCall) -> Counted:
        """The tokens of a call's whole prompt, as the engine's own template makes it."""
        engine, body = _bare(engine), body_of(call)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return Counted(len(prompt), "engine")
        if isinstance(engine, Continuing) and _is_text(body):
            try:
                return Counted(await engine.prompt_size(call.kind, body), "engine")
            except TidegateError:
                pass
        texts, around = _texts(body)
        counts, how = await self.texts(engine, texts)
        exact = how != "estimate" and call.kind == "completion"
        return Counted(sum(counts) + around, how if exact else "estimate")

    async def context(self, engine: Engine, model: str) -> int:
        """Tokens that prompt and answer may have together; 0 where the engine does not say. `model`: the engine's own name for it."""
        known = self._contexts.get((engine.name, model))
        now_ns = time.monotonic_ns()
        if known is None or now_ns - known[1] > _CONTEXT_S * 1e9:
            said = (await engine.figures()).get("context")
            size = said.get(model) if isinstance(said, dict) else said
            known = self._contexts[engine.name, model] = (size if isinstance(size, int) and size > 0 else 0, now_ns)
        return known[0]

    async def _vocabulary(self, name: str) -> Vocabulary | None:
        if name not in self._vocabularies:
            section = self._sections.get(name)
            file = section.tokenizer if section is not None else None
            try:
                found = await asyncio.to_thread(_read, file) if file else None
            except TidegateError:
                found = None
            self._vocabularies[name] = found if found is not None and not found.why_not else None
        return self._vocabularies[name]


def _bare(engine: Engine) -> Engine:
    """The engine itself: counting takes no place in a fleet's books."""
    return engine.engine if isinstance(engine, Member) else engine


def _read(file: str) -> Vocabulary:
    return read_vocabulary(Path(file).expanduser())


def estimate(text: str) -> int:
    """About the tokens of a text, leaning high."""
    if text.isascii():
        return math.ceil(len(text) / _ASCII_PER_TOKEN)
    others = len(text) - len(text.encode("ascii", "ignore"))
    return math.ceil((len(text) - others) / _ASCII_PER_TOKEN + others * _TOKENS_PER_OTHER)


def _is_text(body: dict[str, Any]) -> bool:
    """Whether the prompt is text alone: nobody outside an engine knows how many tokens a picture takes."""
    for message in body.get("messages") or ():
        content = message.get("content")
        if isinstance(content, list) and any(part.get("type") != "text" for part in content):
            return False
    return True


def _texts(body: dict[str, Any]) -> tuple[list[str], int]:
    """What of a call's prompt can be counted one by one, and about how many tokens the rest takes."""
    if "messages" not in body:
        prompt = body.get("prompt")
        return ([prompt] if isinstance(prompt, str) else [one for one in prompt or () if isinstance(one, str)]), 1
    texts: list[str] = []
    for message in body["messages"]:
        texts += [text for name, value in message.items() if name != "role" for text in _spelled(value)]
    tools = body.get("tools") or body.get("functions")
    if tools:
        texts.append(msgspec.json.encode(tools).decode())
    return texts, _AROUND_MESSAGE * len(body["messages"]) + _AROUND_ALL


def _spelled(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(isinstance(part, dict) and "type" in part and "function" not in part for part in value):
        return [str(part.get("text") or "") for part in value]
    return [msgspec.json.encode(value).decode()] if value else []
