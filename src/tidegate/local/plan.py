"""What `tidegate up` is told by app/, and what it tells back: the only words between the supervisor and the rest of the house."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.local.engine import EngineAddress
from tidegate.local.settings import LocalSettings
from tidegate.local.slices import Slice
from tidegate.retrieval.settings import EmbedderSettings

#: Says in a few words what a long step is at; shown beside its spinner.
Note = Callable[[str], None]


@dataclass(frozen=True)
class Running:
    """Where the parts on this machine are. None: that part is off in the settings, and app/ knows the outside one."""

    data: Path
    dsn: str | None
    engine: EngineAddress | None
    embedder: Path | None
    small: EngineAddress | None = None
    #: By the engine's name, those that run for one tenant alone.
    own: Mapping[str, EngineAddress] = field(default_factory=dict)


@dataclass(frozen=True)
class Command:
    """How the gateway is started. `env` is added to our own environment: secrets go there, arguments are public on a machine."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


def ask_engine(url: str, key: str, running: Running) -> str:
    """A curl line for the embedded engine's model, one line, ready to be pasted."""
    model = running.engine.model if running.engine else "MODEL"
    body = json.dumps({"model": model, "stream": True, "messages": [{"role": "user", "content": "What is the capital of France?"}]})
    return f"curl -N {url}/v1/chat/completions -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json' -d '{body}'"


async def _nothing(_running: Running, _note: Note) -> None:
    return None


def _page(url: str, _running: Running) -> str:
    return f"{url}/"


@dataclass(frozen=True)
class UpPlan:
    """Everything that `up` needs from outside its room.

    The callbacks run in the supervisor, in this order, and may raise TidegateErrors, which stop everything that was started:

    - `migrate`: the database answers; bring its schema up to date. Called only where a database is known to `app/`, so it may be a no-op.
    - `first_key`: returns a key to show, or None where there is one already that can no longer be shown.
    - `examples`: all parts answer (not the gateway, which starts at the same time); load what the examples need.
    - `gateway(running, fd)`: the command of the gateway. `fd` is a listening TCP socket that it inherits under this very number and must
      not close on restart's account: we keep our own copy, so that connections wait while a new gateway starts. It must end on SIGTERM
      within `settings.drain_s` + 5 s, and answer GET `health_path` with any status once it serves.
    - `page(url, running)`: the page's address as it is shown.
    - `curl(url, key, running)`: the line to show; `key` is `$TIDEGATE_KEY` where it is not known.
    """

    settings: LocalSettings
    gateway: Callable[[Running, int], Command]
    embedder: EmbedderSettings = field(default_factory=EmbedderSettings)
    #: Engines of tenants, on parts of this machine that nothing else uses.
    slices: Sequence[Slice] = ()
    host: str = "127.0.0.1"
    port: int = 8080
    port_by_hand: bool = False
    migrate: Callable[[Running, Note], Awaitable[None]] = _nothing
    first_key: Callable[[Running, Note], Awaitable[str | None]] = _nothing
    examples: Callable[[Running, Note], Awaitable[None]] = _nothing
    curl: Callable[[str, str, Running], str] = ask_engine
    page: Callable[[str, Running], str] = _page
    health_path: str = "/health"
