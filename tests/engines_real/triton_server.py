"""A real Triton server with a language model in Python that does as its prompt orders.

It runs in an environment of its own, because pytriton wants an older numpy:

    python -m venv ENV && ENV/bin/pip install nvidia-pytriton==0.7.0          (370 MB, linux x86_64, Python 3.8 to 3.13)
    ENV/bin/python tests/engines_real/triton_server.py [--grpc-port N] [--http-port N] [--metrics-port N]

Ports that are not given are chosen free. When the server answers (ten seconds, more on a busy machine), one line of JSON comes on stdout,

    {"ready": true, "grpc": 40001, "http": 40002, "metrics": 40003, "pid": 123, "target": {...}}

and nothing else ever does; what the server says of itself goes to stderr. `target` is what the contract suite wants in a file of its own (see
tests/engines/contract/target.py). It ends with its parent, on SIGTERM and on SIGINT, and takes everything that it started with it.

The model `words` is decoupled: each response carries one word. Inputs, all but the first optional: text_input, stream, max_tokens,
temperature, seed, stop_words. Outputs: text_output, finish_reason, num_input_tokens, num_output_tokens.
The model `plain` takes text_input alone and gives text_output in one piece, without streaming.

The answer to a prompt is the words of WORDS over and over, from where the prompt's answer so far ends: what follows the last
"<|im_start|>assistant" line. So an answer that is continued from a prefix is the answer that would have come. Orders in
the prompt, the last of each kind counts, as of the scripted engine: ##n=16,i=0,t=0,m=none,k=8## with n: words; i, t: ms between words and
before the first; m: none, error (after k words), stall (ten minutes of silence after k words), empty, crash_in (an error before any word),
utf8_split (each word's bytes in two responses), context (says that the prompt is too long).

The model `figures` takes text_input (any text) and gives text_output: JSON with `active` (answers that are being made), `started`, `finished`
and `words` (given out since the start). So a test sees whether an answer that was cancelled runs on: models of pytriton cannot ask whether
their client has left, and run to their end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
from collections.abc import AsyncIterator

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "and", "then", "café", "你好", "runs", "off", "😀", "far"]
#: On a busy machine pytriton's processes give each other up after a second.
ATTEMPTS = 4
ATTEMPT = "TIDEGATE_TRITON_ATTEMPT"
COPIES: set[str] = set()
ORDERS = re.compile(r"##([a-z0-9_=,]+)##")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def die_with_parent() -> None:
    """The kernel sends SIGTERM when the parent dies; a parent that died before this line is seen by its number."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(0)


def orders_in(prompt: str) -> dict[str, str]:
    orders: dict[str, str] = {}
    for found in ORDERS.findall(prompt):
        orders.update(pair.split("=", 1) for pair in found.split(",") if "=" in pair)
    return orders


def words_left(prompt: str, count: int) -> tuple[int, list[str]]:
    """The number of the first word that is left to say, and the words: of the answer the prompt may already hold a beginning."""
    whole = "".join(f" {WORDS[number % len(WORDS)]}" for number in range(count))
    _, mark, said = prompt.rpartition("<|im_start|>assistant\n")
    said = said if mark and whole.startswith(said) else ""
    return said.count(" "), re.findall(r" ?[^ ]+", whole[len(said) :])


