"""The embedder as a process of its own, shared by all workers: `python -m tidegate.local.embedder_child`.

When its socket answers it prints one JSON line on standard output, `{"socket": ..., "pid": ...}`. SIGTERM ends it in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

import click

from tidegate.local.leash import die_with


@click.command()
@click.option("--socket", type=click.Path(path_type=Path), required=True, help="The unix socket to serve on.")
@click.option("--cache", type=click.Path(path_type=Path), required=True, help="Folder for the model made at the first start.")
@click.option("--threads", type=click.IntRange(1), default=1, help="Threads that compute.")
@click.option("--parent", type=int, default=0, help="Die with the parent, which has this pid; 0: do not.")
def main(socket: Path, cache: Path, threads: int, parent: int) -> None:
    """Serve the embedder until SIGTERM."""
    if parent:
        die_with(parent, signal.SIGKILL)
    asyncio.run(_serve(socket, cache, threads))


async def _serve(socket: Path, cache: Path, threads: int) -> None:
    from tidegate.retrieval.embedder_server import serve

    if await answers(socket):
        raise click.ClickException(f"Another embedder serves on {socket}.")
    _forget(socket)  # left by one that was killed
    serving = asyncio.ensure_future(serve(socket, cache, threads))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    announcing = asyncio.ensure_future(_announce(socket))
    with contextlib.suppress(asyncio.CancelledError):
        try:
            await serving
        finally:
            announcing.cancel()
            _forget(socket)


def _forget(socket: Path) -> None:
    socket.unlink(missing_ok=True)


async def _announce(socket: Path) -> None:
    while not await answers(socket):  # noqa: ASYNC110 - whether `serve` listens already shows on its socket alone
        await asyncio.sleep(0.05)
    print(json.dumps({"socket": str(socket), "pid": os.getpid()}), flush=True)


async def answers(socket: Path) -> bool:
    """Does somebody accept connections on this socket?"""
    try:
        _, writer = await asyncio.open_unix_connection(str(socket))
    except OSError:
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


if __name__ == "__main__":
    main()
