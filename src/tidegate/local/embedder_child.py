"""The embedder as a process of its own, shared by all workers: `python -m tidegate.local.embedder_child`.

When its socket answers it prints one JSON line on standard output, `{"socket": ..., "pid": ...}`. SIGTERM ends it in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Literal

import click

from tidegate.core.errors import LocalPartError
from tidegate.local.leash import die_with

#: Seconds after which a thread of Python that computes lets another one have the interpreter. A question changes threads half a dozen times; with
#: Python's own 5 ms it would wait so long each time, while passages are cut into tokens.
SWITCH_S = 0.0005


@click.command()
@click.option("--socket", type=click.Path(path_type=Path), required=True, help="The unix socket to serve on.")
@click.option("--cache", type=click.Path(path_type=Path), required=True, help="Folder for the model made at the first start.")
@click.option("--threads", type=click.IntRange(1), default=1, help="Threads that compute.")
@click.option("--max-length", type=click.IntRange(16, 512), default=512, help="Tokens read at once.")
@click.option("--batch-tokens", type=click.IntRange(16), default=512, help="Tokens computed at once.")
@click.option("--runtime", type=click.Choice(["onnxruntime", "openvino"]), default="onnxruntime", help="What computes.")
@click.option("--parent", type=int, default=0, help="Die with the parent, which has this pid; 0: do not.")
def main(
    socket: Path, cache: Path, threads: int, max_length: int, batch_tokens: int, runtime: Literal["onnxruntime", "openvino"], parent: int
) -> None:
    """Serve the embedder until SIGTERM."""
    if parent:
        die_with(parent, signal.SIGKILL)
    sys.setswitchinterval(SWITCH_S)
    try:
        asyncio.run(_serve(socket, cache, threads, max_length, batch_tokens, runtime))
    except LocalPartError as error:
        sys.exit(f"{error.message} {error.hint or ''}")


async def _serve(
    socket: Path, cache: Path, threads: int, max_length: int, batch_tokens: int, runtime: Literal["onnxruntime", "openvino"]
) -> None:
    from tidegate.retrieval.embedder_server import serve  # loads the model's runtime: not before the leash is on

    def announce() -> None:
        print(json.dumps({"socket": str(socket), "pid": os.getpid()}), flush=True)

    serving = asyncio.ensure_future(
        serve(socket, cache, threads, announce, max_length=max_length, batch_tokens=batch_tokens, runtime=runtime)
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving


if __name__ == "__main__":
    main()
