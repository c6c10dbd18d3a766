"""Speeds that are fitted to recorded flights: those that the engine had, whatever disturbed single steps."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.cli import main
from tidegate.core.errors import SettingsError
from tidegate.sizing.engine_model import Speed
from tidegate.sizing.fitted import LEAST, Step, fit, steps
from tidegate.sizing.traces import Arrival, Served, read

TRUE = Speed(slots=4, prefill=400.0, decode=50.0, half=2.0, chunk=200)
GUESS = Speed(slots=4, chunk=200)


def recorded(requests: int, speed: Speed, disturbed: Callable[[int], float] = lambda step: 1.0, seed: int = 0, gap_s: float = 0.6) -> list[Arrival]:
    """Requests as an engine of these speeds serves them, step by step, four at a time. `disturbed`: how many times as long a step takes."""
    chance = random.Random(seed)
    came_s, waiting = 0.0, []
    for number in range(requests):
        came_s += chance.expovariate(1 / gap_s)
        waiting.append((came_s, number, chance.randint(5, 150), chance.randint(1, 30)))
    running: dict[int, list[float]] = {}
    reading: list[tuple[float, int, int, int]] = []
    left: dict[int, int] = {}
    done: dict[int, Arrival] = {}
    asked = {number: (at_s, prompt, output) for at_s, number, prompt, output in waiting}
    now_s, count, started_s = 0.0, 0, dict[int, float]()
    while len(done) < requests:
        while waiting and waiting[0][0] <= now_s and len(running) + len(reading) < 4:
            reading.append(waiting.pop(0))
            started_s[reading[-1][1]] = now_s
        if not running and not reading:
            now_s = waiting[0][0]
            continue
        room, read = speed.chunk, list[int]()
        while reading and reading[0][2] <= room:
            _, number, prompt, _ = reading.pop(0)
            room -= prompt
            read.append(number)
        took_s = (speed.step_s(len(running)) if running else 0.0) + (speed.chunk - room) / speed.prefill
        now_s += took_s * disturbed(count)
        count += 1
        for number in [*running, *read]:
            running.setdefault(number, []).append(now_s + chance.uniform(0, 0.0005))
            left[number] = left.get(number, asked[number][2]) - 1
            if not left[number]:
                at_s, prompt, output = asked[number]
                done[number] = Arrival(at_s, prompt, output, served=Served(started_s[number], tuple(running.pop(number))))
    return [done[number] for number in range(requests)]


def near(speed: Speed, share: float) -> tuple[object, object, object]:
    return pytest.approx(speed.prefill, rel=share), pytest.approx(speed.decode, rel=share), pytest.approx(speed.half, rel=2 * share)


@settings(max_examples=25)
@given(st.floats(50, 20_000), st.floats(5, 200), st.floats(0.5, 50))
def test_the_speeds_are_found(prefill: float, decode: float, half: float) -> None:
    """Whatever they are, from the same guess: every kind of step takes what it takes with the true ones, to the timers' jitter."""
    true = Speed(4, prefill, decode, half, 200)
    found = fit(recorded(60, true, gap_s=2 * true.busy_s(80, 15)), GUESS)
    for streams, reads in ((1, 0), (2, 0), (4, 0), (0, 100), (3, 100)):
        step = Step(0.0, 1.0, streams, reads)
        assert step.due_s(found.speed) == pytest.approx(step.due_s(true), rel=0.08, abs=0.001)
    assert (found.speed.slots, found.speed.chunk) == (4, 200)


def test_disturbed_steps_count_for_little() -> None:
    """One step in six takes four times as long, as on a machine that has other things to do: the speeds are those of the others."""
    found = fit(recorded(120, TRUE, lambda step: 4.0 if step % 6 == 0 else 1.0), GUESS)
    assert (found.speed.prefill, found.speed.decode, found.speed.half) == near(TRUE, 0.08)


def test_the_fit_says_how_wrong_it_is() -> None:
    """An engine that keeps the model's times is met to the timers' jitter; one whose steps are now fast, now slow is not."""
    steady, unsteady = (fit(recorded(120, TRUE, how), GUESS).wrong for how in (lambda step: 1.0, lambda step: 1.5 if step % 2 else 0.5))
    assert steady < 0.03 < 0.3 < unsteady


