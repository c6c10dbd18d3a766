"""How well passages are found by vectors, by words and by both, in PostgreSQL as the product stores and searches them.

    .venv/bin/python benchmarks/hybrid.py --data ../shared/data [--cache FOLDER] [--rows 200000]

Questions in English and Chinese about paragraphs in English and Chinese (XQuAD, each with each: where the languages differ, words say next to
nothing), questions about the policy documents of an invented bank, and questions that name a product, a tool or a code of that bank. A question is
answered by a document; a document stands where its first passage does. The embedder is the one that is shipped; `--cache` keeps its vectors.

The half of the questions with an even number in their set is what the constants of `retrieval/fuse.py` were chosen on; the odd half judges them.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psycopg
import questions
from common import ROOT, database, record, used_by_others
from pgvector import HalfVector
from pgvector.psycopg import register_vector
from psycopg.types.json import Jsonb
from search import more

from tidegate.core import document as core
from tidegate.core.document import NewPassage
from tidegate.core.search import ANY, Filter, Found
from tidegate.core.words import words
from tidegate.retrieval.chunk import chunk
from tidegate.retrieval.embedder import LocalEmbedder
from tidegate.retrieval.fuse import fuse
from tidegate.retrieval.ingest import embedded_text
from tidegate.retrieval.loaded import Block, Bounds, Loaded
from tidegate.retrieval.loaders import md
from tidegate.retrieval.quality import Question
from tidegate.retrieval.sentences import split_sentences
from tidegate.stores.queries import queries
from tidegate.stores.settings import StoreSettings
from tidegate.stores.systems.postgres import Postgres
from tidegate.stores.words import Terms, Worded, postings

Vectors = npt.NDArray[np.float32]

#: Passages that each leg gives.
K = 50
#: What is told of each order, and how often questions are drawn anew for the intervals.
MEASURES = ("p_at_1", "recall_at_5", "recall_at_10", "mrr", "ndcg_at_10")
DRAWS = 2000
LEGS = ("vectors", "words", "fused")


@dataclass
class Document:
    source: str
    title: str
    passages: list[NewPassage]
    vectors: Vectors


class Embedding:
    """The shipped model, and its vectors of before in a folder."""

    def __init__(self, cache: Path | None) -> None:
        self.cache = cache
        self.model = LocalEmbedder(Path.home() / ".cache" / "tidegate" / "bench", batch_tokens=2048)

    async def vectors(self, texts: Sequence[str], kind: Any) -> Vectors:
        name = hashlib.sha256(json.dumps([self.model.fingerprint, kind, *texts]).encode()).hexdigest()[:24]
        file = self.cache / f"{name}.npy" if self.cache else None
        if file and file.exists():
            return np.asarray(np.load(file), np.float32)
        made = np.concatenate([await self.model.embed(texts[at : at + 256], kind) for at in range(0, len(texts), 256)])
        if file:
            np.save(file, made)
        return made


async def documents(embedding: Embedding, loaded: dict[str, Loaded]) -> list[Document]:
    """Read, cut and embedded as `tidegate ingest` does."""
    found = []
    for source, one in loaded.items():
        passages = await chunk(one, embedding.model.count_tokens)
        found.append(Document(source, one.title, [_with_words(one.title, passage) for passage in passages], np.empty((0, 384), np.float32)))
    texts = [embedded_text(document.title, passage) for document in found for passage in document.passages]
    vectors, at = await embedding.vectors(texts, "passage"), 0
    for document in found:
        document.vectors = vectors[at : at + len(document.passages)]
        at += len(document.passages)
    return found


def _with_words(title: str, passage: NewPassage) -> NewPassage:
    return NewPassage(passage.text, passage.page, passage.heading, passage.tokens, passage.tags, passage.boxes, words(embedded_text(title, passage)))


def read(corpus: str, data: Path) -> dict[str, Loaded]:
    """The documents of a corpus, by the ids that questions name them by. Paragraphs of XQuAD are documents without a title: the titles of its
    articles stand in the questions. The bank's and the statutes are read as the Markdown that they are."""
    if corpus.startswith("xquad"):
        return {id: Loaded("", [Block(text)]) for id, text in questions.texts(corpus, data).items()}
    if corpus == "laws_zh":
        return {file.name: md.load(str(file), Bounds()) for file in sorted((data / "retrieval" / corpus).glob("*.md"))}
    loaded: dict[str, Loaded] = {}
    with tempfile.TemporaryDirectory() as folder:
        for line in (data / "retrieval" / corpus / "documents.jsonl").read_text("utf-8").splitlines():
            one = json.loads(line)
            file = Path(folder) / "one.md"
            file.write_text(f"# {one['title']}\n\n{one['content']}\n", encoding="utf-8")
            loaded[one["id"]] = md.load(str(file), Bounds())
    return loaded


