"""A scripted engine in the test's own loop, and the engines that talk to it. Tests run on uvloop, as the product does, and on asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
import uvloop
from tests.engines.clock import READERS, Clock
from tests.waiting import until as until

from tidegate.bench.scripted import Scripted, start
from tidegate.core.ask import EngineCall
from tidegate.core.plugins import load, names
from tidegate.engines.openai_http import OpenAIHttp
from tidegate.engines.settings import EngineSettings


def speaks_http(adapter: str) -> bool:
    """Whether an adapter talks to servers with OpenAI's API, as the scripted engine is one."""
    made_here = vars(load("tidegate.engines.adapters", adapter)).values()
    return any(isinstance(one, type) and issubclass(one, OpenAIHttp) and one is not OpenAIHttp for one in made_here)


ADAPTERS = [adapter for adapter in names("tidegate.engines.adapters") if speaks_http(adapter)]
#: No condition in these tests takes longer than this unless it is broken.
BOUND_S = 10.0

Build = Callable[..., OpenAIHttp]


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.SelectorEventLoop}


@contextlib.asynccontextmanager
async def building(usual_adapter: str, **usual: Any) -> AsyncIterator[Callable[..., Any]]:
    """Makes engines with the usual settings, or those of a call; closes them."""
    async with contextlib.AsyncExitStack() as stack:

        def make(adapter: str = usual_adapter, **settings: Any) -> Any:
            engine = load("tidegate.engines.adapters", adapter).build("test", EngineSettings(adapter=adapter, **{**usual, **settings}))
            stack.push_async_callback(engine.close)
            return engine

        yield make


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What the fleet takes for the time."""
    clock = Clock()
    for module in READERS:
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
async def server() -> AsyncIterator[Scripted]:
    server = await start()
    yield server
    await server.close()


@pytest.fixture
async def build(server: Scripted) -> AsyncIterator[Build]:
    """Makes engines that talk to the scripted server; closes them."""
    async with building("openai", url=server.url, models=["m"]) as make:
        yield make


@pytest.fixture(params=ADAPTERS)
def engine(request: pytest.FixtureRequest, build: Build) -> OpenAIHttp:
    """Each adapter, so patient that no test passes because a time-out came to help."""
    return build(request.param, first_token_s=100.0, inter_token_s=100.0, total_s=200.0)


def ask(orders: str = "", **fields: Any) -> EngineCall:
    """A chat call whose prompt carries orders for the scripted engine."""
    return EngineCall("chat", "m", {"messages": [{"role": "user", "content": f"Say something. {orders}"}], **fields})


def complete(orders: str = "", **fields: Any) -> EngineCall:
    return EngineCall("completion", "m", {"prompt": f"Once upon a time {orders}", **fields})
