"""Each drill against a real `tidegate up`: which rung catches it, what users see, and that all is whole again, whatever becomes of the drill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.local.conftest import descendants, wait_for

from tidegate.local.drill import drill_names, judge
from tidegate.local.process import Process

pytestmark = [pytest.mark.local, pytest.mark.slow, pytest.mark.timeout(300)]

CAPABILITIES = Path(__file__).with_name("capabilities")
KNOWN, UNKNOWN = '{"question": "What are your hours?"}', '{"question": "What does it cost?"}'

UNCHECKED = {"url": "http://127.0.0.1:1", "models": '["none"]', "conformance": "off"}


class Stack:
    """A `tidegate up` of a test's own, with a second engine and a capability whose budgets are short."""

    def __init__(self, data: Path, **more: str) -> None:
        self.data = data
        self.log = data.parent / "up.log"
        settings = {
            "local.small_engine": "true", "local.postgres_shared_buffers_mb": "32", "local.engine_slots": "2",
            # Their checks at each start, which are tested elsewhere, would keep both cores busy; address and model are those that `up` sets.
            **{f"engines.{name}.{key}": value for name in ("local", "small") for key, value in UNCHECKED.items()},
            "capabilities.folders": json.dumps([str(CAPABILITIES)]), **more,
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "tidegate.cli", "up", "--data", str(data), "--port", "0",
                    *(word for name, value in settings.items() for word in ("--set", f"{name}={value}")),
                ],
                stdout=log, stderr=log, cwd=data.parent, start_new_session=True,
            )
        try:
            wait_for("the start", lambda: "curl" in self.log.read_text() or self.process.poll() is not None)
            assert self.process.poll() is None, self.log.read_text()
        except BaseException:
            self.end()
            raise

    def drill(self, name: str, *options: str) -> tuple[int, dict[str, Any]]:
        done = subprocess.run(self.command(name, *options), capture_output=True, text=True, timeout=200, check=False)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    def command(self, name: str, *options: str) -> list[str]:
        return [sys.executable, "-m", "tidegate.cli", "drill", name, "--json", "--set", f"local.data={self.data}", *options]

    def part(self, name: str) -> Process | None:
        return Process.read(self.data / "run" / f"{name}.pid")

    def stopped(self) -> list[int]:
        """Processes of this stack that stand still."""
        return [process.pid for process in descendants(self.process.pid) if _state(process.pid) == "T"]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.fixture(scope="module")
def stack(data_home: Path) -> Iterator[Stack]:
    data = data_home / "drills" / "data"
    data.parent.mkdir(mode=0o711)
    running = Stack(data)
    yield running
    running.end()
    shutil.rmtree(data.parent, ignore_errors=True)


def caught(report: dict[str, Any]) -> list[str]:
    found: list[str] = report["caught_by"]
    return found


def sights(report: dict[str, Any]) -> set[str]:
    return {seen["sight"] for seen in report["during"]}


def test_db_down_is_caught_without_retrieval(stack: Stack) -> None:
    """The database hangs with all its processes; the answer says that documents were not searched; the same database is there afterwards."""
    before = stack.part("postgres")
    code, report = stack.drill("db-down", "--requests", "4", "--capability", "desk/ask")
    assert (code, caught(report), sights(report)) == (0, ["no_retrieval"], {"answer"})
    assert all(seen["excerpt"].startswith("Without our documents:") for seen in report["during"])
    assert (stack.part("postgres"), report["after"]["rung"], stack.stopped()) == (before, "full", [])


def test_embedder_down_is_caught_by_words_alone(stack: Stack) -> None:
    """The embedder hangs; the full answer rests on what words found, says so, and vectors are there again afterwards."""
    before = stack.part("embedder")
    code, report = stack.drill("embedder-down", "--requests", "4", "--capability", "desk/ask", "--input", KNOWN)
    assert (code, caught(report), sights(report)) == (0, ["full"], {"answer"})
    assert all(seen["cause"].startswith("words_only=slow") for seen in report["during"])
    assert "words_only" not in report["after"]["cause"]
    assert (stack.part("embedder"), stack.stopped()) == (before, [])


