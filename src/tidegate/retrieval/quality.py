"""Retrieval as a number: questions whose answers are known are searched for, and each way of searching is judged by where it has them.

A passage is right where it is of one of the question's documents and holds the question's answer, white space and case aside.

- P@1: the share of questions whose first passage is right.
- recall@k: of a question's documents (at most k), the share that has a right passage among the first k.
- MRR@10: one divided by the rank of the first right passage, 0 beyond the tenth.
- nDCG@10 (Järvelin and Kekäläinen 2002): gain 1 for the first right passage of each document, discounted by log2(1 + rank), over the best possible.

Means over questions stand with an interval that holds 95 % of what drawing the questions anew gives (percentile bootstrap, Efron 1979, 2,000 draws).
"""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from tidegate.core.ask import Passage
from tidegate.core.errors import BadRequest
from tidegate.core.search import Found
from tidegate.retrieval.walk import shown

#: Ranks that MRR and nDCG look at.
DEPTH = 10
RECALL_AT = (1, 3, 5, 10)
_DRAWS = 2000
#: Bytes that a set of questions may have.
MOST_BYTES = 64 << 20
#: The order that an answer is made from, beside those of the legs.
FUSED = "fused"
FINAL = "final"
_SPACE = re.compile(r"\s+")


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question whose answer is known.

    - `documents`: sources of the documents that answer it; the end of a path is enough (`fees/cards.md` for `/data/fees/cards.md`).
    - `answer`: words that the right passage holds; "": any passage of these documents is right. `also`: words that will do as well, where documents
      say it differently.
    - `id`, `kind`, `set`, `corpus`: for people.
    """

    question: str
    documents: list[str]
    answer: str = ""
    also: list[str] = []
    id: str = ""
    kind: str = ""
    set: str = ""
    corpus: str = ""

    def said_in(self, text: str) -> bool:
        """Whether the text holds the answer, or words that will do as well."""
        folded = _folded(text)
        return any(_folded(words) in folded for words in (self.answer, *self.also))

    def answered_by(self, document: str, text: str) -> str | None:
        """The name by which the question knows the document, where a passage of it with this text is right; None where it is not."""
        name = next((name for name in self.documents if same(document, name)), None)
        return name if name is not None and self.said_in(text) else None


class QuestionSet(msgspec.Struct, frozen=True):
    """Questions of one file, and the digest of its bytes."""

    name: str
    sha256: str
    questions: list[Question]


class Mean(msgspec.Struct, frozen=True):
    """A mean over questions, 0 to 1 (a difference: -1 to 1), and the interval that holds it in 95 of 100 draws."""

    value: float
    low: float
    high: float


class Ranked(msgspec.Struct, frozen=True):
    """How well one order of passages does."""

    precision_at_1: Mean
    recall_at: dict[int, Mean]
    mrr: Mean
    ndcg: Mean


class Quality(msgspec.Struct, frozen=True):
    """What a set says of a collection at one index version.

    - `orders`: by name: `vector`, `words`, `fused` and `final`, which is what an answer would be made from.
    - `gains`: of `final`, recall@5 beyond that of each other order, question by question.
    - `unknown`: documents that the set names and the collection does not hold; questions with no other document count as not found.
    """

    collection: str
    index_version: str
    set_name: str
    set_sha256: str
    questions: int
    orders: dict[str, Ranked]
    gains: dict[str, Mean]
    unknown: list[str] = []


class Looks(Protocol):
    """What searches: gives for one question each order of passages, by its name, best first."""

    async def __call__(self, question: str) -> tuple[Mapping[str, Sequence[Passage]], Found]: ...


def read_set(path: Path) -> QuestionSet:
    """A file of questions: JSON, one object a line. Raises BadRequest with the line."""
    try:
        with path.open("rb") as file:  # a device or a pipe may have no end
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise BadRequest(f"The question set {path} cannot be read: {error.strerror or error}.", hint="Name a file of questions.") from None
    if len(content) > MOST_BYTES:
        raise BadRequest(f"The question set {path} holds more than {MOST_BYTES >> 20} MiB.", hint="Name a file of questions, or split it.")
    questions = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            question = msgspec.json.decode(line, type=Question)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BadRequest(f"{path}:{number}: {error}", hint='A line is {"question": "...", "documents": ["..."], "answer": "..."}.') from None
        if not question.question.strip() or not all([question.documents, *question.documents]):
            raise BadRequest(f"{path}:{number}: a question needs words and at least one document, by its name.", hint="Fill both.")
        questions.append(question)
    if not questions:
        raise BadRequest(f"{path} holds no question.", hint='A line is {"question": "...", "documents": ["..."], "answer": "..."}.')
    return QuestionSet(shown(path.name), hashlib.sha256(content).hexdigest(), questions)


async def judge(
    wanted: QuestionSet, look: Looks, *, collection: str, sources: Sequence[str] = (), progress: Callable[[int, int], None] = lambda _, __: None
) -> Quality:
    """Search for every question of the set, one after the other, and judge each order. `sources`: all documents of the collection, to name those
    that the set asks for in vain. Raises what `look` raises."""
    found: dict[str, list[list[tuple[int, str]]]] = {}
    version = "0"
    for done, question in enumerate(wanted.questions):
        orders, state = await look(question.question)
        version = state.index_version
        for name, passages in orders.items():
            found.setdefault(name, []).append(_right(question, passages))
        progress(done + 1, len(wanted.questions))
    figures = {name: [_figures(question, right) for question, right in zip(wanted.questions, rights, strict=True)] for name, rights in found.items()}
    orders_of = {name: _ranked(per_question) for name, per_question in figures.items()}
    final = figures.get(FINAL, [])
    gains = {
        name: mean([mine[1][5] - other[1][5] for mine, other in zip(final, per_question, strict=True)])
        for name, per_question in figures.items() if name != FINAL
    }  # fmt: skip
    unknown = sorted({name for question in wanted.questions for name in question.documents if not any(same(source, name) for source in sources)})
    return Quality(
        collection, version, wanted.name, wanted.sha256, len(wanted.questions), orders_of, gains, unknown if sources else []
    )


def same(source: str, name: str) -> bool:
    """Whether a document's source is the one that a set names."""
    return source == name or source.endswith("/" + name)


