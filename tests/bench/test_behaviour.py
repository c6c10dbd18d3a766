"""How the scripted engine behaves where the prompt orders nothing: its curves, its slots and queue, its stop strings."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.bench.behaviour import Behaviour, Curve, curve, read_words, until_stop
from tidegate.bench.script import read
from tidegate.bench.scripted import start
from tidegate.core.errors import BadRequest, SettingsError

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello there"}]}


def test_curves_are_read() -> None:
    """A number is fixed; with a sigma it is lognormal."""
    assert (curve("20"), curve("1.5~0.25")) == (Curve(20.0), Curve(1.5, 0.25))


@pytest.mark.parametrize("said", ["", "fast", "-1", "20~", "~1", "1e3", "20ms"])
def test_curves_that_are_none(said: str) -> None:
    """Refused with an example."""
    with pytest.raises(SettingsError, match="is no time"):
        curve(said)


def test_a_lognormal_curve_has_its_median() -> None:
    """Half of the times are below it, and the logarithm has the sigma."""
    chance = random.Random(1)
    times = [Curve(20.0, 0.5).draw(chance) for _ in range(4000)]
    assert 19 < statistics.median(times) < 21
    assert 0.45 < statistics.stdev([math.log(time) for time in times]) < 0.55


def test_the_same_seed_gives_the_same_times() -> None:
    """For the same order of requests; another seed gives others."""
    def times(seed: int) -> list[Any]:
        behaviour = Behaviour(curve("20~0.5"), curve("5~0.5"), seed=seed)
        requests = [behaviour.apply(read("chat", BODY), BODY) for _ in range(3)]
        return [(request.orders.first_ms, request.gaps) for request in requests]

    assert times(7) == times(7)
    assert times(7) != times(8)
    assert len({first for first, _ in times(7)}) == 3


def test_what_the_prompt_orders_wins() -> None:
    """An order of the prompt is exact."""
    body = {"messages": [{"role": "user", "content": "##t=3,i=2,n=4##"}]}
    request = Behaviour(curve("20~0.5"), curve("5~0.5")).apply(read("chat", body), body)
    assert (request.orders.first_ms, request.orders.between_ms, request.gaps) == (3.0, 2.0, None)


def test_a_prompt_beyond_the_context_is_refused() -> None:
    """In OpenAI's words."""
    assert Behaviour(context=2).apply(read("chat", BODY), BODY).words
    with pytest.raises(BadRequest, match="maximum context length is 1 tokens"):
        Behaviour(context=1).apply(read("chat", BODY), BODY)


@given(st.lists(st.text("abc", min_size=1, max_size=4), max_size=8), st.lists(st.text("abc", min_size=1, max_size=3), max_size=2))
def test_nothing_of_a_stop_string_is_said(words: list[str], stops: list[str]) -> None:
    """What is left is the text before the first stop string, in the same tokens but for the last."""
    kept, stopped = until_stop(words, stops)
    text = "".join(words)
    places = [text.find(stop) for stop in stops if stop in text]
    assert "".join(kept) == (text[: min(places)] if places else text)
    assert stopped == bool(places)
    assert kept[:-1] == words[: len(kept)][:-1]
    assert "" not in kept


def test_words_of_a_text(tmp_path: Path) -> None:
    """However they are laid out."""
    file = tmp_path / "words.txt"
    file.write_text(" eins\n\nzwei\tdrei", encoding="utf-8")
    assert read_words(file) == (" eins", " zwei", " drei")
    file.write_text(" \n", encoding="utf-8")
    with pytest.raises(SettingsError, match="holds no words"):
        read_words(file)
    file.write_bytes(b"\xff")
    with pytest.raises(SettingsError, match="cannot be read"):
        read_words(file)


async def test_slots_make_others_wait_in_order() -> None:
    """With one slot answers come one after the other, first come first served; the others are counted as waiting."""
    engine = await start(behaviour=Behaviour(curve("20"), slots=1))
    done: list[int] = []
    hang = {"messages": [{"role": "user", "content": "##m=hang##"}]}

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        assert (await client.post("/v1/chat/completions", json=BODY if number else hang)).status_code == 200
        done.append(number)

    async with httpx.AsyncClient(base_url=engine.url, trust_env=False) as client:
        asking: list[asyncio.Task[None]] = []
        for number in range(3):
            asking.append(asyncio.get_running_loop().create_task(ask(client, number)))
            async with asyncio.timeout(10):
                while engine.requests <= number:  # noqa: ASYNC110 - the server is watched from outside
                    await asyncio.sleep(0.001)
        stats = engine.stats()
        asking[0].cancel()  # the first is at work until its client leaves
        await asyncio.gather(*asking[1:])
    assert (stats["active"], stats["waiting"]) == (1, 2)
    assert done == [1, 2]
    assert (engine.active, len(engine.waiting)) == (0, 0)
    await engine.close()


async def test_who_leaves_the_queue_frees_the_place() -> None:
    """A client that hangs up while it waits is forgotten; one that hangs up at work lets the next one in."""
    engine = await start(behaviour=Behaviour(slots=1))
    hang = {"messages": [{"role": "user", "content": "##m=hang##"}]}
    async with httpx.AsyncClient(base_url=engine.url, trust_env=False) as client:
        loop = asyncio.get_running_loop()
        asking = []
        for number, body in enumerate((hang, hang, BODY)):
            asking.append(loop.create_task(client.post("/v1/chat/completions", json=body)))
            async with asyncio.timeout(10):
                while engine.requests <= number:  # noqa: ASYNC110 - the server is watched from outside
                    await asyncio.sleep(0.001)
        asking[1].cancel()
        async with asyncio.timeout(10):
            while len(engine.waiting) > 1:  # noqa: ASYNC110 - the same
                await asyncio.sleep(0.001)
        assert not asking[2].done()
        asking[0].cancel()
        answer = await asyncio.wait_for(asking[2], 10)
        await asyncio.gather(*asking[:2], return_exceptions=True)
    assert answer.status_code == 200
    assert (engine.active, len(engine.waiting), engine.aborted) == (0, 0, 2)
    await engine.close()


async def test_a_long_queue_of_short_answers() -> None:
    """Hundreds that wait are answered one after the other, not in one deep stack."""
    engine = await start(behaviour=Behaviour(slots=1))
    order = b"##t=200##"
    body = b'{"messages": [{"role": "user", "content": "%b"}]}'

    async def ask(content: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(engine.host, engine.port)
        said = body % content
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(said), said))
        line = await reader.readline()
        writer.close()
        return line

    lines = await asyncio.gather(ask(order), *(ask(b"##n=1##") for _ in range(400)))
    assert set(lines) == {b"HTTP/1.1 200 OK\r\n"}
    await engine.close()


@pytest.mark.parametrize("begun", ["", "the quick"])
def test_an_answer_without_an_end_has_as_many_tokens_as_it_may_have(begun: str) -> None:
    """`ignore_eos`, with which load tools ask for answers of an exact length; also where the answer goes on from its middle."""
    last = [{"role": "assistant", "content": begun}] if begun else []
    body = {**BODY, "messages": [*BODY["messages"], *last], "continue_final_message": bool(begun), "max_tokens": 40, "ignore_eos": True}
    request = Behaviour().apply(read("chat", body), body)
    assert (len(request.words), request.finish) == (40, "length")
