"""The llama.cpp engine as a process of its own: `python -m tidegate.local.engine_child`.

A native crash, the engine's environment and its messages stay outside every other process. When it listens it prints one JSON line on
standard output, `{"url": ..., "model": ..., "pid": ...}`; everything else that it says goes to standard error. The API key comes in the
environment variable TIDEGATE_ENGINE_KEY, never in the arguments, which every user can read. SIGTERM ends it at once: it
keeps nothing.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

from tidegate.local.leash import die_with

KEY_VARIABLE = "TIDEGATE_ENGINE_KEY"

#: A long prompt is read in pieces of this many tokens, between which other answers get their turn (2048 stalls them for seconds).
_BATCH_TOKENS = 256
#: Prompts kept for reuse, in MiB; llama.cpp's own default is 8 GiB.
_PROMPT_CACHE_MIB = 256
#: Of ggml_backend_dev_type; and more layers than any model has.
_CPU, _ALL_LAYERS = 0, 999


def _params(model: Path, alias: str, slots: int, context_per_slot: int, threads: int, port: int, key: str) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.model_alias = {alias}
    params.n_parallel = slots
    params.n_ctx = slots * context_per_slot
    params.n_batch = params.n_ubatch = _BATCH_TOKENS
    params.cache_ram_mib = _PROMPT_CACHE_MIB
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.endpoint_metrics = params.endpoint_props = params.endpoint_slots = True
    params.ui = False
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.reuse_port = port != 0  # the supervisor holds the port for us, so that no stranger gets it between two lives of the engine
    params.api_keys = [key]
    return params


@click.command()
@click.option("--model", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=True, help="The GGUF file.")
@click.option("--alias", required=True, help="The name that callers use for the model.")
@click.option("--slots", type=click.IntRange(1, 64), default=4, help="Answers at the same time.")
@click.option("--context-per-slot", type=click.IntRange(256), default=2048, help="Tokens of context for each.")
@click.option("--threads", type=click.IntRange(1), default=1, help="Threads that compute.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port on 127.0.0.1; 0: any free one.")
@click.option("--cores", default="", help="Numbers of the cores that it may use, with commas; empty: any.")
@click.option("--gpu", is_flag=True, help="Put the model on the GPU of CUDA_VISIBLE_DEVICES, and do not start without one.")
@click.option("--parent", type=int, default=0, help="Die with the parent, which has this pid; 0: do not.")
def main(model: Path, alias: str, slots: int, context_per_slot: int, threads: int, port: int, cores: str, gpu: bool, parent: int) -> None:
    """Serve one model until SIGTERM."""
    if parent:
        die_with(parent, signal.SIGKILL)
    if cores:  # before there is a second thread: those that come have what the first has
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    key = os.environ.pop(KEY_VARIABLE, "")
    if not key:
        raise click.UsageError(f"The environment variable {KEY_VARIABLE} must hold the API key that callers will need.")
    ready_line = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what native code prints must not be taken for the ready line
    # Threads that spin while they wait take the cores from each other: 40 tokens/s become 1.4. Read when the library is loaded.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    import xllamacpp

    if gpu and not any(device["type"] != _CPU for device in xllamacpp.get_device_info()):
        sys.exit(f"There is no GPU that this engine could use: CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', '')!r}.")
    params = _params(model, alias, slots, context_per_slot, threads, port, key)
    if gpu:
        params.n_gpu_layers = _ALL_LAYERS
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        sys.exit(f"The engine does not start: {error}")  # it said why on standard error
    with ready_line:
        print(json.dumps({"url": server.listening_address, "model": alias, "pid": os.getpid()}), file=ready_line)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
