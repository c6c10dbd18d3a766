"""Who of the workers is silent for too long, by their parent's own looks."""

from __future__ import annotations

import asyncio

import pytest

from tidegate.local.lives import SLOW_S, Lives, Watch

S = 1_000_000_000


class Machine:
    """Two workers that serve, and a parent that looks by a clock of ours."""

    def __init__(self, hung_s: float = 5.0) -> None:
        self.lives = Lives(2)
        self.watch = Watch(self.lives, hung_s)
        self.now_ns = 0
        for worker in range(self.lives.workers):
            self.watch.begin(worker)
            self.of(worker).serves()

    def of(self, worker: int) -> Lives:
        self.lives.join(worker)
        return self.lives

    def sign(self, worker: int) -> None:
        asyncio.run(_one_sign(self.of(worker)))

    def look(self, after_s: float) -> list[int]:
        self.now_ns += int(after_s * S)
        return self.watch.look(self.now_ns)

    def found_within(self, seconds: float, *signs: int) -> list[int]:
        """Who is found by looks every `every_s`, while some give signs."""
        found: set[int] = set()
        for _ in range(int(seconds / self.watch.every_s)):
            for worker in signs:
                self.sign(worker)
            found |= set(self.look(self.watch.every_s))
        return sorted(found)


async def _one_sign(lives: Lives) -> None:
    task = asyncio.create_task(lives.tell())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_the_silent_one_is_found_and_no_other() -> None:
    """Not before its time, and soon after it."""
    machine = Machine()
    machine.look(0)
    machine.sign(0)
    assert machine.found_within(5.0, 1) == []
    assert machine.found_within(1.5, 1) == [0]


def test_a_parent_that_was_away_blames_nobody() -> None:
    """An hour between two looks counts for no more than they are meant to be apart, whoever stood still meanwhile; silence after it counts."""
    machine = Machine()
    machine.look(0)
    machine.found_within(3.0)
    assert machine.look(3600) == []
    assert machine.found_within(1.0) == []
    assert machine.found_within(2.0) == [0, 1]


def test_a_sign_begins_a_new_period() -> None:
    """Silent again and again, but never for the whole time."""
    machine = Machine()
    machine.look(0)
    for _ in range(5):
        assert machine.found_within(4.0) == []
        machine.sign(0)
        machine.sign(1)


@pytest.mark.parametrize("stage", ["start", "end"])
def test_start_and_end_may_take_longer(stage: str) -> None:
    """Loading models, waiting for threads: they have a bound of their own, and one all the same."""
    machine = Machine()
    if stage == "start":
        machine.watch.begin(0)
    else:
        machine.of(0).ends()
    machine.look(0)
    assert machine.found_within(SLOW_S - 1, 1) == []
    assert machine.found_within(3, 1) == [0]


def test_the_next_process_with_the_number_has_a_fresh_period() -> None:
    """What the dead one was silent for is not its own."""
    machine = Machine()
    machine.look(0)
    machine.found_within(4.5)
    machine.watch.begin(0)
    machine.of(0).serves()
    assert machine.found_within(2.0) == [1]


def test_0_finds_nobody() -> None:
    """For a debugger, in which a worker stands for as long as one likes."""
    machine = Machine(0)
    machine.look(0)
    assert machine.found_within(10_000) == []


def test_the_replaced_are_counted_by_cause() -> None:
    """Of all workers together, in whichever process it is asked."""
    lives = Lives(2)
    for cause in ("hung", "killed", "hung"):
        lives.replace(cause)
    lives.join(1)
    assert lives.replaced() == {"ended": 0, "killed": 1, "hung": 2}
