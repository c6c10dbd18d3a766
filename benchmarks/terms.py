"""What a ban of 100,000 terms costs for each token and for a whole answer: `python benchmarks/terms.py`; writes results/terms.json."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import time
from typing import Any

import common

from tidegate.core.ask import Ask, Caller, Deadline, EngineAnswer, EngineCall
from tidegate.core.chunk import Chunk, Usage
from tidegate.core.flight import Flight
from tidegate.guard.terms import Scan, TermList, Terms
from tidegate.pipeline.control import Control
from tidegate.pipeline.stages.generate import GenerateStage

COUNT = 100_000
ROUNDS = 200
TEXTS = 5
SYLLABLES = [a + b for a in "bcdfghklmnprstvz" for b in "aeio"]
TEXT = (
    "The policy covers damage by water, fire and storm as far as it is not the consequence of gross negligence. A claim has to be reported "
    "within fourteen days, with a list of what was lost and the receipts that you still have; the assessor calls you within three days and "
    "agrees on a date. Until then nothing should be thrown away. We pay 250 euros at once, the rest after the assessment. "
)
EVENT = (
    b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":%b},"finish_reason":null}]}'
)
ANSWER = b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":%b,"finish_reason":"stop"}]}'
WHOLE = {"ascii": "The assessor calls you within three days; until then throw nothing away, says our policy.", "mixed":
         " the quick brown fox jumps over lazy dogs and then café 你好 runs off 😀 far"}  # fmt: skip
CHINESE = "保单承保因水、火灾和风暴造成的损失，但重大过失除外。索赔须在十四天内报告，并附上损失清单和您仍保存的收据。"


def words(rnd: random.Random, count: int) -> list[str]:
    """Invented terms of one to three words, a tenth of them Chinese."""
    made: set[str] = set()
    while len(made) < count:
        if rnd.random() < 0.1:
            made.add("".join(chr(rnd.randint(0x4E00, 0x9FA5)) for _ in range(rnd.randint(2, 5))))
        else:
            made.add(" ".join("".join(rnd.choices(SYLLABLES, k=rnd.randint(2, 5))) for _ in range(rnd.choice((1, 1, 1, 2, 3)))))
    return sorted(term for term in made if term not in TEXT.lower() and term not in CHINESE)


def tokens(text: str) -> list[str]:
    """About as a tokenizer would cut: words with the blank before them, long ones in two."""
    cut: list[str] = []
    for n, word in enumerate(text.split(" ")):
        piece = word if n == 0 else " " + word
        cut += [piece] if len(piece) < 8 else [piece[:5], piece[5:]]
    return cut


def us_per_token(terms: Terms, pieces: list[str], *, first_time: bool = False) -> float:
    """CPU time; the best of many short rounds, for other work on the same cores only ever adds. `first_time`: nothing is known of the pieces yet."""
    took = []
    for _ in range(ROUNDS):
        for known in terms.steps if first_time else ():
            known.clear()
        begin_ns = time.process_time_ns()
        texts = 1 if first_time else TEXTS
        for _ in range(texts):
            scan = Scan(terms)
            for piece in pieces:
                if scan.feed(piece) is not None:
                    raise AssertionError("this text holds no term")
        took.append((time.process_time_ns() - begin_ns) / 1000 / texts / len(pieces))
    return round(min(took), 2)


class Canned:
    """An engine that says the same pieces each time, one a batch."""

    name = "canned"
    usage = Usage(1, 1)

    def __init__(self, pieces: list[str]) -> None:
        self.events = [(piece, EVENT % json.dumps(piece).encode()) for piece in pieces]
        text = "".join(pieces)
        message = json.dumps({"role": "assistant", "content": text}, ensure_ascii=False).encode()
        self.answer = EngineAnswer(text, "stop", self.usage, ANSWER % message)

    def find(self, model: str | None) -> tuple[Any, str]:
        return self, "canned"

    async def start(self, call: EngineCall, flight: Flight) -> Any:
        return self

    async def whole(self, call: EngineCall, flight: Flight) -> EngineAnswer:
        return self.answer

    async def relay(self, take: Any) -> None:
        for piece, event in self.events:
            take([Chunk(1, "text", piece, event)])
        take([Chunk(1, "notice", finish="stop", raw=b"{}")])

    def abort(self) -> None: ...


async def us_in_stage(control: Control | None, pieces: list[str]) -> float:
    """CPU time a token of the whole stage `generate`, its chunk included."""
    stage = GenerateStage(Canned(pieces), control=control)  # type: ignore[arg-type]
    took = []
    for _ in range(ROUNDS):
        ask = Ask(Flight("/bench"), Caller("key", "tenant"), Deadline(60), emit=lambda batch: None)
        ask.call = EngineCall("chat", "default", {})
        begin_ns = time.process_time_ns()
        await stage(ask)
        took.append((time.process_time_ns() - begin_ns) / 1000 / len(pieces))
    return round(min(took), 2)


async def us_of_a_whole_answer(control: Control | None, text: str) -> float:
    """CPU time of the whole stage `generate` for an answer that is not streamed."""
    stage = GenerateStage(Canned([text]), control=control)  # type: ignore[arg-type]
    took = []
    for _ in range(ROUNDS):
        asks = [Ask(Flight("/bench"), Caller("key", "tenant"), Deadline(60)) for _ in range(20)]
        for ask in asks:
            ask.call = EngineCall("chat", "default", {})
        begin_ns = time.process_time_ns()
        for ask in asks:
            await stage(ask)
        took.append((time.process_time_ns() - begin_ns) / 1000 / len(asks))
    return round(min(took), 2)


def main() -> None:
    rnd = random.Random(7)
    listed = words(rnd, COUNT)
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin_ns = time.process_time_ns()
    whole = Terms([TermList(listed)])
    build_s = (time.process_time_ns() - begin_ns) / 1e9
    memory_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) / 1024
    anywhere = Terms([TermList(listed, whole_words=False)])
    result: dict[str, Any] = {
        "terms": COUNT, "build_s": round(build_s, 2), "memory_mb": round(memory_mb, 1),
        "us_per_token": {
            "english_whole_words": us_per_token(whole, tokens(TEXT)), "english_first_time": us_per_token(whole, tokens(TEXT), first_time=True),
            "english_anywhere": us_per_token(anywhere, tokens(TEXT)),
            "chinese_by_character": us_per_token(whole, list(CHINESE)),
            "chinese_by_four": us_per_token(whole, [CHINESE[i : i + 4] for i in range(0, len(CHINESE), 4)]),
        },
    }  # fmt: skip
    pieces = tokens(TEXT) * 5
    result["us_per_token_of_the_stage"] = {
        "without": asyncio.run(us_in_stage(None, pieces)), "with_the_ban": asyncio.run(us_in_stage(Control(whole), pieces)),
    }  # fmt: skip
    result["us_of_a_whole_answer"] = {
        name: {
            "without": asyncio.run(us_of_a_whole_answer(None, text)), "with_the_ban": asyncio.run(us_of_a_whole_answer(Control(whole), text)),
        }
        for name, text in WHOLE.items()
    }  # fmt: skip
    print(result)
    common.record("terms", result)


if __name__ == "__main__":
    main()
