"""Tidegate as `make up` starts it, once for all pages."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from desk import ROOT, Desk, Product, reader

#: From nothing to the curl line. A first start makes a database and an ONNX model on a machine that may have one core.
START_S = 180.0
CURL = re.compile(r"^[\s$>]*(curl (?:.*\\\n)*.*)$", re.MULTILINE)
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_curl(process: subprocess.Popen[bytes], log: Path) -> str:
    """The curl command that the start prints when all is up."""
    give_up_ns = time.perf_counter_ns() + int(START_S * 1e9)
    while True:
        printed = COLOUR.sub("", log.read_text(errors="replace"))
        found = CURL.search(printed)
        if found:
            return found[1]
        assert process.poll() is None, f"make up ended with status {process.returncode}:\n{printed}"
        assert time.perf_counter_ns() < give_up_ns, f"make up printed no curl line within {START_S} s:\n{printed}"
        time.sleep(0.1)


@pytest.fixture(scope="session")
def product() -> Iterator[Product]:
    home = Path(tempfile.mkdtemp(prefix="tg-docs-", dir="/tmp"))  # short, since the paths of sockets are bounded
    home.chmod(0o711)
    data, log, port = home / "data", home / "up.log", free_port()
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["make", "--no-print-directory", "up", f"ARGS=--port {port}"], cwd=ROOT, env=reader(TIDEGATE_LOCAL__DATA=str(data)),
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
        )
    try:
        curl = wait_for_curl(process, log)
        key = re.search(r"Bearer ([^\s'\"]+)", curl)
        assert key is not None, f"The curl line carries no key: {curl}"
        yield Product(f"127.0.0.1:{port}", data, curl, key[1])
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            process.wait(60)
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def desk(product: Product, tmp_path: Path) -> Iterator[Desk]:
    """Where one page is read. `TIDEGATE_KEY` stands for the key that `make up` printed, as the pages say."""
    one = Desk(tmp_path, product.address, reader(TIDEGATE_LOCAL__DATA=str(product.data), TIDEGATE_KEY=product.key, HOME=str(tmp_path)))
    one.lay()
    (tmp_path / ".tidegate").symlink_to(product.data)  # a reader's checkout has the data folder of their `make up`
    (tmp_path / ".curlrc").write_text("fail-with-body\n", encoding="utf-8")  # else an error's body looks like an answer
    try:
        yield one
    finally:
        one.leave()
