"""The targets of the contract suite: each adapter with the scripted engine behind it, llama.cpp for real, or the one that the environment names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from tests.embedded_engine import needs_engine

from tidegate.bench.scripted import start
from tidegate.core.ports import Engine

from ..conftest import ADAPTERS
from .target import Target, external

#: Real engines that continuous integration has: a target's name and the fixture that makes it.
REAL = {"llama_cpp": "llama_target"}
_NAMED = external()
_SCRIPTED = [f"scripted/{adapter}" for adapter in ADAPTERS]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`target` is every engine in turn."""
    if "target_name" in metafunc.fixturenames:
        every: list[Any] = [*_SCRIPTED, *(pytest.param(name, marks=[pytest.mark.local, needs_engine]) for name in REAL)]
        metafunc.parametrize("target_name", [_NAMED.name] if _NAMED else every)


@pytest.fixture
def real_target(request: pytest.FixtureRequest, target_name: str) -> Target | None:
    """A target that is no scripted engine. Not asynchronous, because what starts a real engine runs a loop of its own."""
    if _NAMED is None and target_name in REAL:
        made: Target = request.getfixturevalue(REAL[target_name])
        return made
    return _NAMED


@pytest.fixture
async def target(target_name: str, real_target: Target | None) -> AsyncIterator[Target]:
    if real_target is not None:
        yield real_target
        return
    server = await start()
    yield Target(target_name, target_name.removeprefix("scripted/"), {"url": server.url}, model="m", context=8192, server=server)
    await server.close()


@pytest.fixture
def llama_target(request: pytest.FixtureRequest) -> Target:
    url, key = request.getfixturevalue("llama_url"), request.getfixturevalue("llama_key")
    model = request.getfixturevalue("llama_engine").address.model
    return Target("llama_cpp", "llama_cpp", {"url": url, "api_key": key}, model=model, context=2048)


@pytest.fixture
async def engine(target: Target) -> AsyncIterator[Engine]:
    async with AsyncExitStack() as stack:
        engine = target.build()
        stack.push_async_callback(engine.close)
        yield engine
