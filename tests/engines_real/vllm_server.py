"""A real vLLM on this machine's processor, with the packaged model.

It runs in an environment of its own (see scripts/test-engines.sh):

    ENV/bin/python tests/engines_real/vllm_server.py --model FOLDER [--port N]

FOLDER is what hf_model.py makes. When the server answers (half a minute, more on a busy machine), one line of JSON comes on stdout,

    {"ready": true, "url": "http://127.0.0.1:40001", "pid": 123, "target": {...}}

and nothing else ever does; what the server says of itself goes to stderr. `target` is what the contract suite wants in a file of its own (see
tests/engines/contract/target.py). It ends with its parent, on SIGTERM and on SIGINT, and takes everything that it started with it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from typing import Any

MODEL = "smollm2"
CONTEXT = 2048
#: Seconds that a start may take.
START_S = 290.0
#: Seconds that it has to stop by itself.
STOP_S = 10.0
#: No hub, no statistics, one thread: others work on this machine, too.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}  # fmt: skip


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def die_with_parent() -> None:
    """The kernel sends SIGTERM when the parent dies; a parent that died before this line is seen by its number."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, signal.SIGTERM)
    libc.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what its processes leave behind becomes ours, and is ended with us
    if os.getppid() != parent:
        raise SystemExit(0)


def die_at_once() -> None:
    """For the server itself: where this program is killed, nothing of it stays."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)


def target(url: str) -> dict[str, Any]:
    return {"name": "vllm", "adapter": "vllm", "model": MODEL, "context": CONTEXT, "settings": {"url": url}}


def serve(model: str, port: int) -> int:
    argv = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", MODEL, "--host", "127.0.0.1",
        "--port", str(port), "--enforce-eager", "--dtype", "bfloat16", "--max-model-len", str(CONTEXT), "--max-num-batched-tokens", "256",
        "--max-num-seqs", "8", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))  # wherever it is: what was started is ended below
    with subprocess.Popen(argv, stdout=2, stdin=subprocess.DEVNULL, env={**os.environ, **ENVIRONMENT}, preexec_fn=die_at_once) as child:
        try:
            if not answers(child, url):
                print("vLLM did not start; what it said is above.", file=sys.stderr, flush=True)
                return 1
            print(json.dumps({"ready": True, "url": url, "pid": os.getpid(), "target": target(url)}), flush=True)
            child.wait()
        finally:
            stop(child)
    return 0


def answers(child: subprocess.Popen[bytes], url: str) -> bool:
    give_up = time.perf_counter() + START_S
    while child.poll() is None and time.perf_counter() < give_up:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
        time.sleep(0.5)
    return False


def stop(child: subprocess.Popen[bytes]) -> None:
    """End the server and everything below it: its workers are processes of their own. While it starts it hears no SIGTERM."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(STOP_S)
    child.poll()
    for _ in range(20):  # each round finds those that became ours by the last one
        below = children(os.getpid())
        if not below:
            return
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in below:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def children(parent: int) -> list[int]:
    found: list[int] = []
    for thread in os.listdir(f"/proc/{parent}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{parent}/task/{thread}/children") as file:
            found += [int(pid) for pid in file.read().split()]
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A real vLLM on this machine's processor.")
    parser.add_argument("--model", required=True, help="a Hugging Face folder, as hf_model.py makes it")
    parser.add_argument("--port", type=int, default=0, help="0, the default, takes a free one")
    given = parser.parse_args()
    die_with_parent()
    sys.exit(serve(given.model, given.port or free_port()))
