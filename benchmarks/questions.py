"""The committed questions for judging retrieval: `questions/bank.jsonl` and `questions/names.jsonl`, read, checked and joined with their documents.

    python benchmarks/questions.py --data ../shared/data

says how many questions there are of each kind and corpus, and raises where one names a document that the folder does not hold.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tidegate.core.errors import BadRequest
from tidegate.retrieval.quality import Question, read_set

FOLDER = Path(__file__).parent / "questions"
SETS = ("bank", "names")


def load(name: str) -> list[Question]:
    """The questions of a set, in the file's order. Raises BadRequest with the line that cannot be read."""
    return read_set(FOLDER / f"{name}.jsonl").questions


def texts(corpus: str, data: Path) -> dict[str, str]:
    """Every document of a corpus by its id, from `data/retrieval`. Bank: the content, without its title. XQuAD: paragraphs, as ARTICLE/PARAGRAPH."""
    folder = data / "retrieval"
    if corpus == "tau2_banking":
        lines = (folder / corpus / "documents.jsonl").read_text("utf-8").splitlines()
        return {one["id"]: one["content"] for one in map(json.loads, lines)}
    if corpus == "laws_zh":
        return {file.name: file.read_text("utf-8") for file in sorted((folder / corpus).glob("*.md"))}
    articles = json.loads((folder / f"{corpus}.json").read_text("utf-8"))["data"]
    return {f"{i}/{j}": paragraph["context"] for i, article in enumerate(articles) for j, paragraph in enumerate(article["paragraphs"])}


def resolve(questions: Sequence[Question], data: Path) -> dict[str, dict[str, str]]:
    """All documents of the corpora that the questions are about. Raises BadRequest where a question names one that is not there."""
    corpora = {corpus: texts(corpus, data) for corpus in sorted({question.corpus for question in questions})}
    for question in questions:
        if missing := [document for document in question.documents if document not in corpora[question.corpus]]:
            raise BadRequest(f"{question.id}: {question.corpus} holds no {', '.join(missing)}.", hint="Is the folder whole?")
    return corpora


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
