"""From a question to the passages that may answer it."""

from __future__ import annotations

from tidegate.core.errors import BadRequest
from tidegate.core.ports import Embedder, VectorStore
from tidegate.core.search import ANY, Filter, Found
from tidegate.retrieval.settings import RetrievalSettings


class Search:
    """The question as a vector, and the passages nearest to it."""

    def __init__(self, embedder: Embedder, store: VectorStore, settings: RetrievalSettings) -> None:
        self._embedder = embedder
        self._store = store
        self._settings = settings

    async def find(
        self, question: str, *, k: int | None = None, wanted: Filter = ANY, collection: str | None = None
    ) -> Found:
        """The `k` nearest passages that fit, nearest first; none where nothing does.

        What is not given comes from the settings. Raises BadRequest for a question without words, StoreDown where the embedder or the
        store cannot be reached.
        """
        if not question.strip():
            raise BadRequest("The question is empty.", hint="Ask something.", param="question")
        (vector,) = await self._embedder.embed([question], "query")
        return await self._store.search(collection or self._settings.collection, vector, k or self._settings.k, wanted)