class Figures:
    """What the models did; they run in threads of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.active = self.started = self.finished = self.words = 0

    def add(self, **changes: int) -> None:
        with self.lock:
            for name, change in changes.items():
                setattr(self, name, getattr(self, name) + change)

    def json(self) -> str:
        with self.lock:
            return json.dumps({name: getattr(self, name) for name in ("active", "started", "finished", "words")})


async def answer(prompt: str, max_tokens: int | None, stops: list[str], figures: Figures) -> AsyncIterator[tuple[bytes, int, str]]:
    """Pieces of the answer, each with the words that it completes and, the last, with how it ended."""
    orders = orders_in(prompt)
    count, fault = int(orders.get("n", "16")), orders.get("m", "none")
    at_word = int(orders.get("k", str(count // 2)))
    pause_s, first_s = int(orders.get("i", "0")) / 1000, int(orders.get("t", "0")) / 1000
    if fault == "context":
        raise ValueError("This model's maximum context length is 128 tokens. However, you requested 1000 tokens.")
    if fault == "crash_in":
        raise ValueError("the model was told to fail")
    figures.add(active=1, started=1)
    try:
        await asyncio.sleep(first_s)
        if fault == "empty":
            yield b"", 0, "stop"
            return
        given, sent = "", 0
        holds = max([1, *(len(stop) for stop in stops)]) - 1  # of a stop string the beginning may be there already
        before, left = words_left(prompt, count)
        if not left:
            yield b"", 0, "stop"
        for number, word in enumerate(left, before):
            if number > before and pause_s:
                await asyncio.sleep(pause_s)
            if number == at_word and fault == "error":
                raise ValueError("the model was told to fail after some words")
            if number == at_word and fault == "stall":
                await asyncio.sleep(600)
            given += word
            figures.add(words=1)
            last = number - before == len(left) - 1
            cut = min((given.index(stop) for stop in stops if stop and stop in given), default=-1)
            end = "stop" if last or cut >= 0 else ""
            upto = cut if cut >= 0 else len(given) if end else max(sent, len(given) - holds)
            if not end and max_tokens is not None and number - before + 1 >= max_tokens:
                end, upto = "length", len(given)
            data = given[sent:upto].encode()
            sent = max(sent, upto)
            if fault == "utf8_split" and len(data) > 2:
                yield data[:-1], 0, ""
                data = data[-1:]
            yield data, 1, end
            if end:
                return
    finally:
        figures.add(active=-1, finished=1)


def serve(grpc_port: int, http_port: int, metrics_port: int, folder: str, out: int) -> None:
    """Until a signal; `out` is where the line of JSON goes."""
    import numpy as np
    from pytriton.model_config import ModelConfig, Tensor
    from pytriton.triton import Triton, TritonConfig

    figures = Figures()

    def first(inputs: dict[str, object], name: str) -> object | None:
        values = inputs.get(name)
        return None if values is None or not values.size else values.reshape(-1)[0]  # type: ignore[attr-defined]

    async def words(requests: list[object]) -> AsyncIterator[list[dict[str, object]]]:
        """One request at a time: the model is not batched. As a coroutine, so that one instance makes many answers at once."""
        inputs = requests[0].data  # type: ignore[attr-defined]
        prompt = bytes(first(inputs, "text_input")).decode()  # type: ignore[arg-type]
        bound = first(inputs, "max_tokens")
        stops = [bytes(one).decode() for one in inputs["stop_words"].reshape(-1)] if "stop_words" in inputs else []
        async for data, new, end in answer(prompt, None if bound is None else int(bound), stops, figures):  # type: ignore[call-overload]
            yield [{
                "text_output": np.array([data], dtype=np.object_),
                "finish_reason": np.array([end.encode()], dtype=np.object_),
                "num_input_tokens": np.array([len(prompt.split())], dtype=np.uint32),
                "num_output_tokens": np.array([new], dtype=np.uint32),
            }]

    async def plain(requests: list[object]) -> list[dict[str, object]]:
        prompt = bytes(first(requests[0].data, "text_input")).decode()  # type: ignore[attr-defined,arg-type]
        return [{"text_output": np.array([b"".join([data async for data, _, _ in answer(prompt, None, [], figures)])], dtype=np.object_)}]

    def tell(requests: list[object]) -> list[dict[str, object]]:
        return [{"text_output": np.array([figures.json().encode()], dtype=np.object_)} for _ in requests]

    text, one = Tensor(name="text_input", dtype=bytes, shape=(1,)), (1,)
    told = Tensor(name="text_output", dtype=bytes, shape=(1,))
    config = TritonConfig(
        http_address="127.0.0.1", grpc_address="127.0.0.1", metrics_address="127.0.0.1",
        http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port, exit_timeout_secs=1,
    )  # fmt: skip
    with Triton(config=config, workspace=os.path.join(folder, "workspace")) as triton:
        triton.bind(
            model_name="words",
            infer_func=words,
            inputs=[
                text,
                Tensor(name="max_tokens", dtype=np.int32, shape=one, optional=True),
                Tensor(name="temperature", dtype=np.float32, shape=one, optional=True),
                Tensor(name="seed", dtype=np.int64, shape=one, optional=True),
                Tensor(name="stream", dtype=np.bool_, shape=one, optional=True),
                Tensor(name="stop_words", dtype=bytes, shape=(-1,), optional=True),
            ],
            outputs=[
                told,
                Tensor(name="finish_reason", dtype=bytes, shape=one),
                Tensor(name="num_input_tokens", dtype=np.uint32, shape=one),
                Tensor(name="num_output_tokens", dtype=np.uint32, shape=one),
            ],
            config=ModelConfig(batching=False, decoupled=True),
        )
        triton.bind(model_name="plain", infer_func=plain, inputs=[text], outputs=[told], config=ModelConfig(batching=False))
        triton.bind(model_name="figures", infer_func=tell, inputs=[text], outputs=[told], config=ModelConfig(batching=False))
        triton.run()
        stop = threading.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: stop.set())
        remember_copies()
        ready = {
            "ready": True, "grpc": grpc_port, "http": http_port, "metrics": metrics_port, "pid": os.getpid(), "target": target(grpc_port),
        }  # fmt: skip
        os.write(out, (json.dumps(ready) + "\n").encode())
        stop.wait()
        # models that run on hold their threads: what is left after a while dies with the process
        threading.Timer(5, end, (folder,)).start()
    end(folder)


def target(grpc_port: int) -> dict[str, object]:
    """For the contract suite. Answers that are cancelled run on here, so none of them is long."""

    def chat(orders: str) -> dict[str, object]:
        return {"kind": "chat", "body": {"messages": [{"role": "user", "content": f"Say something. ##{orders}##"}]}}

    return {
        "name": "triton", "adapter": "triton", "model": "words", "context": 128,
        "settings": {"url": f"http://127.0.0.1:{grpc_port}", "chat_template": "chatml"},
        "calls": {
            "short": chat("n=12,i=1"), "long": chat("n=400,i=5"), "unicode": chat("n=16,m=utf8_split"), "prefill": chat("t=2000,n=2"),
            "overflow": chat("m=context"), "completion": {"kind": "completion", "body": {"prompt": "Once upon a time ##n=12##"}},
        },
    }  # fmt: skip


def adopt_orphans() -> None:
    """Processes whose parent dies become children of this one: the server leaves its helpers behind when it is told to hurry."""
    ctypes.CDLL(None, use_errno=True).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def end(folder: str) -> None:
    """Ends every process below this one, takes its folder away (pytriton's copies of the server are large), then ends this one."""
    end_children()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def end_children() -> None:
    """Ends every process below this one, and takes away the copies of models that Triton makes for them."""
    remember_copies()
    for copied in COPIES:
        shutil.rmtree(copied, ignore_errors=True)
    for _ in range(20):  # each round finds those that became ours by the last one
        below = descendants(os.getpid())
        if not below:
            break
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in below:
            with contextlib.suppress(ChildProcessError):  # a grandchild is not ours to wait for, until the next round
                os.waitpid(pid, 0)


def remember_copies() -> None:
    """Triton copies each model into a folder of its own in /tmp, names it to the process that runs it, and mostly leaves it behind."""
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as file:
            COPIES.update(re.findall(r"/tmp/folder\w{6}(?=/)", file.read()))


def descendants(parent: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for child in children(parent):
            found += [child, *descendants(child)]
    return found


def children(parent: int) -> list[int]:
    with open(f"/proc/{parent}/task/{parent}/children") as file:
        found = [int(pid) for pid in file.read().split()]
    for thread in os.listdir(f"/proc/{parent}/task"):
        if thread != str(parent):
            with contextlib.suppress(OSError), open(f"/proc/{parent}/task/{thread}/children") as file:
                found += [int(pid) for pid in file.read().split()]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="A real Triton server with a model that does as its prompt orders.")
    for name in ("grpc", "http", "metrics"):
        parser.add_argument(f"--{name}-port", type=int, default=0)
    given = parser.parse_args()
    die_with_parent()
    library = sysconfig.get_config_var("LIBDIR")
    if library not in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        # Triton's Python backend is linked against libpython, and the loader looks there only where it is told before the start
        os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, (library, os.environ.get("LD_LIBRARY_PATH", ""))))
        os.execv(sys.executable, [sys.executable, *sys.argv])
    adopt_orphans()
    out = os.dup(1)
    os.dup2(2, 1)  # whatever pytriton prints is no answer
    with tempfile.TemporaryDirectory(prefix="tg-triton-") as folder:
        os.environ["PYTRITON_HOME"] = os.path.join(folder, "home")
        ports = [port or free_port() for port in (given.grpc_port, given.http_port, given.metrics_port)]
        try:
            serve(ports[0], ports[1], ports[2], folder, out)
        except Exception as error:
            print(f"Triton did not start: {error!r}"[:2000], file=sys.stderr, flush=True)
        end_children()
    attempt = int(os.environ.get(ATTEMPT, "1"))
    if attempt == ATTEMPTS:
        os._exit(1)
    os.environ[ATTEMPT] = str(attempt + 1)
    os.dup2(out, 1)
    os.execv(sys.executable, [sys.executable, *sys.argv])


if __name__ == "__main__":
    main()
