"""Does an answer that was cut go on as it would have gone on? On the real llama.cpp, alone, at temperature 0.

    .venv/bin/python benchmarks/continuation.py [--prompts 60] [--places 5]

Starts the embedded engine. An answer is cut at several places, and goes on from exactly what was said there:

- `same`: by `continue_from`, as the gateway does after a cut, while the engine still has the cut run in its cache.
- `other`: the same, as on another instance, which has to read what was said as a part of its prompt.
- `engine`, `engine again`: the ids of prompt and prefix straight to the engine, twice, without its cache.

- `uncut repeated`: the whole answer once more.

Engines are not batch-invariant: what was read in one piece, or lies elsewhere in the cache, is a little different from what was said token by token,
and a near tie then falls the other way. So `same` and `other` are to differ from the uncut answer no more often than it differs from its own
repetition.
Writes benchmarks/results/continuation.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import uvloop
from common import embedded_engine, record

from tidegate.core.ask import EngineCall, Said
from tidegate.core.chunk import Chunk
from tidegate.core.flight import Flight
from tidegate.core.ports import EngineStream
from tidegate.engines.adapters.llama_cpp import LlamaCpp
from tidegate.engines.settings import EngineSettings

TOKENS = 40
ASKED = (
    "Tell me about {}.", "Write one sentence that praises {}.", "List three facts about {}.", "Why do people like {}?", "Explain {} to a child.",
    "What is wrong with {}?",
)
THINGS = ("the sea", "bicycles", "bread", "winter", "the number seven", "old clocks", "railways", "bees", "chess", "lighthouses")


async def read(stream: EngineStream) -> list[str]:
    """The text of a run, piece by piece."""
    pieces: list[str] = []

    def take(batch: list[Chunk]) -> None:
        pieces.extend(chunk.text for chunk in batch if chunk.kind == "text" and chunk.text)

    await stream.relay(take)
    return pieces


async def straight(engine: LlamaCpp, model: str, ids: list[int], left: int) -> str:
    fields = {"model": model, "prompt": ids, "n_predict": left, "temperature": 0, "cache_prompt": False, "stream": False}
    return str((await engine.post_json(f"{engine.root}/completion", fields))["content"])


async def one_place(engine: LlamaCpp, call: EngineCall, prompt: list[int], uncut: list[str], place: int) -> dict[str, bool]:
    said, left = Said("".join(uncut[:place]), place, None), TOKENS - place
    rest = "".join(uncut[place:])
    (ids,) = await engine.tokenize([said.text], False)
    repeated = "".join(await read(await engine.start(call, Flight("uncut"))))  # which also brings the run back into the engine's cache
    same = "".join(await read(await engine.continue_from(call, said, Flight("same"))))
    itself = await straight(engine, call.model, [*prompt, *ids], left)
    other = "".join(await read(await engine.continue_from(call, said, Flight("other"))))
    again = await straight(engine, call.model, [*prompt, *ids], left)
    return {
        "uncut repeated is uncut": repeated == said.text + rest, "same is uncut": same == rest, "other is uncut": other == rest,
        "engine is uncut": itself == rest, "other is engine": other == itself, "engine again is engine": again == itself,
    }


async def one_prompt(engine: LlamaCpp, model: str, text: str, places: int) -> list[dict[str, bool]]:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS, "temperature": 0}
    call = EngineCall("chat", model, body)
    uncut = await read(await engine.start(call, Flight("uncut")))
    prompt = await engine.chat_ids(body, ())
    assert prompt is not None
    if len(uncut) <= places + 2:
        return []
    return [await one_place(engine, call, prompt, uncut, 1 + number * (len(uncut) - 2) // places) for number in range(places)]


async def measure(prompts: int, places: int, url: str, key: str) -> dict[str, Any]:
    engine = LlamaCpp("real", EngineSettings(adapter="llama_cpp", url=url, api_key=key, models=["m"]))  # type: ignore[arg-type]
    asked = [form.format(thing) for form in ASKED for thing in THINGS][:prompts]
    found = [one for text in asked for one in await one_prompt(engine, "m", text, places)]
    await engine.close()
    counts = {name: sum(one[name] for one in found) for name in found[0]}
    return {
        "prompts": prompts, "places": len(found), "tokens": TOKENS, "alike": counts,
        "gates": {
            "same differs from uncut no more often than uncut repeated": counts["same is uncut"] >= counts["uncut repeated is uncut"],
            "other differs from uncut no more often than uncut repeated": counts["other is uncut"] >= counts["uncut repeated is uncut"],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=60, choices=range(1, 61), metavar="1..60")
    parser.add_argument("--places", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tg-", dir="/tmp") as home:
        Path(home).chmod(0o711)
        with embedded_engine(Path(home)) as local:
            result = uvloop.run(measure(options.prompts, options.places, local.address.url, local.address.key))
    print(json.dumps(result, indent=1))
    print("written:", record("continuation", result))


if __name__ == "__main__":
    main()