def mean(values: Sequence[float]) -> Mean:
    """With its interval; the draws are the same each time."""
    if not values:
        return Mean(0.0, 0.0, 0.0)
    array = np.asarray(values, np.float64)
    drawn = np.random.default_rng(20_261_130).integers(0, len(array), (_DRAWS, len(array)))
    low, high = np.percentile(array[drawn].mean(axis=1), (2.5, 97.5))
    return Mean(float(array.mean()), float(low), float(high))


def _folded(text: str) -> str:
    return _SPACE.sub(" ", unicodedata.normalize("NFKC", text)).strip().casefold()


def _right(question: Question, passages: Sequence[Passage]) -> list[tuple[int, str]]:
    """Rank, from 1, and document of each right passage."""
    judged = ((rank, question.answered_by(passage.document, passage.text)) for rank, passage in enumerate(passages, 1))
    return [(rank, name) for rank, name in judged if name is not None]


def _figures(question: Question, right: Sequence[tuple[int, str]]) -> tuple[float, dict[int, float], float, float]:
    """P@1, recall@k, MRR, nDCG of one question."""
    first: dict[str, int] = {}
    for rank, name in right:
        first.setdefault(name, rank)
    ranks = sorted(first.values())
    most = len(set(question.documents))
    recall = {k: sum(rank <= k for rank in ranks) / min(k, most) for k in RECALL_AT}
    best = min(ranks, default=DEPTH + 1)
    ideal = sum(1 / math.log2(1 + rank) for rank in range(1, min(DEPTH, most) + 1))
    gained = sum(1 / math.log2(1 + rank) for rank in ranks if rank <= DEPTH)
    return float(best == 1), recall, 1 / best if best <= DEPTH else 0.0, gained / ideal


def _ranked(figures: Sequence[tuple[float, dict[int, float], float, float]]) -> Ranked:
    return Ranked(
        mean([one[0] for one in figures]), {k: mean([one[1][k] for one in figures]) for k in RECALL_AT},
        mean([one[2] for one in figures]), mean([one[3] for one in figures]),
    )