def asked_of(data: Path) -> dict[str, list[Question]]:
    """All questions by the name of their set."""
    sets: dict[str, list[Question]] = {}
    for language in ("en", "zh"):
        articles = json.loads((data / "retrieval" / f"xquad.{language}.json").read_text("utf-8"))["data"]
        for about in ("en", "zh"):
            sets[f"xquad {language} -> {about}"] = [
                Question(one["question"], [f"{i}/{j}"], id=one["id"], corpus=f"xquad.{about}")
                for i, article in enumerate(articles) for j, paragraph in enumerate(article["paragraphs"]) for one in paragraph["qas"]
            ]  # fmt: skip
    for name in questions.SETS:
        sets[name] = questions.load(name)
    return sets


# -- how well


async def store_all(store: Postgres, name: str, found: list[Document]) -> dict[str, float]:
    """Every document, one transaction each, as an ingest does. Returns what it took."""
    began_s = time.perf_counter()
    for one in found:
        head = core.Document(collection=name, source=one.source, title=one.title, sha256="x")
        await store.replace_document(head, one.passages, one.vectors)
    took_s = time.perf_counter() - began_s
    await store.build_indexes(name)
    count_of = sum(len(one.passages) for one in found)
    return {"documents": len(found), "passages": count_of, "ms_a_passage": round(1e3 * took_s / count_of, 2)}


def judged(one: Question, found: Found, ids: Sequence[str], is_right: Callable[[Question, str, str], bool]) -> list[float]:
    """`MEASURES` of one order. A document counts where its first right passage stands."""
    by_id = {passage.id: passage for passage in found.passages}
    ranks: dict[str, int] = {}
    for rank, id in enumerate(ids, 1):
        passage = by_id[id]
        if passage.document not in ranks and is_right(one, passage.document, passage.text):
            ranks[passage.document] = rank
    total = len(one.documents)
    ideal = sum(1 / math.log2(rank + 1) for rank in range(1, min(total, 10) + 1))
    gained = sum(1 / math.log2(rank + 1) for rank in ranks.values() if rank <= 10)
    first = min(ranks.values(), default=0)
    return [
        float(first == 1), sum(rank <= 5 for rank in ranks.values()) / total, sum(rank <= 10 for rank in ranks.values()) / total,
        1 / first if first else 0.0, gained / ideal,
    ]  # fmt: skip


async def judge(store: Postgres, asked: list[Question], vectors: Vectors, corpora: dict[str, list[Document]]) -> npt.NDArray[np.float64]:
    """An array of questions x `LEGS` x `MEASURES`."""
    held = {
        one.id: any(one.answered_by(document.source, passage.text) for document in corpora[one.corpus] for passage in document.passages)
        for one in asked
    }

    def is_right(one: Question, document: str, passage: str) -> bool:
        """Words that no passage holds whole were cut in two: then any passage of the document is right."""
        return one.answered_by(document, passage) is not None if held[one.id] else document in one.documents

    rows = []
    for one, vector in zip(asked, vectors, strict=True):
        found = await store.search(one.corpus, vector, K, words=words(one.question))
        fused = [passage.id for passage in fuse(found).passages]
        rows.append([judged(one, found, ids, is_right) for ids in (found.legs[0].ids, found.legs[1].ids, fused)])
    return np.array(rows)


