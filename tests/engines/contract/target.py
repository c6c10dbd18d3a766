"""What the contract suite runs against: one adapter with one engine behind it, and how that engine is brought to do what a test needs.

A target of its own plugs in by one JSON file, named by TIDEGATE_ENGINE_TARGET; the suite then runs against that one alone:

    {"name": "vllm", "adapter": "vllm", "model": "smollm2", "context": 2048, "settings": {"url": "http://127.0.0.1:8000"}}

`settings` are those of [engines.NAME]. `calls`, where it is there, gives the calls by which this engine does what a test needs, in place of
those below: {"short": {"kind": "chat", "body": {...}}, ...}.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from tidegate.bench.scripted import Scripted
from tidegate.core.ask import EngineCall
from tidegate.core.chunk import Chunk
from tidegate.core.flight import Flight
from tidegate.core.plugins import load
from tidegate.core.ports import Engine, EngineStream
from tidegate.engines.settings import EngineSettings

VARIABLE = "TIDEGATE_ENGINE_TARGET"
#: Seconds that any one condition may take, on a machine whose one core also runs the model.
BOUND_S = 90.0
#: Figures that say how many answers the engine is working on, and how many tokens it has made since it started.
RUNNING = ("requests_running", "slots_busy", "active", "running")
GENERATED = "tokens_generated"


def _chat(text: str, **more: Any) -> dict[str, Any]:
    return {"kind": "chat", "body": {"messages": [{"role": "user", "content": text}], **more}}


#: The scripted engine is told what to say.
_SCRIPTED: dict[str, dict[str, Any]] = {
    "short": _chat("Say something. ##n=12,i=1##"),
    "long": _chat("Say something. ##n=100000,i=2##"),
    "unicode": _chat("Say something. ##n=16,m=utf8_split##"),
    "prefill": _chat("Say something. ##t=60000##"),
    "overflow": _chat("Say something. ##m=context##"),
    "completion": {"kind": "completion", "body": {"prompt": "Once upon a time ##n=12##"}},
}
#: A real model does not do as it is told, but the same at temperature 0, and as long as one wants where its own end is ignored.
_REAL: dict[str, dict[str, Any]] = {
    "short": _chat("What is the capital of France? Tell me a little about it.", temperature=0, max_tokens=24),
    "long": _chat("Tell me a long story.", temperature=0, max_tokens=400, ignore_eos=True),
    "unicode": _chat("Say hello and add an emoji, then count.", temperature=0, max_tokens=24),
    "prefill": _chat("Tell me about each of these: " + "words and sentences, " * 150, temperature=0, max_tokens=200, ignore_eos=True),
    "overflow": _chat("word " * 5000, max_tokens=1),
    "completion": {"kind": "completion", "body": {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}},
}


class Target:
    """One adapter and one engine. `server`: the scripted engine, where that is what is behind it. `context`: tokens that the model holds."""

    def __init__(
        self, name: str, adapter: str, settings: dict[str, Any], *, model: str, context: int,
        calls: dict[str, dict[str, Any]] | None = None, server: Scripted | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.adapter = adapter
        self.settings = settings
        self.model = model
        self.context = context
        self.server = server
        self._calls = {**(_SCRIPTED if server else _REAL), **(calls or {})}

    @property
    def real(self) -> bool:
        return self.server is None

    def build(self, **settings: Any) -> Engine:
        """The adapter's engine; patient, so that no test passes because a time-out came to help."""
        patient = {"first_token_s": 100.0, "inter_token_s": 100.0, "total_s": 200.0}
        section = EngineSettings.model_validate(
            {"adapter": self.adapter, "models": [self.model], **patient, **self.settings, **settings}
        )
        engine: Engine = load("tidegate.engines.adapters", self.adapter).build("test", section)
        return engine

    def call(self, what: str, **fields: Any) -> EngineCall:
        """The call that has this engine do `what`: short, long, unicode, prefill, overflow, completion; with more fields."""
        made = self._calls[what]
        return EngineCall(made["kind"], self.model, {**made["body"], **fields})

    def saying(self, text: str, **fields: Any) -> EngineCall:
        """A short chat whose user says `text`."""
        body = {**self._calls["short"]["body"], **fields}
        orders = " ##n=3##" if self.server else ""
        return EngineCall("chat", self.model, {**body, "messages": [{"role": "user", "content": text + orders}]})


def external() -> Target | None:
    """The target that the environment names."""
    path = os.environ.get(VARIABLE)
    if not path:
        return None
    said = json.loads(Path(path).read_text())
    return Target(
        said["name"], said["adapter"], said["settings"], model=said["model"], context=said["context"], calls=said.get("calls"),
    )  # fmt: skip


def cannot(engine: Engine) -> dict[str, str]:
    """What the engine's adapter says that it cannot do, with the reasons."""
    return dict(getattr(engine, "cannot", {}))


# -- reading


async def read(engine: Engine, call: EngineCall, flight: Flight | None = None) -> list[Chunk]:
    """All chunks of a stream, taken as the product takes them."""
    return await collect(await engine.start(call, flight or Flight("test")))


async def collect(stream: EngineStream) -> list[Chunk]:
    got: list[Chunk] = []
    async with asyncio.timeout(BOUND_S):
        await stream.relay(got.extend)
    return got


def ids_of(chunks: list[Chunk]) -> list[int] | None:
    """The ids of the text, where every piece of it told them."""
    ids: list[int] = []
    for chunk in chunks:
        if chunk.kind == "text" and chunk.text:
            if chunk.token_ids is None:
                return None
            ids += chunk.token_ids
    return ids


def end_of(chunks: list[Chunk]) -> str:
    (end,) = [chunk.finish for chunk in chunks if chunk.finish]
    return end


# -- the engine's own counters


async def running(engine: Engine) -> int | None:
    """Answers that the engine is working on, as it says itself; None where it does not answer just now."""
    figures = await engine.figures()
    return next((int(figures[name]) for name in RUNNING if name in figures), None)


async def generated(engine: Engine) -> int | None:
    """Tokens that the engine has made, as it says itself; None where it does not count them."""
    told = (await engine.figures()).get(GENERATED)
    return None if told is None else int(told)


async def until(ask: Callable[[], Awaitable[int | None]], is_it: Callable[[int | None], bool]) -> list[int | None]:
    """Ask until the answer is the right one; all answers. With a bound."""
    said: list[int | None] = []
    async with asyncio.timeout(BOUND_S):
        while True:
            said.append(await ask())
            if is_it(said[-1]):
                return said
            await asyncio.sleep(0.005)


async def until_running(engine: Engine, count: int) -> list[int | None]:
    """Wait until the engine says that it works on so many answers; what it said on the way."""
    return await until(lambda: running(engine), lambda said: said == count)


def body_of(raw: bytes) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.json.decode(raw)
    return body
