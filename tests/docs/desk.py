"""A desk at which a page is read: a folder that looks like a checkout, and a shell whose variables last from block to block."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from blocks import Block

ROOT = Path(__file__).parents[2]
#: Not on a desk: the checkout's own history, environment, state and caches.
PRIVATE = shutil.ignore_patterns(".git", ".venv", ".tidegate", "dist", "*_cache", ".hypothesis", "__pycache__")
#: The address that pages use; a test's product listens elsewhere.
ADDRESS = re.compile(r"(?:127\.0\.0\.1|localhost):8080")
#: How long one block may take. A model on one core answers in seconds; the bound is for what hangs.
BLOCK_S = 120.0


@dataclass(frozen=True)
class Product:
    """A running `make up`: where it listens, its data folder, the curl command it printed and the key in it."""

    address: str
    data: Path
    curl: str
    key: str


@dataclass
class Desk:
    """`address` is host:port of the running product; `environment` is what the reader's shell has set."""

    folder: Path
    address: str
    environment: dict[str, str]
    running: list[tuple[Block, subprocess.Popen[bytes]]] = field(default_factory=list)

    def lay(self) -> None:
        """Make the folder look like a checkout. All copies: whatever a page does, it does not reach the real one."""
        shutil.copytree(ROOT, self.folder, symlinks=True, ignore=PRIVATE, dirs_exist_ok=True)
        activate = self.folder / ".venv" / "bin" / "activate"
        activate.parent.mkdir(parents=True)
        shutil.copy(Path(sys.executable).with_name("activate"), activate)  # it names the environment by its full path

    def do(self, block: Block) -> None:
        """What a reader would do with this block. Raises AssertionError that shows the block and what it printed."""
        text = ADDRESS.sub(self.address, block.script)
        if block.steer == "file":
            path = self.folder / block.words
            assert path.parent.resolve().is_relative_to(self.folder.resolve()), f"{block.where} writes outside the desk: {block.words}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif block.steer == "until":
            self._start(block, text)
        elif block.language == "python":
            self._run(block, [sys.executable, "-W", "error", "-c", text])
        else:
            self._run(block, ["bash", "-euo", "pipefail", "-c", self._lasting(text)])
            self._remember()

    def leave(self) -> None:
        """Stop what the page left running, as its reader would with Ctrl-C, and see that it ends well."""
        wrong = []
        for block, process in reversed(self.running):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            if process.wait(60) != 0:  # the others have to be stopped all the same
                wrong.append(f"{block.where} ended with status {process.returncode} after Ctrl-C")
        assert not wrong

    def _lasting(self, text: str) -> str:
        # Every variable is exported, so that it is there for the next block, as it is in a reader's one shell.
        return f"trap 'env -0 >.desk-environment' EXIT\nset -a\n{text}"

    def _remember(self) -> None:
        saved = self.folder / ".desk-environment"
        pairs = (pair.partition("=") for pair in saved.read_text(encoding="utf-8").split("\0") if pair)
        self.environment = {name: value for name, _, value in pairs}
        saved.unlink()

    def _run(self, block: Block, command: list[str]) -> None:
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=BLOCK_S, check=False,
        )
        printed = done.stdout.decode(errors="replace")
        wanted = done.returncode != 0 if block.steer == "fails" else done.returncode == 0
        assert wanted, f"{block.where} ended with status {done.returncode}\n{block.text}\nprinted:\n{printed}"

    def _start(self, block: Block, text: str) -> None:
        log = self.folder / f".desk-{block.line}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {text}"], cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            )
        self.running.append((block, process))
        give_up_ns = time.perf_counter_ns() + int(BLOCK_S * 1e9)
        while block.words not in (printed := log.read_text(errors="replace")):
            assert process.poll() is None, f"{block.where} ended with status {process.returncode}\nprinted:\n{printed}"
            assert time.perf_counter_ns() < give_up_ns, f"{block.where} never printed {block.words!r}:\n{printed}"
            time.sleep(0.05)


def reader(**more: str) -> dict[str, str]:
    """The environment of somebody who activated .venv and set nothing else, and `more`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TIDEGATE_", "OPENAI_", "PYTEST_"))}
    venv = str(Path(sys.executable).parent)
    return {**kept, "PATH": f"{venv}:{kept['PATH']}", "VIRTUAL_ENV": str(Path(venv).parent), **more}