def test_engine_down_is_caught_by_the_small_model(stack: Stack) -> None:
    """The engine is dead for as long as the drill asks; the second one answers, streamed or not; then the first is back with another pid."""
    before = stack.part("engine")
    code, report = stack.drill("engine-down", "--requests", "4", "--capability", "desk/ask")
    assert (code, caught(report), sights(report)) == (0, ["small_model"], {"answer"})
    assert {seen["cause"] for seen in report["during"]} == {"engine_down"}
    assert report["after"]["rung"] == "full"
    assert stack.part("engine") not in (None, before)
    assert stack.stopped() == []


def test_slow_engine_is_caught_within_the_budgets(stack: Stack) -> None:
    """Ten times as slow: users get an answer from some rung in time, and the engine runs at its speed again."""
    code, report = stack.drill("slow-engine", "--requests", "2", "--capability", "desk/ask", "--input", KNOWN)
    assert (code, sights(report), report["after"]["rung"], stack.stopped()) == (0, {"answer"}, "full", [])


def test_slots_full_leaves_nobody_without_words(stack: Stack) -> None:
    """All slots taken and a queue: every user sees an answer or the message, and the slots are free again."""
    code, report = stack.drill("slots-full", "--requests", "3", "--capability", "desk/ask", "--input", KNOWN, "--input", UNKNOWN)
    assert (code, report["after"]["rung"]) == (0, "full")
    assert sights(report) <= {"answer", "message"}


