"""Words in PostgreSQL: which stand in which passage, and which passages hold those of a question. What is counted, and how: `bm25.py`."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
import psycopg
from psycopg.rows import TupleRow

from tidegate.core.ask import Passage
from tidegate.core.document import Box
from tidegate.core.search import Ranking
from tidegate.stores.bm25 import LENGTH_MOST, asked_once, count
from tidegate.stores.queries import queries

Link = psycopg.AsyncConnection[TupleRow]

#: Postings that a search reads at most, the rarest words first; those of more frequent words only of passages that are good without them.
READ_MOST = 10_000
#: So many of the best are judged again with the words that were not read: of the first ten of 200,000 passages, 99 in 100 are those of a search that
#: reads all. With a filter fewer are: each costs as many looks as passages do not fit.
AGAIN, AGAIN_FILTERED = 200, 50
#: So many of the best are looked at whether they fit a filter, before all that fit are taken instead; and where there is no filter but that nothing
#: superseded is quoted.
WALK, WALK_FREELY = 2_500, 500
#: Where fewer fit a filter, search begins with them: it would look at most of what holds the words before it found enough that fit.
FEW = 1_000
_POSTING = np.dtype([("fields", ">i2"), ("size", ">i4"), ("term", ">i8"), ("size_too", ">i4"), ("posting", ">i8")])
_COPY_HEAD, _COPY_END = b"PGCOPY\n\xff\r\n\0" + bytes(8), b"\xff\xff"


class Terms:
    """The digests that stand for a collection's words, 64 bits each."""

    def __init__(self, collection: str) -> None:
        self._key = hashlib.sha256(collection.encode("utf-8", "surrogatepass")).digest()
        self._known: dict[str, int] = {}

    def __call__(self, word: str) -> int:
        term = self._known.get(word)
        if term is None:
            digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8, key=self._key).digest()
            term = self._known[word] = int.from_bytes(digest, "big", signed=True)
        return term


class Worded:
    """A passage's words as they are stored."""

    def __init__(self, words: Sequence[str], terms: Terms) -> None:
        self._words, self._terms = words, terms
        self.length = min(len(words), LENGTH_MOST)
        digest = hashlib.blake2b("\0".join(words).encode("utf-8", "surrogatepass"), digest_size=8).digest()
        self.digest = int.from_bytes(digest, "big", signed=True) if words else 0

    @cached_property
    def often(self) -> dict[int, int]:
        """By term."""
        return {self._terms(word): often for word, often in count(self._words).items()}


class Changed(NamedTuple):
    """What a document's change does to the counts of its collection: passages by term, passages with words, words."""

    terms: dict[int, int]
    worded: int = 0
    words_total: int = 0


async def put_words(link: Link, coming: Mapping[int, Worded], going: Mapping[int, int]) -> Changed:
    """Passages by number: words for those that come; those that go lose theirs (by number, how many they had). A number may do both."""
    changed: Counter[int] = Counter()
    if going:
        for term, passages in await (await link.execute(queries()["drop_postings"].sql, {"numbers": list(going)})).fetchall():
            changed[term] -= passages
    coming = {number: worded for number, worded in coming.items() if worded.length}
    if coming:
        async with link.cursor() as cursor, cursor.copy(queries()["put_postings"].sql) as copy:
            await copy.write(postings(coming))
        for worded in coming.values():
            changed.update(worded.often.keys())
    return Changed(
        {term: by for term, by in changed.items() if by},
        len(coming) - sum(length > 0 for length in going.values()),
        sum(worded.length for worded in coming.values()) - sum(going.values()),
    )


async def count_words(link: Link, changed: Changed) -> None:
    """Last, after the collection's row is locked."""
    if changed.terms:
        await link.execute(queries()["count_words"].sql, {"terms": list(changed.terms), "counts": list(changed.terms.values())})
    if fewer := [term for term, by in changed.terms.items() if by < 0]:
        await link.execute(queries()["forget_words"].sql, {"terms": fewer})


def postings(coming: Mapping[int, Worded]) -> bytes:
    """As PostgreSQL copies them in binary, sorted as their index is."""
    rows = np.empty(sum(len(worded.often) for worded in coming.values()), _POSTING)
    rows["fields"], rows["size"], rows["size_too"] = 2, 8, 8
    at = 0
    for number, worded in coming.items():
        part = rows[at : at + len(worded.often)]
        part["term"] = np.fromiter(worded.often.keys(), np.int64, len(part))
        part["posting"] = (number << 24 | worded.length << 8) + np.fromiter(worded.often.values(), np.int64, len(part))
        at += len(part)
    return _COPY_HEAD + rows[np.argsort(rows["term"], kind="stable")].tobytes() + _COPY_END


async def find_words(link: Link, search: dict[str, Any], words: Sequence[str], fit: int | None) -> tuple[list[Passage], Ranking]:
    """The best by BM25, with what they are quoted by. `search`: collection, vector, k and filter; `fit`: about how many the filter lets pass, None:
    nearly all."""
    terms = Terms(search["collection"])
    walk, again = (max(WALK_FREELY, search["k"]), AGAIN) if fit is None else (WALK, AGAIN_FILTERED)
    parameters = {**search, "terms": [terms(word) for word in asked_once(words)], "most": READ_MOST, "again": again, "walk": walk}
    few_fit = fit is not None and fit < FEW
    rows = await _rows(link, "find_words_fitting" if few_fit else "find_words", parameters)
    if not few_fit and sum(row[2] is not None for row in rows) < search["k"] and rows[0][1] > walk:
        rows = await _rows(link, "find_words_fitting", parameters)
    rows = [row for row in rows if row[2] is not None]
    return [passage_of(row[2:10]) for row in rows], Ranking(
        "words", [row[2] for row in rows], [row[10] for row in rows], [min(1.0, max(0.0, row[11])) for row in rows]
    )


def passage_of(row: Sequence[Any]) -> Passage:
    """From what a query tells of a passage: id, source, title, text, score, page, tags, boxes."""
    id, source, title, text, score, page, tags, boxes = row
    tags_of, boxes_of = msgspec.json.decode(tags, type=dict[str, str]), msgspec.json.decode(boxes, type=list[Box])
    return Passage(id, source, title, text, score, page, tags_of, boxes_of)


async def _rows(link: Link, name: str, parameters: dict[str, Any]) -> list[TupleRow]:
    return await (await link.execute(queries()[name].sql, parameters)).fetchall()
