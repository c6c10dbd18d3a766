"""The scripted engine's steps: all its answers share them, and their times are those of the engine model of `tidegate simulate`."""

from __future__ import annotations

import asyncio
import heapq
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tidegate.bench.behaviour import Behaviour
from tidegate.bench.scripted import Scripted, _Connection, start
from tidegate.bench.steps import Speeds, Steps, Turn, parse
from tidegate.cli import main
from tidegate.core.errors import SettingsError
from tidegate.sizing.engine_model import Engine, Speed
from tidegate.sizing.job import Job

SPEEDS = Speeds(prefill=1000.0, decode=10.0, half=3.0, chunk=100)


class Clock:
    """An event loop without waiting."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._calls: list[tuple[float, int, Callable[[], Any]]] = []

    def time(self) -> float:
        return self.now_s

    def call_at(self, when: float, callback: Callable[[], Any]) -> None:
        heapq.heappush(self._calls, (when, len(self._calls), callback))

    def run(self, until_s: float = 1e9) -> None:
        while self._calls and self._calls[0][0] <= until_s:
            self.now_s, _, callback = heapq.heappop(self._calls)
            callback()
        self.now_s = max(self.now_s, until_s) if until_s < 1e9 else self.now_s


class Answer:
    """One answer of so many tokens, and when it had them."""

    def __init__(self, steps: Steps, clock: Clock, prompt: int, output: int) -> None:
        self.at_s: list[float] = []
        self._steps, self._clock, self._output = steps, clock, output
        self.turn: Turn = steps.enter(prompt, self._on_token)

    def _on_token(self) -> None:
        self.at_s.append(self._clock.now_s)
        if len(self.at_s) == self._output:
            self._steps.leave(self.turn)


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 40), st.integers(0, 4_000)), min_size=1, max_size=20))
def test_its_times_are_those_of_the_engine_model(asked: list[tuple[int, int, int]]) -> None:
    """Whatever comes when: first tokens and ends are those that the simulator's engine has for the same requests."""
    clock, engine = Clock(), Engine(Speed(len(asked), SPEEDS.prefill, SPEEDS.decode, SPEEDS.half, SPEEDS.chunk))
    steps = Steps(SPEEDS, clock)
    answers, jobs = [], []
    for number, (prompt, output, came_ms) in enumerate(sorted(asked, key=lambda one: one[2]), 1):
        # Each at its own few microseconds: steps last whole thirds of a millisecond, and none may end at the instant at which somebody comes.
        came_ns = came_ms * 1_000_000 + 137 * number * number
        clock.run(came_ns / 1e9)
        answers.append(Answer(steps, clock, prompt, output))
        engine.advance(came_ns)
        jobs.append(Job(number, "t", prompt, output, 1.0, 0, came_ns, came_ns))
        engine.start(jobs[-1], came_ns)
    clock.run()
    while engine.next_ns is not None:
        engine.advance(engine.next_ns)
    assert [(one.at_s[0], one.at_s[-1]) for one in answers] == [(pytest.approx(one.first_ns / 1e9), pytest.approx(one.done_ns / 1e9)) for one in jobs]


def test_who_leaves_takes_no_more_time() -> None:
    """Of two answers one leaves, and one whose prompt is not read yet: from the next step on the other has the engine for itself."""
    clock = Clock()
    steps = Steps(SPEEDS, clock)
    stays, leaves = Answer(steps, clock, 100, 12), Answer(steps, clock, 100, 99)
    clock.run(0.35)  # 0.1 s for each prompt and 0.1 s for a token beside the second
    unread = Answer(steps, clock, 5000, 1)
    steps.leave(leaves.turn)
    steps.leave(unread.turn)
    clock.run()
    assert (len(leaves.at_s), unread.at_s) == (1, [])
    # Two tokens by 0.3 s, the third beside the one that left, the others alone.
    assert stays.at_s[2:] == [pytest.approx(0.3 + 0.4 / 3 + 0.1 * number) for number in range(10)]


def test_speeds_are_read() -> None:
    """Keys and values in any order; what is not said is as usual."""
    assert parse(" decode=60, chunk=256") == Speeds(decode=60.0, chunk=256)
    assert parse("") == Speeds()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("decod=3", "does not know 'decod'"), ("decode", "decode="), ("decode=fast", "decode=fast"), ("decode=0", "decode=0"), ("half=-1", "half=-1"),
        ("chunk=1.5", "chunk=1.5"), ("prefill=inf", "prefill=inf"), ("prefill=nan", "prefill=nan"), ("half=2,half=3", "half twice"),
    ],
)  # fmt: skip
def test_wrong_speeds_are_refused(said: str, words: str) -> None:
    """By name, with what is allowed."""
    with pytest.raises(SettingsError, match=words):
        parse(said)


def test_speeds_and_curves_exclude_each_other() -> None:
    """The command says so and does not start."""
    result = CliRunner().invoke(main, ["scripted", "--speeds", "decode=60", "--first-ms", "20"])
    assert result.exit_code == 2
    assert "Leave out --first-ms" in result.output


@pytest.mark.parametrize("stream", [True, False])
async def test_answers_come_whole(stream: bool) -> None:
    """The words are those of an engine without speeds, streamed or not, one answer after the other on a connection; no slot is left taken."""
    body = {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 5, "ignore_eos": True, "stream": stream}
    fast, plain = await start(behaviour=Behaviour(speeds=Speeds(1e6, 1e4, 60.0, 64))), await start()
    async with httpx.AsyncClient(trust_env=False) as client:
        said = [(await client.post(f"{one.url}/v1/chat/completions", json=body)).text for one in (fast, plain, fast, plain)]
    assert said[0] == said[1] == said[2]
    assert fast.active == 0
    await fast.close()
    await plain.close()


class Wire(asyncio.Transport):
    """What is written."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.data += data

    def is_closing(self) -> bool:
        return False


async def test_the_engine_does_not_wait_for_a_client_that_reads_slowly() -> None:
    """Its tokens come all the same; when it reads again they are there, without another step."""
    server = Scripted(behaviour=Behaviour(speeds=Speeds(1e6, 1e4, 60.0, 64)))
    await server.listen("127.0.0.1", 0)
    body = json.dumps({"messages": [{"role": "user", "content": "##n=7##"}], "stream": True})
    request = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
    slow, quick = _Connection(server), _Connection(server)
    wires = [Wire(), Wire()]
    for connection, wire in zip((slow, quick), wires, strict=True):
        connection.connection_made(wire)
        connection.data_received(request)
    slow.pause_writing()
    async with asyncio.timeout(10):
        while not wires[1].data.endswith(b"0\r\n\r\n"):  # noqa: ASYNC110 - the wire is watched from outside
            await asyncio.sleep(0.001)
    assert b"[DONE]" not in wires[0].data
    slow.resume_writing()
    assert wires[0].data == wires[1].data
    for connection in (slow, quick):
        connection.connection_lost(None)
    await server.close()


async def test_an_order_of_its_own_time_wins() -> None:
    """A prompt that orders its times is not in the steps: it comes although a step takes a hundred seconds."""
    engine = await start(behaviour=Behaviour(speeds=Speeds(decode=0.01)))
    body = {"messages": [{"role": "user", "content": "##t=1,i=1,n=3##"}]}
    async with httpx.AsyncClient(base_url=engine.url, trust_env=False) as client:
        answer = json.loads((await client.post("/v1/chat/completions", json=body)).text)
    assert answer["usage"]["completion_tokens"] == 3
    await engine.close()
