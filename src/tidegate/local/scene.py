"""Where a drill takes place: the `tidegate up` that runs on a data folder, its parts, and who may stop them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tidegate.core.errors import LocalPartError
from tidegate.local.process import Process

_POLL_S = 0.005


@dataclass(frozen=True)
class Payload:
    """One request as it is sent. `name`: what it is, for people."""

    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    name: str = ""


@dataclass
class Scene:
    """A running system, as a drill sees it. `model` and `slots` are those of the capability's engine; `path` is the capability's route."""

    data: Path
    url: str
    key: str
    client: httpx.AsyncClient
    switch: Switch
    path: str = ""
    model: str = ""
    slots: int = 4
    inputs: list[dict[str, Any]] = field(default_factory=list)

    def part(self, name: str) -> Process:
        """A part by its pid file. Raises LocalPartError where it is not run by this `tidegate up`, or is down already."""
        process = self._noted(name)
        if process is None:
            raise LocalPartError(
                f"No {name} runs on the data folder {self.data}.", hint="A drill breaks what `tidegate up` itself has started, and finds running."
            )
        return process

    def _noted(self, name: str) -> Process | None:
        return Process.read(self.data / "run" / f"{name}.pid")

    async def newer(self, name: str, than: Process) -> Process:
        """The part's next process."""
        while (process := self._noted(name)) is None or process == than:  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(_POLL_S)
        return process


class Switch:
    """The hand on the dead man's switch (drill_switch.py), a process of its own: whatever becomes of us, it lets everything go on."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._one = asyncio.Lock()

    @classmethod
    @contextlib.asynccontextmanager
    async def held(cls, limit_s: float) -> AsyncIterator[Switch]:
        """`limit_s`: seconds after which everything goes on in any case."""
        process = subprocess.Popen(  # noqa: ASYNC220 - a fork and nothing more
            [sys.executable, "-P", "-m", "tidegate.local.drill_switch", str(limit_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True,
        )
        switch = cls(process)
        try:
            await switch._heard("start")
            yield switch
        finally:
            switch.let_go()
            assert process.stdout is not None
            process.stdout.close()

    def let_go(self) -> None:
        """Everything goes on again, now. Not to be cut short, and quick: the switch sends its signals and ends. May be called twice."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    async def freeze(self, process: Process) -> None:
        """Stop a process and all below it. Raises LocalPartError."""
        await self._order(f"freeze {process.pid} {process.ticks}")

    async def slow(self, process: Process, run_ms: float, stop_ms: float) -> None:
        """Let it run and stop it in turns. Raises LocalPartError."""
        await self._order(f"slow {process.pid} {process.ticks} {run_ms} {stop_ms}")

    async def _order(self, line: str) -> None:
        async with self._one:
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(line.encode("ascii") + b"\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                raise LocalPartError("The drill's time is up: everything goes on again.", hint="Ask fewer requests, or raise --patience.") from None
            await self._heard(line.split()[0])

    async def _heard(self, what: str) -> None:
        assert self._process.stdout is not None
        said = (await asyncio.to_thread(self._process.stdout.readline)).decode().strip()
        if said != "ok":
            raise LocalPartError(
                f"The drill cannot {what} its part: {said or 'its switch has ended'}.", hint="Run the drill as the user of `tidegate up`."
            )


def running(data: Path) -> tuple[str, str]:
    """Address and first key of the `tidegate up` that runs on a data folder. Raises LocalPartError."""
    hint = "Start it with `tidegate up`, or name its data folder with --set local.data=FOLDER."
    try:
        url = str(json.loads((data / "run" / "gateway.json").read_text("utf-8"))["url"])
    except (OSError, ValueError, KeyError, TypeError):
        raise LocalPartError(f"No gateway runs on the data folder {data}.", hint=hint) from None
    if Process.read(data / "run" / "gateway.pid") is None:
        raise LocalPartError(f"No `tidegate up` runs on the data folder {data}.", hint=hint)
    try:
        return url, (data / "first-key").read_text("utf-8").strip()
    except OSError:
        raise LocalPartError(f"There is no readable first key in {data}.", hint="Give a key with --key or TIDEGATE_KEY.") from None
