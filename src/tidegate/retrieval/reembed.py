"""Another embedder under a collection: new vectors for the passages that are stored, document by document. No file is read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tidegate.core.document import NewPassage, Unembedded
from tidegate.core.ports import DocumentStore, Embedder, Vectors
from tidegate.retrieval.bulk import EMBED_BATCH, patiently
from tidegate.retrieval.ingest import embedded_text

#: Documents that are read from the store at once.
AT_ONCE = 20


async def reembed(
    collection: str, *, embedder: Embedder, store: DocumentStore, patience_s: float = 0.0, progress: Callable[[int, str], None] = lambda *_: None
) -> int:
    """Make all vectors of the collection this embedder's, and tell how many documents had others. `progress`: how many are done, and the last one's
    source.

    From the first one on until all are done nobody can search the collection; a run that was stopped goes on where it was. Tags, dates and ids stay
    as they are, and so does the way in which documents were cut. Raises StoreDown, SettingsError where the store cannot do it.
    """
    done = 0
    while documents := await patiently(lambda: store.unembedded(collection, embedder.fingerprint, AT_ONCE), patience_s):
        for document in documents:
            done += await patiently(lambda document=document: _one(document, embedder, store), patience_s)  # type: ignore[misc]
            progress(done, document.source)
    return done


async def _one(document: Unembedded, embedder: Embedder, store: DocumentStore) -> bool:
    texts = [embedded_text(document.title, NewPassage(text, heading=heading)) for _, heading, text in document.passages]
    parts = [await embedder.embed(texts[at : at + EMBED_BATCH], "passage") for at in range(0, len(texts), EMBED_BATCH)]
    vectors: Vectors = np.concatenate(parts) if parts else np.empty((0, embedder.dimensions), np.float32)
    return await store.reembed_document(document, embedder.fingerprint, vectors)