def test_steps_are_read_off_tokens() -> None:
    """Two streams and a prompt: tokens that came together are one step, which began when the one before it ended, or when a prompt came."""
    one = Arrival(0.0, 30, 3, served=Served(0.1, (0.2, 0.3, 0.5)))
    other = Arrival(0.2, 40, 2, cached=10, served=Served(0.25, (0.501, 0.6)))
    assert steps([one, other], 100) == [Step(0.1, 0.2, 0, 30), Step(0.2, 0.3, 1, 0), Step(0.3, 0.5, 1, 30), Step(0.5, 0.6, 1, 0)]


def test_prompts_that_come_to_an_idle_engine_begin_with_the_first() -> None:
    """Two of one step: it began when the first of them was sent."""
    one, other = (Arrival(0.0, 30, 1, served=Served(at_s, (0.5,))) for at_s in (0.1, 0.2))
    assert steps([one, other], 100) == [Step(0.1, 0.5, 0, 60)]


def test_a_prompt_of_several_chunks_tells_no_step() -> None:
    """Nobody sees where its steps ended."""
    assert steps([Arrival(0.0, 101, 2, served=Served(0.0, (1.0, 1.1)))], 100) == [Step(1.0, 1.1, 1, 0)]


def test_too_few_steps_are_refused() -> None:
    """And a trace that tells no times at all."""
    with pytest.raises(SettingsError, match=f"0 steps of an engine; a fit takes {LEAST}"):
        fit([Arrival(0.0, 5, 5)], GUESS)


def flights(folder: Path, arrivals: list[Arrival]) -> Path:
    """As `tidegate flights --json` prints them."""
    records = [
        {
            "began_unix_ns": 10**18 + round(one.at_s * 1e9), "tenant": "a",
            "usage": {"prompt_tokens": one.prompt + 20, "completion_tokens": one.output, "cached_tokens": 20},
            "laps": [["queue", round((one.served.started_s - one.at_s) * 1e9)], ["engine.send", 1], ["engine.first_token", 1]],
            "token_ns": [round((at_s - one.at_s) * 1e9) for at_s in one.served.tokens_s],
        }
        for one in reversed(arrivals) if one.served is not None
    ]  # fmt: skip
    file = folder / "flights.json"
    file.write_text(json.dumps({"flights": records}, separators=(",", ":")))
    return file


def test_flights_tell_the_steps(tmp_path: Path) -> None:
    """Through the file: the same steps as without it, since tokens that were cached are not read."""
    arrivals = recorded(40, TRUE)
    found = steps(read(flights(tmp_path, arrivals), 100).arrivals, TRUE.chunk)
    wanted = steps(arrivals, TRUE.chunk)
    assert [(one.streams, one.reads) for one in found] == [(one.streams, one.reads) for one in wanted]
    assert found[-1].ended_s - found[0].ended_s == pytest.approx(wanted[-1].ended_s - wanted[0].ended_s)


def test_the_command_takes_the_speeds_from_the_trace(tmp_path: Path) -> None:
    """With --fit they are those of the flights; what is said counts all the same; without it they are as usual."""
    file = flights(tmp_path, recorded(120, TRUE))
    said = ["simulate", "--trace", str(file), "--json", "--policy", "fifo", "--what-if", "slots=4,chunk=200"]
    lines = ([*said, "--fit"], [*said[:-1], f"{said[-1]},decode=7", "--fit"], said)
    fitted, held, plain = (json.loads(CliRunner().invoke(main, line).output)["scenarios"][0] for line in lines)
    assert (fitted["scenario"]["prefill"], fitted["scenario"]["decode"], fitted["scenario"]["half"]) == near(TRUE, 0.08)
    assert (fitted["scenario"]["slots"], fitted["fitted"]["steps"] > LEAST) == (4, True)
    assert (held["scenario"]["decode"], held["scenario"]["prefill"]) == (7.0, fitted["scenario"]["prefill"])
    assert (plain["scenario"]["decode"], plain["fitted"]) == (140.0, None)
    assert "steps of the engine" in CliRunner().invoke(main, [*said[:3], *said[4:], "--fit"]).output
