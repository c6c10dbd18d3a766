"""`tidegate up` from the start to an orderly stop."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import Up, wait_for

pytestmark = pytest.mark.local

Start = Callable[..., Up]


def test_the_table_holds_a_curl_line_that_can_be_pasted(start: Start) -> None:
    """The curl line stands on one line of its own, from its start, and a shell reads it whole."""
    up = start().ready()
    line = next(line for line in up.lines if line.startswith("curl"))
    words = shlex.split(line)
    assert words[2] == f"{up.url}/v1/chat/completions"
    assert "Authorization: Bearer tg-stub" in words


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything_and_the_exit_code_is_0(start: Start, number: signal.Signals) -> None:
    """Ctrl-C, TERM and a lost terminal end it the same way: nothing runs on, no pid file stays."""
    up = start().ready()
    left = up.processes()
    assert up.end(number) == 0
    assert left
    assert not any(process.alive() for process in left)
    assert not list((up.data / "run").glob("*.pid"))


def test_parts_stop_in_the_order_that_loses_nothing(start: Start) -> None:
    """The gateway stops first and the database last, and it is told so."""
    up = start(settings={"postgres": True, "engine": True}).ready()
    left = up.processes()
    assert up.end() == 0
    assert [line for line in up.lines if line.startswith("stopping")] == ["stopping gateway", "stopping engine", "stopping database"]
    assert not any(process.alive() for process in left)
    assert "database system is shut down" in (up.data / "log" / "postgres.log").read_text()


def test_a_signal_during_the_start_stops_what_was_started(start: Start) -> None:
    """Ctrl-C need not wait until everything is up."""
    up = start(settings={"postgres": True, "engine": True})
    up.said("engine: starting")
    assert up.end() == 0
    assert not any(line.startswith("curl") for line in up.lines)
    assert up.child("engine") is None


def test_a_second_signal_hastens(start: Start) -> None:
    """A gateway that does not end is not waited for once the signal comes again."""
    up = start(env={"STUB_DEAF": "1"}, settings={"drain_s": 600.0}).ready()
    up.process.send_signal(signal.SIGINT)
    up.said("stopping gateway")
    assert up.end(signal.SIGINT) == 0


def test_a_taken_port_that_was_set_by_hand_is_an_error(start: Start) -> None:
    """The error names the port and the way out."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        up = start(port=port, port_by_hand=True)
        assert up.ended() == 3
    assert f"ERROR Port {port} of 127.0.0.1 is taken by another program." in up.lines
    assert any(line.startswith("HINT") and f":{port}" in line for line in up.lines)


def test_a_taken_default_port_gives_way_to_the_next(start: Start) -> None:
    """The next free port is taken and said."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        up = start(port=port).ready()
        up.said(f"Port {port} is taken")
        assert int(up.url.rpartition(":")[2]) > port


def test_a_second_up_on_the_same_folder_is_refused(start: Start) -> None:
    """The error names the process that has the folder; the first one goes on."""
    first = start().ready()
    second = start()
    assert second.ended() == 3
    assert any(line.startswith("ERROR") and f"(pid {first.process.pid})" in line for line in second.lines)
    assert first.gateway()["pid"]


def test_a_gateway_that_cannot_start_is_shown_with_its_last_words(start: Start) -> None:
    """The error holds what the gateway said; nothing runs on."""
    up = start(env={"STUB_DIES": "the settings are wrong"})
    assert up.ended() == 3
    assert "the settings are wrong" in up.lines
    assert any(re.match(r"ERROR gateway ended with code 1 before it was ready", line) for line in up.lines)


@pytest.mark.mounts
def test_a_disk_that_is_too_small_for_the_database_is_said(start: Start, small_disk: Path) -> None:
    """Whatever runs out of room first, the hint is the same and nothing runs on."""
    up = start(data=small_disk / "data", settings={"postgres": True, "min_free_disk_mb": 0})
    assert up.ended() == 3
    assert any(line.startswith("HINT") and "The disk is full" in line for line in up.lines), up.lines


@pytest.mark.mounts
def test_a_part_is_restarted_on_a_full_disk(start: Start, small_disk: Path) -> None:
    """A running Tidegate does not fall over because a pid file cannot be written."""
    up = start(data=small_disk / "data", settings={"min_free_disk_mb": 0}).ready()
    pid = up.gateway()["pid"]
    with contextlib.suppress(OSError), (small_disk / "fill").open("wb", buffering=0) as fill:
        while True:
            fill.write(b"x" * 65536)
    os.kill(pid, signal.SIGKILL)
    up.said("gateway is back")
    assert up.gateway()["pid"] != pid


def test_the_gateway_is_told_where_everything_is(whole: Up) -> None:
    """Address of the database and the engine with its key reach the gateway."""
    told = whole.gateway()["told"]
    assert told["dsn"].startswith("postgresql://tidegate@/tidegate?host=")
    assert told["engine"]["model"] == "smollm2-135m-instruct"
    assert told["engine"]["slots"] == 4
    assert Path(told["embedder"]).is_socket()


def _pid_after(up: Up, name: str, pid: int) -> Any:
    return wait_for(f"another {name}", lambda: (child := up.child(name)) and child.pid != pid and child)


@pytest.mark.parametrize("name", ["gateway", "engine", "embedder", "postgres"])
def test_a_killed_child_is_restarted(whole: Up, name: str) -> None:
    """kill -9 of any part brings a new one; the gateway's and the engine's addresses stay the same."""
    before, told = whole.child(name), whole.gateway()["told"]
    assert before is not None
    os.kill(before.pid, signal.SIGKILL)
    _pid_after(whole, name, before.pid)
    whole.said(f"{'database' if name == 'postgres' else name} is back")
    assert whole.gateway()["told"] == told
