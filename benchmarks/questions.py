"""The committed questions for judging retrieval: `questions/bank.jsonl` and `questions/names.jsonl`, read, checked and joined with their documents.

    python benchmarks/questions.py --data ../shared/data

says how many questions there are of each kind and corpus, and raises where one names a document that the folder does not hold.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Literal

import msgspec

FOLDER = Path(__file__).parent / "questions"
SETS = ("bank", "names")
Corpus = Literal["tau2_banking", "xquad.en", "xquad.zh", "laws_zh"]


class BadQuestions(Exception):
    """A line that is no question, or a question whose document is not there. Names the file and the line, or the question."""


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One question and where it is answered.

    `answer` are words of the first document, `also` words of the others where they say it differently: every document holds one of them.
    """

    id: str
    set: Literal["bank", "names"]
    corpus: Corpus
    question: str
    documents: tuple[str, ...]
    answer: str
    kind: str
    also: tuple[str, ...] = ()

    def answered_by(self, document: str, passage: str) -> bool:
        """Whether a passage of a document is right: the document is one of ours and the passage holds the words, however its white space runs."""
        held = _even(passage)
        return document in self.documents and any(_even(words) in held for words in (self.answer, *self.also))


def load(name: str, folder: Path = FOLDER) -> list[Question]:
    """The questions of a set, in the file's order. Raises BadQuestions with the line that cannot be read or whose id came before."""
    file = folder / f"{name}.jsonl"
    found: dict[str, Question] = {}
    for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        try:
            question = msgspec.json.decode(line, type=Question)
        except msgspec.DecodeError as error:
            raise BadQuestions(f"{file.name}, line {number}: {error}") from error
        if question.id in found:
            raise BadQuestions(f"{file.name}, line {number}: the id {question.id} came before.")
        found[question.id] = question
    return list(found.values())


def texts(corpus: Corpus, data: Path) -> dict[str, str]:
    """Every document of a corpus by its id, from `data/retrieval`. Bank: the content, without its title. XQuAD: paragraphs, as ARTICLE/PARAGRAPH."""
    folder = data / "retrieval"
    if corpus == "tau2_banking":
        lines = (folder / corpus / "documents.jsonl").read_text("utf-8").splitlines()
        return {one["id"]: one["content"] for one in map(json.loads, lines)}
    if corpus == "laws_zh":
        return {file.name: file.read_text("utf-8") for file in sorted((folder / corpus).glob("*.md"))}
    articles = json.loads((folder / f"{corpus}.json").read_text("utf-8"))["data"]
    return {f"{i}/{j}": paragraph["context"] for i, article in enumerate(articles) for j, paragraph in enumerate(article["paragraphs"])}


def resolve(questions: list[Question], data: Path) -> dict[Corpus, dict[str, str]]:
    """All documents of the corpora that the questions are about. Raises BadQuestions where a question names one that is not there."""
    corpora = {corpus: texts(corpus, data) for corpus in sorted({question.corpus for question in questions})}
    for question in questions:
        if missing := [document for document in question.documents if document not in corpora[question.corpus]]:
            raise BadQuestions(f"{question.id}: {question.corpus} holds no {', '.join(missing)}.")
    return corpora


def _even(text: str) -> str:
    return " ".join(text.split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds retrieval/")
    data = parser.parse_args().data
    for name in SETS:
        questions = load(name)
        resolve(questions, data)
        documents = {(question.corpus, document) for question in questions for document in question.documents}
        print(f"{name}: {len(questions)} questions, answered by {len(documents)} documents")
        for counts in (Counter(question.corpus for question in questions), Counter(question.kind for question in questions)):
            print("  " + ", ".join(f"{what} {count}" for what, count in counts.most_common()))


if __name__ == "__main__":
    main()
