"""From a question to the passages that may answer it: found by vectors and words, fused, looked at a second time, without repetitions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import msgspec

from tidegate.core.ask import Ask, Passage
from tidegate.core.errors import BadRequest, EmbedderDown, OtherEmbedder, SettingsError
from tidegate.core.plugins import nearest
from tidegate.core.ports import Embedder, Vectors, VectorStore
from tidegate.core.search import ANY, Filter, Found, Leg
from tidegate.core.words import words
from tidegate.retrieval.compress import compress
from tidegate.retrieval.diverse import choose
from tidegate.retrieval.fuse import fuse
from tidegate.retrieval.recall import Sampler
from tidegate.retrieval.rerank import OFF, RerankerParts, Second, known_rerankers, open_rerankers
from tidegate.retrieval.settings import RetrievalSettings

#: Seconds that a search may take where nobody says.
SECONDS = 10.0
#: A passage that holds this share of the weight of the question's words stays, however far its vector is: an article number or a
#: name is found by its letters alone.
COVERED = 0.6
#: Characters of a question whose words are searched for: BM25 looks at 256 words, and the event loop is not to read a book for them.
WORDS_OF = 8_000
#: Of a search's time, what the embedder may take before words are searched for alone.
EMBED_SHARE = 0.6


class Steps(msgspec.Struct, frozen=True):
    """What one search wants to have otherwise; None: as the settings say.

    - `rerank`: a reranker's name, or `off`.
    - `min_score`: passages whose cosine is lower are left out, unless words found them with a coverage of at least `COVERED`.
    - `seconds`: what the whole search may take; the reranker gets its share of what is left of it.
    """

    hybrid: bool | None = None
    rerank: str | None = None
    compress: bool | None = None
    min_score: float = 0.0
    seconds: float = SECONDS


class Stand(msgspec.Struct, frozen=True):
    """Where one leg had a passage, from 1 on, with the leg's own score; `coverage` of the words leg."""

    rank: int
    score: float
    coverage: float | None = None


class Searched(Found, msgspec.Struct, frozen=True):
    """What was found, and how it came to its order.

    - `words_only`: "" or why words alone found the passages: the embedder was down (`embedder_down`) or too slow (`slow`).
    - `reranker`: whose order it is; `off`: the fused one. `scores`: its own, of each passage.
    - `not_reranked`: "" or why a reranker was wanted and its judgement is not used: slow, wrong_scores, resting (it failed a moment ago), or an
      error's code.
    - `weak`: candidates left out by `min_score`; `repeated`: by others that say the same; `left_out`: characters that compression took.
    - `differing`: ids of passages of two documents that say the same with other figures.
    - `took_ns`: by step: embed, store, fuse, rerank, choose, compress.
    """

    words_only: str = ""
    reranker: str = OFF
    scores: list[float] = []
    not_reranked: str = ""
    weak: int = 0
    repeated: int = 0
    left_out: int = 0
    differing: list[tuple[str, str]] = []
    took_ns: dict[str, int] = {}

    def stands(self, passage_id: str) -> dict[Leg, Stand]:
        """Where each leg had the passage; a leg that did not find it is missing."""
        return {
            leg.leg: Stand(at + 1, leg.scores[at], leg.coverage[at] if leg.coverage else None)
            for leg in self.legs
            for at, id in enumerate(leg.ids)
            if id == passage_id
        }