def told(rows: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Means with intervals that hold 95 of 100 draws of the same number of questions; and of the differences, fused less each leg."""
    rng = np.random.default_rng(5)
    drawn = np.stack([rows[rng.integers(0, len(rows), len(rows))].mean(axis=0) for _ in range(DRAWS)])

    def of(mean: npt.NDArray[np.float64], draws: npt.NDArray[np.float64]) -> dict[str, list[float]]:
        low, high = np.quantile(draws, [0.025, 0.975], axis=0)
        return {name: [round(float(x), 4) for x in (mean[at], low[at], high[at])] for at, name in enumerate(MEASURES)}

    mean = rows.mean(axis=0)
    found: dict[str, Any] = {"questions": len(rows)} | {leg: of(mean[at], drawn[:, at]) for at, leg in enumerate(LEGS)}
    for at, leg in enumerate(LEGS[:2]):
        found[f"fused less {leg}"] = of(mean[2] - mean[at], drawn[:, 2] - drawn[:, at])
    return found


async def quality(dsn: str, data: Path, cache: Path | None) -> dict[str, Any]:
    embedding, store = Embedding(cache), Postgres(StoreSettings(dsn=dsn))
    corpora = {name: await documents(embedding, read(name, data)) for name in ("xquad.en", "xquad.zh", "tau2_banking", "laws_zh")}
    found: dict[str, Any] = {"stored": {name: await store_all(store, name, one) for name, one in corpora.items()}}
    print(found["stored"], flush=True)
    for name, asked in asked_of(data).items():
        rows = await judge(store, asked, await embedding.vectors([one.question for one in asked], "query"), corpora)
        found[name] = {"all": told(rows), "chosen on (even)": told(rows[0::2]), "judged on (odd)": told(rows[1::2])}
        print(name, {leg: {one: row[0] for one, row in found[name]["judged on (odd)"][leg].items()} for leg in LEGS}, flush=True)
    await store.close()
    return found


# -- how fast


def passages_of(corpora: dict[str, list[Document]], count_of: int) -> Iterator[tuple[str, list[str]]]:
    """Passages with their words, each of some ten real sentences of one language, drawn anew for each."""
    rng = np.random.default_rng(11)
    pools = []
    for names in (("xquad.en", "tau2_banking"), ("xquad.zh", "laws_zh")):
        texts = {text for name in names for one in corpora[name] for passage in one.passages for _, text in split_sentences(passage.text)}
        pools.append([(text, words(text)) for text in sorted(texts) if len(text) >= 15])
    for _ in range(count_of):
        pool = pools[int(rng.random() < 0.3)]
        chosen = [pool[at] for at in rng.integers(0, len(pool), int(rng.integers(6, 14)))]
        yield "\n".join(text for text, _ in chosen), [word for _, of_one in chosen for word in of_one]


def load_many(dsn: str, corpora: dict[str, list[Document]], count_of: int) -> dict[str, Any]:
    """So many passages, twenty a document, by COPY."""
    rng = np.random.default_rng(7)
    base = np.concatenate([one.vectors for found in corpora.values() for one in found])
    vectors = more(base, count_of, rng)
    terms, stood, words_total, postings_of = Terms("many"), Counter[int](), 0, 0
    with psycopg.connect(dsn, autocommit=True) as link:
        register_vector(link)
        link.execute("select tidegate.passages_partition('many')")
        with link.cursor() as cursor:
            cursor.execute(
                "insert into tidegate.documents (collection, source, title, sha256, size_bytes)"
                " select 'many', 'd' || n, 'D', '', 0 from generate_series(0, %s) as n returning id", (count_of // 20,),
            )  # fmt: skip
            ids = [row[0] for row in cursor.fetchall()]
            made = passages_of(corpora, count_of)
            for start in range(0, count_of, 5000):
                part = list(itertools.islice(made, 5000))
                worded = {start + at + 1: Worded(of_one, terms) for at, (_, of_one) in enumerate(part)}
                columns = "id, document_id, collection, ordinal, text, tags, embedding, number, words"
                with cursor.copy(f"copy tidegate.passages ({columns}) from stdin with (format binary)".encode()) as copy:
                    copy.set_types(["text", "int8", "text", "int4", "text", "jsonb", "halfvec", "int8", "int4"])
                    for at, (text, _) in enumerate(part, start):
                        tags = Jsonb({"department": str(rng.integers(0, 50)), "rare": str(rng.integers(0, 2000))})
                        copy.write_row((
                            f"{at:024x}", ids[at // 20], "many", at % 20, text, tags, HalfVector(vectors[at]), at + 1, worded[at + 1].length,
                        ))  # fmt: skip
                with cursor.copy(queries()["put_postings"].sql) as copy:
                    copy.write(postings(worded))
                for one in worded.values():
                    stood.update(one.often.keys())
                    words_total += one.length
                    postings_of += len(one.often)
            cursor.execute("select setval('tidegate.passage_numbers', %s)", (count_of + 1,))
            cursor.execute(queries()["count_words"].sql, {"terms": list(stood), "counts": list(stood.values())})
            cursor.execute(
                "insert into tidegate.collections (name, changes, index_version, worded, words_total) values ('many', 1, '1-bench', %s, %s)",
                (count_of, words_total),
            )
        sizes = link.execute(
            "select relname::text, pg_total_relation_size(oid) from pg_class where oid in ('tidegate.postings'::regclass, 'tidegate.words'::regclass)"
        ).fetchall()
    return {
        "passages": count_of, "words_a_passage": round(words_total / count_of), "postings_a_passage": round(postings_of / count_of),
        "different_words": len(stood), "bytes_a_passage": {name: round(size / count_of) for name, size in sizes},
    }  # fmt: skip


#: Questions of nothing but the most frequent words: what a search may cost at most.
FREQUENT = ["what is the", "who was it and where is he", "how is this to be in the end", "is it of the one or the other", "have they all been"]


async def speed(dsn: str, asked: list[Question], vectors: Vectors, k: int = 20) -> dict[str, Any]:
    """Milliseconds of a search by vectors and of one by both legs, in turn, after a round to warm up."""
    store = Postgres(StoreSettings(dsn=dsn))
    with psycopg.connect(dsn, autocommit=True) as link:
        link.execute("create extension if not exists pg_prewarm")
        link.execute(
            "select pg_prewarm(c.oid) from pg_class as c join pg_namespace as n on n.oid = c.relnamespace"
            " where n.nspname = 'tidegate' and relkind in ('r', 'i')"
        )
    frequent = [(words(FREQUENT[at % len(FREQUENT)]), vector) for at, vector in enumerate(vectors)]
    questions_of = [(words(one.question), vector) for one, vector in zip(asked, vectors, strict=True)]
    kinds: dict[str, tuple[list[tuple[list[str], Any]], Callable[[int], Filter]]] = {
        "no filter": (questions_of, lambda at: ANY),
        "department, 1 of 50": (questions_of, lambda at: Filter({"department": str(at % 50)})),
        "tag, 1 of 2,000, without a facet": (questions_of, lambda at: Filter({"rare": str(at % 2000)})),
        "no filter, frequent words only": (frequent, lambda at: ANY),
    }
    told_of: dict[str, Any] = {}
    for name, (those, wanted) in kinds.items():
        took_ms: dict[str, list[float]] = {"vectors": [], "both": []}
        for measured in (False, True):
            for at, (of_question, vector) in enumerate(those):
                for leg, given in (("vectors", []), ("both", of_question)):
                    began_ns = time.perf_counter_ns()
                    found = await store.search("many", vector, k, wanted(at), words=given)
                    if measured:
                        took_ms[leg].append((time.perf_counter_ns() - began_ns) / 1e6)
        told_of[name] = {"way": found.way} | {
            leg: {f"p{share}_ms": round(float(np.quantile(of_leg, share / 100)), 2) for share in (50, 95)} for leg, of_leg in took_ms.items()
        }
        print(name, told_of[name], flush=True)
    await store.close()
    return told_of


async def fast(dsn: str, data: Path, cache: Path | None, rows: int) -> dict[str, Any]:
    embedding = Embedding(cache)
    corpora = {name: await documents(embedding, read(name, data)) for name in ("xquad.en", "xquad.zh", "tau2_banking", "laws_zh")}
    began_s = time.perf_counter()
    found: dict[str, Any] = {"stored": await asyncio.to_thread(load_many, dsn, corpora, rows)}
    store = Postgres(StoreSettings(dsn=dsn))
    await store.build_indexes("many", facets=("department",))
    await store.close()
    found["seconds_to_load"] = round(time.perf_counter() - began_s)
    sets = asked_of(data)
    asked = sets["xquad en -> en"][:150] + sets["xquad zh -> zh"][:50]
    vectors = await embedding.vectors([one.question for one in asked], "query")
    with used_by_others() as others:
        found["ms"] = await speed(dsn, asked, vectors)
    return found | {"cores_used_by_others": others.cores}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--cache", type=Path, help="a folder that keeps vectors")
    parser.add_argument("--rows", type=int, default=200_000, help="passages that searches are timed over; 0: none are")
    given = parser.parse_args()
    with database() as (_, dsn, _key):
        found = {"quality": asyncio.run(quality(dsn, given.data, given.cache))}
    if given.rows:
        with database(shared_buffers_mb=max(512, given.rows * 16 // 1000)) as (_, dsn, _key):
            found[f"speed, {given.rows:,} passages"] = asyncio.run(fast(dsn, given.data, given.cache, given.rows))
    record("hybrid", found)


if __name__ == "__main__":
    main()
