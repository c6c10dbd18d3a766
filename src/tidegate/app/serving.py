"""`tidegate serve`: the process that serves, or several, and what it asks of the system."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import resource
import socket
import sys
from pathlib import Path

import msgspec
import uvloop

from tidegate.api.server import listening_socket
from tidegate.api.server import serve as serve_door
from tidegate.app.common import Common
from tidegate.app.gateway import WORKERS, Gateway
from tidegate.app.parts import open_embedder
from tidegate.core.errors import SettingsError, TidegateError
from tidegate.local.folder import explained, own_folder, take_lock
from tidegate.local.listener import url_of
from tidegate.local.workers import Workers
from tidegate.settings import Settings
from tidegate.telemetry.log import configure
from tidegate.telemetry.workers import clear

log = logging.getLogger(__name__)

_MOST_FILES = 65_536
_SWITCH_S = 0.0005
#: Names of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def serve(settings: Settings, fd: int | None = None) -> int:
    """`tidegate serve`: the gateway alone, until SIGINT or SIGTERM. `fd`: a listening socket that a supervisor hands over."""
    configure(settings.log)
    _allow_many_connections()
    _keep_freed_memory()
    sockets = _listening(settings, fd)
    if len(sockets) == 1:
        uvloop.run(_serve(settings, sockets[0]))
        return 0
    with explained(settings.local.folder):
        run = settings.local.folder / "run"
        own_folder(run, 0o700)
        # Sockets and figures of workers have fixed names there: a second gateway would take those of the first away.
        lock = take_lock(run / "workers.lock", f"The data folder {settings.local.folder} is in use by another gateway with several workers")
        clear(settings.local.folder / WORKERS)
    common = Common.of(settings)

    def work(index: int) -> int:
        os.close(lock)  # it goes with the first process, whatever becomes of this one
        for other in sockets:
            if other is not sockets[index]:
                other.close()
        common.join(index)
        try:
            uvloop.run(_serve(settings, sockets[index], index, common))
        except TidegateError as error:
            print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
            return 2 if isinstance(error, SettingsError) else 1
        return 0

    return Workers(common.lives, work, common.reclaim, hung_s=settings.server.hung_worker_s).run()


def _keep_freed_memory() -> None:
    """Have the C library keep the room of large request bodies for the next ones. Given back and fetched anew each time, a body of 200 kB costs
    a hundred page faults, a third of all that it costs. Nothing where the C library is not glibc."""
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 4 << 20)
        mallopt(_M_TRIM_THRESHOLD, 32 << 20)


def _listening(settings: Settings, fd: int | None) -> list[socket.socket]:
    """One socket for each worker; of a socket that was handed over, a copy for each. Raises SettingsError."""
    server = settings.server
    if fd is not None:
        handed = socket.socket(fileno=fd)
        return [handed, *(handed.dup() for _ in range(server.workers - 1))]
    try:
        first = listening_socket(server.host, server.port, server.backlog)
        if server.workers == 1:
            return [first]
        # Others may share a port only with us, so it was taken alone before: a port in use must be an error, not half of somebody's traffic.
        port = first.getsockname()[1]
        first.close()
        return [listening_socket(server.host, port, server.backlog, shared=True) for _ in range(server.workers)]
    except OSError as error:
        raise SettingsError(
            f"The gateway cannot listen on {server.host}:{server.port}: {error.strerror}.", hint="Set server.port to a free port, or 0 for any."
        ) from None


def _allow_many_connections() -> None:
    """A stream takes two file descriptors, and the usual soft limit of 1024 is there for programs that use `select`, which we do not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _serve(settings: Settings, bound: socket.socket, index: int = 0, common: Common | None = None) -> None:
    """One gateway process: the only one, or the worker with this number, which gives its parent signs of life."""
    telling = asyncio.create_task(common.lives.tell()) if common is not None else None
    async with open_embedder(settings, own=index == 0) as embedder:
        gateway = Gateway(settings, embedder, index=index, common=common)
        await gateway.start()
        # What lives as long as the process need not be looked at by every collection, and requests leave few cycles behind.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        # The drain's thread works beside the event loop: a token must not wait for it for Python's usual 5 ms.
        sys.setswitchinterval(_SWITCH_S)
        if index == 0:
            url = url_of(bound)
            _note_running(settings.local.folder, url, os.getpid() if common is None else os.getppid())
            log.info("serving on %s", url)
        if common is not None:
            common.lives.serves()
        try:
            await serve_door(gateway.door, settings.server, bound, gateway.stopping, gateway.peers)
        finally:
            if common is not None:
                common.lives.ends()
            await gateway.stop()
    if telling is not None:
        telling.cancel()


def _note_running(data: Path, url: str, pid: int) -> None:
    """Where this gateway is, for `tidegate flight` on the same machine; `pid` is whom to ask to stop."""
    run = data / "run"
    run.mkdir(mode=0o700, exist_ok=True)
    written = run / "gateway.json.new"
    written.write_bytes(msgspec.json.encode({"url": url, "pid": pid}))
    written.replace(run / "gateway.json")  # whoever reads sees it whole