class Search:
    """The road of a question. One for all collections and requests of a process."""

    def __init__(
        self, embedder: Embedder, store: VectorStore, settings: RetrievalSettings, rerankers: Mapping[str, Second] | None = None
    ) -> None:
        """`rerankers`: all that any search may name; None: the one of the settings. Raises SettingsError."""
        self._embedder = embedder
        self._store = store
        self._settings = settings
        self._rerankers = open_rerankers([settings.rerank], RerankerParts(settings)) if rerankers is None else rerankers
        self._sampler = Sampler(store, settings.recall_sample)

    async def find(
        self, question: str, *, k: int | None = None, wanted: Filter = ANY, collection: str | None = None, steps: Steps | None = None,
        ask: Ask | None = None,
    ) -> Searched:
        """At most `k` passages that fit, best first; none where nothing does. `ask`: the request that searches, where it is one: its flight has the
        laps, and engines are asked in its name.

        What is not given comes from the settings. Raises BadRequest for a question without words, SettingsError for a reranker that was not opened,
        StoreDown where the store cannot be reached, or where the embedder cannot and words are not searched for; never for a reranker.
        """
        if not question.strip():
            raise BadRequest("The question is empty.", hint="Ask something.", param="question")
        settings, steps = self._settings, steps or Steps()
        k, collection = k or settings.k, collection or settings.collection
        second = self._second(settings.rerank if steps.rerank is None else steps.rerank)
        hybrid = settings.hybrid if steps.hybrid is None else steps.hybrid
        clock = _Clock(ask)
        vector, words_only = await self._vector(question, hybrid, steps.seconds)
        clock.lap("embed")
        candidates = max(k, settings.candidates)
        found = await self._store.search(collection, vector, candidates, wanted, words=words(question[:WORDS_OF]) if hybrid else ())
        if vector is not None and found.fingerprint not in ("", self._embedder.fingerprint):
            raise OtherEmbedder(collection, found.fingerprint, self._embedder.fingerprint)
        clock.lap("store")
        if ask is not None and vector is not None:
            self._sampler.look(ask.flight, collection, vector, k, wanted, found)
        if hybrid:
            found = fuse(found)
        passages = _strong(found, steps.min_score)
        weak = len(found.passages) - len(passages)
        passages = passages[:candidates]
        clock.lap("fuse")
        searched = Searched(passages, found.index_version, found.way, found.legs, found.fingerprint, words_only=words_only, weak=weak)
        if second is not None and len(passages) > 1:
            left_s = steps.seconds - clock.spent_s()
            judged = await second.judge(question, searched, max(0.0, left_s * settings.rerank_share), ask)
            passages = [passages[at] for at in judged.order]
            reranker = second.reranker.name if judged.scores else OFF
            searched = msgspec.structs.replace(searched, passages=passages, scores=judged.scores, reranker=reranker, not_reranked=judged.why)
            clock.lap("rerank")
        searched = await asyncio.to_thread(_chosen, searched, k)  # reading texts takes milliseconds: streams of others go on meanwhile
        clock.lap("choose")
        if settings.compress if steps.compress is None else steps.compress:
            searched = await asyncio.to_thread(_compressed, question, searched)
            clock.lap("compress")
        return msgspec.structs.replace(searched, took_ns=clock.took_ns)

    async def _vector(self, question: str, hybrid: bool, seconds: float) -> tuple[Vectors | None, str]:
        """The question's vector; or none, and why, where words may be searched for without one."""
        if not hybrid:
            return (await self._embedder.embed([question], "query"))[0], ""
        try:
            async with asyncio.timeout(seconds * EMBED_SHARE):
                return (await self._embedder.embed([question], "query"))[0], ""
        except EmbedderDown as error:
            return None, error.code
        except TimeoutError:
            return None, "slow"

    def _second(self, name: str) -> Second | None:
        if name == OFF:
            return None
        if name not in self._rerankers:
            hint = nearest(name, known_rerankers()) if name not in known_rerankers() else "Name it in retrieval.rerank, or in a capability."
            raise SettingsError(f"There is no reranker {name!r} here.", hint=hint)
        return self._rerankers[name]

    async def close(self) -> None:
        await self._sampler.close()
        for second in self._rerankers.values():
            await second.close()


def _strong(found: Found, min_score: float) -> list[Passage]:
    if not min_score:
        return list(found.passages)
    covered = {
        id for leg in found.legs if leg.leg == "words" for id, share in zip(leg.ids, leg.coverage, strict=True) if share >= COVERED
    }
    return [passage for passage in found.passages if passage.score >= min_score or passage.id in covered]


def _chosen(searched: Searched, k: int) -> Searched:
    passages, scores = searched.passages, searched.scores
    chosen = choose(passages, k)
    return msgspec.structs.replace(
        searched, passages=[passages[at] for at in chosen.kept], scores=[scores[at] for at in chosen.kept] if scores else [],
        repeated=len(chosen.repeated), differing=[(passages[one].id, passages[other].id) for one, other in chosen.differing],
    )


def _compressed(question: str, searched: Searched) -> Searched:
    shown = compress(question, [passage.text for passage in searched.passages])
    passages = [
        msgspec.structs.replace(passage, shown=text) if text != passage.text else passage
        for passage, text in zip(searched.passages, shown, strict=True)
    ]
    left_out = sum(len(passage.text) - len(text) for passage, text in zip(searched.passages, shown, strict=True))
    return msgspec.structs.replace(searched, passages=passages, left_out=left_out)


class _Clock:
    """Whose the time was, by step; in the flight too, as `retrieve.STEP`, where a request searches."""

    def __init__(self, ask: Ask | None) -> None:
        self._ask = ask
        self._began_ns = self._last_ns = time.perf_counter_ns()
        self.took_ns: dict[str, int] = {}

    def lap(self, step: str) -> None:
        now_ns = time.perf_counter_ns()
        self.took_ns[step] = now_ns - self._last_ns
        self._last_ns = now_ns
        if self._ask is not None and step in ("embed", "store", "rerank"):  # the others take microseconds
            self._ask.flight.lap(f"retrieve.{step}", now_ns)

    def spent_s(self) -> float:
        return (time.perf_counter_ns() - self._began_ns) / 1e9
