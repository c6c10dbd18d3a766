"""A killed run leaves nothing that hurts."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import psycopg
import pytest

from .conftest import Up, descendants, wait_for

pytestmark = pytest.mark.local

Start = Callable[..., Up]


def test_a_killed_supervisor_takes_all_with_it_and_the_next_start_works(start: Start) -> None:
    """kill -9: every child dies, what was committed is there after the next start."""
    up = start(settings={"postgres": True, "engine": True}).ready()
    dsn = up.gateway()["told"]["dsn"]
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS n")
    left = up.processes()
    assert len(left) > 3
    up.process.kill()
    up.ended()
    wait_for("the death of every child", lambda: not any(process.alive() for process in left))
    start(settings={"postgres": True, "engine": True}).ready()
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT n FROM kept").fetchone() == (42,)


def test_a_supervisor_killed_at_any_moment_of_the_first_start_hurts_nobody(start: Start) -> None:
    """kill -9 while the cluster is made: the next start makes it anew."""
    first = start(settings={"postgres": True})
    wait_for("initdb", lambda: (first.data / "pg.new").exists() or (first.data / "pg").exists())
    first.process.kill()
    first.ended()
    start(settings={"postgres": True}).ready()


def test_a_frozen_database_server_of_a_killed_run_is_stopped_first(start: Start) -> None:
    """A server that outlived its supervisor is stopped before the next one starts on the same cluster."""
    up = start(settings={"postgres": True}).ready()
    server = up.child("postgres")
    assert server is not None
    os.kill(server.pid, signal.SIGSTOP)
    up.process.kill()
    up.ended()
    again = start(settings={"postgres": True})
    again.said("database: starting")
    assert server.alive()
    os.kill(server.pid, signal.SIGCONT)
    again.ready()
    assert not server.alive()


def test_no_connection_is_refused_while_the_gateway_restarts(start: Start) -> None:
    """Callers wait for the new gateway in the backlog: each gets an answer unless it was being served by the one that died."""
    up = start().ready()
    url, done, refused, answered = up.url, threading.Event(), [], set()

    def call() -> None:
        while not done.is_set():
            try:
                answered.add(httpx.get(url, timeout=30.0).json()["pid"])
            except httpx.ConnectError as error:
                refused.append(error)
            except httpx.HTTPError:
                pass  # it was in the hands of the gateway that was killed

    caller = threading.Thread(target=call)
    caller.start()
    try:
        for _ in range(3):
            pid = up.gateway()["pid"]
            os.kill(pid, signal.SIGKILL)
            wait_for("the next gateway's answers", lambda pid=pid: answered - {pid} and up.gateway()["pid"] != pid)
    finally:
        done.set()
        caller.join()
    assert not refused
    assert len(answered) >= 2


def test_the_left_over_child_of_a_killed_run_is_stopped(start: Start, tmp_path: Path) -> None:
    """A process that the pid file names by pid and start time is stopped at the next start."""
    from tidegate.local.process import Process

    with subprocess.Popen(["sleep", "600"]) as sleeper:
        process = Process.of(sleeper.pid)
        assert process is not None
        first = start()
        (first.ready().data / "run").mkdir(exist_ok=True)
        first.end()
        process.write(first.data / "run" / "engine.pid")
        start().ready()
        assert sleeper.wait(10) == -signal.SIGTERM


@pytest.mark.slow
def test_a_gateway_that_outlives_a_killed_supervisor_gives_its_port_back(start: Start) -> None:
    """It does not hear the kernel's SIGTERM; the next start ends it and gets the same port, though it was set by hand."""
    first = start(env={"STUB_DEAF": "1"}).ready()
    port, gateway = int(first.url.rpartition(":")[2]), first.child("gateway")
    assert gateway is not None
    first.process.kill()
    first.ended()
    start(port=port, port_by_hand=True).ready()
    assert not gateway.alive()


def test_a_reused_pid_is_never_stopped(start: Start) -> None:
    """A pid file whose start time is another process's stops nobody."""
    from tidegate.local.process import Process

    first = start().ready()
    first.end()
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        process = Process.of(sleeper.pid)
        assert process is not None
        Process(process.pid, process.ticks - 1).write(first.data / "run" / "engine.pid")
        start().ready()
        assert process.alive()
        sleeper.kill()


def test_a_postmaster_file_that_names_a_stranger_is_no_obstacle(start: Start) -> None:
    """In a restarted container another process often has the old server's pid: the database starts, the stranger lives."""
    first = start(settings={"postgres": True}).ready()
    server = first.child("postgres")
    assert server is not None
    pid_file = first.data / "pg" / "postmaster.pid"
    lines, owner = pid_file.read_text().splitlines(), pid_file.stat()
    first.end()
    switch = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []} if os.geteuid() == 0 else {}
    with subprocess.Popen(["sleep", "600"], cwd="/", **switch) as stranger:  # type: ignore[call-overload]
        pid_file.write_text("\n".join([str(stranger.pid), *lines[1:]]) + "\n")
        os.chown(pid_file, owner.st_uid, owner.st_gid)
        start(settings={"postgres": True}).ready()
        assert stranger.poll() is None
        stranger.kill()


def test_nothing_is_left_below_a_supervisor_that_ended(start: Start) -> None:
    """No zombie, no grandchild."""
    up = start(settings={"postgres": True}).ready()
    pid = up.process.pid
    assert descendants(pid)
    up.end()
    assert not descendants(pid)
