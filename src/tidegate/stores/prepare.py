"""What both systems do with a document before they store it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from tidegate.core.document import Document, NewPassage
from tidegate.core.errors import BadRequest, SettingsError
from tidegate.core.ports import Vectors
from tidegate.stores.clean import clean_struct, clean_value

#: Numbers of an embedding, as the schema has them.
DIMENSIONS = 384
#: Most bytes of a passage's tags: they stand beside its vector in indexes, whose entries have 2,700 bytes at most.
TAGS_BYTES = 1200


def check_vectors(vectors: Vectors) -> None:
    """Raises SettingsError where the embedder and the schema do not fit, BadRequest for a vector with what is no number: it would be near to nothing,
    or to everything."""
    dimensions = vectors.shape[-1]
    if dimensions != DIMENSIONS:
        raise SettingsError(
            f"The embedder's vectors have {dimensions} numbers, the store's {DIMENSIONS}.", hint=f"Use a model of {DIMENSIONS} dimensions."
        )
    if not np.isfinite(vectors).all():
        hint = "Look at the embedder: no text has such a vector."
        raise BadRequest("A vector holds what is no number (NaN or infinity).", hint=hint, param="vectors")


def prepare(document: Document, passages: Sequence[NewPassage], vectors: Vectors) -> tuple[Document, list[NewPassage], list[str]]:
    """Document and passages as they can be stored, and a note where a character had to be replaced. Checks the vectors' shape."""
    if len(passages):
        check_vectors(vectors)
    if len(vectors) != len(passages):
        raise ValueError(f"{len(passages)} passages came with {len(vectors)} vectors.")
    for tags in (document.tags, *(passage.tags for passage in passages if passage.tags)):
        size = len(msgspec.json.encode(clean_value(document.tags | tags)))
        if size > TAGS_BYTES:
            raise BadRequest(f"The tags take {size} bytes; at most {TAGS_BYTES} can be searched by.", hint="Shorten or drop some.", param="tags")
    bare = [msgspec.structs.replace(passage, words=[]) for passage in passages]  # words are stored as digests: any will do
    clean = [clean_struct(passage) for passage in bare]
    changed = sum(before != after for before, after in zip(bare, clean, strict=True))
    head = clean_struct(document)
    notes = []
    if changed or head != document:
        where = f"{changed} of {len(clean)} passages" if changed else "the document's head"
        notes.append(f"Characters that a database cannot keep (NUL, broken surrogates) were replaced by U+FFFD in {where}.")
    worded = [msgspec.structs.replace(one, words=passage.words) for one, passage in zip(clean, passages, strict=True)]
    return msgspec.structs.replace(head, passages=len(clean)), worded, notes