def test_hostile_payloads_meet_clear_words(stack: Stack) -> None:
    """Nothing that a caller sends is a 500, or nothing at all; and most of it is refused before any rung."""
    code, report = stack.drill("hostile-payload", "--capability", "desk/ask")
    assert (code, sights(report) <= {"answer", "message", "error"}) == (0, True)
    assert len(report["during"]) >= 20
    refused = [seen for seen in report["during"] if 400 <= seen["status"] < 500]
    assert len(refused) >= 10


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_drill_that_dies_leaves_nothing_stopped(stack: Stack, how: signal.Signals) -> None:
    """Killed in its middle, or ended by Ctrl-C: the database runs on at once."""
    drill = subprocess.Popen(
        stack.command("db-down", "--requests", "50", "--capability", "desk/ask"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    database = stack.part("postgres")
    assert database is not None
    wait_for("the database to stand", lambda: _state(database.pid) == "T")
    drill.send_signal(how)
    drill.wait(30)
    wait_for("everything to run again", lambda: not stack.stopped())
    assert stack.part("postgres") == database


def test_two_drills_at_once_are_refused(stack: Stack) -> None:
    """The second would measure the first."""
    first = subprocess.Popen(
        stack.command("db-down", "--requests", "50", "--capability", "desk/ask"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    database = stack.part("postgres")
    assert database is not None
    try:
        wait_for("the first drill", lambda: _state(database.pid) == "T")
        second = subprocess.run(stack.command("engine-down"), capture_output=True, text=True, timeout=60, check=False)
        assert second.returncode == 1
        assert "Another drill runs" in second.stderr
    finally:
        first.kill()
        first.wait(30)
    wait_for("everything to run again", lambda: not stack.stopped())


def test_without_a_tidegate_there_is_no_drill(tmp_path: Path) -> None:
    """A drill breaks only what `tidegate up` has started on this data folder."""
    done = subprocess.run(
        [sys.executable, "-m", "tidegate.cli", "drill", "engine-down", "--set", f"local.data={tmp_path}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "No gateway runs on the data folder" in done.stderr


def test_an_unknown_drill_names_the_known_ones() -> None:
    """All of them, as they are typed."""
    done = subprocess.run([sys.executable, "-m", "tidegate.cli", "drill", "engine-dwon"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert all(name in done.stderr for name in drill_names())
    assert drill_names() == ["db-down", "embedder-down", "engine-down", "hostile-payload", "slots-full", "slow-engine"]


# -- what users see, and the switch alone


TRACE = {"trace_id": "t", "message": "m"}


@pytest.mark.parametrize(
    ("answer", "sight"),
    [
        (httpx.Response(200, json={"answer": "a", "trace_id": "t"}), "answer"),
        (httpx.Response(200, json={"decision": "accept", "trace_id": "t"}), "answer"),
        (httpx.Response(503, json={"error": {**TRACE, "code": "x", "rung": "message"}}), "message"),
        (httpx.Response(502, json={"error": {**TRACE, "code": "engine_cut"}}), "error"),
        (httpx.Response(500, json={"error": {**TRACE, "code": "internal"}}), "bare"),
        (httpx.Response(503, json={"error": {"message": "m", "code": "x"}}), "bare"),
        (httpx.Response(500, text="Internal Server Error"), "bare"),
        (httpx.Response(200, json={}), "bare"),
        (httpx.Response(200, text='event: token\ndata: {"text": "a"}\n\n', headers={"content-type": "text/event-stream"}), "bare"),
        (
            httpx.Response(
                200, headers={"content-type": "text/event-stream"},
                text='event: token\ndata: {"text": "a"}\n\n'
                'event: error\ndata: {"error": {"message": "m", "code": "x", "trace_id": "t", "status": 502}}\n\n',
            ),
            "error",
        ),
    ],
)
def test_what_a_user_saw(answer: httpx.Response, sight: str) -> None:
    """An answer, a message, an error with words, or what must never be seen."""
    assert judge(answer).sight == sight


class Hand:
    """The switch, and a process that it holds."""

    def __init__(self, limit_s: float = 60) -> None:
        self.victim = subprocess.Popen(["sh", "-c", "sleep 1000 & sleep 1000"])
        self.switch = subprocess.Popen(
            [sys.executable, "-P", "-m", "tidegate.local.drill_switch", str(limit_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.said() == "ok"

    def said(self) -> str:
        assert self.switch.stdout is not None
        return self.switch.stdout.readline().strip()

    def order(self, line: str) -> str:
        assert self.switch.stdin is not None
        self.switch.stdin.write(line + "\n")
        self.switch.stdin.flush()
        return self.said()

    def freeze(self) -> str:
        process = Process.of(self.victim.pid)
        assert process is not None
        return self.order(f"freeze {process.pid} {process.ticks}")

    def states(self) -> set[str]:
        return {_state(process.pid) for process in [*descendants(self.victim.pid)]} | {_state(self.victim.pid)}


@pytest.fixture
def hand(request: pytest.FixtureRequest) -> Iterator[Hand]:
    one = Hand(**getattr(request, "param", {}))
    yield one
    for process in [*(found.pid for found in descendants(one.victim.pid)), one.victim.pid]:
        os.kill(process, signal.SIGKILL)
    one.victim.wait()
    assert one.switch.stdin is not None
    assert one.switch.stdout is not None
    one.switch.stdin.close()
    one.switch.wait(30)
    one.switch.stdout.close()


def test_a_process_stands_with_all_below_it(hand: Hand) -> None:
    """Until the input ends."""
    wait_for("its children", lambda: len(descendants(hand.victim.pid)) == 2)
    assert hand.freeze() == "ok"
    wait_for("all to stand", lambda: hand.states() == {"T"})
    assert hand.switch.stdin is not None
    hand.switch.stdin.close()
    wait_for("all to run", lambda: hand.states() == {"S"})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_switch_that_is_told_to_end_lets_go_first(hand: Hand, number: signal.Signals) -> None:
    """Also its own end is one of the ways in which a drill ends."""
    assert hand.freeze() == "ok"
    hand.switch.send_signal(number)
    hand.switch.wait(30)
    assert "T" not in hand.states()


@pytest.mark.parametrize("hand", [{"limit_s": 0.5}], indirect=True)
def test_when_its_time_is_up_everything_goes_on(hand: Hand) -> None:
    """A drill that hangs does not keep a part from its work."""
    assert hand.freeze() == "ok"
    hand.switch.wait(30)
    wait_for("all to run", lambda: "T" not in hand.states())


def test_what_is_slowed_runs_and_stands_in_turns(hand: Hand) -> None:
    """Both states are seen, and in the end it runs."""
    process = Process.of(hand.victim.pid)
    assert process is not None
    assert hand.order(f"slow {process.pid} {process.ticks} 20 20") == "ok"
    wait_for("a standing turn", lambda: _state(process.pid) == "T")
    wait_for("a running turn", lambda: _state(process.pid) == "S")
    assert hand.switch.stdin is not None
    hand.switch.stdin.close()
    hand.switch.wait(30)
    assert _state(process.pid) == "S"


def test_another_process_with_the_same_pid_is_left_alone(hand: Hand) -> None:
    """Known by its start time too; and an order that is none is refused in words."""
    process = Process.of(hand.victim.pid)
    assert process is not None
    assert hand.order(f"freeze {process.pid} {process.ticks + 1}") == "it is gone"
    assert "T" not in hand.states()
    assert hand.order("explode 1 2") == "no order 'explode'"
    assert "an order is" in hand.order("freeze x")
