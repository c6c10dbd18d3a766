"""Two machines and a Valkey server, each in a network of its own where this system allows it: one limit, to the unit, also behind a cut wire."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.stores.valkey_server import ValkeyServer, free_port, running
from tests.waiting import until_blocking as until

COINS = '{"money_per_day": 300.0, "machines": 2}'  # nothing of it refills within a test


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


class Net:
    """A bridge, and behind it a network namespace for each machine, with a wire that can be cut. Where that is not allowed: the loopback."""

    def __init__(self) -> None:
        self.name = f"tg{os.getpid() % 100_000}"
        self.host = "127.0.0.1"
        self.apart = False
        self._made: list[tuple[str, ...]] = []

    def open(self) -> None:
        try:
            self._make("link", "add", self.name, "type", "bridge", undo=("link", "del", self.name))
            ip("addr", "add", f"10.{os.getpid() % 200 + 20}.0.1/24", "dev", self.name)
            ip("link", "set", self.name, "up")
            for number in (1, 2):
                space, wire = f"{self.name}n{number}", f"{self.name}w{number}"
                self._make("netns", "add", space, undo=("netns", "del", space))
                self._make("link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", space, undo=("link", "del", wire))
                ip("link", "set", wire, "master", self.name, "up")
                ip("-n", space, "addr", "add", f"10.{os.getpid() % 200 + 20}.0.{number + 1}/24", "dev", "eth0")
                ip("-n", space, "link", "set", "eth0", "up")
        except (OSError, subprocess.CalledProcessError):
            self.close()
            return
        self.apart = True
        self.host = f"10.{os.getpid() % 200 + 20}.0.1"

    def _make(self, *words: str, undo: tuple[str, ...]) -> None:
        ip(*words)
        self._made.append(undo)

    def inside(self, machine: int) -> list[str]:
        return ["ip", "netns", "exec", f"{self.name}n{machine}"] if self.apart else []

    def wire(self, machine: int, state: str) -> None:
        ip("link", "set", f"{self.name}w{machine}", state)

    def close(self) -> None:
        for undo in reversed(self._made):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                ip(*undo)
        self._made = []


class Machine:
    def __init__(self, net: Net, number: int, url: str, limits: str) -> None:
        self.process = subprocess.Popen(
            [*net.inside(number), sys.executable, "-m", "tests.admission.machine", url, limits],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2],
        )

    def begin(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(order.encode() + b"\n")
        self.process.stdin.flush()

    def told(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the machine ended"
        told: dict[str, Any] = json.loads(line)
        return told

    def do(self, order: str) -> dict[str, Any]:
        self.begin(order)
        return self.told()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture(scope="module")
def net() -> Iterator[Net]:
    one = Net()
    one.open()
    yield one
    one.close()


@pytest.fixture
def server(net: Net) -> Iterator[ValkeyServer]:
    with running("--bind", net.host, "--protected-mode", "no", port=free_port()) as one:
        one.url = one.url.replace("127.0.0.1", net.host)
        yield one


@pytest.fixture
def start(net: Net, server: ValkeyServer) -> Iterator[Callable[[int, str], Machine]]:
    made: list[Machine] = []

    def start_one(number: int, limits: str) -> Machine:
        made.append(Machine(net, number, server.url, limits))
        return made[-1]

    yield start_one
    for machine in made:
        machine.kill()


def test_two_machines_keep_one_limit_to_the_unit(start: Callable[[int, str], Machine]) -> None:
    """Both take what they can at the same time; with what the last leases give back it is the limit, not one more."""
    one, other = start(1, COINS), start(2, COINS)
    one.begin("drain")
    other.begin("drain")
    passed = one.told()["passed"] + other.told()["passed"]
    assert 290 <= passed <= 300
    one.do("back")
    other.do("back")
    total = [passed]

    def all_passed() -> bool:
        total[0] += other.do("admit 1")["passed"]
        return bool(total[0] == 300)

    until(all_passed, "the last unit")
    assert one.do("drain")["passed"] + other.do("drain")["passed"] == 0


def test_a_machine_behind_a_cut_wire_uses_its_share_and_comes_back(start: Callable[[int, str], Machine], net: Net, server: ValkeyServer) -> None:
    """It has half of each limit for itself then, the other machine goes on with the store, and both are one again when the wire is whole."""
    limits = '{"requests_per_minute": 120, "machines": 2}'
    one, other = start(1, limits), start(2, limits)
    assert one.do("admit 1") == {"passed": 1, "up": True}
    assert other.do("admit 1") == {"passed": 1, "up": True}
    if net.apart:
        net.wire(1, "down")
    else:
        server.hang()
    until(lambda: not one.do("state")["up"], "the loss")
    alone = one.do("admit 200")
    assert alone["up"] is False
    assert 60 <= alone["passed"] <= 60 + 12
    if net.apart:
        assert other.do("admit 5") == {"passed": 5, "up": True}
        net.wire(1, "up")
    else:
        server.hang(False)
    until(lambda: bool(one.do("state")["up"]), "the way back")


def test_a_machine_that_is_killed_costs_the_others_no_more_than_its_lease(start: Callable[[int, str], Machine]) -> None:
    """What it had leased and not spent is missing until it has refilled: at most a tenth of the limit; never is there more."""
    one, other = start(1, COINS), start(2, COINS)
    assert one.do("admit 100")["passed"] == 100
    one.kill()
    assert 170 <= other.do("drain")["passed"] <= 200
