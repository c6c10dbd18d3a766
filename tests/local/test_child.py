"""One managed child."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tidegate.core.errors import LocalPartError
from tidegate.local.child import Child, ChildSpec
from tidegate.local.logfile import LogFile
from tidegate.local.process import Process

from .conftest import wait_for


async def _at_once() -> bool:
    return True


async def _never() -> bool:
    return False


def spec(tmp_path: Path, code: str, ready: Callable[[], Awaitable[bool]] = _at_once, **more: object) -> ChildSpec:
    return ChildSpec(  # type: ignore[arg-type]
        name="part", argv=[sys.executable, "-c", code], env=dict(os.environ), log=LogFile(tmp_path / "part.log", 1_000_000),
        pid_file=tmp_path / "part.pid", ready=ready, **({"ready_within_s": 20.0} | more),
    )


async def test_a_child_that_dies_before_it_is_ready_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    """The error names code, log and what was said."""
    child = Child(spec(tmp_path, "import sys; sys.exit('no such model')", _never))
    with pytest.raises(LocalPartError, match=r"part ended with code 1 before it was ready\. Its log .*part\.log ends with:\nno such model"):
        await child.start()


async def test_a_child_that_is_never_ready_is_stopped(tmp_path: Path) -> None:
    """The time is bounded, and nothing runs on after it."""
    child = Child(spec(tmp_path, "import signal; signal.pause()", _never, ready_within_s=0.1))
    with pytest.raises(LocalPartError, match="part was not ready within"):
        await child.start()
    assert child.pid is not None
    assert Process.of(child.pid) is None


async def test_a_program_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """The error names the program."""
    child = Child(ChildSpec("part", ["/no/such/program"], {}, LogFile(tmp_path / "log", 1), tmp_path / "pid", _at_once))
    with pytest.raises(LocalPartError, match=r"part cannot be started: /no/such/program: .*No such file"):
        await child.start()


@pytest.mark.parametrize("words", ["could not write: No space left on device", "HINT:  Check free disk space."])
async def test_a_full_disk_in_a_childs_log_gets_its_own_hint(tmp_path: Path, words: str) -> None:
    """Whatever the child is, and however it says it, a full disk has one way out."""
    child = Child(spec(tmp_path, f"import sys; sys.exit({words!r})", _never, hint="another hint"))
    with pytest.raises(LocalPartError) as error:
        await child.start()
    assert "The disk is full" in str(error.value.hint)


async def test_keep_restarts_and_counts(tmp_path: Path) -> None:
    """Each death is told with its reason and its number."""
    child, told = Child(spec(tmp_path, "import signal; signal.pause()")), []
    await child.start()
    keeping = asyncio.ensure_future(child.keep(told.append))
    for number in (1, 2):
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            while f"part is back (restart {number})" not in told:  # noqa: ASYNC110 - what is told is a list
                await asyncio.sleep(0.01)
    keeping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await keeping
    assert await child.stop()
    assert child.restarts == 2
    assert told[0] == "part was killed by SIGKILL; restart 1 in 0.2 s"
    assert told[2] == "part was killed by SIGKILL; restart 2 in 0.4 s"


async def test_stop_ends_with_the_last_signal(tmp_path: Path) -> None:
    """SIGKILL follows where SIGTERM is not heard, and the pid file goes."""
    said = tmp_path / "part.log"

    async def deaf() -> bool:
        return "deaf" in said.read_text()

    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    child = Child(spec(tmp_path, code, deaf, stop_steps=((signal.SIGTERM, 0.1), (signal.SIGKILL, 20.0))))
    await child.start()
    assert await child.stop()
    assert not (tmp_path / "part.pid").exists()


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    """kill -9 of the parent reaches the child through the kernel."""
    parent = subprocess.Popen(
        [sys.executable, "-c", (
            "import subprocess, signal, sys\n"
            "from tidegate.local.leash import leash\n"
            "child = subprocess.Popen(['sleep', '600'], preexec_fn=leash(signal.SIGKILL), start_new_session=True)\n"
            "print(child.pid, flush=True)\n"
            "signal.pause()\n"
        )], stdout=subprocess.PIPE, text=True,
    )
    assert parent.stdout is not None
    child = Process.of(int(parent.stdout.readline()))
    assert child is not None
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for("the child's death", lambda: not child.alive())


def test_a_child_whose_parent_is_gone_already_ends_itself() -> None:
    """The race between fork and prctl: a parent that is not the expected one counts as dead."""
    done = subprocess.run(
        [sys.executable, "-c", "import signal\nfrom tidegate.local.leash import die_with\ndie_with(1, signal.SIGKILL)\nprint('alive')"],
        check=True, capture_output=True, text=True,
    )
    assert done.stdout == ""


def test_a_log_is_bounded_while_its_writer_goes_on(tmp_path: Path) -> None:
    """The file is copied aside and cut under the open descriptor."""
    log = LogFile(tmp_path / "x.log", 100)
    descriptor = log.open()
    os.write(descriptor, b"a" * 150)
    log.trim()
    os.write(descriptor, b"b" * 10)
    os.close(descriptor)
    assert (tmp_path / "x.log").read_bytes() == b"b" * 10
    assert (tmp_path / "x.log.1").read_bytes() == b"a" * 150


def test_the_tail_is_what_was_said_since(tmp_path: Path) -> None:
    """Words of an earlier run are not shown as the reason of this one's end."""
    log = LogFile(tmp_path / "x.log", 1000)
    log.path.write_text("old\n")
    since = log.size()
    with log.path.open("a") as file:
        file.write("new 1\nnew 2\n")
    assert log.tail(since, lines=1) == "new 2"
    assert log.tail(since) == "new 1\nnew 2"
