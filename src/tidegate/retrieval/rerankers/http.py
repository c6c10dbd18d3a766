"""A reranker behind HTTP: text-embeddings-inference, Jina, Cohere, vLLM, llama.cpp, Infinity. Which shape it speaks is told by what it answers."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec

from tidegate.core.ask import Ask
from tidegate.core.errors import SettingsError, StoreDown
from tidegate.core.search import Found
from tidegate.retrieval.rerank import RerankerParts

#: The caller bounds the time of a question; this bounds what a server may do where nobody does.
_WITHIN_S = 60.0
#: An answer is a number a passage: more is none.
_MOST_BYTES = 4 << 20
#: What a server says to a field that it does not know, or misses.
_NOT_THIS_SHAPE = frozenset({400, 404, 405, 422})


class Http:
    """One server. Asks in Cohere's shape, which most speak (`query`, `documents`), else in TEI's (`query`, `texts`); what was understood stays."""

    name = "http"

    def __init__(self, url: str, model: str = "", api_key: str = "") -> None:
        self._url = url
        self._model = model
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(timeout=_WITHIN_S, headers=headers, trust_env=False)
        self._shapes = [self._cohere, self._tei]

    async def scores(self, question: str, found: Found, ask: Ask | None = None) -> list[float]:
        texts = [passage.text for passage in found.passages]
        if not texts:
            return []
        status = 0
        for shape in list(self._shapes):
            status, answer = await self._post(shape(question, texts))
            if status == httpx.codes.OK:
                self._shapes = [shape]
                return _scores(answer, len(texts))
            if status not in _NOT_THIS_SHAPE:
                break
        raise StoreDown(f"The reranker answered with status {status}.", hint="Is retrieval.rerank_url the whole address, with its path (/rerank)?")

    def _cohere(self, question: str, texts: list[str]) -> dict[str, Any]:
        return {"query": question, "documents": texts} | ({"model": self._model} if self._model else {})

    def _tei(self, question: str, texts: list[str]) -> dict[str, Any]:
        return {"query": question, "texts": texts, "truncate": True}

    async def _post(self, body: dict[str, Any]) -> tuple[int, bytes]:
        try:
            async with self._client.stream(
                "POST", self._url, content=msgspec.json.encode(body), headers={"content-type": "application/json"}
            ) as response:
                answer = b""
                async for piece in response.aiter_bytes():
                    answer += piece
                    if len(answer) > _MOST_BYTES:
                        raise StoreDown(f"The reranker's answer is longer than {_MOST_BYTES} bytes.")
                return response.status_code, answer
        except httpx.HTTPError as error:
            raise StoreDown(
                f"The reranker cannot be reached: {type(error).__name__}.", hint="Is it running at retrieval.rerank_url?", retry_after_s=1
            ) from None

    async def close(self) -> None:
        await self._client.aclose()


def _scores(answer: bytes, count: int) -> list[float]:
    """TEI gives a list; Jina, Cohere, vLLM and llama.cpp `results`; Voyage `data`. Each entry names its text by `index`."""
    try:
        told: Any = msgspec.json.decode(answer)
        entries = told if isinstance(told, list) else told.get("results", told.get("data"))
        scores: dict[int, float] = {}
        for entry in entries:
            score = entry.get("relevance_score", entry.get("score"))
            scores[int(entry["index"])] = float(score)
        return [scores[at] for at in range(count)]
    except (msgspec.DecodeError, AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError):
        raise StoreDown(
            "The reranker's answer has no score for each text.", hint="Tidegate reads the answers of TEI, Jina, Cohere, vLLM and llama.cpp."
        ) from None


def build(parts: RerankerParts) -> Http:
    settings = parts.settings
    if not settings.rerank_url:
        raise SettingsError('A reranker behind HTTP is wanted (rerank = "http"), but retrieval.rerank_url is empty.', hint="Set its whole address.")
    return Http(settings.rerank_url, settings.rerank_model, settings.rerank_api_key.get_secret_value() if settings.rerank_api_key else "")
